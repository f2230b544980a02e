//! The fused dual GEMM on sm_90a: `Cᵀ = act(W · Aᵀ)`, weights as the register operand of `wgmma`.
//!
//! ```text
//! weight producer   1 thread   bulk copies of packed chunks        ─┐ full[stage]      ┌─ empty[stage]
//! token producer    1 thread   TMA of A, 128-byte swizzle           ─┘  → consumers ──┘
//! consumers         1..4 warpgroups: 64 weight rows (32 features, gate and up) × all tokens of the tile
//!    per K block of 64: 4 wgmma on decoded fragments · load the next block's codes · wait for the previous
//!    wgmmas · release their stage · decode the next block
//! epilogue          activation in registers, transposed through shared memory, 16-byte stores
//! ```
//!
//! Two threads load, because one is too slow: issuing a bulk copy from a single lane costs about 100 clocks, and a
//! stage of 128 K needs six of them. Weights do not depend on the kernel before, so they start ahead of
//! `griddepcontrol.wait`.
//!
//! Flow: [`Config`] → here → PTX. Spec: <https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions>.

use dualgemm_gemm::Program;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::*;

use super::config::{Config, Layout};
use super::decode::{FIELD_MASK, MAGNITUDE_MASK, SCALE_MASK, SIGN_MASK};
use super::pack::{CHUNK_BYTES, CHUNK_FEATURES, CODE_BYTES};
use crate::Error;

/// Name of the kernel in its module.
pub const ENTRY: &str = "dual_gemm";

/// `(a & b) | c` and `(a & b) | (c & d)`'s first step, as truth tables of `lop3`.
const AND_OR: u8 = 0xEA;

/// Generates the kernel. `aligned` promises that rows of C start at multiples of 16 bytes.
///
/// # Errors
/// If the configuration does not fit the architecture.
pub fn generate(config: &Config, program: &Program, aligned: bool) -> Result<Module, Error> {
    let layout = config.layout()?;
    let mut module = Builder::new(Target::Sm90a, Version::new(8, 0));
    module.comment(&format!("C = act(A B1^T, A B2^T), nvfp4 weights, f16 A and C: {}", config.name()));
    module.kernel(ENTRY, |k| Fused::new(k, config, &layout, program, aligned).emit(k));
    Ok(module.finish()?)
}

/// Values that every role reads.
pub(super) struct Fused<'a> {
    pub(super) config: &'a Config,
    layout: &'a Layout,
    pub(super) program: &'a Program,
    pub(super) aligned: bool,
    map: TensorMapParam,
    weights: PointerParam,
    pub(super) out: PointerParam,
    pub(super) m: Reg<U32>,
    pub(super) n: Reg<U32>,
    /// K blocks of 64.
    blocks: Reg<U32>,
    pub(super) alpha: [Param<F32>; 2],
    pub(super) base: Addr<Shared>,
    warp: Reg<U32>,
    pub(super) lane: Reg<U32>,
    /// First token and first feature of the tile.
    pub(super) token: Reg<U32>,
    pub(super) tile: Reg<U32>,
}

/// Where a role stands in the ring. Offsets run along instead of being multiplied out for every block: the main loop
/// has few instructions to spare beside decoding.
#[derive(Clone, Copy)]
struct Position {
    stage: Reg<U32>,
    phase: Reg<U32>,
    /// `stage · step`.
    offset: Reg<U32>,
    step: u32,
}

