//! W4A16 without intrinsics: loops over eight f32 lanes, which LLVM turns into SSE2, NEON or other vectors.
//!
//! Where the target has a fused multiply-add (ARM64, or x86-64 compiled for one), these loops use it, and the results have
//! the bits of every other instruction set. Elsewhere it would be a call into the C library for every element. So the loops
//! round products before adding them, and their results differ from the others in the last bits.

use dualgemm_formats::BlockFormat;

use super::many_rows;
use super::pairs::{self, Pairs};
use super::vector::{DOUBLED, Vector, scale_factor};
use crate::fetch::AHEAD;
use crate::isa::Portable;
use crate::pack::{PANEL, SCALES, UP_CODES, unpack_scale};

/// Eight lanes.
#[derive(Clone, Copy)]
pub(crate) struct Lanes<const FUSED: bool>([f32; 8]);

impl<const FUSED: bool> Vector for Lanes<FUSED> {
    const LANES: usize = 8;
    const AHEAD: usize = AHEAD;
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [Self; 4] {
        let first = column / PANEL * UP_CODES + quad / 2 * 64 + column % PANEL * 4;
        std::array::from_fn(|k| {
            Self(std::array::from_fn(|feature| {
                // SAFETY: inside the chunk's 256 code bytes: 128·half + 64·line + 4·feature + k.
                let byte = unsafe { *chunk.add(first + 4 * feature + k) };
                DOUBLED[usize::from(byte >> (quad % 2 * 4) & 15)]
            }))
        })
    }

    #[inline(always)]
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self {
        Self(std::array::from_fn(|feature| {
            // SAFETY: inside the chunk's 32 scale bytes.
            let byte = unsafe { *chunk.add(SCALES + column + feature) };
            unpack_scale(format, byte) * scale_factor(format)
        }))
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 8])
    }

    #[inline(always)]
    unsafe fn splat(value: *const f32) -> Self {
        // SAFETY: the trait has `value` point to an f32.
        Self([unsafe { *value }; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the trait has `from` point to `LANES` values, eight.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self) {
        // SAFETY: the trait has `to` point to room for `LANES` values, eight.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(value.0) };
    }

    #[inline(always)]
    unsafe fn add(a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| a.0[i] + b.0[i]))
    }

    #[inline(always)]
    unsafe fn max(a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| if a.0[i] > b.0[i] { a.0[i] } else { b.0[i] }))
    }

    #[inline(always)]
    unsafe fn mul(a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| a.0[i] * b.0[i]))
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| {
            if FUSED { a.0[i].mul_add(b.0[i], c.0[i]) } else { a.0[i] * b.0[i] + c.0[i] }
        }))
    }

    #[inline(never)]
    unsafe fn pass(pass: &many_rows::Pass) {
        // SAFETY: the trait has the pointers of the pass be valid, and any machine runs this.
        unsafe { many_rows::pass::<Self>(pass) }
    }
}

/// One vector's sums of pairs. A loop over two vectors is not vectorized by LLVM.
#[inline(always)]
fn add_dot(mut sums: [f32; 8], weights: [[f32; 8]; 2], a: [f32; 2]) -> [f32; 8] {
    for (weights, a) in weights.iter().zip(a) {
        for (sum, w) in sums.iter_mut().zip(weights) {
            *sum += w * a;
        }
    }
    sums
}

/// Pairs as floats: their products and sums are integers below 2²³, and exact. LLVM regroups integers across lanes, as it does
/// those of W4A4. Without the instructions that pairs are made for, they take a third longer than floats; they are used so that
/// all machines give the same bits.
impl<const FUSED: bool> Pairs for Portable<FUSED> {
    type Floats = Lanes<FUSED>;
    /// More rows take twice the time, since LLVM does not keep their sums in registers.
    const ROWS: usize = 2;
    type Pairs = [[f32; 8]; 2];
    type Pair = [f32; 2];
    type Sums = [f32; 8];

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [[[f32; 8]; 2]; 2] {
        // SAFETY: both traits demand the same of the chunk.
        let [k0, k1, k2, k3] = unsafe { Lanes::<FUSED>::weights(chunk, column, quad) };
        [[k0.0, k2.0], [k1.0, k3.0]]
    }

    #[inline(always)]
    unsafe fn splat(pair: *const [i16; 2]) -> [f32; 2] {
        // SAFETY: the trait has `pair` point to a pair.
        unsafe { pair.read_unaligned() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn scaled(scales: Self::Floats, unit: Self::Floats) -> Self::Floats {
        // SAFETY: any machine runs this.
        unsafe { Self::Floats::mul(scales, unit) }
    }

    #[inline(always)]
    unsafe fn dot(weights: [[f32; 8]; 2], a: [f32; 2]) -> [f32; 8] {
        add_dot([0.0; 8], weights, a)
    }

    #[inline(always)]
    unsafe fn add_dots(sums: [[f32; 8]; 2], weights: [[[f32; 8]; 2]; 2], a: [f32; 2]) -> [[f32; 8]; 2] {
        [add_dot(sums[0], weights[0], a), add_dot(sums[1], weights[1], a)]
    }

    #[inline(always)]
    unsafe fn floats(sums: [f32; 8]) -> Lanes<FUSED> {
        Lanes(sums)
    }

    #[inline(never)]
    unsafe fn pass(pass: &pairs::Pass) {
        // SAFETY: the trait has the pointers of the pass be valid, and any machine runs this.
        unsafe { pairs::pass::<Self>(pass) }
    }
}
