//! Shadow memory: for every 32-bit word, who wrote it last and who read it since.
//!
//! Words share *states*: a state is interned, a word holds its number, and an access maps old number to new
//! number. A tile that one instruction fills moves from one state to one other, so the map is computed once and
//! the rest is comparing and storing a `u32`. Bytes of a word with different histories split it into four states.
//!
//! Accesses are kept until something ordered after them reads or writes (as in FastTrack, Flanagan and Freund 2009) that
//! knows no more of the rest of the grid and conflicts with as much;
//! strong writes (atomics, volatile) that are not ordered with each other are kept together.

use super::hash::QuickMap;
use super::lanes::{Debt, Debts, Lanes, Order, Tags, Who};
use super::order::{Actor, Actors};
use super::outside::Era;
use super::proxy::Memory;
use crate::decode::operand::Scope;
use smallvec::SmallVec;

/// One access as the shadow remembers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Access {
    pub actor: Actor,
    pub clock: u32,
    pub pc: u32,
    pub kind: Kind,
    /// What it knew of the rest of the grid, for global memory.
    pub era: Era,
}

impl Access {
    /// Whether both are strong and reach each other, so that they do not race; `apart` is the least scope that holds both.
    pub fn both_strong(&self, other: &Access, apart: Scope) -> bool {
        self.kind.strong.min(other.kind.strong) >= Some(apart)
    }

    /// Whether whatever conflicts with `older`, which is ordered before this and no weaker, conflicts with this as well.
    fn stands_for(&self, older: &Access) -> bool {
        self.era == older.era
            && self.kind.strong <= older.kind.strong
            && self.kind.constant >= older.kind.constant
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kind {
    pub write: bool,
    /// Atomic, volatile or relaxed, and how far it reaches: does not race with another strong access in reach.
    pub strong: Option<Scope>,
    /// Through the async proxy.
    pub proxy: bool,
    /// A write of the bytes that are there already: does not race with another write.
    pub same: bool,
    /// A read of what nothing writes while the kernel runs, as `ld.global.nc` says.
    pub constant: bool,
}

impl Kind {
    /// A plain load.
    pub const READ: Kind = Kind { write: false, strong: None, proxy: false, same: false, constant: false };
    /// A plain store.
    pub const WRITE: Kind = Kind { write: true, strong: None, proxy: false, same: false, constant: false };
    /// A read by an async engine.
    pub const PROXY_READ: Kind =
        Kind { write: false, strong: None, proxy: true, same: false, constant: false };
    /// A write by an async engine.
    pub const PROXY_WRITE: Kind =
        Kind { write: true, strong: None, proxy: true, same: false, constant: false };

    /// The same access, strong or not.
    #[must_use]
    pub const fn strong(self, strong: Option<Scope>) -> Kind {
        Kind { strong, ..self }
    }

    /// A write that changes nothing, through the generic proxy.
    #[must_use]
    pub const fn same(self) -> Kind {
        Kind { same: self.write && !self.proxy, ..self }
    }

    /// The same read, of constant memory or not.
    #[must_use]
    pub const fn constant(self, constant: bool) -> Kind {
        Kind { constant, ..self }
    }

    /// "write", "atomic access", ...
    pub const fn noun(self) -> &'static str {
        match (self.write, self.strong.is_some(), self.proxy) {
            (true, false, false) => "write",
            (false, false, false) if self.constant => "constant read",
            (false, false, false) => "read",
            (true, true, false) => "strong write",
            (false, true, false) => "strong read",
            (true, _, true) => "async write",
            (false, _, true) => "async read",
        }
    }
}

/// Why an access is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conflict {
    /// Not ordered with this one.
    Race(Access),
    /// Ordered, but by no proxy fence.
    Unfenced(Access),
    /// One of the two is a read of constant memory, the other writes it.
    NotConstant(Access),
    /// Nothing wrote the byte.
    Uninit,
}

/// Number of an interned state.
pub type StateId = u32;
/// The state of a word that nothing wrote.
pub const FRESH: StateId = 0;
/// The state of a word that the host, or something long before, wrote.
pub const WRITTEN: StateId = 1;

type List = SmallVec<[Access; 2]>;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Cell {
    written: bool,
    writes: List,
    reads: List,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum State {
    Whole(Cell),
    Split([StateId; 4]),
}

#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Races and missing fences.
    pub race: bool,
    /// Unwritten bytes.
    pub uninit: bool,
    pub memory: Memory,
    /// The parties of the cluster.
    pub actors: Actors,
}

/// All states in use by the words of one cluster.
#[derive(Debug)]
pub struct States {
    states: Vec<State>,
    ids: QuickMap<State, StateId>,
    last: Option<(Step, Next)>,
}

/// The state that an access leads to, and what it asks of the lanes of each byte, if it does.
type Next = (StateId, Option<[Debts; 4]>);

/// A word in this state, and the bytes of it that are accessed. The view is its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    id: StateId,
    mask: u8,
    access: Access,
    view: usize,
    memory: Memory,
    uninit: bool,
}

