//! The end of the fused sm_120 kernel: sums in fragments become rows of C, through shared memory.

use dualgemm_ptx::builder::*;

use super::config::SLAB;
use super::fused::Fused;
use crate::parts::rows::PIECE;
use crate::parts::tiles::Tile;

impl Fused<'_> {
    /// Puts sums where the ring was: `[K group][gate, up][token][feature]` f32.
    pub(super) fn stage(&self, k: &mut Kernel, sums: &[[Reg<F32>; 4]]) {
        let config = self.config;
        let [along, beside, k_group] = self.place(k);
        let (g, q) = (k.eval(self.lane >> 2), k.eval(self.lane & 3));
        let first_token = k.eval(beside * (config.token_groups() * 8));
        let token = k.eval(first_token + (q << 1));
        let first_feature = k.eval(along * (config.slabs() * SLAB));
        let column = k.eval((first_feature + g) << 2);
        let ring = self.base.at(self.layout.ring.offset);
        let place = k.offset(ring, k_group * (2 * config.plane()) + (token * config.pitch() + column));
        for (i, sum) in (0u32..).zip(sums) {
            let (slab, group) = (i / config.token_groups(), i % config.token_groups());
            let place = place.at(slab * SLAB * 4 + group * 8 * config.pitch());
            // Rows g are gate and rows g + 8 up; columns are tokens 2q and 2q + 1.
            for (e, value) in (0u32..).zip(sum) {
                k.st(place.at(e / 2 * config.plane() + e % 2 * config.pitch()), *value);
            }
        }
    }

    /// Adds the K groups in order, activates and stores.
    pub(super) fn store(&self, k: &mut Kernel, tile: Tile) {
        let config = self.config;
        let alpha = self.rows.alpha(k, tile.group);
        let pieces = config.features / PIECE;
        let thread = k.special(Special::TidX);
        k.for_range("store", thread, config.tokens * pieces, config.consumer_warps() * 32, |k, i, _| {
            let (token, piece) = (k.eval(i / pieces), k.eval(i % pieces));
            let ring = self.base.at(self.layout.ring.offset);
            let from = k.offset(ring, token * config.pitch() + piece * (PIECE * 4));
            let four = |k: &mut Kernel, from: Addr<Shared>| {
                let first: [Reg<F32>; 4] = k.ld_vector(from);
                (1..config.k_groups).fold(first, |sums, k_group| {
                    let more: [Reg<F32>; 4] = k.ld_vector(from.at(k_group * 2 * config.plane()));
                    std::array::from_fn(|e| k.add(sums[e], more[e]))
                })
            };
            let halves = [0, 1].map(|half| {
                (0..PIECE / 4).flat_map(|i| four(k, from.at(half * config.plane() + i * 16))).collect()
            });
            let [gate, up]: [Vec<Reg<F32>>; 2] = halves;
            let token = k.eval(tile.token + token);
            let first = k.eval(piece * PIECE + tile.feature);
            self.rows.store_sums(k, (token, tile.end), (tile.group, first), alpha, [&gate, &up]);
        });
    }
}
