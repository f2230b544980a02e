//! The end of the fused sm_100 kernel: sums in tensor memory become rows of C.

use dualgemm_ptx::builder::*;

use super::fused::Fused;
use crate::parts::epilogue;
use crate::parts::operand::ATOM_ROWS;
use crate::parts::ring::Position;

/// First token and first feature of a tile.
#[derive(Clone, Copy)]
struct Origin {
    token: Reg<U32>,
    feature: Reg<U32>,
}

impl Fused<'_> {
    /// Columns of an accumulator that are handled at once: a piece of a token's row, or some tokens of a feature.
    fn chunk(&self) -> u32 {
        if self.rows_are_tokens() { 16 } else { 8 }
    }

    /// The warp's quarter of the 128 lanes, and this thread's lane among them.
    fn quarter(&self, k: &mut Kernel) -> (Reg<U32>, Reg<U32>) {
        let quarter = k.and(self.warp, 3u32);
        let row = k.shl(quarter, 5u32);
        (quarter, k.add(row, self.lane))
    }

    /// Loads `chunk` columns of gate and of up from column `column` on, for this thread's lane.
    fn load_sums(&self, k: &mut Kernel, sums: Addr<Tmem>, column: u32) -> [Vec<Reg<F32>>; 2] {
        let halves = [0, 1].map(|half| {
            let from = sums.at(half * self.config.n + column);
            k.tmem_ld(TmemShape::Lanes32Bits32, self.chunk() as usize, from)
        });
        k.tmem_wait_ld();
        halves.map(|half| half.into_iter().map(|bits| k.from_bits(bits)).collect())
    }

    /// This warp's lanes of tensor memory.
    fn own_lanes(&self, k: &mut Kernel, tmem: Reg<U32>) -> Addr<Tmem> {
        let (quarter, _) = self.quarter(k);
        let lanes = k.shl(quarter, 21u32);
        Addr::new(k.add(tmem, lanes))
    }

    /// Stores every tile of this cluster as it is completed.
    pub(super) fn store_tiles(&self, k: &mut Kernel, tmem: Addr<Tmem>) {
        let at = Position::start(k, 0, self.config.accumulators);
        let lanes = self.own_lanes(k, tmem.base());
        let alpha = self.alphas(k);
        self.for_tiles(k, "store_tiles", |k, token, feature| {
            let done = at.barrier(k, self.base.at(self.layout.done.offset));
            k.mbarrier_wait(done, at.phase, "done");
            k.tcgen05_fence_after();
            let pair = k.mul(at.index, 2 * self.config.n);
            let sums = Addr::new(k.add(lanes.base(), pair));
            let origin = Origin { token: self.own_token(k, token), feature };
            for column in (0..self.config.n).step_by(self.chunk() as usize) {
                let halves = self.load_sums(k, sums, column);
                let column = k.mov::<U32>(column);
                self.store_chunk(k, origin, column, alpha, &halves);
            }
            k.tcgen05_fence_before();
            k.warp_sync();
            let stored = at.barrier(k, self.base.at(self.layout.stored.offset));
            let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
            match self.config.cta_group {
                1 => k.when(first_lane).mbarrier_arrive(stored),
                _ => {
                    let even = k.and(self.rank, !1u32);
                    let stored = k.map_to_rank(stored, even);
                    k.when(first_lane).mbarrier_arrive_remote_release(stored);
                }
            }
            at.advance(k);
        });
    }

    fn alphas(&self, k: &mut Kernel) -> [Reg<F32>; 2] {
        [k.ld_param(&self.alpha[0]), k.ld_param(&self.alpha[1])]
    }

    /// Puts this CTA's sums where its ring was, `[gate, up][column][128 rows]` f32.
    pub(super) fn put_sums(&self, k: &mut Kernel, tmem: Addr<Tmem>) {
        k.mbarrier_wait(self.base.at(self.layout.done.offset), 0u32, "done");
        k.tcgen05_fence_after();
        let lanes = self.own_lanes(k, tmem.base());
        let (_, row) = self.quarter(k);
        let row = k.shl(row, 2u32);
        let to = k.offset(self.base.at(self.layout.ring.offset), row.cast());
        for column in (0..self.config.n).step_by(self.chunk() as usize) {
            for (half, sums) in (0u32..).zip(self.load_sums(k, lanes, column)) {
                for (i, sum) in (0u32..).zip(sums) {
                    k.st(to.at((half * self.config.n + column + i) * ATOM_ROWS * 4), sum);
                }
            }
        }
    }

    /// Adds the CTAs' sums in rank order, for this CTA's part of the tile, and stores it.
    pub(super) fn add_sums(&self, k: &mut Kernel) {
        let (config, chunk) = (self.config, self.chunk());
        let alpha = self.alphas(k);
        let (_, row) = self.quarter(k);
        let row = k.shl(row, 2u32);
        let from = k.offset(self.base.at(self.layout.ring.offset), row.cast());
        let feature = k.div(self.first_tile, self.token_tiles);
        let token = k.rem(self.first_tile, self.token_tiles);
        let origin = Origin {
            token: k.mul(token, config.tile_tokens()),
            feature: k.mul(feature, config.tile_features()),
        };
        k.for_range("parts", self.rank, config.n / chunk, config.split_k, |k, part, _| {
            let column = k.mul(part, chunk);
            let offset = k.mul(column, ATOM_ROWS * 4);
            let own = k.offset(from, offset.cast());
            let ranks: Vec<Addr<Cluster>> =
                (0..config.split_k).map(|rank| k.map_to_rank(own, rank)).collect();
            let halves = [0, 1].map(|half| {
                (0..chunk)
                    .map(|i| {
                        let at = (half * config.n + i) * ATOM_ROWS * 4;
                        let first = k.ld::<F32, _>(ranks[0].at(at));
                        ranks[1..].iter().fold(first, |sum, rank| {
                            let more = k.ld::<F32, _>(rank.at(at));
                            k.add(sum, more)
                        })
                    })
                    .collect()
            });
            self.store_chunk(k, origin, column, alpha, &halves);
        });
    }

    /// Activates and stores what one thread holds of `chunk` columns from `column` on.
    fn store_chunk(
        &self,
        k: &mut Kernel,
        origin: Origin,
        column: Reg<U32>,
        alpha: [Reg<F32>; 2],
        [gate, up]: &[Vec<Reg<F32>>; 2],
    ) {
        let values: Vec<Reg<F32>> = gate
            .iter()
            .zip(up)
            .map(|(&gate, &up)| {
                let (gate, up) = (k.mul(gate, alpha[0]), k.mul(up, alpha[1]));
                epilogue::evaluate(k, self.program, gate, up)
            })
            .collect();
        let (_, row) = self.quarter(k);
        if self.rows_are_tokens() {
            let token = k.add(origin.token, row);
            let feature = k.add(origin.feature, column);
            self.rows.store_features(k, token, feature, &values);
        } else {
            let feature = k.add(origin.feature, row);
            let first = k.add(origin.token, column);
            for (i, value) in (0u32..).zip(values) {
                let token = k.add(first, i);
                self.rows.store_element(k, token, feature, value);
            }
        }
    }
}