impl<'a> Fused<'a> {
    fn new(
        k: &mut Kernel,
        config: &'a Config,
        layout: &'a Layout,
        program: &'a Program,
        aligned: bool,
    ) -> Self {
        k.required_threads(config.threads());
        k.min_ctas(1);
        let map = k.tensor_map("tokens");
        let (weights, out) = (k.pointer("weights"), k.pointer("out"));
        let sizes = [k.param::<U32>("m"), k.param::<U32>("n"), k.param::<U32>("k_blocks")];
        let alpha = [k.param::<F32>("alpha_gate"), k.param::<F32>("alpha_up")];
        let base = k.shared(&layout.smem);
        let [m, n, blocks] = sizes.map(|param| k.ld_param(&param));
        let warp = k.warp_index();
        let thread = k.special(Special::TidX);
        let lane = k.and(thread, 31u32);
        let cta = k.special(Special::CtaidX);
        k.comment("Token tiles run fastest: CTAs that run together read the same weights.");
        let up = k.add(m, config.tokens - 1);
        let token_tiles = k.div(up, config.tokens);
        let tile = k.div(cta, token_tiles);
        let token = k.rem(cta, token_tiles);
        let token = k.mul(token, config.tokens);
        Self {
            config,
            layout,
            program,
            aligned,
            map,
            weights,
            out,
            m,
            n,
            blocks,
            alpha,
            base,
            warp,
            lane,
            token,
            tile,
        }
    }

    fn emit(&self, k: &mut Kernel) {
        self.init_barriers(k);
        let consumer_warps = self.config.consumer_threads() / 32;
        let (producer_registers, consumer_registers) = self.config.registers();
        let is_producer = k.compare(Cmp::Ge, self.warp, consumer_warps);
        k.if_else(
            is_producer,
            "producer",
            |k| {
                k.setmaxnreg_dec(producer_registers);
                let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
                let weights = k.compare_and(Cmp::Eq, self.warp, consumer_warps, first_lane);
                k.if_(weights, "weights", |k| self.load_weights(k));
                let tokens = k.compare_and(Cmp::Eq, self.warp, consumer_warps + 1, first_lane);
                k.if_(tokens, "tokens", |k| self.load_tokens(k));
            },
            |k| {
                k.setmaxnreg_inc(consumer_registers);
                let acc = k.zeros(self.config.tokens as usize / 2);
                match self.config.k_groups {
                    1 => self.multiply(k, &acc),
                    _ => self.multiply_k_group(k, &acc),
                }
                k.comment("Every warpgroup is done with the ring.");
                k.bar_sync(1u32, self.config.consumer_threads());
                match self.config.k_groups {
                    1 => self.store_transposed(k, &acc),
                    _ => self.store_reduced(k, &acc),
                }
            },
        );
    }

    fn init_barriers(&self, k: &mut Kernel) {
        let thread = k.special(Special::TidX);
        let first = k.compare(Cmp::Eq, thread, 0u32);
        k.if_(first, "init", |k| {
            for stage in 0..self.config.stages {
                k.mbarrier_init(self.base.at(self.layout.full.part(stage)), 1u32);
                k.mbarrier_init(
                    self.base.at(self.layout.empty.part(stage)),
                    self.config.consumer_threads() / 32,
                );
            }
            k.fence_mbarrier_init();
        });
        k.cta_sync();
        k.launch_dependents();
    }

    // ---- the ring ----

    fn start(&self, k: &mut Kernel, phase: u32, step: u32) -> Position {
        Position { stage: k.mov::<U32>(0u32), phase: k.mov::<U32>(phase), offset: k.mov::<U32>(0u32), step }
    }

    fn advance(&self, k: &mut Kernel, at: Position) {
        k.to(at.stage).add(at.stage, 1u32);
        if at.step != 0 {
            k.to(at.offset).add(at.offset, at.step);
        }
        let wrapped = k.compare(Cmp::Eq, at.stage, self.config.stages);
        k.when(wrapped).to(at.stage).mov::<U32>(0u32);
        if at.step != 0 {
            k.when(wrapped).to(at.offset).mov::<U32>(0u32);
        }
        k.when(wrapped).to(at.phase).xor(at.phase, 1u32);
    }

    fn barrier(&self, k: &mut Kernel, region: u32, stage: Reg<U32>) -> Addr<Shared> {
        let offset = k.shl(stage, 3u32);
        k.offset(self.base.at(region), offset.cast())
    }

