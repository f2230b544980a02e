//! The fused dual GEMM on a checkpoint's own layout: codes by TMA, scales from global memory into registers.
//!
//! ```text
//! code producer    1 thread   TMA of 64 bytes of each gate and up row                ─┐ full[stage]    ┌─ empty[stage]
//! token producer   1 thread   TMA of tokens, K in the order of [`order`](super::order) ─┘ → consumers ───┘
//! consumers        1 or 2 warpgroups: 16 bytes of codes per lane and row, 32 fragment registers, eight wgmma a stage
//! epilogue         activation in registers, staged in shared memory, 16-byte stores
//! ```
//!
//! As in the prepacked kernel a warp's first eight rows are gate and the other eight up of the same features, so a
//! thread's sums are gate and up of one feature. A lane needs two scales per row and stage; it loads those of four
//! stages while it works on the four before.
//!
//! Flow: [`Config`] → here → PTX.

use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::*;

use super::config::{Config, GROUP_FEATURES, ROW_BYTES};
use super::order::SPAN;
use crate::Error;
use crate::fused::{ENTRY, Tile as _};
use crate::generic::module;
use crate::generic::rowwise::scale_offset;
use crate::parts::ring::{Position, low_word};
use crate::parts::tma_tiles::{CtaTile, Layout};
use crate::parts::variant::Variant;
use crate::sm90a::decode::{MAGNITUDE_MASK, SIGN_MASK};

/// Stages whose scales are loaded together.
const SCALE_STAGES: u32 = 4;
/// `(a & b) | c` as a truth table of `lop3`.
const AND_OR: u8 = 0xEA;
/// 2¹⁵, twice: an e4m3 byte placed in a half is `scale · 2⁻⁸`; times this it is `scale · 2⁷`.
const SCALE_FACTOR: u32 = 0x7800_7800;

/// Generates the kernel.
pub fn generate(config: &Config, variant: &Variant) -> Result<Module, Error> {
    let layout = config.layout(variant.out)?;
    config.rules().one_problem(variant)?;
    let about =
        format!("C = act(A B1^T, A B2^T), nvfp4 weights as they lie in a checkpoint: {}", config.name());
    module(Target::Sm90a, &about, ENTRY, |k| {
        Fused::new(k, config, &layout, variant).emit(k);
    })
}

struct Fused<'a> {
    config: &'a Config,
    layout: &'a Layout,
    frame: CtaTile,
    /// Tensor maps of A, gate codes, up codes.
    maps: [TensorMapParam; 3],
    scales: [PointerParam; 2],
    /// Blocks of 16 of a row.
    scale_blocks: Reg<U32>,
    /// Stages that K takes.
    blocks: Reg<U32>,
}

/// What a consumer lane keeps.
struct Consumer {
    /// Its gate and up codes in stage 0.
    codes: [Addr<Shared>; 2],
    /// Low word of the descriptor of the tokens in stage 0.
    tokens: Reg<U32>,
    /// Feature of its rows.
    feature: Reg<U32>,
    /// Lane of the four that share a row.
    q: Reg<U32>,
    take: Position,
    release: Position,
    /// Four words of gate and four of up.
    raw: [Reg<B32>; 8],
    /// Scales of a stage: two bytes of gate, two of up; of this group of stages and of the next.
    now: [Reg<B32>; SCALE_STAGES as usize],
    next: [Reg<B32>; SCALE_STAGES as usize],
    fragments: [[Reg<B32>; 16]; 2],
}

impl<'a> Fused<'a> {
    fn new(k: &mut Kernel, config: &'a Config, layout: &'a Layout, variant: &Variant) -> Self {
        let maps = ["tokens", "gate_codes", "up_codes"].map(|name| k.tensor_map(name));
        let scales = [k.pointer("gate_scales"), k.pointer("up_scales")];
        let sizes = ["m", "n", "scale_blocks"].map(|name| k.param(name));
        let frame = CtaTile::new(k, config.shape(), layout, sizes, variant);
        let blocks = k.eval((frame.k + (SPAN as u32 / 16 - 1)) >> (SPAN / 16).ilog2());
        Self { config, layout, maps, scales, scale_blocks: frame.k, frame, blocks }
    }

