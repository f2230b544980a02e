//! Accesses of a warp: what its lanes read or write side by side is one access.
//!
//! A run that breaks a rule is carried out again lane by lane, so that what is reported names the lane.

use super::*;
use crate::check::order::View;
use crate::check::undefined::Hole;

/// The bytes of every lane, one after the other.
pub type Bytes = [u8; 1024];

/// Consecutive lanes whose bytes follow each other in memory, or are the same.
#[derive(Debug, Clone, Copy)]
struct Run {
    first: usize,
    end: usize,
    /// All have the address of the first.
    same: bool,
}

impl Run {
    /// The run that starts at a lane of the mask.
    fn from(first: usize, mask: u32, addresses: &[u64; 32], bytes: u64) -> Run {
        let follows = |by: u64| {
            (first + 1..32)
                .find(|&l| mask >> l & 1 == 0 || addresses[l] != addresses[l - 1].wrapping_add(by))
                .unwrap_or(32)
        };
        match (follows(bytes), follows(0)) {
            (end, same) if same > end => Run { first, end: same, same: true },
            (end, _) => Run { first, end, same: false },
        }
    }

    fn lanes(self) -> u32 {
        (self.end - self.first) as u32
    }

    fn mask(self) -> u32 {
        u32::MAX >> (32 - self.lanes()) << self.first
    }
}

/// The runs of the lanes of a mask, in order.
fn runs(mut mask: u32, addresses: &[u64; 32], bytes: usize) -> impl Iterator<Item = Run> {
    std::iter::from_fn(move || {
        let first = (mask != 0).then(|| mask.trailing_zeros() as usize)?;
        let run = Run::from(first, mask, addresses, bytes as u64);
        mask &= !run.mask();
        Some(run)
    })
}

impl Cx<'_, '_> {
    /// Reads `bytes` bytes for every active lane. Returns the lanes that read undefined bytes.
    pub fn load_warp(
        &mut self,
        space: Space,
        addresses: &[u64; 32],
        bytes: usize,
        kind: Kind,
        out: &mut Bytes,
    ) -> Result<Vec<(usize, Hole)>> {
        let mut holes = Vec::new();
        let aligned = || lanes(self.m).all(|l| addresses[l].is_multiple_of(bytes as u64));
        if space == Space::Local && aligned() && self.w.local.load(self.m, addresses, bytes, out) {
            return Ok(holes);
        }
        for run in runs(self.m, addresses, bytes) {
            if self.load_run(space, addresses[run.first], run, bytes, kind, out) {
                continue;
            }
            for l in run.first..run.end {
                self.aligned_to(space, addresses[l], bytes as u64, l)?;
                let hole = self.load_lane(space, addresses[l], l, kind, &mut out[l * bytes..][..bytes])?;
                holes.extend(hole.map(|hole| (l, hole)));
            }
        }
        Ok(holes)
    }

    /// Writes `bytes` bytes for every active lane, those in `holes` undefined.
    pub fn store_warp(
        &mut self,
        space: Space,
        addresses: &[u64; 32],
        bytes: usize,
        kind: Kind,
        src: &Bytes,
        holes: Option<&[Option<Hole>; 32]>,
    ) -> Result<()> {
        let aligned = || lanes(self.m).all(|l| addresses[l].is_multiple_of(bytes as u64));
        if space == Space::Local
            && holes.is_none()
            && aligned()
            && self.w.local.store(self.m, addresses, bytes, src)
        {
            return Ok(());
        }
        for run in runs(self.m, addresses, bytes) {
            if holes.is_none() && self.store_run(space, addresses[run.first], run, bytes, kind, src) {
                continue;
            }
            for l in run.first..run.end {
                self.aligned_to(space, addresses[l], bytes as u64, l)?;
                let hole = holes.and_then(|holes| holes[l]);
                self.store_lane(space, addresses[l], l, kind, &src[l * bytes..][..bytes], hole)?;
            }
        }
        Ok(())
    }

    /// Where a run is, if it is worth an access of its own and can be one, and what its lanes know.
    fn place_of(
        &mut self,
        space: Space,
        address: u64,
        run: Run,
        bytes: usize,
        write: bool,
    ) -> Option<(Place, Arc<View>)> {
        if run.lanes() == 1 || !address.is_multiple_of(bytes as u64) {
            return None;
        }
        let at = place(space, address);
        match at {
            Place::Global(_) => {}
            Place::Shared { rank, .. } if space != Space::SharedCta || rank as usize == self.cta => {}
            _ => return None,
        }
        self.w.note(self.g, run.mask(), write);
        Some((at, self.g.known.alike(run.mask())?))
    }

    /// Reads a run. False if something is wrong: then nothing is changed that the lanes would not change as well.
    fn load_run(
        &mut self,
        space: Space,
        address: u64,
        run: Run,
        bytes: usize,
        kind: Kind,
        out: &mut Bytes,
    ) -> bool {
        let Some((at, view)) = self.place_of(space, address, run, bytes, false) else { return false };
        let lanes = run.lanes() as usize;
        let len = if run.same { bytes } else { bytes * lanes };
        let again = (bytes * lanes - len) as u64;
        let (shared, global) = (self.cl.counters.shared_read, self.cl.counters.global_read);
        let who = self.who(&view, if run.same { Lanes::Several } else { Lanes::Each(run.first, bytes) });
        let start = run.first * bytes;
        let to = &mut out[start..][..len];
        let done = self.cl.touch(at, len, kind, who).and_then(|()| self.cl.read_at(at, to));
        let counters = &mut self.cl.counters;
        match (done, at) {
            (Err(_), _) => {
                (counters.shared_read, counters.global_read) = (shared, global);
                return false;
            }
            (_, Place::Global(_)) => counters.global_read += again,
            _ => counters.shared_read += again,
        }
        // Of the same bytes for all lanes, twice as many with each copy.
        let mut filled = len;
        while filled < bytes * lanes {
            let more = filled.min(bytes * lanes - filled);
            out.copy_within(start..start + more, start + filled);
            filled += more;
        }
        true
    }

    /// Writes a run. False if something is wrong, as [`load_run`](Cx::load_run).
    fn store_run(
        &mut self,
        space: Space,
        address: u64,
        run: Run,
        bytes: usize,
        kind: Kind,
        src: &Bytes,
    ) -> bool {
        if run.same {
            return false;
        }
        let Some((at, view)) = self.place_of(space, address, run, bytes, true) else { return false };
        let len = bytes * run.lanes() as usize;
        let (shared, global) = (self.cl.counters.shared_written, self.cl.counters.global_written);
        let who = self.who(&view, Lanes::Each(run.first, bytes));
        let from = &src[run.first * bytes..][..len];
        let done = self.cl.touch(at, len, kind, who).and_then(|()| self.cl.write_at(at, from));
        if done.is_err() {
            (self.cl.counters.shared_written, self.cl.counters.global_written) = (shared, global);
        }
        done.is_ok()
    }
}
