//! Scales of tiles that start in the middle of a column: moved by 16 rows in shared memory, between TMA and tensor
//! memory, by the warp that has nothing else to do.
//!
//! A column of tensor memory has the scales of 32 rows, a word in each lane, and `tcgen05.mma` takes those of a tile's first
//! row from lane 0. An atom lies in shared memory as 32 lines of 16 bytes: line l has the words of rows l, l + 32, l + 64 and
//! l + 96, one for each column. So where a tile starts 16 rows behind a column's first, line l takes the words of line
//! l + 16 in its first half; in its second half those of line l - 16, each from the column behind, the last one from the
//! next atom's first.
//!
//! ```text
//! arrived[stage] → each CTA's warp 3 → moved[stage] of the CTA that multiplies
//! ```

use dualgemm_ptx::builder::*;

use super::config::{COLUMN_ROWS, Moved};
use super::fused::Fused;
use crate::parts::format::ATOM_BYTES;
use crate::parts::operand::OperandIndex;

/// Rows that scales are moved by.
const HALF: u32 = COLUMN_ROWS / 2;

impl Fused<'_> {
    /// Moves the weights' scales of every stage of every tile that needs it.
    pub(super) fn move_scales(&self, k: &mut Kernel, scales: &Moved) {
        let at = self.ring.start(k, false);
        let own = k.eval(self.lane << 4);
        let second_half = k.compare(Cmp::Ge, self.lane, HALF);
        let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
        self.tiles.for_each(k, "moved_tiles", |k, tile| {
            let moves = k.compare(Cmp::Ne, tile.feature & HALF, 0u32);
            k.for_range("moved_stages", self.first_stage, self.end_stage, 1, |k, _, _| {
                let arrived = at.barrier(k, self.base.at(scales.arrived.offset));
                k.mbarrier_wait(arrived, at.phase, "scales");
                k.if_(moves, "move", |k| {
                    let stage = k.eval(at.index * self.layout.ring.stride);
                    let ring = self.base.at(self.layout.ring.offset);
                    let line = k.offset(ring, stage + own);
                    self.move_lines(k, line, second_half);
                    // Ordinary stores above; the copy to tensor memory reads through the async proxy, which sees them only
                    // after this.
                    k.fence_proxy_async_shared();
                });
                k.warp_sync();
                let moved = at.barrier(k, self.base.at(scales.moved.offset));
                self.arrive_at_leader(k, moved, first_lane);
                at.advance(k);
            });
        });
    }

    /// Every lane takes the words of the line 16 further or before, from the lane that has it, in all atoms of the stage at
    /// this line. No lane reads what another writes, so that nothing has to order them.
    fn move_lines(&self, k: &mut Kernel, own: Addr<Shared>, second_half: Reg<Pred>) {
        let part = self.config.parts()[OperandIndex::Gate as usize];
        let along_k = part.atom_bytes() / ATOM_BYTES;
        // Offsets of the atoms that follow each other along the rows.
        let rows = [OperandIndex::Gate, OperandIndex::Up].into_iter().flat_map(|which| {
            (0..along_k).map(move |atom| {
                let first = self.layout.scales[which as usize] + atom * ATOM_BYTES;
                (0..part.atoms).map(|row| first + row * part.atom_bytes()).collect::<Vec<_>>()
            })
        });
        let rows: Vec<Vec<u32>> = rows.collect();
        let words: Vec<Vec<Reg<B32>>> = rows
            .iter()
            .map(|atoms| atoms.iter().flat_map(|&at| k.ld_vector::<B32, _, 4>(own.at(at))).collect())
            .collect();
        for (atoms, words) in rows.iter().zip(words) {
            let words: Vec<Reg<B32>> =
                words.into_iter().map(|word| k.shuffle(Shuffle::Xor, word, HALF)).collect();
            let moved: Vec<Reg<B32>> = (0..words.len())
                .map(|i| match words.get(i + 1) {
                    Some(&behind) => k.select::<B32>(second_half, behind, words[i]),
                    None => words[i],
                })
                .collect();
            for (&at, line) in atoms.iter().zip(moved.chunks_exact(4)) {
                k.st_vector(own.at(at), line);
            }
        }
    }
}
