//! W4A16 in plain Rust: loops over eight f32 lanes, which LLVM turns into SSE2, NEON or other vectors.
//!
//! Where the target has a fused multiply-add (ARM64, or x86-64 compiled for one), it is used, and the results have
//! the bits of every other instruction set. Elsewhere it would be a call into the C library for every element, so
//! products are rounded before they are added; these results differ from the others in the last bits.

use dualgemm_formats::BlockFormat;

use super::Functions;
use super::kernel::{self, Pass};
use super::pairs::{self, Pairs};
use super::vector::{DOUBLED, Vector};
use crate::pack::{PANEL, SCALES, UP_CODES, unpack_scale};

/// Whether the target this is compiled for has a fused multiply-add.
pub(super) const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

#[derive(Clone, Copy)]
pub(super) struct Portable<const FUSED: bool>([f32; 8]);

impl<const FUSED: bool> Vector for Portable<FUSED> {
    const LANES: usize = 8;
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
            unpack_scale(format, byte) * 0.5
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

    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}
}

/// Pairs as floats: their products and sums are integers below 2²³, and exact. As integers LLVM regroups them across
/// lanes, as it does those of W4A4.
pub(super) struct FloatPairs<const FUSED: bool>;

impl<const FUSED: bool> Pairs for FloatPairs<FUSED> {
    type Floats = Portable<FUSED>;
    type Pairs = [[f32; 8]; 2];
    type Sums = [f32; 8];

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [[[f32; 8]; 2]; 2] {
        // SAFETY: the caller's promises.
        let [k0, k1, k2, k3] = unsafe { Portable::<FUSED>::weights(chunk, column, quad) };
        [[k0.0, k2.0], [k1.0, k3.0]]
    }

    #[inline(always)]
    unsafe fn splat(pair: *const [i16; 2]) -> [[f32; 8]; 2] {
        // SAFETY: the caller passes a pair.
        unsafe { pair.read_unaligned() }.map(|integer| [f32::from(integer); 8])
    }

    #[inline(always)]
    unsafe fn dot(weights: [[f32; 8]; 2], a: [[f32; 8]; 2]) -> [f32; 8] {
        std::array::from_fn(|i| weights[0][i] * a[0][i] + weights[1][i] * a[1][i])
    }

    #[inline(always)]
    unsafe fn add_dots(
        mut sums: [[f32; 8]; 2],
        weights: [[[f32; 8]; 2]; 2],
        a: [[f32; 8]; 2],
    ) -> [[f32; 8]; 2] {
        for (sums, weights) in sums.iter_mut().zip(weights) {
            *sums = std::array::from_fn(|i| sums[i] + weights[0][i] * a[0][i] + weights[1][i] * a[1][i]);
        }
        sums
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
    Functions { narrow, wide, group_rows: Portable::<FUSED>::ROWS }
}