    fn emit(&self, k: &mut Kernel) {
        let Self { frame, layout, maps: [tokens, gate, up], .. } = self;
        let panels = [0, self.config.panel_bytes()];
        frame.emit(
            k,
            |k| frame.load_weights(k, [gate, up], self.blocks, (&layout.weights, ROW_BYTES)),
            |k| frame.load_tokens(k, tokens, self.blocks, (&layout.tokens, &panels, SPAN as u32 / 2)),
            |k| {
                let sums = k.zeros(self.config.tokens as usize / 2);
                self.multiply(k, &sums);
                self.store(k, &sums);
            },
        );
    }

    // ---- consumers ----

    /// Feature of this lane's rows in the tile.
    fn lane_feature(&self, k: &mut Kernel) -> Reg<U32> {
        let g = k.eval(self.frame.lane >> 2);
        k.eval(self.frame.warp * (GROUP_FEATURES / 4) + g)
    }

    fn consumer(&self, k: &mut Kernel) -> Consumer {
        let feature = self.lane_feature(k);
        let q = k.eval(self.frame.lane & 3);
        let codes_start = self.frame.base.at(self.layout.weights.offset);
        let codes = k.offset(codes_start, feature * ROW_BYTES + (q << 4));
        let up = self.config.features() * ROW_BYTES;
        let feature = k.eval(feature + self.frame.feature);
        let tokens = self.frame.base.at(self.layout.tokens.offset);
        Consumer {
            codes: [codes, codes.at(up)],
            tokens: low_word(k, tokens, self.layout.tile.wgmma_desc()),
            feature,
            q,
            take: self.frame.ring.start(k, false),
            release: self.frame.ring.start(k, false),
            raw: array(k),
            now: array(k),
            next: array(k),
            fragments: [array(k), array(k)],
        }
    }

    /// Loads the scales of a group of stages, from stage `first` on.
    fn load_scales(&self, k: &mut Kernel, consumer: &Consumer, first: Reg<U32>) {
        let starts = [0, 1].map(|half| k.ld_pointer(&self.scales[half]));
        let pair = k.eval(consumer.q << 1);
        let exists = k.compare(Cmp::Lt, consumer.feature, self.frame.rows.n);
        for (i, to) in consumer.next.into_iter().enumerate() {
            let block = k.eval((first + i as u32) * (SPAN as u32 / 16) + pair);
            let inside = k.compare_and(Cmp::Lt, block, self.scale_blocks, exists);
            let layout = self.config.scale_layout;
            let offset = scale_offset(k, layout, consumer.feature, block, self.scale_blocks);
            let halves = starts.map(|start| {
                let from = k.offset(start, offset);
                let bytes = k.mov::<U16>(Value::from(0u16));
                k.when(inside).to(bytes).ld::<U16, _>(from);
                bytes
            });
            let word = k.pack_32(halves[0], halves[1]);
            k.assign(to, word);
        }
    }

    /// Waits for the next stage and loads this lane's codes.
    fn load_codes_of_lane(&self, k: &mut Kernel, consumer: &Consumer) {
        self.frame.ring.wait_full(k, consumer.take);
        let at = k.eval(consumer.take.index * self.layout.weights.stride);
        for (half, start) in consumer.codes.into_iter().enumerate() {
            let from = k.offset(start, at);
            let words: [Reg<B32>; 4] = k.ld_vector(from);
            for (i, word) in words.into_iter().enumerate() {
                k.assign(consumer.raw[4 * half + i], word);
            }
        }
    }

    /// Decodes half a stage, words `2 · half` and the next of gate and up: four k16 steps.
    fn decode(&self, k: &mut Kernel, consumer: &Consumer, half: u32, scales: Reg<B32>) {
        let zero = k.mov::<B32>(0u32);
        let factor = k.mov::<B32>(SCALE_FACTOR).cast::<F16x2>();
        for row in 0..2u32 {
            // This half's scale byte of the row, in both halves of a register.
            let byte = 2 * row + half;
            let both = k.permute(scales, zero, byte | 4 << 4 | byte << 8 | 4 << 12);
            let placed = k.eval(both << 7);
            let scale = k.mul(placed.cast::<F16x2>(), factor);
            for word in 0..2u32 {
                let pairs = pairs(k, consumer.raw[(4 * row + 2 * half + word) as usize]);
                for (p, pair) in pairs.into_iter().enumerate() {
                    // Pair 2s + h is register row + 2h of step 2 · word + s.
                    let step = 2 * word as usize + p / 2;
                    let register = row as usize + 2 * (p % 2);
                    let product = k.mul(pair.cast::<F16x2>(), scale);
                    k.assign(consumer.fragments[half as usize][4 * step + register], product.cast());
                }
            }
        }
    }

