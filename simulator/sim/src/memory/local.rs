//! Memory private to a thread, for the 32 lanes of a warp: `.local` variables and function parameters.

use super::{Place, outside};
use crate::check::undefined::{Hole, Holes};
use crate::trap::Fault;

/// `size` bytes for each of 32 lanes.
#[derive(Debug, Clone, Default)]
pub struct Local {
    bytes: Vec<u8>,
    size: usize,
    holes: Holes,
}

impl Local {
    /// Zeroed memory.
    pub fn new(size: usize) -> Local {
        Local { bytes: vec![0; size * 32], size, holes: Holes::default() }
    }

    /// The `len` bytes at `offset` of a lane.
    ///
    /// # Errors
    /// A bounds fault; `place` says what the program accessed.
    pub fn slice(&mut self, lane: usize, offset: u64, len: usize, place: Place) -> Result<&mut [u8], Fault> {
        let end = offset.checked_add(len as u64).filter(|&end| end <= self.size as u64);
        let Some(end) = end else {
            return Err(outside(place, len as u64, "the thread's memory", self.size as u64));
        };
        let start = lane * self.size;
        Ok(&mut self.bytes[start + offset as usize..start + end as usize])
    }

    fn at(&self, lane: usize, offset: u64) -> u64 {
        (lane * self.size) as u64 + offset
    }

    /// The undefined ones of these bytes.
    pub fn hole(&self, lane: usize, offset: u64, len: usize) -> Option<Hole> {
        self.holes.of(self.at(lane, offset), len as u64)
    }

    /// These bytes have been written, the ones in `hole` with undefined values.
    pub fn set_hole(&mut self, lane: usize, offset: u64, len: usize, hole: Option<Hole>) {
        let at = self.at(lane, offset);
        self.holes.fill(at, len as u64);
        if let Some(hole) = hole {
            self.holes.dig(at, hole);
        }
    }
}
