//! The end of the fused sm_100 kernel: sums in tensor memory become rows of C.

use dualgemm_ptx::builder::*;

use super::config::Side;
use super::fused::Fused;
use crate::parts::format::ATOM_ROWS;
use crate::parts::ring::Position;
use crate::parts::rows::PIECE;
use crate::parts::tiles::Tile;

/// Threads that store.
const STORERS: u32 = 128;

impl Fused<'_> {
    /// The warp's quarter of the 128 lanes, and this thread's lane among them.
    pub(super) fn quarter(&self, k: &mut Kernel) -> (Reg<U32>, Reg<U32>) {
        let quarter = k.eval(self.warp & 3);
        (quarter, k.eval((quarter << 5) + self.lane))
    }

    /// Loads `columns` columns of gate and of up from column `first` on, for this thread's lane.
    fn load_sums(&self, k: &mut Kernel, sums: Addr<Tmem>, first: u32, columns: u32) -> [Vec<Reg<F32>>; 2] {
        self.load_halves(k, [0, 1].map(|half| sums.at(half * self.config.n + first)), columns)
    }

    /// Loads `columns` columns of gate and of up from these places on, for this thread's lane.
    fn load_halves(&self, k: &mut Kernel, from: [Addr<Tmem>; 2], columns: u32) -> [Vec<Reg<F32>>; 2] {
        let halves = from.map(|from| k.tmem_ld(TmemShape::Lanes32Bits32, columns as usize, from));
        k.tmem_wait_ld();
        halves.map(|half| half.into_iter().map(|bits| k.from_bits(bits)).collect())
    }

    /// Stores every tile of this cluster as it is completed.
    pub(super) fn store_tiles(&self, k: &mut Kernel, tmem: Addr<Tmem>) {
        let at = Position::start(k, 0, self.config.accumulators);
        let (quarter, _) = self.quarter(k);
        let lanes = k.offset(tmem, quarter << 21);
        self.tiles.for_each(k, "store_tiles", |k, tile| {
            let tile = self.own(k, tile);
            let done = at.barrier(k, self.base.at(self.layout.done.offset));
            k.mbarrier_wait(done, at.phase, "done");
            let sums = k.offset(lanes, at.index * (2 * self.config.n));
            let alpha = self.rows.alpha(k, tile.group);
            match (self.config.side, self.config.split_k) {
                (Side::Features, _) => {
                    self.put_sums(k, sums);
                    self.add_sums(k, tile, alpha);
                }
                (Side::Tokens, 1) => {
                    for first in (0..self.config.n).step_by(PIECE as usize) {
                        let [gate, up] = self.load_sums(k, sums, first, PIECE);
                        let first = k.mov::<U32>(first);
                        self.store_token(k, tile, alpha, first, [&gate, &up]);
                    }
                }
                (Side::Tokens, _) => self.exchange_halves(k, sums, tile, alpha),
                (Side::HalfAtoms, _) => {
                    let feature = self.half_atoms_feature(k, tile.feature);
                    let tile = Tile { feature, ..tile };
                    for first in (0..2 * self.config.n).step_by(2 * PIECE as usize) {
                        let places = [sums.at(first), sums.at(first + PIECE)];
                        let [gate, up] = self.load_halves(k, places, PIECE);
                        let first = k.mov::<U32>(first);
                        self.store_token(k, tile, alpha, first, [&gate, &up]);
                    }
                }
            }
            if !self.config.exchanges() {
                let stored = at.barrier(k, self.base.at(self.layout.stored.offset));
                let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
                self.arrive_at_leader(k, stored, first_lane);
            }
            at.advance(k);
        });
    }

    /// Activates and stores 16 columns of this thread's token, from column `first` on.
    fn store_token(
        &self,
        k: &mut Kernel,
        tile: Tile,
        alpha: [Reg<F32>; 2],
        first: Reg<U32>,
        [gate, up]: [&[Reg<F32>]; 2],
    ) {
        let (_, row) = self.quarter(k);
        let token = k.eval(tile.token + row);
        let feature = k.eval(tile.feature + first);
        self.store_piece(k, tile, (token, feature), alpha, [gate, up]);
    }

    /// Activates and stores 16 features of a token.
    fn store_piece(
        &self,
        k: &mut Kernel,
        tile: Tile,
        (token, feature): (Reg<U32>, Reg<U32>),
        alpha: [Reg<F32>; 2],
        [gate, up]: [&[Reg<F32>]; 2],
    ) {
        self.rows.store_sums(k, (token, tile.end), (tile.group, feature), alpha, [gate, up]);
    }

    /// Puts this CTA's sums where its ring was, `[gate, up][column][128 rows]` f32, and waits for those of the cluster.
    /// Of the rows of a column, the first four of every 16 come first, then the second four: eight threads that read eight
    /// times 16 rows read 128 bytes in a row. They are permuted, so that 32 threads with a row each write to 32 banks.
    fn put_sums(&self, k: &mut Kernel, sums: Addr<Tmem>) {
        let (_, row) = self.quarter(k);
        let piece = k.eval(row >> PIECE.ilog2());
        let four = k.eval((row >> 2) & (PIECE / 4 - 1));
        let place = k.eval(four * (ATOM_ROWS / PIECE) + (piece ^ (four << 1)));
        let ring = self.base.at(self.layout.ring.offset);
        let to = k.offset(ring, (place * 4 + (row & 3)) << 2);
        for first in (0..self.config.n).step_by(8) {
            for (half, sums) in (0u32..).zip(self.load_sums(k, sums, first, 8)) {
                for (i, sum) in (0u32..).zip(sums) {
                    k.st(to.at((half * self.config.n + first + i) * ATOM_ROWS * 4), sum);
                }
            }
        }
        self.wait_for_sums(k);
    }

    /// Tells the CTAs with the same rows that this one's sums are in shared memory, and waits for theirs.
    fn wait_for_sums(&self, k: &mut Kernel) {
        k.warp_sync();
        let put = self.base.at(self.layout.put.offset);
        let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
        for part in 0..self.config.split_k {
            if self.config.split_k == 1 {
                k.when(first_lane).mbarrier_arrive(put);
            } else {
                let rank = k.eval(self.half + part * self.config.cta_group);
                let put = k.map_to_rank(put, rank);
                k.when(first_lane).mbarrier_arrive_remote_release(put);
            }
        }
        match self.config.split_k {
            1 => k.mbarrier_wait(put, 0u32, "put"),
            _ => k.mbarrier_wait_cluster(put, 0u32, "put"),
        }
    }

    /// Two CTAs have sums of the same tokens and features, each over its part of K. The first stores the lower half of
    /// the features, the second the upper: each puts what the other stores where its ring was, four columns of 128 rows
    /// behind each other, and adds what the other has put to what is in its tensor memory.
    fn exchange_halves(&self, k: &mut Kernel, sums: Addr<Tmem>, tile: Tile, alpha: [Reg<F32>; 2]) {
        let own = self.config.n / 2;
        let other = k.eval(self.part ^ 1);
        let [kept, sent] = [self.part, other].map(|part| k.eval(part * own));
        let [kept_sums, sent_sums] = [kept, sent].map(|first| k.offset(sums, first));
        let (_, row) = self.quarter(k);
        let place = k.offset(self.base.at(self.layout.ring.offset), row << 4);
        let fours = |half: u32, first: u32| {
            let four = (half * own + first) / 4;
            (four..four + PIECE / 4).map(|four| four * ATOM_ROWS * 16)
        };
        for first in (0..own).step_by(PIECE as usize) {
            for (half, sums) in (0..).zip(self.load_sums(k, sent_sums, first, PIECE)) {
                for (at, sums) in fours(half, first).zip(sums.chunks_exact(4)) {
                    k.st_vector(place.at(at), sums);
                }
            }
        }
        self.wait_for_sums(k);
        let rank = k.eval(self.rank ^ self.config.cta_group);
        let others = k.map_to_rank(place, rank);
        for first in (0..own).step_by(PIECE as usize) {
            let more = [0, 1].map(|half| {
                fours(half, first).flat_map(|at| k.ld_vector::<F32, _, 4>(others.at(at))).collect::<Vec<_>>()
            });
            let sums = self.load_sums(k, kept_sums, first, PIECE);
            let [gate, up] = [0, 1].map(|half| {
                sums[half].iter().zip(&more[half]).map(|(&sum, &more)| k.add(sum, more)).collect::<Vec<_>>()
            });
            let first = k.eval(kept + first);
            self.store_token(k, tile, alpha, first, [&gate, &up]);
        }
    }

    /// The sums at `from` of every CTA of the cluster, four at a time, added in rank order.
    fn add_four(&self, k: &mut Kernel, from: Addr<Shared>) -> [Reg<F32>; 4] {
        if self.config.split_k == 1 {
            return k.ld_vector(from);
        }
        let ranks = (0..self.config.split_k).map(|rank| k.map_to_rank(from, rank)).collect::<Vec<_>>();
        let first: [Reg<F32>; 4] = k.ld_vector(ranks[0]);
        ranks[1..].iter().fold(first, |sums, rank| {
            let more: [Reg<F32>; 4] = k.ld_vector(*rank);
            std::array::from_fn(|e| k.add(sums[e], more[e]))
        })
    }

    /// Adds the CTAs' sums of features and stores this CTA's part of the tile, every `split_k`-th: a thread 16 features of
    /// one token.
    fn add_sums(&self, k: &mut Kernel, tile: Tile, alpha: [Reg<F32>; 2]) {
        let (config, plane) = (self.config, self.config.n * ATOM_ROWS * 4);
        let ring = self.base.at(self.layout.ring.offset);
        let (_, row) = self.quarter(k);
        let pieces = ATOM_ROWS / PIECE;
        let first = k.eval(self.rank * STORERS + row);
        k.for_range("parts", first, config.n * pieces, STORERS * config.split_k, |k, i, _| {
            let (column, piece) = (k.eval(i / pieces), k.eval(i % pieces));
            let feature = k.eval(piece * PIECE);
            let fours: Vec<Addr<Shared>> = (0..PIECE / 4)
                .map(|four| {
                    let place = column * (ATOM_ROWS / 4) + (piece ^ (2 * four));
                    k.offset(ring, place << 4).at(four * ATOM_ROWS / PIECE * 16)
                })
                .collect();
            let halves = [0, 1]
                .map(|half| fours.iter().flat_map(|from| self.add_four(k, from.at(half * plane))).collect());
            let [gate, up]: [Vec<Reg<F32>>; 2] = halves;
            let place = (k.eval(tile.token + column), k.eval(tile.feature + feature));
            self.store_piece(k, tile, place, alpha, [&gate, &up]);
        });
    }
}
