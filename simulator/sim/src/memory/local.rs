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
    pub fn slice(&mut self, lane: usize, offset: u64, len: usize, place: Place) -> Result<&mut [u8], Fault> {
        let end = offset.checked_add(len as u64).filter(|&end| end <= self.size as u64);
        let Some(end) = end else {
            return Err(outside(place, len as u64, "the thread's memory", self.size as u64));
        };
        let start = lane * self.size;
        Ok(&mut self.bytes[start + offset as usize..start + end as usize])
    }

    /// Copies `N` bytes of each lane at these offsets to `out`, or from there; false, and nothing changed, if some do not lie
    /// inside or undefined ones are about.
    #[inline]
    fn lanes<const N: usize>(
        &mut self,
        mask: u32,
        offsets: &[u64; 32],
        mut copy: impl FnMut(&mut [u8; N], usize),
    ) -> bool {
        let inside = |l: usize| mask >> l & 1 == 0 || offsets[l].saturating_add(N as u64) <= self.size as u64;
        if !self.holes.is_empty() || !(0..32).all(inside) {
            return false;
        }
        for (l, offset) in offsets.iter().enumerate().filter(|(l, _)| mask >> l & 1 != 0) {
            if let Some(bytes) = self.bytes[l * self.size + *offset as usize..].first_chunk_mut() {
                copy(bytes, l);
            }
        }
        true
    }

    /// Reads 4, 8 or 16 bytes of every lane of a mask, one after the other in `out`. False, and nothing done, if some do
    /// not lie inside or undefined ones are about.
    pub fn load(&mut self, mask: u32, offsets: &[u64; 32], bytes: usize, out: &mut [u8]) -> bool {
        fn to<const N: usize>(out: &mut [u8]) -> impl FnMut(&mut [u8; N], usize) {
            |from, l| out[l * N..][..N].copy_from_slice(from)
        }
        match bytes {
            4 => self.lanes::<4>(mask, offsets, to(out)),
            8 => self.lanes::<8>(mask, offsets, to(out)),
            16 => self.lanes::<16>(mask, offsets, to(out)),
            _ => false,
        }
    }

    /// Writes 4, 8 or 16 defined bytes of every lane of a mask; false as for [`load`](Local::load).
    pub fn store(&mut self, mask: u32, offsets: &[u64; 32], bytes: usize, src: &[u8]) -> bool {
        fn from<const N: usize>(src: &[u8]) -> impl FnMut(&mut [u8; N], usize) {
            |to, l| to.copy_from_slice(&src[l * N..][..N])
        }
        match bytes {
            4 => self.lanes::<4>(mask, offsets, from(src)),
            8 => self.lanes::<8>(mask, offsets, from(src)),
            16 => self.lanes::<16>(mask, offsets, from(src)),
            _ => false,
        }
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
