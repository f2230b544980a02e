//! The end of the fused kernel: sums in registers become rows of C. Two ways, by how the sums are spread over threads.

use dualgemm_ptx::builder::*;

use super::fused::Fused;
use crate::parts::epilogue;

impl Fused<'_> {
    fn activate(&self, k: &mut Kernel, alpha: [Reg<F32>; 2], gate: Reg<F32>, up: Reg<F32>) -> Reg<F32> {
        let gate = k.mul(gate, alpha[0]);
        let up = k.mul(up, alpha[1]);
        epilogue::evaluate(k, self.program, gate, up)
    }

    fn alphas(&self, k: &mut Kernel) -> [Reg<F32>; 2] {
        [k.ld_param(&self.alpha[0]), k.ld_param(&self.alpha[1])]
    }

    /// Activation in registers, transposition by `stmatrix`, then whole 16-byte pieces of C's rows.
    pub(super) fn store_transposed(&self, k: &mut Kernel, acc: &[Reg<F32>]) {
        let config = self.config;
        let [row_group, _, warp] = self.place(k);
        let alpha = self.alphas(k);
        let column = k.shl(row_group, 5u32);
        let slab = k.shl(warp, 3u32);
        let column = k.add(column, slab);
        let column = k.shl(column, 1u32);
        // `stmatrix` takes the row address of matrix i from lanes 8i .. 8i+8; a matrix is 8 tokens.
        let groups: Vec<&[Reg<F32>]> = acc.chunks_exact(4).collect();
        let at_once = if groups.len().is_multiple_of(4) { 4 } else { 1 };
        let row = if at_once == 4 { self.lane } else { k.and(self.lane, 7u32) };
        let row = k.mul(row, config.pitch());
        let place = k.add(row, column);
        let place = k.offset(self.base, place.cast());
        for (index, groups) in groups.chunks(at_once).enumerate() {
            let halves: Vec<Reg<F16x2>> = groups
                .iter()
                .map(|c| {
                    let [first, second] =
                        [self.activate(k, alpha, c[0], c[2]), self.activate(k, alpha, c[1], c[3])];
                    k.f32_to_f16x2(first, second)
                })
                .collect();
            let row = index as u32 * at_once as u32 * 8 * config.pitch();
            k.stmatrix(true, place.at(row), &halves);
        }
        k.bar_sync(1u32, config.consumer_threads());

        let out = k.ld_pointer(&self.out);
        let pieces = config.features() / 8;
        let thread = k.special(Special::TidX);
        let first_feature = k.mul(self.tile, config.features());
        k.for_range("store", thread, config.tokens * pieces, config.consumer_threads(), |k, i, _| {
            let (token, piece) = (k.div(i, pieces), k.rem(i, pieces));
            let from = k.mul(token, config.pitch());
            let column = k.shl(piece, 4u32);
            let from = k.add(from, column);
            let from = k.offset(self.base, from.cast());
            let feature = k.shl(piece, 3u32);
            let feature = k.add(first_feature, feature);
            let token = k.add(self.token, token);
            let inside = k.compare(Cmp::Lt, token, self.m);
            let row = k.mul_wide(token, self.n);
            let at = |k: &mut Kernel, feature: Reg<U32>| {
                let feature = k.convert::<U64, U32>(feature);
                let element = k.add(row, feature);
                let byte = k.shl(element, 1u32);
                k.offset(out, byte)
            };
            if self.aligned {
                let inside = k.compare_and(Cmp::Lt, feature, self.n, inside);
                k.if_(inside, "piece", |k| {
                    let words: [Reg<B32>; 4] = k.ld_vector(from);
                    let to = at(k, feature);
                    k.st_vector(to, &words);
                });
            } else {
                for element in 0..8u32 {
                    let feature = k.add(feature, element);
                    let inside = k.compare_and(Cmp::Lt, feature, self.n, inside);
                    k.if_(inside, "element", |k| {
                        let half: Reg<B16> = k.ld(from.at(element * 2));
                        let to = at(k, feature);
                        k.st(to, half);
                    });
                }
            }
        });
    }

    /// Adds the K groups' sums in fixed order, so that the result does not depend on timing, then activates and
    /// stores.
    pub(super) fn store_reduced(&self, k: &mut Kernel, acc: &[Reg<F32>]) {
        let config = self.config;
        let thread = k.special(Special::TidX);
        let own = k.shl(thread, 4u32);
        let own = k.offset(self.base, own.cast());
        let plane = config.consumer_threads() * 16;
        for (j, sums) in acc.chunks_exact(4).enumerate() {
            k.st_vector(own.at(j as u32 * plane), sums);
        }
        k.bar_sync(1u32, config.consumer_threads());
        let alpha = self.alphas(k);
        let out = k.ld_pointer(&self.out);
        let threads = config.row_groups * 128;
        let items = config.tokens / 8 * threads;
        k.for_range("reduce", thread, items, config.consumer_threads(), |k, i, _| {
            let (group, peer) = (k.div(i, threads), k.rem(i, threads));
            let from = k.mul(group, plane);
            let slot = k.shl(peer, 4u32);
            let from = k.add(from, slot);
            let from = k.offset(self.base, from.cast());
            let mut sums: [Reg<F32>; 4] = k.ld_vector(from);
            for k_group in 1..config.k_groups {
                let more: [Reg<F32>; 4] = k.ld_vector(from.at(k_group * threads * 16));
                sums = std::array::from_fn(|e| k.add(sums[e], more[e]));
            }
            k.comment(
                "Thread `peer` held feature lane/4 of its warp's eight, tokens 2(lane%4) and the next.",
            );
            let warp = k.shr(peer, 5u32);
            let feature = k.shl(warp, 3u32);
            let lane = k.and(peer, 31u32);
            let g = k.shr(lane, 2u32);
            let feature = k.add(feature, g);
            let first = k.mul(self.tile, config.features());
            let feature = k.add(feature, first);
            let token = k.shl(group, 3u32);
            let q = k.and(lane, 3u32);
            let pair = k.shl(q, 1u32);
            let token = k.add(token, pair);
            let token = k.add(token, self.token);
            let inside = k.compare(Cmp::Lt, feature, self.n);
            for e in 0..2 {
                let value = self.activate(k, alpha, sums[e], sums[e + 2]);
                let half = k.f32_to_f16(value);
                let token = k.add(token, e as u32);
                let inside = k.compare_and(Cmp::Lt, token, self.m, inside);
                let row = k.mul_wide(token, self.n);
                let column = k.convert::<U64, U32>(feature);
                let element = k.add(row, column);
                let byte = k.shl(element, 1u32);
                let to = k.offset(out, byte);
                k.when(inside).st(to, half);
            }
        });
    }
}
