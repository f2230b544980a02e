//! W4A16 on ARM64, in vectors of eight floats: two byte shuffles turn codes into bf16, and bf16 are the upper halves of f32.

use std::arch::aarch64::*;
use std::arch::asm;

use dualgemm_formats::BlockFormat;
use half::{bf16, f16};

use super::many_rows;
use super::pairs::{self, Pairs};
use super::vector::{DOUBLED, Vector, scale_factor};
use crate::fetch::AHEAD;
use crate::isa::{Neon, unsafe_methods};
use crate::pack::{PANEL, UP_CODES};
use crate::w4a4::neon::{self, Dot};
use crate::w4a4::scale_unit;

/// Eight lanes.
#[derive(Clone, Copy)]
pub(crate) struct Lanes([float32x4_t; 2]);

/// The low or the high bytes (`shift` 16 or 24) of the f32 values of twice the codes, whose lower half is zero.
const fn code_bytes(shift: u32) -> [u8; 16] {
    let (mut bytes, mut code) = ([0; 16], 0);
    while code < 16 {
        assert!(DOUBLED[code].to_bits() as u16 == 0);
        bytes[code] = (DOUBLED[code].to_bits() >> shift) as u8;
        code += 1;
    }
    bytes
}

/// Twice the codes of four features × four k of a line: one vector of features per k.
#[inline(always)]
unsafe fn four(line: *const u8, quad: usize) -> [float32x4_t; 4] {
    const TABLES: [[u8; 16]; 2] = [code_bytes(16), code_bytes(24)];
    /// Where the byte of each k and feature is.
    const BY_K: [u8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];
    // SAFETY: `line` points to 16 bytes of a chunk, and tables have as many.
    unsafe {
        let bytes = vqtbl1q_u8(vld1q_u8(line), vld1q_u8(BY_K.as_ptr()));
        let codes =
            if quad.is_multiple_of(2) { vandq_u8(bytes, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(bytes) };
        let [low, high] = [0, 1].map(|byte| vqtbl1q_u8(vld1q_u8(TABLES[byte].as_ptr()), codes));
        let halves = [vzip1q_u8(low, high), vzip2q_u8(low, high)].map(|halves| vreinterpretq_u16_u8(halves));
        let widened = |halves| vreinterpretq_f32_u16(halves);
        let zero = vdupq_n_u16(0);
        [
            widened(vzip1q_u16(zero, halves[0])),
            widened(vzip2q_u16(zero, halves[0])),
            widened(vzip1q_u16(zero, halves[1])),
            widened(vzip2q_u16(zero, halves[1])),
        ]
    }
}

impl Vector for Lanes {
    const LANES: usize = 8;
    const AHEAD: usize = AHEAD;
    /// Four accumulators each take 24 of 32 registers.
    const ROWS: usize = 6;

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [Self; 4] {
        // SAFETY: reads half of a line of 64 bytes: 128 · half + 64 · line + 32 + 32 ≤ 256, the chunk's code bytes.
        unsafe {
            let from = chunk.add(column / PANEL * UP_CODES + quad / 2 * 64 + column % PANEL * 4);
            let fours = [four(from, quad), four(from.add(16), quad)];
            std::array::from_fn(|k| Self([fours[0][k], fours[1][k]]))
        }
    }

    #[inline(always)]
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self {
        // SAFETY: reads the scales of the chunk, to which `chunk` points.
        unsafe {
            let factor = scale_factor(format) / scale_unit(format);
            Self(neon::scales(chunk, column, format).map(|scales| vmulq_n_f32(scales, factor)))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u32, low: Self, high: Self) {
        let bits = |floats: float32x4_t| {
            // SAFETY: every ARM64 processor has NEON.
            unsafe { vreinterpretq_u32_f32(floats) }
        };
        for i in 0..2 {
            // SAFETY: `to` points to room for eight words.
            unsafe { vst1q_u32(to.add(4 * i), vsriq_n_u32::<16>(bits(high.0[i]), bits(low.0[i]))) };
        }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        let (low, high): (float32x4_t, float32x4_t);
        // SAFETY: reads eight values, and every ARM64 processor has the instructions, for which stable Rust has no type.
        unsafe {
            asm!(
                "fcvtl {low:v}.4s, {halves:v}.4h",
                "fcvtl2 {high:v}.4s, {halves:v}.8h",
                low = out(vreg) low, high = lateout(vreg) high, halves = in(vreg) vld1q_u16(from.cast()),
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        Self([low, high])
    }

    unsafe_methods! {
        fn load_bf16(from: *const bf16) -> Self {{
            let (halves, zero) = (vld1q_u16(from.cast()), vdupq_n_u16(0));
            Self([vzip1q_u16(zero, halves), vzip2q_u16(zero, halves)].map(|bits| vreinterpretq_f32_u16(bits)))
        }}
        fn sums(vectors: [Self; 4]) -> [f32; 4] {{
            let [a, b, c, d] = vectors.map(|vector| vaddq_f32(vector.0[0], vector.0[1]));
            std::mem::transmute::<float32x4_t, [f32; 4]>(vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)))
        }}
        fn zero() -> Self { Self([vdupq_n_f32(0.0); 2]) }
        fn splat(value: *const f32) -> Self { Self([vld1q_dup_f32(value); 2]) }
        fn load(from: *const f32) -> Self { Self([vld1q_f32(from), vld1q_f32(from.add(4))]) }
        fn store(to: *mut f32, value: Self) {{
            vst1q_f32(to, value.0[0]);
            vst1q_f32(to.add(4), value.0[1]);
        }}
        fn add(a: Self, b: Self) -> Self { Self([vaddq_f32(a.0[0], b.0[0]), vaddq_f32(a.0[1], b.0[1])]) }
        fn max(a: Self, b: Self) -> Self {
            Self(std::array::from_fn(|i| vbslq_f32(vcgtq_f32(a.0[i], b.0[i]), a.0[i], b.0[i])))
        }
        fn mul(a: Self, b: Self) -> Self { Self([vmulq_f32(a.0[0], b.0[0]), vmulq_f32(a.0[1], b.0[1])]) }
        fn mul_add(a: Self, b: Self, c: Self) -> Self {
            Self([vfmaq_f32(c.0[0], a.0[0], b.0[0]), vfmaq_f32(c.0[1], a.0[1], b.0[1])])
        }
    }

    #[inline(never)]
    unsafe fn pass(pass: &many_rows::Pass) {
        // SAFETY: the trait has the pointers of the pass be valid, and every ARM64 processor has NEON.
        unsafe { many_rows::pass::<Self>(pass) }
    }
}

/// Pairs as floats, like those of [`portable`](super::portable): integers of 16 bits are multiplied four at a time as well, but on
/// fewer of a processor's units.
impl<D: Dot> Pairs for D {
    type Floats = Lanes;
    const ROWS: usize = 4;
    type Pairs = [Lanes; 2];
    type Pair = float32x2_t;
    type Sums = Lanes;

    unsafe_methods! {
        fn weights(chunk: *const u8, column: usize, quad: usize) -> [[Lanes; 2]; 2] {{
            let [k0, k1, k2, k3] = Lanes::weights(chunk, column, quad);
            [[k0, k2], [k1, k3]]
        }}
        fn splat(pair: *const [i16; 2]) -> float32x2_t {{
            let both = vreinterpret_s16_s32(vdup_n_s32(pair.cast::<i32>().read_unaligned()));
            vcvt_f32_s32(vget_low_s32(vmovl_s16(both)))
        }}
        fn dot(weights: [Lanes; 2], a: float32x2_t) -> Lanes { add_dot(Lanes::zero(), weights, a) }
        fn add_dots(sums: [Lanes; 2], weights: [[Lanes; 2]; 2], a: float32x2_t) -> [Lanes; 2] {
            [add_dot(sums[0], weights[0], a), add_dot(sums[1], weights[1], a)]
        }
        fn scaled(scales: Lanes, unit: Lanes) -> Lanes { Lanes::mul(scales, unit) }
    }

    #[inline(always)]
    unsafe fn floats(sums: Lanes) -> Lanes {
        sums
    }

    unsafe fn pass(pass: &pairs::Pass) {
        // One function for all instruction sets, which do not differ here.
        #[inline(never)]
        unsafe fn compiled(pass: &pairs::Pass) {
            // SAFETY: every ARM64 processor has NEON, and the caller has the pointers of the pass be valid.
            unsafe { pairs::pass::<Neon>(pass) }
        }
        // SAFETY: the trait has the pointers of the pass be valid.
        unsafe { compiled(pass) }
    }
}

/// One vector's sums of pairs.
#[inline(always)]
unsafe fn add_dot(sums: Lanes, weights: [Lanes; 2], a: float32x2_t) -> Lanes {
    // SAFETY: every ARM64 processor has NEON.
    Lanes(std::array::from_fn(|i| unsafe {
        vfmaq_lane_f32::<1>(vfmaq_lane_f32::<0>(sums.0[i], weights[0].0[i], a), weights[1].0[i], a)
    }))
}
