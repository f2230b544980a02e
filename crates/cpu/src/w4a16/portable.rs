//! W4A16 in plain Rust: loops over eight f32 lanes, which LLVM turns into SSE2, NEON or other vectors.
//!
//! Where the target has a fused multiply-add (ARM64, or x86-64 compiled for one), it is used, and the results have
//! the bits of every other instruction set. Elsewhere it would be a call into the C library for every element, so
//! products are rounded before they are added; these results differ from the others in the last bits.

use dualgemm_formats::BlockFormat;

use super::Functions;
use super::kernel::{self, Pass};
use super::vector::{DOUBLED, Vector};
use crate::pack::{PANEL, SCALES, UP_CODES};

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
            format.decode_scale(byte) * 0.5
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

/// [`kernel::narrow`] and [`kernel::wide`] in plain Rust.
pub(super) const fn functions<const FUSED: bool>() -> Functions {
    let (narrow, wide) = (kernel::narrow::<Portable<FUSED>>, kernel::wide::<Portable<FUSED>>);
    Functions { narrow, wide, group_rows: Portable::<FUSED>::ROWS }
}
