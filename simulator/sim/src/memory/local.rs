//! Memory private to a thread, for the 32 lanes of a warp: `.local` variables and function parameters.

use super::{Place, outside};
use crate::check::undefined::{Hole, Holes, Origin, Source};
use crate::trap::Fault;

/// `size` bytes for each of 32 lanes.
#[derive(Debug, Clone, Default)]
pub struct Local {
    bytes: Vec<u8>,
    size: usize,
    /// Which bytes have been written.
    written: Vec<bool>,
    /// Of those, the ones with undefined values.
    holes: Holes,
}

impl Local {
    /// Zeroed memory; whether reads of it are `checked` for what nothing wrote.
    pub fn new(size: usize, checked: bool) -> Local {
        let bytes = vec![0; size * 32];
        Local { written: vec![!checked; bytes.len()], bytes, size, holes: Holes::default() }
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

    /// Visits `N` bytes of each lane at these offsets, and whether they were written; false if some do not lie inside,
    /// undefined ones are about, or a visit says so.
    #[inline]
    fn lanes<const N: usize>(
        &mut self,
        mask: u32,
        offsets: &[u64; 32],
        mut visit: impl FnMut(&mut [u8; N], &mut [bool; N], usize) -> bool,
    ) -> bool {
        let Some(last) = self.size.checked_sub(N).filter(|_| self.holes.is_empty()) else { return false };
        offsets.iter().enumerate().filter(|(l, _)| mask >> l & 1 != 0).all(|(l, &offset)| {
            if offset > last as u64 {
                return false;
            }
            let at = l * self.size + offset as usize;
            let (bytes, written) = (&mut self.bytes[at..], &mut self.written[at..]);
            match (bytes.first_chunk_mut(), written.first_chunk_mut()) {
                (Some(bytes), Some(written)) => visit(bytes, written, l),
                _ => false,
            }
        })
    }

    /// Reads 4, 8 or 16 bytes of every lane of a mask, one after the other in `out`. False if not all lie inside and are
    /// defined.
    pub fn load(&mut self, mask: u32, offsets: &[u64; 32], bytes: usize, out: &mut [u8]) -> bool {
        fn to<const N: usize>(out: &mut [u8]) -> impl FnMut(&mut [u8; N], &mut [bool; N], usize) -> bool {
            |from, written, l| {
                out[l * N..][..N].copy_from_slice(from);
                *written == [true; N]
            }
        }
        match bytes {
            4 => self.lanes::<4>(mask, offsets, to(out)),
            8 => self.lanes::<8>(mask, offsets, to(out)),
            16 => self.lanes::<16>(mask, offsets, to(out)),
            _ => false,
        }
    }

    /// Writes 4, 8 or 16 defined bytes of every lane of a mask. False, and only lanes before are written, if not all lie inside
    /// or undefined ones are about.
    pub fn store(&mut self, mask: u32, offsets: &[u64; 32], bytes: usize, src: &[u8]) -> bool {
        fn from<const N: usize>(src: &[u8]) -> impl FnMut(&mut [u8; N], &mut [bool; N], usize) -> bool {
            |to, written, l| {
                to.copy_from_slice(&src[l * N..][..N]);
                *written = [true; N];
                true
            }
        }
        match bytes {
            4 => self.lanes::<4>(mask, offsets, from(src)),
            8 => self.lanes::<8>(mask, offsets, from(src)),
            16 => self.lanes::<16>(mask, offsets, from(src)),
            _ => false,
        }
    }

    /// The undefined ones of bytes inside that instruction `pc` reads; `place` is that of the first.
    pub fn hole(&self, lane: usize, offset: u64, len: usize, (place, pc): (Place, u32)) -> Option<Hole> {
        let at = lane * self.size + offset as usize;
        let stored = self.holes.of(at as u64, len as u64);
        let written = &self.written[at..at + len];
        let never = (0..len).filter(|b| !written[*b]).fold(0, |m, b| m | 1 << b.min(31));
        let origin = stored.map_or(Origin { source: Source::Thread(place), pc }, |hole| hole.origin);
        Some(Hole { bytes: never | stored.map_or(0, |hole| hole.bytes), origin })
            .filter(|hole| hole.bytes != 0)
    }

    /// These bytes have been written, the ones in `hole` with undefined values.
    pub fn set_hole(&mut self, lane: usize, offset: u64, len: usize, hole: Option<Hole>) {
        let at = lane * self.size + offset as usize;
        self.written[at..at + len].fill(true);
        self.holes.fill(at as u64, len as u64);
        if let Some(hole) = hole {
            self.holes.dig(at as u64, hole);
        }
    }
}
