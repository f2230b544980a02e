//! Lanes of a warp as threads of their own, for strict checks: an instruction that they execute together, or a `shfl`, does
//! not order one lane's accesses with another's. Only `bar.warp.sync`, a barrier, or a release and an acquire do (PTX ISA,
//! "Memory Consistency Model"; CUDA C++ Programming Guide, "Warp Shuffle Functions" and "Warp Vote Functions").
//!
//! States of the shadow are the same for all lanes of an instruction, so that a tile is still one state. Which lane made the
//! last accesses is beside them, a byte for each byte of memory.

use super::order::{Actor, GROUPS_PER_WARP, View, Whose};
use super::shadow::Access;

/// Who accesses.
#[derive(Debug, Clone, Copy)]
pub struct Who<'v> {
    pub actor: Actor,
    pub clock: u32,
    pub pc: u32,
    /// What it knows.
    pub view: &'v View,
    /// The first actor of its warp, if its lanes are told apart.
    pub warp: Option<Actor>,
    pub lanes: Lanes,
}

/// For which lanes bytes are accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lanes {
    /// It does not matter.
    #[default]
    Any,
    /// For several lanes at once.
    Several,
    /// For all lanes of the warp, each of which knows of it.
    Every,
    One(usize),
    /// For lanes from the first on, so many bytes (a power of two) for each.
    Each(usize, usize),
}

/// Stands for several lanes.
const SEVERAL: u8 = 32;
/// Stands for all of them.
const EVERY: u8 = 33;

impl Lanes {
    /// The same for what begins at byte `at` of the access, where a lane's bytes begin.
    #[must_use]
    pub fn from(self, at: usize) -> Lanes {
        match self {
            Lanes::Each(first, bytes) => Lanes::Each(first + at / bytes, bytes),
            other => other,
        }
    }

    /// The lane of byte `at` of the access.
    fn of(self, at: usize) -> u8 {
        match self {
            Lanes::Any | Lanes::Several => SEVERAL,
            Lanes::Every => EVERY,
            Lanes::One(lane) => lane as u8,
            Lanes::Each(first, bytes) => (first + (at >> bytes.trailing_zeros())) as u8,
        }
    }

    /// The lanes of the four bytes of a word, the first of which is byte `at` of the access, or lies before it.
    #[inline]
    pub fn of_word(self, at: isize) -> u32 {
        match self {
            Lanes::Each(_, bytes) if bytes < 4 => {
                u32::from_le_bytes([0, 1, 2, 3].map(|b| self.of((at + b).max(0) as usize)))
            }
            _ => u32::from(self.of(at.max(0) as usize)) * 0x0101_0101,
        }
    }
}

impl Who<'_> {
    /// Whether an actor is of the same warp, whose lanes are told apart.
    pub fn is_of_warp(&self, actor: Actor) -> bool {
        self.warp.is_some_and(|first| (first..first + GROUPS_PER_WARP as Actor).contains(&actor))
    }

    /// How an earlier access of an actor is ordered with one of this party's.
    #[inline]
    pub fn order(&self, actor: Actor, clock: u32) -> Order {
        if self.view.knows(actor, clock) {
            return Order::Before;
        }
        let mut whose = self.view.whose(actor, clock);
        if self.is_of_warp(actor) {
            whose.own = true;
        } else if actor == self.actor {
            return Order::Before;
        }
        if whose == Whose::default() { Order::None } else { Order::Of(whose) }
    }
}

/// How an earlier access is ordered with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    None,
    /// It happened before.
    Before,
    /// It happened before if these lanes made it.
    Of(Whose),
}

/// An earlier access that is ordered with one only if some lane made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Debt {
    pub access: Access,
    pub whose: Whose,
}

impl Debt {
    /// Whether `now` may access what the lane `made` has accessed.
    fn is_paid(&self, made: u8, now: u8) -> bool {
        let Whose { lanes, own } = self.whose;
        match made {
            // Which of them is not kept.
            SEVERAL => lanes.count_ones() > 1,
            EVERY => own || lanes != 0,
            lane => own && now == lane || lanes >> lane & 1 != 0,
        }
    }
}

/// The lanes that made the last accesses of every word of a memory, a byte for each byte; empty until lanes are told apart.
#[derive(Debug, Default)]
pub struct Tags {
    wrote: Vec<u32>,
    /// Reads by the warp that read last, since that write.
    read: Vec<u32>,
}

/// What a step of a word's state says of lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Debts {
    /// Of the last write.
    pub write: Option<Debt>,
    /// Of the last read.
    pub read: Option<Debt>,
    /// The lanes of the last read are among those that the next one must be ordered with.
    pub more: bool,
}

impl Tags {
    /// Makes room for a memory of so many words.
    pub fn reach(&mut self, words: usize) {
        if self.wrote.len() < words {
            self.wrote.resize(words, 0);
            self.read.resize(words, 0);
        }
    }

    /// Looks at an access to the bytes `mask` of a word by the lanes `now`, of each byte.
    pub fn check(&self, word: usize, mask: u8, now: u32, debts: &[Debts; 4]) -> Result<(), (usize, Access)> {
        let (wrote, read) = (self.wrote[word].to_le_bytes(), self.read[word].to_le_bytes());
        let now = now.to_le_bytes();
        for b in (0..4).filter(|b| mask >> b & 1 != 0) {
            for (debt, made) in [(&debts[b].write, wrote[b]), (&debts[b].read, read[b])] {
                if let Some(debt) = debt.as_ref().filter(|debt| !debt.is_paid(made, now[b])) {
                    return Err((b, debt.access));
                }
            }
        }
        Ok(())
    }

    /// Remembers it.
    #[inline]
    pub fn keep(&mut self, word: usize, mask: u8, now: u32, write: bool, debts: Option<&[Debts; 4]>) {
        let kept = if write { &mut self.wrote[word] } else { &mut self.read[word] };
        if mask == 0xf && debts.is_none() {
            *kept = now;
            return;
        }
        let (mut old, now) = (kept.to_le_bytes(), now.to_le_bytes());
        for b in (0..4).filter(|b| mask >> b & 1 != 0) {
            let more = debts.is_some_and(|debts| debts[b].more);
            old[b] = if more && old[b] != now[b] { SEVERAL } else { now[b] };
        }
        *kept = u32::from_le_bytes(old);
    }
}