    /// Runs `load` for every stage: `load(k, at, first block, blocks of this stage)`, after the stage is empty.
    fn fill_ring(
        &self,
        k: &mut Kernel,
        name: &str,
        step: u32,
        load: impl FnOnce(&mut Kernel, Position, Reg<U32>, Reg<U32>),
    ) {
        let at = self.start(k, 1, step);
        k.for_range(name, 0u32, self.blocks, self.config.blocks_per_stage, |k, block, _| {
            let empty = self.barrier(k, self.layout.empty.offset, at.stage);
            k.mbarrier_wait(empty, at.phase, "empty");
            let left = k.sub(self.blocks, block);
            let count = k.min(left, self.config.blocks_per_stage);
            load(k, at, block, count);
            self.advance(k, at);
        });
    }

    // ---- producers ----

    fn load_weights(&self, k: &mut Kernel) {
        let weights = k.ld_pointer(&self.weights);
        k.comment("Row tiles beyond the last one read it again; their features are not stored.");
        let up = k.add(self.n, CHUNK_FEATURES as u32 - 1);
        let tiles = k.shr(up, CHUNK_FEATURES.ilog2());
        let last = k.sub(tiles, 1u32);
        let first = k.mul(self.tile, self.config.row_groups);
        let rows: Vec<Addr<Global>> = (0..self.config.row_groups)
            .map(|group| {
                let tile = k.add(first, group);
                let tile = k.min(tile, last);
                let chunk = k.mul_wide(tile, self.blocks);
                let byte = k.mul(chunk, CHUNK_BYTES as u64);
                k.offset(weights, byte)
            })
            .collect();
        // Weights that one CTA alone reads leave L2 first (measured: 1 to 3 % at one token); those that other token
        // tiles read too must stay.
        let l2 = (self.config.tokens <= 64).then_some(Eviction::First);
        let options = TmaOptions { l2, ..TmaOptions::default() };
        self.fill_ring(k, "weight_stages", self.layout.weights.stride, |k, at, block, count| {
            let full = self.barrier(k, self.layout.full.offset, at.stage);
            let per_block = self.config.tokens * 128 + self.config.row_groups * CHUNK_BYTES as u32;
            let bytes = k.mul(count, per_block);
            k.mbarrier_arrive_expect_tx(full, bytes);
            let bytes = k.mul(count, CHUNK_BYTES as u32);
            let from = k.mul_wide(block, CHUNK_BYTES as u32);
            let slot = k.offset(self.base.at(self.layout.weights.offset), at.offset.cast());
            for (group, row) in rows.iter().enumerate() {
                let from = k.offset(*row, from);
                let to = slot.at(group as i64 * i64::from(self.config.blocks_per_stage) * CHUNK_BYTES as i64);
                k.bulk_load(to, from, bytes, full, &options);
            }
        });
    }

    fn load_tokens(&self, k: &mut Kernel) {
        let map = k.tensor_map_address(&self.map);
        k.prefetch_tensor_map(map);
        k.grid_dependency_wait();
        let options = TmaOptions::default();
        self.fill_ring(k, "token_stages", self.layout.tokens.stride, |k, at, block, count| {
            let full = self.barrier(k, self.layout.full.offset, at.stage);
            let slot = k.offset(self.base.at(self.layout.tokens.offset), at.offset.cast());
            for b in 0..self.config.blocks_per_stage {
                let here = k.compare(Cmp::Gt, count, b);
                k.if_(here, "token_block", |k| {
                    let block = k.add(block, b);
                    let column = k.shl(block, 6u32);
                    let coordinates = [column.cast::<S32>().into(), self.token.cast::<S32>().into()];
                    let to = slot.at(b * self.config.tokens * 128);
                    k.tensor_load(to, map, &coordinates, full, &options);
                });
            }
        });
    }