    /// Four `wgmma` on half a stage.
    fn multiply_half(&self, k: &mut Kernel, consumer: &Consumer, half: u32, at: Reg<U32>, sums: &[Reg<F32>]) {
        let high = k.mov::<B32>((self.layout.tile.wgmma_desc() >> 32) as u32);
        k.wgmma_fence();
        for step in 0..4u32 {
            let a = std::array::from_fn(|i| consumer.fragments[half as usize][4 * step as usize + i]);
            let advance = self.layout.tile.advance_k(32 * step) as u32;
            let low = k.eval(at + (half * self.config.panel_bytes() / 16 + advance));
            let desc = k.pack_64(low.cast::<B32>(), high);
            k.wgmma(WgmmaFormat::Half(HalfFormat::F16), sums, WgmmaA::Regs(a), desc, true);
        }
        k.wgmma_commit();
    }

    fn multiply(&self, k: &mut Kernel, sums: &[Reg<F32>]) {
        let consumer = self.consumer(k);
        let zero = k.mov::<U32>(0u32);
        self.load_scales(k, &consumer, zero);
        self.load_codes_of_lane(k, &consumer);
        self.decode(k, &consumer, 0, consumer.next[0]);
        k.for_range("scale_groups", 0u32, self.blocks, SCALE_STAGES, |k, first, this| {
            for (now, next) in consumer.now.into_iter().zip(consumer.next) {
                k.assign(now, next);
            }
            let after = k.eval(first + SCALE_STAGES);
            self.load_scales(k, &consumer, after);
            for i in 0..SCALE_STAGES {
                let stage = k.eval(first + i);
                if i > 0 {
                    let done = k.compare(Cmp::Ge, stage, self.blocks);
                    k.break_if(this, done);
                }
                self.stage(k, &consumer, stage, i as usize, sums);
            }
        });
        k.wgmma_wait(0);
    }

    /// One stage; its first half is decoded already, and so is the first half of the next one afterwards.
    fn stage(&self, k: &mut Kernel, consumer: &Consumer, stage: Reg<U32>, i: usize, sums: &[Reg<F32>]) {
        let at = k.eval(consumer.take.index * (self.layout.tokens.stride / 16) + consumer.tokens);
        self.multiply_half(k, consumer, 0, at, sums);
        k.comment("The stage before is multiplied.");
        k.wgmma_wait(1);
        self.frame.release_before(k, stage, consumer.release);
        self.decode(k, consumer, 1, consumer.now[i]);
        self.multiply_half(k, consumer, 1, at, sums);
        consumer.take.advance(k);
        let more = k.compare(Cmp::Lt, stage + 1, self.blocks);
        k.if_(more, "load", |k| self.load_codes_of_lane(k, consumer));
        k.wgmma_wait(1);
        let scales = *consumer.now.get(i + 1).unwrap_or(&consumer.next[0]);
        self.decode(k, consumer, 0, scales);
    }

    fn store(&self, k: &mut Kernel, sums: &[Reg<F32>]) {
        let frame = &self.frame;
        let staged = frame.staged(k);
        let feature = self.lane_feature(k);
        let token = k.eval((frame.lane & 3) << 1);
        let of_c = k.eval(frame.feature + feature);
        let factors = frame.rows.factors(k, None, of_c);
        let place = staged.place(k, token, feature);
        for (j, sums) in sums.chunks_exact(4).enumerate() {
            for e in 0..2 {
                let value = factors.activate(k, &frame.rows.variant.program, [sums[e], sums[e + 2]]);
                staged.store(k, place.at((8 * j + e) as u32 * staged.pitch()), value);
            }
        }
        frame.copy_out(k, &staged);
    }
}

fn array<const N: usize>(k: &mut Kernel) -> [Reg<B32>; N] {
    std::array::from_fn(|_| k.mov::<B32>(0u32))
}

/// The four pairs of a word of eight codes, as halves `code · 2⁻¹⁴`: nibbles p and p + 4.
fn pairs(k: &mut Kernel, word: Reg<B32>) -> [Reg<B32>; 4] {
    std::array::from_fn(|p| {
        let p = p as u32;
        let magnitude = match p {
            3 => k.eval(word.cast::<U32>() >> 3).cast(),
            _ => k.eval(word << (9 - 4 * p)),
        };
        let sign = match p {
            3 => k.eval(word & SIGN_MASK),
            _ => k.eval((word << (12 - 4 * p)) & SIGN_MASK),
        };
        k.lop3(magnitude, MAGNITUDE_MASK, sign, AND_OR)
    })
}
