//! W4A16 in plain Rust: loops over eight f32 lanes, which LLVM turns into SSE2, NEON or other vectors.
//!
//! Where the target has a fused multiply-add (ARM64, or x86-64 compiled for one), it is used, and the results have
//! the bits of every other instruction set. Elsewhere it would be a call into the C library for every element, so
//! products are rounded before they are added; these results differ from the others in the last bits.

use dualgemm_formats::BlockFormat;

use super::Functions;
use super::kernel::{self, Pass};
use super::pairs::{self, Pairs};
use super::vector::{DOUBLED, Vector, scale_factor};
use crate::fetch::AHEAD;
use crate::pack::{PANEL, SCALES, UP_CODES, unpack_scale};

#[derive(Clone, Copy)]
pub(super) struct Portable<const FUSED: bool>([f32; 8]);

impl<const FUSED: bool> Vector for Portable<FUSED> {
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
        // SAFETY: the caller passes a value.
        Self([unsafe { *value }; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller passes eight values.
        Self(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self) {
        // SAFETY: the caller passes room for eight values.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(value.0) };
    }

    #[inline(always)]
    unsafe fn add(a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| a.0[i] + b.0[i]))
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
    unsafe fn pass(pass: &Pass) {
        // SAFETY: the caller's promises.
        unsafe { kernel::pass::<Self>(pass) }
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

/// Pairs as floats: their products and sums are integers below 2²³, and exact. As integers LLVM regroups them across
/// lanes, as it does those of W4A4. Without the instructions for which there are pairs they take a third longer than floats, for
/// the same bits as everywhere.
pub(super) struct FloatPairs<const FUSED: bool>;

impl<const FUSED: bool> Pairs for FloatPairs<FUSED> {
    type Floats = Portable<FUSED>;
    /// LLVM keeps no more in registers, and else takes twice the time.
    const ROWS: usize = 2;
    type Pairs = [[f32; 8]; 2];
    type Pair = [f32; 2];
    type Sums = [f32; 8];

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [[[f32; 8]; 2]; 2] {
        // SAFETY: the caller's promises.
        let [k0, k1, k2, k3] = unsafe { Portable::<FUSED>::weights(chunk, column, quad) };
        [[k0.0, k2.0], [k1.0, k3.0]]
    }

    #[inline(always)]
    unsafe fn splat(pair: *const [i16; 2]) -> [f32; 2] {
        // SAFETY: the caller passes a pair.
        unsafe { pair.read_unaligned() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn scaled(scales: Self::Floats, unit: Self::Floats) -> Self::Floats {
        // SAFETY: any machine has the instructions.
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
    unsafe fn floats(sums: [f32; 8]) -> Portable<FUSED> {
        Portable(sums)
    }

    #[inline(never)]
    unsafe fn pass(pass: &pairs::Pass) {
        // SAFETY: the caller's promises.
        unsafe { pairs::pass::<Self>(pass) }
    }
}

/// [`kernel::narrow`] and [`kernel::wide`] in plain Rust.
pub(super) const fn functions<const FUSED: bool>() -> Functions {
    let (narrow, wide) = (kernel::narrow::<Portable<FUSED>>, kernel::wide::<FloatPairs<FUSED>>);
    let (group_rows, pair_rows) = (Portable::<FUSED>::ROWS, FloatPairs::<FUSED>::ROWS);
    Functions { narrow, wide, group_rows, pair_rows }
}
