//! The end of a tile: sums in registers become rows of C. Two ways, by how the sums are spread over threads.

use dualgemm_ptx::builder::*;

use super::apart::FeatureSums;
use super::fused::{Fused, GateSums};
use super::schedule::Tile;
use crate::parts::epilogue::{self, Factors};
use crate::parts::staged::Staged;
use crate::parts::variant::{Out, Products};

impl Fused<'_> {
    /// Everything after the main loop of a tile.
    pub(super) fn finish(&self, k: &mut Kernel, tile: Tile, acc: &[Reg<F32>]) {
        if self.config.k_groups > 1 {
            return self.store_reduced(k, tile, acc);
        }
        if self.config.k_split > 1 {
            let (tile, acc) = self.own_half(k, tile, acc);
            k.cluster_arrive_relaxed();
            return self.store_whole(k, tile, acc);
        }
        if self.config.common {
            self.add_common(k, acc);
        }
        let Some(part) = tile.part else { return self.store_whole(k, tile, acc) };
        let thread = k.special(Special::TidX);
        k.if_else(
            part.head,
            "finish",
            |k| {
                k.if_(!part.tail, "others", |k| {
                    self.await_parts(k, part);
                    self.for_each_part(k, part, |k, slot| {
                        let from = self.part_of_thread(k, slot, thread);
                        for (j, sums) in acc.chunks_exact(4).enumerate() {
                            let more: [Reg<F32>; 4] = k.ld_vector(from.at(j as u32 * self.plane()));
                            sums.iter().zip(more).for_each(|(sum, more)| {
                                k.to(*sum).add(*sum, more);
                            });
                        }
                    });
                });
                self.store_whole(k, tile, acc);
            },
            |k| {
                let slot = self.own_slot(k, part);
                let to = self.part_of_thread(k, slot, thread);
                for (j, sums) in acc.chunks_exact(4).enumerate() {
                    k.st_vector(to.at(j as u32 * self.plane()), sums);
                }
                self.publish_part(k, part);
            },
        );
    }

    /// Stores sums that are whole: C, or gate's for a later launch.
    fn store_whole(&self, k: &mut Kernel, tile: Tile, acc: &[Reg<F32>]) {
        match &self.gate_sums {
            GateSums::None => self.store_transposed(k, tile, acc, None),
            GateSums::Kept(sums) => {
                let thread = k.special(Special::TidX);
                let to = self.gate_of_thread(k, sums, tile, thread);
                for (group, sums) in acc.chunks_exact(4).enumerate() {
                    self.keep_gate(k, to.at(group as u32 * self.plane()), sums);
                }
            }
            GateSums::Read(sums) => {
                let thread = k.special(Special::TidX);
                let gate = self.gate_of_thread(k, sums, tile, thread);
                self.store_transposed(k, tile, acc, Some(gate));
            }
        }
    }

    /// A thread's features in the tile, from `feature` on, with their factors; empty if C is not made here.
    fn features_of_thread(&self, k: &mut Kernel, tile: Tile, feature: Reg<U32>) -> Vec<(Reg<U32>, Factors)> {
        let count = match self.variant.products {
            Products::Gate => 0,
            products => products.features_per_thread(),
        };
        (0..count)
            .map(|i| {
                let feature = if i == 0 { feature } else { k.eval(feature + 8 * i) };
                (feature, self.factors(k, tile, feature))
            })
            .collect()
    }

    /// What the sums of a feature, given by its place in the tile, become products by.
    fn factors(&self, k: &mut Kernel, tile: Tile, feature: Reg<U32>) -> Factors {
        let of_c = k.eval(feature + tile.chunk * self.variant.chunk_features());
        self.rows.factors(k, tile.group, of_c)
    }

    fn activate(&self, k: &mut Kernel, factors: &Factors, gate: Reg<F32>, up: Reg<F32>) -> Reg<F32> {
        if self.variant.products == Products::Linear {
            return factors.product(k, 0, gate);
        }
        if !self.variant.round_gate_up_to_bf16 {
            return factors.activate(k, &self.variant.program, [gate, up]);
        }
        let [gate, up] = [(0, gate), (1, up)].map(|(half, sum)| {
            let product = factors.product(k, half, sum);
            let rounded = k.f32_to_bf16(product);
            k.bf16_to_f32(rounded)
        });
        epilogue::evaluate(k, &self.variant.program, gate, up)
    }

    /// Two neighbouring 16-bit elements of C.
    fn pair(&self, k: &mut Kernel, low: Reg<F32>, high: Reg<F32>) -> Reg<B32> {
        match self.variant.out {
            Out::Bf16 => k.f32_to_bf16x2(low, high).cast(),
            Out::F16 | Out::F32 | Out::Nvfp4 { .. } => k.f32_to_f16x2(low, high).cast(),
        }
    }

    // ---- sums of one warpgroup: staged, then whole pieces of C's rows ----

    fn store_transposed(&self, k: &mut Kernel, tile: Tile, acc: &[Reg<F32>], gate: Option<Addr<Global>>) {
        let [row_group, _, warp] = self.place(k);
        let slab = self.slab_log2();
        let column = k.eval((row_group << (slab + 2)) + (warp << slab));
        let feature = k.eval(column + (self.lane >> 2));
        let groups = || acc.chunks_exact(4).enumerate();
        for (i, (feature, factors)) in self.features_of_thread(k, tile, feature).iter().enumerate() {
            let sums = |k: &mut Kernel, (group, sums): (usize, &[Reg<F32>])| {
                let gate = gate.map(|gate| gate.at(group as u32 * self.plane()));
                self.feature_sums(k, i, sums, gate)
            };
            match self.variant.out {
                Out::F16 | Out::Bf16 => {
                    let column = if i == 0 { column } else { k.eval(column + 8 * i as u32) };
                    let sums: Vec<FeatureSums> = groups().map(|group| sums(k, group)).collect();
                    self.stage_halves(k, factors, column, &sums);
                }
                Out::F32 | Out::Nvfp4 { .. } => {
                    for (group, four) in groups() {
                        let sums = sums(k, (group, four));
                        let group = k.mov::<U32>(group as u32);
                        self.stage_floats(k, factors, (group, *feature), &sums);
                    }
                }
            }
        }
        self.copy_out(k, tile, acc.len() as u32 * 2);
    }

    /// Features of a warp's slab of weight rows, as a power of two.
    fn slab_log2(&self) -> u32 {
        (8 * self.variant.products.features_per_thread()).ilog2()
    }

    /// Transposes 16-bit elements by `stmatrix` to rows of tokens. `column` is the first of the warp's eight features,
    /// `sums` those of all groups of eight tokens.
    fn stage_halves(&self, k: &mut Kernel, factors: &Factors, column: Reg<U32>, sums: &[FeatureSums]) {
        let staged = self.staged();
        let byte = k.eval(column << 1);
        // `stmatrix` takes the row address of matrix i from lanes 8i .. 8i+8; a matrix is 8 tokens.
        let at_once = if sums.len().is_multiple_of(4) { 4 } else { 1 };
        let token = if at_once == 4 { self.lane } else { k.eval(self.lane & 7) };
        let row = k.eval(token * staged.pitch());
        let place = k.offset(staged.start, row + byte);
        for (index, sums) in sums.chunks(at_once).enumerate() {
            let halves: Vec<Reg<B32>> = sums
                .iter()
                .map(|FeatureSums { gate, up }| {
                    let first = self.activate(k, factors, gate[0], up[0]);
                    let second = self.activate(k, factors, gate[1], up[1]);
                    self.pair(k, first, second)
                })
                .collect();
            let row = index as u32 * at_once as u32 * 8 * staged.pitch();
            k.stmatrix(true, place.at(row), &halves);
        }
    }

    /// Stages elements as f32: those of two tokens of group `group` of eight, of one feature.
    fn stage_floats(
        &self,
        k: &mut Kernel,
        factors: &Factors,
        (group, feature): (Reg<U32>, Reg<U32>),
        sums: &FeatureSums,
    ) {
        let staged = self.staged();
        let token = self.token_of(k, group);
        let place = staged.place(k, token, feature);
        for e in 0..2 {
            let value = self.activate(k, factors, sums.gate[e], sums.up[e]);
            k.st(place.at(e as u32 * staged.pitch()), value);
        }
    }

    /// First of the two tokens of a group of eight whose sums a lane holds.
    fn token_of(&self, k: &mut Kernel, group: Reg<U32>) -> Reg<U32> {
        let pair = k.eval((self.lane & 3) << 1);
        k.eval((group << 3) + pair)
    }

    fn staged(&self) -> Staged<'_> {
        let start = self.shared(self.layout.epilogue + self.config.exchange_bytes());
        let (features, threads) = (self.features(), self.config.consumer_threads());
        Staged { rows: &self.rows, start, features, threads }
    }

    /// Staged rows of `tokens` tokens to C, once all threads have staged theirs.
    fn copy_out(&self, k: &mut Kernel, tile: Tile, tokens: u32) {
        k.bar_sync(1u32, self.config.consumer_threads());
        let feature = k.eval(tile.chunk * self.variant.chunk_features());
        let end = match self.config.common {
            false => self.rows.n,
            true => {
                k.comment("The pair's common features are the second CTA's.");
                let rank = k.special(Special::ClusterCtaRank);
                let groups = k.eval(rank + self.config.own_groups());
                k.eval((groups * self.variant.chunk_features() + feature).min(self.rows.n))
            }
        };
        self.staged().copy_out(k, tokens, (tile.token, tile.token_end), (feature, end));
        // Lanes leave the loop apart, and the next tile's `wgmma` wants whole warps.
        k.warp_sync();
    }

    // ---- sums of several K groups ----

    /// Adds the K groups' sums in fixed order, so that the result does not depend on timing, then activates and
    /// stores.
    fn store_reduced(&self, k: &mut Kernel, tile: Tile, acc: &[Reg<F32>]) {
        let config = self.config;
        let thread = k.special(Special::TidX);
        let sums_at = self.shared(self.layout.epilogue);
        let (tile, groups, parts) = self.spread_sums(k, tile, acc);
        if let Some(part) = tile.part {
            let shared = k.compare_and(Cmp::Eq, thread, 0u32, part.head);
            k.if_(shared, "others", |k| self.spin_for_parts(k, part));
        }
        if config.k_split == 1 {
            k.bar_sync(1u32, config.consumer_threads());
        }
        let plane = config.row_groups * 128 * 16 * parts;
        let threads = config.row_groups * 128;
        let (peer, k_group) = match config.row_groups {
            1 => (k.eval(thread & 127), k.eval(thread >> 7)),
            _ => (k.eval(thread % threads), k.eval(thread / threads)),
        };
        k.comment("Thread `peer` held feature lane/4 of its warp's eight, tokens 2(lane%4) and the next.");
        let feature = k.eval(((peer >> 5) << self.slab_log2()) + (self.lane >> 2));
        let features = self.features_of_thread(k, tile, feature);
        let gate = match &self.gate_sums {
            GateSums::None => None,
            GateSums::Kept(sums) | GateSums::Read(sums) => Some(self.gate_of_thread(k, sums, tile, peer)),
        };
        let from = k.offset(sums_at, peer << 4);
        let store = |k: &mut Kernel, group: Reg<U32>, sums: [Reg<F32>; 4]| {
            let gate = gate.map(|gate| k.offset(gate, group.mul_wide(self.plane())));
            if let (GateSums::Kept(_), Some(to)) = (&self.gate_sums, gate) {
                return self.keep_gate(k, to, &sums);
            }
            for (i, (feature, factors)) in features.iter().enumerate() {
                let sums = self.feature_sums(k, i, &sums, gate);
                match self.variant.out {
                    Out::Nvfp4 { .. } => self.stage_floats(k, factors, (group, *feature), &sums),
                    _ => self.store_direct(k, tile, factors, (group, *feature), &sums),
                }
            }
        };
        k.for_range("reduce", k_group, groups, config.k_groups, |k, group, _| {
            let from = k.offset(from, group * plane);
            let mut sums: [Reg<F32>; 4] = k.ld_vector(from);
            for part in 1..parts {
                let more: [Reg<F32>; 4] = k.ld_vector(from.at(part * threads * 16));
                sums = std::array::from_fn(|e| k.add(sums[e], more[e]));
            }
            let Some(part) = tile.part else { return store(k, group, sums) };
            k.if_else(
                part.head,
                "finish",
                |k| {
                    self.for_each_part(k, part, |k, slot| {
                        let from = self.part_of_thread(k, slot, peer);
                        let from = k.offset(from, group.mul_wide(self.plane()));
                        let more: [Reg<F32>; 4] = k.ld_vector(from);
                        sums.iter().zip(more).for_each(|(sum, more)| {
                            k.to(*sum).add(*sum, more);
                        });
                    });
                    store(k, group, sums);
                },
                |k| {
                    let slot = self.own_slot(k, part);
                    let to = self.part_of_thread(k, slot, peer);
                    let to = k.offset(to, group.mul_wide(self.plane()));
                    k.st_vector(to, &sums);
                },
            );
        });
        if let Some(part) = tile.part {
            k.if_(!part.head, "publish", |k| self.publish_part(k, part));
        }
        if matches!(self.variant.out, Out::Nvfp4 { .. }) && !features.is_empty() {
            let body = |k: &mut Kernel| self.copy_out(k, tile, groups * 8);
            match tile.part {
                None => body(k),
                Some(part) => k.if_(part.head, "copy_out", body),
            }
        }
    }

    /// Stores the elements of two tokens of one feature.
    fn store_direct(
        &self,
        k: &mut Kernel,
        tile: Tile,
        factors: &Factors,
        (group, feature): (Reg<U32>, Reg<U32>),
        sums: &FeatureSums,
    ) {
        let feature = k.eval(feature + tile.chunk * self.variant.chunk_features());
        let inside = k.compare(Cmp::Lt, feature, self.rows.n);
        let token = self.token_of(k, group);
        let row = k.eval(token + tile.token);
        for e in 0..2 {
            let value = self.activate(k, factors, sums.gate[e], sums.up[e]);
            let row = k.eval(row + e as u32);
            let inside = k.compare_and(Cmp::Lt, row, tile.token_end, inside);
            let to = self.rows.place(k, row, feature);
            self.variant.out.store(k, Some(inside), to, value);
        }
    }
}
