//! Undefined values: where one came from, and which bytes of memory hold one.

use crate::memory::Place;
use crate::program::Reg;
use std::collections::BTreeMap;

/// What nothing has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Register(Reg),
    /// A byte of shared memory.
    Shared {
        /// Rank of its CTA in the cluster.
        rank: u32,
        offset: u32,
    },
    /// A byte of local memory or of the parameters of a function.
    Thread(Place),
    /// What `shfl` takes from a lane that does not take part.
    Lane(u32),
    /// The quotient or remainder of an integer division by zero.
    Division,
}

/// Where an undefined value came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// What was read.
    pub source: Source,
    /// The instruction that read it first.
    pub pc: u32,
}

/// The undefined bytes of what was read, and where the first came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hole {
    /// One bit for each byte.
    pub bytes: u32,
    pub origin: Origin,
}

impl Hole {
    /// The bit of a byte. Only a tensor map has more than 32. None of its bytes may be undefined, so that the rest shares a bit.
    pub fn bit(byte: u32) -> u32 {
        1 << byte.min(31)
    }
}

/// Bytes of a memory in which a store left an undefined value. Mostly there are none.
#[derive(Debug, Clone, Default)]
pub struct Holes(BTreeMap<u64, Origin>);

impl Holes {
    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The undefined ones of `len` bytes.
    #[inline]
    pub fn of(&self, at: u64, len: u64) -> Option<Hole> {
        if self.0.is_empty() {
            return None;
        }
        let mut found = self.0.range(at..at + len);
        let (&first, &origin) = found.next()?;
        let bit = |byte: u64| Hole::bit((byte - at) as u32);
        Some(Hole { bytes: found.fold(bit(first), |bytes, (&b, _)| bytes | bit(b)), origin })
    }

    /// These bytes have been written with defined values.
    #[inline]
    pub fn fill(&mut self, at: u64, len: u64) {
        while let Some((&byte, _)) = self.0.range(at..at + len).next() {
            self.0.remove(&byte);
        }
    }

    /// Undefined bytes have been written from `at` on.
    pub fn dig(&mut self, at: u64, hole: Hole) {
        let bytes = (0..32).filter(|b| hole.bytes >> b & 1 != 0);
        self.0.extend(bytes.map(|b| (at + b, hole.origin)));
    }
}
