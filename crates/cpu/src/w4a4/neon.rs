//! W4A4 on ARM64, in vectors of eight features: two registers of bytes, four features × four k each.
//!
//! The instruction sets differ in the products of bytes alone ([`Dot`]). Weights carry no bias, since all instructions take signed
//! bytes. Those that stable Rust has no intrinsics for are assembly: `sdot` and `smmla`.
//!
//! Reference: Arm Architecture Reference Manual, DDI 0487, "C7.2 Alphabetical list of A64 Advanced SIMD and floating-point
//! instructions".

use std::arch::aarch64::*;
use std::arch::asm;

use dualgemm_formats::BlockFormat;
use dualgemm_formats::scalar::e2m1::DOUBLED;

use super::activations::Block;
use super::digits::{self, DigitBlock, DigitTask};
use super::kernel::Pass;
use super::vector::Vector;
use crate::fetch::AHEAD;
use crate::isa::{Neon, NeonBf16, NeonDot, NeonI8mm, compiled_for};
use crate::pack::{CHUNK_K, PANEL, SCALE_EXPONENT, SCALES, UP_CODES};
use crate::tile::TILE_COLS;

/// Products of bytes.
///
/// Methods are `unsafe` because the machine must have the instruction set.
pub(crate) trait Dot: Copy {
    /// Partial sums of four features.
    type Sums: Copy;
    /// Whether there are products of two rows at once.
    const PAIRS: bool;

    /// Zeros.
    unsafe fn zero() -> Self::Sums;

    /// `sums` plus the products of four features × four k with bytes `4 · QUAD ..` of `a`.
    unsafe fn add<const QUAD: i32>(sums: Self::Sums, weights: int8x16_t, a: int8x16_t) -> Self::Sums;

    /// The finished sums by feature.
    unsafe fn total(sums: Self::Sums) -> int32x4_t;
}

/// `smlal`: products of two features each in i16, four lanes per feature. A lane adds four products of at most 12 · 12, or of
/// 12 · 128 where `a` is digits.
impl Dot for Neon {
    type Sums = [int16x8_t; 2];
    const PAIRS: bool = false;

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        // SAFETY: every ARM64 processor has NEON.
        unsafe { [vdupq_n_s16(0); 2] }
    }

    #[inline(always)]
    unsafe fn add<const QUAD: i32>([low, high]: Self::Sums, weights: int8x16_t, a: int8x16_t) -> Self::Sums {
        // SAFETY: every ARM64 processor has NEON.
        unsafe {
            let quad = vreinterpretq_s8_s32(vdupq_laneq_s32::<QUAD>(vreinterpretq_s32_s8(a)));
            [vmlal_s8(low, vget_low_s8(weights), vget_low_s8(quad)), vmlal_high_s8(high, weights, quad)]
        }
    }

    #[inline(always)]
    unsafe fn total([low, high]: Self::Sums) -> int32x4_t {
        // SAFETY: every ARM64 processor has NEON.
        unsafe { vpaddlq_s16(vpaddq_s16(low, high)) }
    }
}