impl Default for States {
    fn default() -> States {
        let mut states = States { states: Vec::new(), ids: QuickMap::default(), last: None };
        states.intern(State::Whole(Cell::default()));
        states.intern(State::Whole(Cell { written: true, ..Cell::default() }));
        states
    }
}

/// Readers or strong writers kept per word; more than this many unordered ones are not all needed to find a race.
const KEPT: usize = 16;

impl States {
    fn intern(&mut self, state: State) -> StateId {
        if let Some(&id) = self.ids.get(&state) {
            return id;
        }
        let id = self.states.len() as StateId;
        self.states.push(state.clone());
        self.ids.insert(state, id);
        id
    }

    /// How many states exist; a caller compacts when it grows large.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Drops every state that no word holds. `words` visits all words of all shadows.
    pub fn compact<'a>(&mut self, words: impl Iterator<Item = &'a mut Vec<StateId>>) {
        let old = std::mem::take(self);
        let mut map: Vec<Option<StateId>> = vec![None; old.states.len()];
        for word in words.flat_map(|w| w.iter_mut()) {
            *word = match map[*word as usize] {
                Some(id) => id,
                None => {
                    let state = match &old.states[*word as usize] {
                        State::Split(parts) => {
                            State::Split(parts.map(|p| self.intern(old.states[p as usize].clone())))
                        }
                        whole => whole.clone(),
                    };
                    let id = self.intern(state);
                    map[*word as usize] = Some(id);
                    id
                }
            };
        }
    }

    /// The states of the four bytes of a word.
    fn parts(&self, id: StateId) -> [StateId; 4] {
        match &self.states[id as usize] {
            State::Whole(_) => [id; 4],
            State::Split(parts) => *parts,
        }
    }

    fn cell(&self, id: StateId) -> &Cell {
        match &self.states[id as usize] {
            State::Whole(cell) => cell,
            // `Split` holds whole states only.
            State::Split(parts) => self.cell(parts[0]),
        }
    }

    fn step_cell(
        &mut self,
        id: StateId,
        a: Access,
        who: &Who<'_>,
        look: Look,
    ) -> Result<(StateId, Debts), Conflict> {
        let cell = self.cell(id);
        let mut debts = Debts::default();
        if look.uninit && !a.kind.write && !cell.written {
            return Err(Conflict::Uninit);
        }
        if !look.race {
            return Ok((if a.kind.write { WRITTEN } else { id }, debts));
        }
        // Of an access of a warp whose lanes are told apart, only the last is known by whom it was.
        let owes = |list: &List, b: &Access, whose| {
            let last = list.iter().rfind(|b| !b.kind.proxy);
            (last == Some(b)).then_some(Debt { access: *b, whose })
        };
        let exempt = |b: &Access| a.both_strong(b, look.actors.apart(a.actor, b.actor));
        if a.kind.constant
            && let Some(w) = cell.writes.first()
        {
            return Err(Conflict::NotConstant(*w));
        }
        for w in &cell.writes {
            let allowed = exempt(w) || a.kind.same && !w.kind.proxy;
            match who.order(w.actor, w.clock) {
                Order::None if !allowed => return Err(Conflict::Race(*w)),
                Order::Of(whose) if !allowed => debts.write = debts.write.or(owes(&cell.writes, w, whose)),
                _ => {}
            }
            if a.kind.proxy && !w.kind.proxy && !who.view.knows_fenced(look.memory, w.actor, w.clock) {
                return Err(Conflict::Unfenced(*w));
            }
        }
        let needed = |b: &&Access| {
            let follows = b.actor == a.actor || who.order(b.actor, b.clock) == Order::Before;
            !(follows && a.stands_for(b))
        };
        let keep = |list: &List| -> List { list.iter().filter(needed).copied().take(KEPT - 1).collect() };
        let new = if a.kind.write {
            if let Some(r) = cell.reads.iter().find(|r| r.kind.constant) {
                return Err(Conflict::NotConstant(*r));
            }
            for r in cell.reads.iter().filter(|r| !exempt(r)) {
                match who.order(r.actor, r.clock) {
                    Order::None => return Err(Conflict::Race(*r)),
                    Order::Of(whose) => debts.read = debts.read.or(owes(&cell.reads, r, whose)),
                    Order::Before => {}
                }
            }
            let mut writes = keep(&cell.writes);
            // What follows must be ordered after this write like after any other.
            writes.push(Access { kind: Kind { same: false, ..a.kind }, ..a });
            Cell { written: true, writes, reads: keep(&cell.reads) }
        } else {
            let again =
                |b: &Access| b.actor == a.actor && matches!(who.order(b.actor, b.clock), Order::Of(_));
            debts.more = cell.reads.iter().rfind(|b| !b.kind.proxy).is_some_and(again);
            let mut reads = keep(&cell.reads);
            reads.push(a);
            Cell { written: cell.written, writes: cell.writes.clone(), reads }
        };
        Ok((self.intern(State::Whole(new)), debts))
    }

    fn step(
        &mut self,
        id: StateId,
        mask: u8,
        a: Access,
        who: &Who<'_>,
        look: Look,
    ) -> Result<Next, Conflict> {
        let mut debts = [Debts::default(); 4];
        let next = if mask == 0xf && matches!(self.states[id as usize], State::Whole(_)) {
            let (next, all) = self.step_cell(id, a, who, look)?;
            debts = [all; 4];
            next
        } else {
            let mut parts = self.parts(id);
            for (i, part) in parts.iter_mut().enumerate() {
                if mask >> i & 1 != 0 {
                    (*part, debts[i]) = self.step_cell(*part, a, who, look)?;
                }
            }
            if parts.iter().all(|&p| p == parts[0]) { parts[0] } else { self.intern(State::Split(parts)) }
        };
        Ok((next, (debts != [Debts::default(); 4]).then_some(debts)))
    }

    /// Forgets the last step, before the next instruction or operation in flight: what a party knows may change.
    #[inline]
    pub fn forget(&mut self) {
        self.last = None;
    }

    /// Applies an access to `len` bytes at byte `start` of `words`, whose lanes are in `tags`. On a conflict returns the byte
    /// and the cause.
    pub fn access(
        &mut self,
        (words, mut tags): (&mut [StateId], Option<&mut Tags>),
        start: usize,
        len: usize,
        a: Access,
        who: &Who<'_>,
        look: Look,
    ) -> Result<(), (usize, Conflict)> {
        if len == 0 {
            return Ok(());
        }
        let (first, last) = (start / 4, (start + len - 1) / 4);
        let view = std::ptr::from_ref(who.view) as usize;
        // State, mask, next state, and whether no lane has to be looked at or remembered.
        let mut memo = (StateId::MAX, 0, 0, true);
        let keeps = who.lanes != Lanes::Any;
        if let Some(tags) = tags.as_mut().filter(|_| keeps) {
            tags.reach(words.len());
        }
        for (i, word) in words.iter_mut().enumerate().take(last + 1).skip(first) {
            let low = start.saturating_sub(i * 4).min(4);
            let high = (start + len - i * 4).min(4);
            let mask = (0xfu8 << low) & (0xf >> (4 - high));
            let old = *word;
            if (memo.0, memo.1) != (old, mask) {
                let Look { memory, uninit, .. } = look;
                let step = Step { id: old, mask, access: a, view, memory, uninit };
                if self.last.as_ref().is_none_or(|(last, _)| *last != step) {
                    let next = self.step(old, mask, a, who, look);
                    self.last = Some((step, next.map_err(|c| (self.blame(old, i, mask, c), c))?));
                }
                if let Some((_, (new, debts))) = &self.last {
                    memo = (old, mask, *new, !keeps && debts.is_none());
                }
            }
            if !memo.3
                && let Some(tags) = &mut tags
                && let Some((_, (_, debts))) = &self.last
            {
                let now = who.lanes.of_word(i as isize * 4 - start as isize);
                let debts = debts.as_ref();
                let fault = |(byte, b)| (i * 4 + byte, Conflict::Race(b));
                debts.map_or(Ok(()), |debts| tags.check(i, mask, now, debts)).map_err(fault)?;
                if keeps {
                    tags.keep(i, mask, now, a.kind.write, debts);
                }
            }
            *word = memo.2;
        }
        Ok(())
    }

    /// The first byte of word `i` that shows conflict `c`.
    fn blame(&self, id: StateId, i: usize, mask: u8, c: Conflict) -> usize {
        let shows = |cell: &Cell| match c {
            Conflict::Uninit => !cell.written,
            Conflict::Race(b) | Conflict::Unfenced(b) | Conflict::NotConstant(b) => {
                cell.writes.contains(&b) || cell.reads.contains(&b)
            }
        };
        let parts = self.parts(id);
        let byte = (0..4).find(|&b| mask >> b & 1 != 0 && shows(self.cell(parts[b])));
        i * 4 + byte.unwrap_or(0)
    }

    /// Whether every one of the `len` bytes at `start` has been written.
    pub fn written(&self, words: &[StateId], start: usize, len: usize) -> bool {
        (start..start + len).all(|b| self.cell(self.parts(words[b / 4])[b % 4]).written)
    }

    /// For every state, whether it remembers a write.
    pub fn writers(&self) -> Vec<bool> {
        let whole = |id: StateId| !self.cell(id).writes.is_empty();
        (0..self.states.len() as StateId).map(|id| self.parts(id).into_iter().any(whole)).collect()
    }

    /// The accesses remembered for the four bytes of a word: `(byte mask, access)`, writes before reads.
    pub fn remembered(&self, id: StateId) -> Vec<(u8, Access)> {
        let mut out: Vec<(u8, Access)> = Vec::new();
        for (b, part) in self.parts(id).into_iter().enumerate() {
            let cell = self.cell(part);
            for a in cell.writes.iter().chain(&cell.reads) {
                match out.iter_mut().find(|(_, x)| x == a) {
                    Some((mask, _)) => *mask |= 1 << b,
                    None => out.push((1 << b, *a)),
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests;
