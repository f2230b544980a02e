//! The end of a tile: sums in registers become rows of C. Two ways, by how the sums are spread over threads.

use dualgemm_ptx::builder::*;

use super::apart::FeatureSums;
use super::fused::{Alpha, Fused, GateSums, Quantize};
use super::schedule::Tile;
use super::variant::{Out, Products};
use crate::generic::rowwise::scale_offset;
use crate::parts::epilogue::{self, Factors};
use crate::parts::nvfp4;

impl Fused<'_> {
    /// Everything after the main loop of a tile.
    pub(super) fn finish(&self, k: &mut Kernel, tile: Tile, acc: &[Reg<F32>]) {
        if self.config.k_groups > 1 {
            return self.store_reduced(k, tile, acc);
        }
        if self.config.k_split > 1 {
            let (tile, acc) = self.exchange_halves(k, tile, acc);
            return self.store_whole(k, tile, &acc);
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

    /// What one feature, given by its place in the tile, is multiplied by. Features beyond the last have no bias.
    fn factors(&self, k: &mut Kernel, tile: Tile, feature: Reg<U32>) -> Factors {
        let mut alpha = match &self.alpha {
            Alpha::Values(alpha) => [k.ld_param(&alpha[0]), k.ld_param(&alpha[1])],
            Alpha::Table(table, common) => {
                let table = k.ld_pointer(table);
                let bytes = k.mov::<U64>(8u64);
                let at = self.of_group(k, table, tile, bytes);
                let own: [Reg<F32>; 2] = k.ld_vector(at);
                [0, 1].map(|half| {
                    let common = k.ld_param(&common[half]);
                    k.mul(own[half], common)
                })
            }
        };
        if let Some(scale) = &self.a_scale {
            let scale = k.ld_pointer(scale);
            let scale: Reg<F32> = k.ld(scale);
            alpha = alpha.map(|alpha| k.mul(alpha, scale));
        }
        let bias = self.bias.as_ref().map(|halves| {
            let first = k.eval(tile.features * self.features());
            let feature = k.eval(first + feature);
            let inside = k.compare(Cmp::Lt, feature, self.n);
            let byte = k.eval(feature.mul_wide(4));
            let row_bytes = k.eval(self.n.mul_wide(4));
            [&halves[0], &halves[1]].map(|half| {
                let bias = k.mov(0.0f32);
                let table = k.ld_pointer(half);
                let table = self.of_group(k, table, tile, row_bytes);
                let at = k.offset(table, byte);
                k.when(inside).to(bias).ld::<F32, _>(at);
                bias
            })
        });
        Factors { alpha, bias }
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
        k.bar_sync(1u32, self.config.consumer_threads());
        self.copy_out(k, tile, acc.len() as u32 * 2);
    }

    /// Features of a warp's slab of weight rows, as a power of two.
    fn slab_log2(&self) -> u32 {
        (8 * self.variant.products.features_per_thread()).ilog2()
    }

    /// Transposes 16-bit elements by `stmatrix` to rows of tokens. `column` is the first of the warp's eight features,
    /// `sums` those of all groups of eight tokens.
    fn stage_halves(&self, k: &mut Kernel, factors: &Factors, column: Reg<U32>, sums: &[FeatureSums]) {
        let pitch = self.config.pitch(self.variant);
        let byte = k.eval(column << 1);
        // `stmatrix` takes the row address of matrix i from lanes 8i .. 8i+8; a matrix is 8 tokens.
        let at_once = if sums.len().is_multiple_of(4) { 4 } else { 1 };
        let token = if at_once == 4 { self.lane } else { k.eval(self.lane & 7) };
        let row = k.eval(token * pitch);
        let place = k.offset(self.staged(), row + byte);
        for (index, sums) in sums.chunks(at_once).enumerate() {
            let halves: Vec<Reg<B32>> = sums
                .iter()
                .map(|FeatureSums { gate, up }| {
                    let first = self.activate(k, factors, gate[0], up[0]);
                    let second = self.activate(k, factors, gate[1], up[1]);
                    self.pair(k, first, second)
                })
                .collect();
            let row = index as u32 * at_once as u32 * 8 * pitch;
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
        let pitch = self.config.pitch(self.variant);
        let token = self.token_of(k, group);
        let row = k.eval(token * pitch);
        let place = k.offset(self.staged(), row + (feature << 2));
        for e in 0..2 {
            let value = self.activate(k, factors, sums.gate[e], sums.up[e]);
            k.st(place.at(e as u32 * pitch), value);
        }
    }

    /// First of the two tokens of a group of eight whose sums a lane holds.
    fn token_of(&self, k: &mut Kernel, group: Reg<U32>) -> Reg<U32> {
        let pair = k.eval((self.lane & 3) << 1);
        k.eval((group << 3) + pair)
    }

    /// Address of an element of C's row-major matrix of `bytes`-byte elements.
    fn element(&self, k: &mut Kernel, row: Reg<U32>, feature: Reg<U32>, bytes: u32) -> Addr<Global> {
        let out = k.ld_pointer(&self.out);
        let start = k.eval(row.mul_wide(self.n));
        k.offset(out, (start + feature.widen()) << bytes.ilog2())
    }

    fn staged(&self) -> Addr<Shared> {
        self.shared(self.layout.epilogue + self.config.exchange_bytes())
    }

    /// Staged rows of `tokens` tokens to C, a piece at a time.
    fn copy_out(&self, k: &mut Kernel, tile: Tile, tokens: u32) {
        let (config, out) = (self.config, self.variant.out);
        let piece_features = out.piece();
        let (pieces, bytes) = (self.features() / piece_features, out.staged_bytes());
        let stage = self.staged();
        let thread = k.special(Special::TidX);
        let first_feature = k.eval(tile.features * self.features());
        k.for_range("store", thread, tokens * pieces, config.consumer_threads(), |k, i, _| {
            let (token, piece) = (k.eval(i / pieces), k.eval(i % pieces));
            let row = token * config.pitch(self.variant);
            let from = k.offset(stage, piece * (piece_features * bytes) + row);
            let feature = k.eval(piece * piece_features + first_feature);
            let row = k.eval(tile.token + token);
            let inside = k.compare(Cmp::Lt, row, tile.token_end);
            match &self.quantize {
                Some(quantize) => {
                    let inside = k.compare_and(Cmp::Lt, feature, self.n, inside);
                    k.if_(inside, "block", |k| self.store_block(k, from, (row, feature), quantize));
                }
                None if self.variant.aligned => {
                    let inside = k.compare_and(Cmp::Lt, feature, self.n, inside);
                    k.if_(inside, "piece", |k| {
                        let words: [Reg<B32>; 4] = k.ld_vector(from);
                        let to = self.element(k, row, feature, bytes);
                        k.st_vector(to, &words);
                    });
                }
                None => {
                    for element in 0..piece_features {
                        let feature = k.eval(feature + element);
                        let inside = k.compare_and(Cmp::Lt, feature, self.n, inside);
                        k.if_(inside, "element", |k| {
                            let to = self.element(k, row, feature, bytes);
                            let from = from.at(element * bytes);
                            match bytes {
                                2 => {
                                    let half: Reg<B16> = k.ld(from);
                                    k.st(to, half);
                                }
                                _ => {
                                    let word: Reg<B32> = k.ld(from);
                                    k.st(to, word);
                                }
                            }
                        });
                    }
                }
            }
        });
        // Lanes leave the loop apart, and the next tile's `wgmma` wants whole warps.
        k.warp_sync();
    }

    /// One block of 16 staged elements as codes and a scale byte, by the rule of the CPU path.
    fn store_block(
        &self,
        k: &mut Kernel,
        from: Addr<Shared>,
        (row, feature): (Reg<U32>, Reg<U32>),
        quantize: &Quantize,
    ) {
        let factors = [k.ld_param(&quantize.factors[0]), k.ld_param(&quantize.factors[1])];
        let halves: [[Reg<F32>; 8]; 2] = [0u32, 32].map(|byte| {
            let quarters: [[Reg<F32>; 4]; 2] = [0u32, 16].map(|more| k.ld_vector(from.at(byte + more)));
            std::array::from_fn(|i| quarters[i / 4][i % 4])
        });
        let (words, byte) = nvfp4::encode_block(k, halves, factors);
        let out = k.ld_pointer(&self.out);
        let start = k.eval(row.mul_wide(self.n));
        let to = k.offset(out, (start + feature.widen()) >> 1);
        k.st_vector(to, &words);
        let (block, blocks) = (k.eval(feature >> 4), k.eval(self.n >> 4));
        let offset = scale_offset(k, quantize.layout, row, block, blocks);
        let scales = k.ld_pointer(&quantize.scales);
        let to = k.offset(scales, offset);
        k.st_byte(to, byte);
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
            let body = |k: &mut Kernel| {
                k.bar_sync(1u32, config.consumer_threads());
                self.copy_out(k, tile, groups * 8);
            };
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
        let feature = k.eval(feature + tile.features * self.features());
        let inside = k.compare(Cmp::Lt, feature, self.n);
        let token = self.token_of(k, group);
        let row = k.eval(token + tile.token);
        for e in 0..2 {
            let value = self.activate(k, factors, sums.gate[e], sums.up[e]);
            let row = k.eval(row + e as u32);
            let inside = k.compare_and(Cmp::Lt, row, tile.token_end, inside);
            let to = self.element(k, row, feature, self.variant.out.staged_bytes());
            self.variant.out.store(k, inside, to, value);
        }
    }
}
