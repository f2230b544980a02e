//! Shared memory of one CTA, with its shadow.

use super::{Place, SHARED_RESERVED, outside};
use crate::check::lanes::Tags;
use crate::check::shadow::{FRESH, StateId};
use crate::check::undefined::Holes;
use crate::trap::Fault;

/// Bytes and shadow. Offset 0 of the address space is offset 0 here; the reserved first KiB holds nothing.
#[derive(Debug, Default)]
pub struct Shared {
    bytes: Vec<u8>,
    /// One state for every 32-bit word.
    pub shadow: Vec<StateId>,
    /// The lanes that made the last accesses.
    pub tags: Tags,
    /// Bytes whose last write was of an undefined value.
    pub holes: Holes,
}

impl Shared {
    /// `size` usable bytes, never written.
    pub fn new(size: u32) -> Shared {
        let total = (SHARED_RESERVED + size).next_multiple_of(16) as usize;
        let mut bytes = vec![0; total];
        bytes.truncate((SHARED_RESERVED + size) as usize);
        Shared { bytes, shadow: vec![FRESH; total / 4], tags: Tags::default(), holes: Holes::default() }
    }

    /// Usable bytes.
    pub fn size(&self) -> u32 {
        self.bytes.len() as u32 - SHARED_RESERVED
    }

    fn check(&self, rank: u32, offset: u32, len: usize) -> Result<(), Fault> {
        if offset < SHARED_RESERVED || offset as usize + len > self.bytes.len() {
            let what = "the shared memory (offsets from 0x400)";
            return Err(outside(Place::Shared { rank, offset }, len as u64, what, self.size().into()));
        }
        Ok(())
    }

    /// The `len` bytes at `offset`; `rank` is for the message.
    #[inline]
    pub fn slice(&self, rank: u32, offset: u32, len: usize) -> Result<&[u8], Fault> {
        self.check(rank, offset, len)?;
        Ok(&self.bytes[offset as usize..][..len])
    }

    /// The `len` bytes at `offset`, to write.
    #[inline]
    pub fn slice_mut(&mut self, rank: u32, offset: u32, len: usize) -> Result<&mut [u8], Fault> {
        self.check(rank, offset, len)?;
        Ok(&mut self.bytes[offset as usize..][..len])
    }
}
