//! Weights beside 16-bit A in the fused sm_100 kernel: codes times scales, in A's format, on their way from shared to
//! tensor memory; and the product that reads them there.
//!
//! ```text
//! full[stage] ─→ warps 8 to 11 (gate), 12 to 15 (up): a thread has one row ─→ widened[buffer] ─→ warp 2
//!                                                      taken[buffer] ←───────────────────────────┤
//! empty[stage] ←────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The products of a stage end after all its codes were read, so that they alone give it back.
//!
//! A code has two significant bits and a scale four, and their product lies between 2⁻¹⁰ and 2688: exact in f16, and
//! in bf16 as well. Tensor scales are left to the epilogue.
//!
//! Why tensor memory: the instruction reads 32 bytes of K of each of its `n` tokens from shared memory in `n / 2`
//! clocks, 64 bytes of the 128 that shared memory gives. Rows of weights from there would be 4096 bytes more in the
//! same clocks, and as many written: at 64 tokens 320 bytes per clock in all. From tensor memory they cost none, and
//! the accumulators leave the room up to 192 tokens.

use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::{InstrDesc, OperandFormat};

use super::config::{WIDE_COLUMNS, WidenedWeights};
use super::fused::Fused;
use crate::parts::format::{ATOM_BYTES, ATOM_ROWS};
use crate::parts::operand::OperandIndex;
use crate::parts::ring::Position;

/// K elements of one 16-bit matrix instruction, and the columns of tensor memory that they take.
const MMA_K: u32 = 16;
const MMA_COLUMNS: u32 = MMA_K / 2;

