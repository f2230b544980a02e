//! Accesses of a warp: what its lanes read or write side by side is one access.
//!
//! A run that breaks a rule is carried out again lane by lane, so that what is reported names the lane.

use super::*;
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
            if self.load_run((space, addresses[run.first]), run, bytes, kind, out) {
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
            if holes.is_none() && self.store_run((space, addresses[run.first]), run, bytes, kind, src) {
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

    /// Makes a run one access, if it is worth one and can be one; `carry` moves its bytes. None if that is not so or something
    /// is wrong: then nothing is changed that the lanes would not change as well.
    fn access_run(
        &mut self,
        (space, address): (Space, u64),
        run: Run,
        bytes: usize,
        kind: Kind,
        carry: impl FnOnce(&mut Cluster<'_>, Place) -> Result<()>,
    ) -> Option<Place> {
        if run.lanes() == 1 || !address.is_multiple_of(bytes as u64) {
            return None;
        }
        let at = place(space, address);
        match at {
            Place::Global(_) => {}
            Place::Shared { rank, .. } if space != Space::SharedCta || rank as usize == self.cta => {}
            _ => return None,
        }
        self.w.note(self.g, run.mask(), kind.write);
        let view = self.g.known.alike(run.mask())?;
        let len = if run.same { bytes } else { bytes * run.lanes() as usize };
        let who = self.who(&view, if run.same { Lanes::Several } else { Lanes::Each(run.first, bytes) });
        let c = &self.cl.counters;
        let before = [c.shared_read, c.global_read, c.shared_written, c.global_written];
        if self.cl.touch(at, len, kind, who).and_then(|()| carry(self.cl, at)).is_ok() {
            return Some(at);
        }
        let c = &mut self.cl.counters;
        [c.shared_read, c.global_read, c.shared_written, c.global_written] = before;
        None
    }

    /// Reads a run, or does nothing and returns false.
    fn load_run(&mut self, from: (Space, u64), run: Run, bytes: usize, kind: Kind, out: &mut Bytes) -> bool {
        let all = bytes * run.lanes() as usize;
        let (start, mut filled) = (run.first * bytes, if run.same { bytes } else { all });
        let to = &mut out[start..][..filled];
        let Some(at) = self.access_run(from, run, bytes, kind, |cl, at| cl.read_at(at, to)) else {
            return false;
        };
        let again = (all - filled) as u64;
        match at {
            Place::Global(_) => self.cl.counters.global_read += again,
            _ => self.cl.counters.shared_read += again,
        }
        // Of the same bytes for all lanes, twice as many with each copy.
        while filled < all {
            let more = filled.min(all - filled);
            out.copy_within(start..start + more, start + filled);
            filled += more;
        }
        true
    }

    /// Writes a run, or does nothing and returns false.
    fn store_run(&mut self, to: (Space, u64), run: Run, bytes: usize, kind: Kind, src: &Bytes) -> bool {
        let from = &src[run.first * bytes..][..bytes * run.lanes() as usize];
        !run.same && self.access_run(to, run, bytes, kind, |cl, at| cl.write_at(at, from)).is_some()
    }
}