    // ---- consumers ----

    /// Warpgroup's row group and K group, warp in the warpgroup.
    pub(super) fn place(&self, k: &mut Kernel) -> [Reg<U32>; 3] {
        let warpgroup = k.shr(self.warp, 2u32);
        let (rows, k_group) = match (self.config.row_groups, self.config.k_groups) {
            (_, 1) => (warpgroup, k.mov::<U32>(0u32)),
            (1, _) => (k.mov::<U32>(0u32), warpgroup),
            (groups, _) => (k.rem(warpgroup, groups), k.div(warpgroup, groups)),
        };
        [rows, k_group, k.and(self.warp, 3u32)]
    }

    /// Addresses of this lane's codes and scales in stage 0, block 0 of its row group.
    fn lane_addresses(&self, k: &mut Kernel, row_group: Reg<U32>, warp: Reg<U32>) -> [Addr<Shared>; 2] {
        let group = k.mul(row_group, self.config.blocks_per_stage * CHUNK_BYTES as u32);
        let start = k.offset(self.base.at(self.layout.weights.offset), group.cast());
        let thread = k.shl(warp, 5u32);
        let thread = k.add(thread, self.lane);
        let codes = k.shl(thread, 4u32);
        let codes = k.offset(start, codes.cast());
        let row = k.shr(thread, 2u32);
        let scales = k.shl(row, 3u32);
        let scales = k.offset(start.at(CODE_BYTES as i64), scales.cast());
        [codes, scales]
    }

    /// Four code words and two scale words of one block of the stage at `at`.
    fn load_block(
        &self,
        k: &mut Kernel,
        lane: [Addr<Shared>; 2],
        at: Reg<U32>,
        block: u32,
        raw: &[Reg<B32>; 6],
    ) {
        let [codes, scales] = lane.map(|address| k.offset(address, at.cast()).at(block * CHUNK_BYTES as u32));
        let words: [Reg<B32>; 4] = k.ld_vector(codes);
        let pairs: [Reg<B32>; 2] = k.ld_vector(scales);
        for (to, from) in raw.iter().zip(words.into_iter().chain(pairs)) {
            k.assign(*to, from);
        }
    }

    /// Low word of the descriptor of block 0 of the tokens in stage 0; it alone changes from tile to tile, by bytes
    /// over 16.
    fn first_desc(&self, k: &mut Kernel) -> Reg<U32> {
        let start = self.base.at(self.layout.tokens.offset);
        let address = k.add(start.base().cast::<U32>(), start.offset() as u32);
        let field = k.shr(address, 4u32);
        k.or(field.cast::<B32>(), self.layout.token_tile.wgmma_desc() as u32).cast()
    }

    /// Bytes from stage to stage of the tokens, in the unit of descriptors.
    fn desc_step(&self) -> u32 {
        self.layout.tokens.stride / 16
    }

    /// Four `wgmma` on decoded fragments; `low` is the low word of the descriptor of the block's tokens.
    fn multiply_block(&self, k: &mut Kernel, acc: &[Reg<F32>], fragments: &[Reg<B32>; 16], low: Reg<U32>) {
        let high = k.mov::<B32>((self.layout.token_tile.wgmma_desc() >> 32) as u32);
        k.wgmma_fence();
        for step in 0..4 {
            let a = std::array::from_fn(|i| fragments[4 * step + i]);
            let advance = self.layout.token_tile.advance_k(32 * step as u32) as u32;
            let low = if step == 0 { low } else { k.add(low, advance) };
            let desc = k.pack_64(low.cast::<B32>(), high);
            k.wgmma(WgmmaFormat::Half(HalfFormat::F16), acc, WgmmaA::Regs(a), desc, true);
        }
        k.wgmma_commit();
    }