impl Fused<'_> {
    /// Widens every stage of every tile: this thread its row of gate or of up.
    pub(super) fn widen(&self, k: &mut Kernel, wide: &WidenedWeights, tmem: Addr<Tmem>) {
        let (stage_at, buffer_at) = (self.ring.start(k, false), Position::start(k, 1, wide.buffers));
        let (quarter, row) = self.quarter(k);
        let up = k.eval((self.warp >> 2) & 1);
        let (codes, scales) = self.row_in_stage(k, quarter, row, up);
        let first = up * WIDE_COLUMNS + (quarter << 21) + tmem.base();
        let first = Addr::<Tmem>::new(k.eval(first)).at(wide.column);
        let first_lane = k.compare(Cmp::Eq, self.lane, 0u32);
        self.tiles.for_each(k, "widen_tiles", |k, _| {
            k.for_range("widen_stages", self.first_stage, self.end_stage, 1, |k, stage, _| {
                let full = stage_at.barrier(k, self.ring.full);
                k.mbarrier_wait(full, stage_at.phase, "weights");
                let offset = k.eval(stage_at.index * self.layout.ring.stride);
                let first_step = k.eval(stage * self.config.steps());
                for step in 0..self.config.steps() {
                    let here = k.compare(Cmp::Lt, first_step + step, self.steps);
                    k.if_(here, "widen_step", |k| {
                        let pieces = [0, 1].map(|piece| {
                            let at = k.offset(codes[(2 * step + piece) as usize], offset);
                            k.ld_vector::<B32, _, 4>(at)
                        });
                        let at = k.offset(scales.at(step * ATOM_BYTES), offset);
                        let scales = k.ld::<B32, _>(at);
                        let values = widen_step(k, wide.format, pieces, scales);
                        let taken = buffer_at.barrier(k, self.base.at(wide.taken.offset));
                        k.mbarrier_wait(taken, buffer_at.phase, "taken");
                        let to = k.offset(first, buffer_at.index * (2 * WIDE_COLUMNS));
                        k.tmem_st(TmemShape::Lanes32Bits32, to, &values);
                        k.tmem_wait_st();
                        let widened = buffer_at.barrier(k, self.base.at(wide.widened.offset));
                        k.when(first_lane).mbarrier_arrive(widened);
                        buffer_at.advance(k);
                    });
                }
                stage_at.advance(k);
            });
        });
    }

    /// Where stage 0 has the 16-byte pieces of this thread's row of codes, and its scale word.
    fn row_in_stage(
        &self,
        k: &mut Kernel,
        quarter: Reg<U32>,
        row: Reg<U32>,
        up: Reg<U32>,
    ) -> (Vec<Addr<Shared>>, Addr<Shared>) {
        let (layout, part) = (self.layout, self.config.parts()[OperandIndex::Gate as usize]);
        let ring = self.base.at(layout.ring.offset);
        let [gate_codes, up_codes] =
            [OperandIndex::Gate, OperandIndex::Up].map(|half| layout.codes[half as usize]);
        let start = k.eval(row * part.row_bytes() + up * (up_codes - gate_codes));
        k.comment("Codes lie permuted in rows of 64 bytes: bits 4 and 5 change with bits 7 and 8.");
        let bits = k.eval((row << 3) & 0x30);
        let pieces = (0..part.row_bytes() / 16)
            .map(|piece| k.offset(ring.at(gate_codes), start + (bits ^ (piece * 16))));
        let codes = pieces.collect();
        let [gate_scales, up_scales] =
            [OperandIndex::Gate, OperandIndex::Up].map(|half| layout.scales[half as usize]);
        let line = self.lane * 16 + up * (up_scales - gate_scales);
        (codes, k.offset(ring.at(gate_scales), quarter * 4 + line))
    }

    /// Gate and up of one step, from the next buffer.
    pub(super) fn multiply_wide(
        &self,
        k: &mut Kernel,
        (wide, buffer_at): (&WidenedWeights, Position),
        (step, slot): (u32, Addr<Shared>),
        (tmem, sums): (Addr<Tmem>, Addr<Tmem>),
        [accumulate, always]: [Reg<Pred>; 2],
    ) {
        let widened = buffer_at.barrier(k, self.base.at(wide.widened.offset));
        k.mbarrier_wait(widened, buffer_at.phase, "widened");
        let weights = k.offset(tmem, buffer_at.index * (2 * WIDE_COLUMNS)).at(wide.column);
        let format = match wide.format {
            HalfFormat::F16 => OperandFormat::F16,
            HalfFormat::Bf16 => OperandFormat::Bf16,
        };
        let desc = InstrDesc::new(ATOM_ROWS, self.config.n, format);
        let desc = k.mov::<B32>(desc.encode().expect("`Config::layout` checked the shape"));
        let tile = &self.layout.tiles[OperandIndex::A as usize];
        let start = self.desc(k, slot.at(self.layout.codes[OperandIndex::A as usize]), tile.tcgen05_desc());
        let mmas = WIDE_COLUMNS / MMA_COLUMNS;
        for i in 0..mmas {
            let tokens = k.eval(start + tile.advance_k((step * mmas + i) * 2 * MMA_K)).cast::<B64>();
            for half in 0..2 {
                let a = weights.at(half * WIDE_COLUMNS + i * MMA_COLUMNS).into();
                let d = sums.at(half * self.config.n);
                let mma = Mma { group: self.group(), collector: Collector::Discard, d, a, b: tokens, desc };
                k.tcgen05_mma(mma, format, if i == 0 { accumulate } else { always });
            }
        }
        let taken = buffer_at.barrier(k, self.base.at(wide.taken.offset));
        self.commit(k, taken);
        buffer_at.advance(k);
    }
}

/// The 64 weights of two pieces of codes and a word of four scales, two to a register, lower K in the lower half.
fn widen_step(
    k: &mut Kernel,
    format: HalfFormat,
    pieces: [[Reg<B32>; 4]; 2],
    scales: Reg<B32>,
) -> Vec<Reg<B32>> {
    let (low, high) = k.unpack_32(scales);
    let mut values = Vec::with_capacity(WIDE_COLUMNS as usize);
    for (piece, pair) in pieces.into_iter().zip([low, high]) {
        let pair = k.e4m3x2_to_f16x2(pair);
        for (words, both) in piece.chunks_exact(2).zip([0x1010u32, 0x3232]) {
            let scale = k.permute(pair, pair, both);
            for &word in words {
                for codes in k.unpack_bytes(word) {
                    let codes = k.e2m1x2_to_f16x2(codes);
                    let product = k.mul(codes, scale);
                    values.push(match format {
                        HalfFormat::F16 => product.cast(),
                        HalfFormat::Bf16 => {
                            let (low, high) = k.unpack_32(product);
                            let [low, high] = [low, high].map(|half| k.f16_to_f32(half.cast()));
                            k.f32_to_bf16x2(low, high).cast()
                        }
                    });
                }
            }
        }
    }
    values
}