compiled_for!(NeonDot, {
    /// Adds to each lane of `sums` its four products of `weights` and of lane `QUAD` of `a`.
    #[inline]
    fn sdot<const QUAD: i32>(mut sums: int32x4_t, weights: int8x16_t, a: int8x16_t) -> int32x4_t {
        // SAFETY: the instruction is part of the set that this is compiled for.
        unsafe {
            asm!(
                "sdot {sums:v}.4s, {weights:v}.16b, {a:v}.4b[{quad}]",
                sums = inout(vreg) sums, weights = in(vreg) weights, a = in(vreg) a, quad = const QUAD,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sums
    }
});

compiled_for!(NeonI8mm, {
    /// Adds the products of two rows and two features, eight k each: row by row.
    #[inline]
    fn smmla(mut sums: int32x4_t, rows: int8x16_t, features: int8x16_t) -> int32x4_t {
        // SAFETY: the instruction is part of the set that this is compiled for.
        unsafe {
            asm!(
                "smmla {sums:v}.4s, {rows:v}.16b, {features:v}.16b",
                sums = inout(vreg) sums, rows = in(vreg) rows, features = in(vreg) features,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sums
    }
});

/// Implements `Dot` by `sdot`.
macro_rules! by_sdot {
    ($($isa:ident, pairs: $pairs:literal;)*) => {$(
        impl Dot for $isa {
            type Sums = int32x4_t;
            const PAIRS: bool = $pairs;

            #[inline(always)]
            unsafe fn zero() -> int32x4_t {
                // SAFETY: every ARM64 processor has NEON.
                unsafe { vdupq_n_s32(0) }
            }

            #[inline(always)]
            unsafe fn add<const QUAD: i32>(sums: int32x4_t, weights: int8x16_t, a: int8x16_t) -> int32x4_t {
                // SAFETY: the caller holds a token of an instruction set that has `sdot`.
                unsafe { sdot::<QUAD>(sums, weights, a) }
            }

            #[inline(always)]
            unsafe fn total(sums: int32x4_t) -> int32x4_t {
                sums
            }
        }
    )*};
}
by_sdot! { NeonDot, pairs: false; NeonI8mm, pairs: true; NeonBf16, pairs: true; }

/// Fewest rows that are taken in pairs: each pass brings weights and scales into another order for them, by 24 instructions.
const MIN_PAIRED: usize = 6;

/// The bits of eight scales as f32; scales of nvfp4 are multiplied by 2 to the power of -[`SCALE_EXPONENT`].
#[inline(always)]
unsafe fn scale_bits(chunk: *const u8, column: usize, format: BlockFormat) -> [uint32x4_t; 2] {
    // SAFETY: reads 8 of the chunk's 32 scale bytes, since `column` is a multiple of 8 below 32.
    unsafe {
        let (bytes, zero) = (vld1_u8(chunk.add(SCALES + column)), vdupq_n_u16(0));
        // The upper 16 bits of each lane.
        let halves = match format {
            BlockFormat::Nvfp4 => vshll_n_u8::<4>(bytes),
            BlockFormat::Mxfp4 => vshll_n_u8::<7>(bytes),
        };
        let bits =
            [vzip1q_u16(zero, halves), vzip2q_u16(zero, halves)].map(|bits| vreinterpretq_u32_u16(bits));
        match format {
            BlockFormat::Nvfp4 => bits,
            // Byte 0 is 2⁻¹²⁷, a subnormal.
            BlockFormat::Mxfp4 => bits.map(|bits| vmaxq_u32(bits, vdupq_n_u32(1 << 22))),
        }
    }
}

/// [`Vector::scales`].
///
/// # Safety
/// `chunk` points to a chunk of a panel.
#[inline(always)]
pub(crate) unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> [float32x4_t; 2] {
    // SAFETY: `scale_bits` reads the scales of a chunk, to which `chunk` points.
    unsafe {
        scale_bits(chunk, column, format).map(|bits| {
            vreinterpretq_f32_u32(match format {
                BlockFormat::Nvfp4 => vaddq_u32(bits, vdupq_n_u32((SCALE_EXPONENT - 1) << 23)),
                BlockFormat::Mxfp4 => bits,
            })
        })
    }
}

impl<D: Dot> Vector for D {
    const LANES: usize = 8;
    const AHEAD: usize = AHEAD;
    type Quads = [int8x16_t; 2];
    type Quad = int8x16_t;
    type Sums = [D::Sums; 2];
    type Floats = [float32x4_t; 2];

    fn bias_word(_sum: i32) -> i32 {
        0
    }

    #[inline(always)]
    unsafe fn doubled(codes: [u8; CHUNK_K]) -> ([i8; CHUNK_K], i32) {
        // SAFETY: every ARM64 processor has NEON; vectors and arrays have 16 bytes.
        unsafe {
            let doubled = vqtbl1q_s8(vld1q_s8(DOUBLED.as_ptr()), vld1q_u8(codes.as_ptr()));
            (std::mem::transmute::<int8x16_t, [i8; CHUNK_K]>(doubled), i32::from(vaddlvq_s8(doubled)))
        }
    }

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize) -> [Self::Quads; 4] {
        // SAFETY: reads half of each of two lines of 64 bytes: 128 · half + 64 + 32 + 32 ≤ 256, the chunk's code bytes.
        unsafe {
            let (table, nibble) = (vld1q_s8(DOUBLED.as_ptr()), vdupq_n_u8(15));
            let first = chunk.add(column / PANEL * UP_CODES + column % PANEL * 4);
            let line = |at| [vld1q_u8(first.add(at)), vld1q_u8(first.add(at + 16))];
            let low = |line: [uint8x16_t; 2]| line.map(|codes| vqtbl1q_s8(table, vandq_u8(codes, nibble)));
            let high = |line: [uint8x16_t; 2]| line.map(|codes| vqtbl1q_s8(table, vshrq_n_u8::<4>(codes)));
            let lines = [line(0), line(64)];
            [low(lines[0]), high(lines[0]), low(lines[1]), high(lines[1])]
        }
    }

    #[inline(always)]
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self::Floats {
        // SAFETY: both demand the same of the chunk.
        unsafe { scales(chunk, column, format) }
    }

    #[inline(always)]
    unsafe fn raw_scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self::Floats {
        // SAFETY: `scale_bits` reads the scales of a chunk, to which `chunk` points.
        unsafe { scale_bits(chunk, column, format).map(|bits| vreinterpretq_f32_u32(bits)) }
    }

    #[inline(always)]
    unsafe fn quad(quad: *const i8) -> int8x16_t {
        // SAFETY: the trait has `quad` point to four codes.
        unsafe { vreinterpretq_s8_s32(vdupq_n_s32(quad.cast::<i32>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn start(_word: *const i32) -> Self::Sums {
        // SAFETY: the caller's machine has the instruction set.
        unsafe { [D::zero(); 2] }
    }

    #[inline(always)]
    unsafe fn dots(sums: [Self::Sums; 2], weights: [Self::Quads; 2], quad: int8x16_t) -> [Self::Sums; 2] {
        // SAFETY: the caller's machine has the instruction set.
        unsafe { add_quad::<D, 0>(sums, weights, quad) }
    }

    /// One load of all 16 codes: instructions take the quad from its lane.
    #[inline(always)]
    unsafe fn block_dots(
        sums: [Self::Sums; 2],
        weights: &[[Self::Quads; 4]; 2],
        codes: *const i8,
    ) -> [Self::Sums; 2] {
        let quad = |quad: usize| [weights[0][quad], weights[1][quad]];
        // SAFETY: the caller's machine has the instruction set, and `codes` points to 16 codes.
        unsafe {
            let a = vld1q_s8(codes);
            let sums = add_quad::<D, 1>(add_quad::<D, 0>(sums, quad(0), a), quad(1), a);
            add_quad::<D, 3>(add_quad::<D, 2>(sums, quad(2), a), quad(3), a)
        }
    }

    #[inline(always)]
    unsafe fn first_rows(pass: &Pass<Self>, rows: usize, blocks: *const Block, sums: *mut f32) -> usize {
        let paired = paired::<D>(rows);
        if paired > 0 {
            // SAFETY: both demand the same of the pointers, and `PAIRS` says that the machine has the instructions.
            unsafe { multiply_pairs(pass, paired / 2, blocks, sums) }
        }
        paired
    }

    #[inline(always)]
    unsafe fn swap_pairs(rows: usize, sums: *mut f32) {
        for at in 0..paired::<D>(rows) / 2 * (TILE_COLS / 4) {
            // SAFETY: four columns of two rows, which are among the rows at `sums`.
            unsafe {
                let first = sums.add(at / (TILE_COLS / 4) * 2 * TILE_COLS + at % (TILE_COLS / 4) * 4);
                let rows = [first, first.add(TILE_COLS)].map(|row| vreinterpretq_f64_f32(vld1q_f32(row)));
                vst1q_f32(first, vreinterpretq_f32_f64(vzip1q_f64(rows[0], rows[1])));
                vst1q_f32(first.add(TILE_COLS), vreinterpretq_f32_f64(vzip2q_f64(rows[0], rows[1])));
            }
        }
    }

    #[inline(always)]
    unsafe fn floats(sums: Self::Sums) -> Self::Floats {
        // SAFETY: the caller's machine has the instruction set.
        unsafe { sums.map(|sums| vcvtq_f32_s32(D::total(sums))) }
    }

    const SCALES_INTEGERS: bool = false;

    #[inline(always)]
    unsafe fn scaled_floats(sums: Self::Sums, scale: *const i32) -> Self::Floats {
        // SAFETY: the caller's machine has the instruction set, and `scale` points to a word.
        unsafe { sums.map(|sums| vcvtq_f32_s32(vmulq_n_s32(D::total(sums), *scale >> 16))) }
    }

    type Joined = [int32x4_t; 2];

    #[inline(always)]
    unsafe fn joined(_bias: *const i32) -> Self::Joined {
        // SAFETY: every ARM64 processor has NEON.
        unsafe { [vdupq_n_s32(0); 2] }
    }

    #[inline(always)]
    unsafe fn start_digit(bias: *const i32, _digit: usize) -> Self::Sums {
        // SAFETY: there is no bias: nothing is read.
        unsafe { Self::start(bias) }
    }

    #[inline(always)]
    unsafe fn join(joined: Self::Joined, sums: Self::Sums, digit: usize) -> Self::Joined {
        // SAFETY: the caller's machine has the instruction set.
        std::array::from_fn(|i| unsafe {
            match digit {
                2 => D::total(sums[i]),
                1 => vsubq_s32(D::total(sums[i]), vshlq_n_s32::<7>(joined[i])),
                _ => vaddq_s32(D::total(sums[i]), vshlq_n_s32::<8>(joined[i])),
            }
        })
    }

    #[inline(always)]
    unsafe fn joined_floats(joined: Self::Joined) -> Self::Floats {
        // SAFETY: every ARM64 processor has NEON.
        unsafe { joined.map(|joined| vcvtq_f32_s32(joined)) }
    }

    #[inline(always)]
    unsafe fn multiply_blocks(task: &DigitTask, blocks: &[DigitBlock]) {
        // SAFETY: both demand the same of the task and of the blocks.
        unsafe { digits::multiply_blocks::<Self>(task, blocks) }
    }

    #[inline(always)]
    unsafe fn splat(value: *const f32) -> Self::Floats {
        // SAFETY: the trait has `value` point to an f32.
        unsafe { [vld1q_dup_f32(value); 2] }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: every ARM64 processor has NEON.
        unsafe { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        // SAFETY: every ARM64 processor has NEON.
        unsafe { [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Floats {
        // SAFETY: the trait has `from` point to `LANES` values, eight.
        unsafe { [vld1q_f32(from), vld1q_f32(from.add(4))] }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::Floats) {
        // SAFETY: the trait has `to` point to room for `LANES` values, eight.
        unsafe {
            vst1q_f32(to, value[0]);
            vst1q_f32(to.add(4), value[1]);
        }
    }
}

/// [`Vector::dots`] with quad `QUAD` of `a`.
#[inline(always)]
unsafe fn add_quad<D: Dot, const QUAD: i32>(
    [left, right]: [[D::Sums; 2]; 2],
    weights: [[int8x16_t; 2]; 2],
    a: int8x16_t,
) -> [[D::Sums; 2]; 2] {
    // SAFETY: the caller's machine has the instruction set.
    let add = |sums, weights| unsafe { D::add::<QUAD>(sums, weights, a) };
    [
        [add(left[0], weights[0][0]), add(left[1], weights[0][1])],
        [add(right[0], weights[1][0]), add(right[1], weights[1][1])],
    ]
}

/// How many of so many rows are taken in pairs.
#[inline(always)]
fn paired<D: Dot>(rows: usize) -> usize {
    if D::PAIRS && rows >= MIN_PAIRED { rows & !1 } else { 0 }
}

/// [`Vector::first_rows`] by `smmla`, which gives products of two rows with two features: row by row, so that sums of four
/// columns are those of the first two in both rows, in the place of the first row, and then those of the other two.
///
/// # Safety
/// That of the method, and the machine has `smmla`.
#[inline(always)]
unsafe fn multiply_pairs<D: Dot>(pass: &Pass<D>, pairs: usize, blocks: *const Block, sums: *mut f32) {
    // SAFETY: the caller passes the blocks of two rows for each pair, and their sums at 16 columns; its machine has the
    // instructions.
    unsafe {
        let halves = |left, right| {
            let (left, right) = (vreinterpretq_s64_s8(left), vreinterpretq_s64_s8(right));
            [vreinterpretq_s8_s64(vzip1q_s64(left, right)), vreinterpretq_s8_s64(vzip2q_s64(left, right))]
        };
        // By four features and line: features two by two, eight k each.
        let weights: [[[int8x16_t; 2]; 2]; 4] = std::array::from_fn(|four| {
            std::array::from_fn(|line| {
                let quads = [2 * line, 2 * line + 1].map(|quad| pass.weights[four / 2][quad][four % 2]);
                let [low, high] = quads.map(|quad| vreinterpretq_s32_s8(quad));
                [vreinterpretq_s8_s32(vzip1q_s32(low, high)), vreinterpretq_s8_s32(vzip2q_s32(low, high))]
            })
        });
        let scales: [[float32x4_t; 2]; 4] = std::array::from_fn(|four| {
            let scales = vreinterpretq_f64_f32(pass.scales[four / 2][four % 2]);
            [
                vreinterpretq_f32_f64(vzip1q_f64(scales, scales)),
                vreinterpretq_f32_f64(vzip2q_f64(scales, scales)),
            ]
        });
        for pair in 0..pairs {
            let [first, second] = [blocks.add(2 * pair), blocks.add(2 * pair + 1)];
            let codes = |block: *const Block| vld1q_s8((&raw const (*block).codes).cast());
            let scale = |block: *const Block| vld1_dup_f32((&raw const (*block).scale).cast());
            let a = halves(codes(first), codes(second));
            let scale = vcombine_f32(scale(first), scale(second));
            for (four, (weights, scales)) in weights.iter().zip(&scales).enumerate() {
                for two in 0..2 {
                    let dots = smmla(smmla(vdupq_n_s32(0), a[0], weights[0][two]), a[1], weights[1][two]);
                    let to = sums.add((2 * pair + two) * TILE_COLS + 4 * four);
                    let product = vmulq_f32(vcvtq_f32_s32(dots), scale);
                    vst1q_f32(to, vfmaq_f32(vld1q_f32(to), product, scales[two]));
                }
            }
        }
    }
}