    /// Main loop of a warpgroup that takes every K block. Fragments are double-buffered: while the tensor core
    /// multiplies block b from one set, the other set's multiplication (b − 1) ends and block b + 1 is decoded.
    fn multiply(&self, k: &mut Kernel, acc: &[Reg<F32>]) {
        let [row_group, _, warp] = self.place(k);
        let lane = self.lane_addresses(k, row_group, warp);
        let raw = array(k);
        let fragments: [[Reg<B32>; 16]; 2] = [array(k), array(k)];
        let load = self.start(k, 0, self.layout.weights.stride);
        let multiply = self.start(k, 0, self.desc_step());
        let release = self.start(k, 0, 0);
        let first_desc = self.first_desc(k);
        let per_stage = self.config.blocks_per_stage;
        let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);

        let full = self.barrier(k, self.layout.full.offset, load.stage);
        k.mbarrier_wait(full, load.phase, "full");
        self.load_block(k, lane, load.offset, 0, &raw);
        if per_stage == 1 {
            self.advance(k, load);
        }
        decode_block(k, &raw, &fragments[0]);

        // The loop body covers an even number of blocks (fragment sets alternate) and whole stages (the position
        // inside a stage is then known when the text is written).
        let unrolled = if per_stage.is_multiple_of(2) { per_stage } else { 2 * per_stage };
        k.for_range("k_blocks", 0u32, self.blocks, unrolled, |k, start, this| {
            for b in 0..unrolled {
                let block = k.add(start, b);
                if b > 0 {
                    let done = k.compare(Cmp::Ge, block, self.blocks);
                    k.break_if(this, done);
                }
                let (now, next) = (&fragments[b as usize % 2], &fragments[(b as usize + 1) % 2]);
                let desc = k.add(first_desc, multiply.offset);
                let desc = match b % per_stage {
                    0 => desc,
                    b => k.add(desc, b * self.config.tokens * 8),
                };
                self.multiply_block(k, acc, now, desc);
                if (b + 1) % per_stage == 0 {
                    self.advance(k, multiply);
                }
                let block = k.add(block, 1u32);
                let more = k.compare(Cmp::Lt, block, self.blocks);
                k.if_(more, "load", |k| {
                    if (b + 1) % per_stage == 0 {
                        let full = self.barrier(k, self.layout.full.offset, load.stage);
                        k.mbarrier_wait(full, load.phase, "full");
                    }
                    self.load_block(k, lane, load.offset, (b + 1) % per_stage, &raw);
                    if (b + 2).is_multiple_of(per_stage) || per_stage == 1 {
                        self.advance(k, load);
                    }
                });
                k.comment("The previous block is multiplied: its fragments are free, and so is its stage if it was the last.");
                k.wgmma_wait(1);
                if b % per_stage == 0 {
                    let previous = if b == 0 { Some(k.compare(Cmp::Ne, start, 0u32)) } else { None };
                    self.release(k, release, previous, first_lane);
                }
                decode_block(k, &raw, next);
            }
        });
        k.wgmma_wait(0);
    }

    /// Tells the producers that this warp is done with a stage; `only_if` guards the first turn.
    fn release(&self, k: &mut Kernel, at: Position, only_if: Option<Reg<Pred>>, first_lane: Reg<Pred>) {
        let body = |k: &mut Kernel| {
            let empty = self.barrier(k, self.layout.empty.offset, at.stage);
            k.when(first_lane).mbarrier_arrive(empty);
            self.advance(k, at);
        };
        match only_if {
            Some(condition) => k.if_(condition, "release", body),
            None => body(k),
        }
    }

    /// Main loop of a warpgroup that takes one K block of every stage. The other K groups' multiplications hide
    /// this one's decode, so one set of fragments is enough; the next block's codes are loaded while this one's is
    /// multiplied.
    fn multiply_k_group(&self, k: &mut Kernel, acc: &[Reg<F32>]) {
        let [row_group, k_group, warp] = self.place(k);
        let lane = self.lane_addresses(k, row_group, warp);
        let skip = k.mul(k_group, CHUNK_BYTES as u32);
        let lane = lane.map(|address| k.offset(address, skip.cast()));
        let raw = array(k);
        let fragments = array(k);
        let load = self.start(k, 0, self.layout.weights.stride);
        let multiply = self.start(k, 0, self.desc_step());
        let first_desc = self.first_desc(k);
        let skipped = k.mul(k_group, self.config.tokens * 8);
        let group_desc = k.add(first_desc, skipped);
        let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
        // Waits for a stage and loads this group's block of it, if it has one.
        let fetch = |k: &mut Kernel, start: Reg<U32>| {
            let full = self.barrier(k, self.layout.full.offset, load.stage);
            k.mbarrier_wait(full, load.phase, "full");
            let block = k.add(start, k_group);
            let mine = k.compare(Cmp::Lt, block, self.blocks);
            k.if_(mine, "fetch", |k| self.load_block(k, lane, load.offset, 0, &raw));
            self.advance(k, load);
        };
        let zero = k.mov::<U32>(0u32);
        fetch(k, zero);
        decode_block(k, &raw, &fragments);
        k.for_range("k_stages", 0u32, self.blocks, self.config.blocks_per_stage, |k, start, _| {
            let block = k.add(start, k_group);
            let mine = k.compare(Cmp::Lt, block, self.blocks);
            k.if_(mine, "block", |k| {
                let desc = k.add(group_desc, multiply.offset);
                self.multiply_block(k, acc, &fragments, desc);
            });
            let next = k.add(start, self.config.blocks_per_stage);
            let more = k.compare(Cmp::Lt, next, self.blocks);
            k.if_(more, "next", |k| fetch(k, next));
            k.wgmma_wait(0);
            let empty = self.barrier(k, self.layout.empty.offset, multiply.stage);
            k.when(first_lane).mbarrier_arrive(empty);
            self.advance(k, multiply);
            decode_block(k, &raw, &fragments);
        });
    }
}

fn array<const N: usize>(k: &mut Kernel) -> [Reg<B32>; N] {
    std::array::from_fn(|_| k.mov::<B32>(0u32))
}

/// Decodes one block: 16 fragment registers from four code words and two scale words, the operations of
/// [`super::decode`].
fn decode_block(k: &mut Kernel, raw: &[Reg<B32>; 6], fragments: &[Reg<B32>; 16]) {
    for pair in 0..2 {
        let scales = raw[4 + pair];
        let first = k.and(scales, SCALE_MASK);
        let rotated = k.funnel_left(scales, scales, 8u32);
        let second = k.and(rotated, SCALE_MASK);
        for (step, scale) in [first, second].into_iter().enumerate() {
            let step = 2 * pair + step;
            decode_word(k, raw[step], scale, &fragments[4 * step..4 * step + 4]);
        }
    }
}

fn decode_word(k: &mut Kernel, word: Reg<B32>, scale: Reg<B32>, fragments: &[Reg<B32>]) {
    let (gate, up) = k.unpack_32(scale);
    let scales = [k.pack_32(gate, gate), k.pack_32(up, up)];
    let left = |k: &mut Kernel, n: u32| if n == 0 { word } else { k.shl(word, n) };
    let fields = [0u32, 3].map(|shift| {
        let shifted = left(k, shift);
        k.and(shifted, FIELD_MASK)
    });
    let split = [(6u32, 1u32), (9, 2)].map(|(magnitude, sign)| {
        let sign = left(k, sign);
        let sign = k.and(sign, SIGN_MASK);
        let magnitude = left(k, magnitude);
        k.lop3(magnitude, MAGNITUDE_MASK, sign, AND_OR)
    });
    for (i, field) in fields.into_iter().chain(split).enumerate() {
        let product = k.mul(field.cast::<F16x2>(), scales[i % 2].cast::<F16x2>());
        k.assign(fragments[i], product.cast::<B32>());
    }
}
