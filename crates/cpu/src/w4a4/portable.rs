//! W4A4 in plain Rust: loops over eight i16 lanes, which LLVM turns into SSE2, NEON or other vectors.

use dualgemm_formats::BlockFormat;
use dualgemm_formats::scalar::e2m1::DOUBLED;

use super::vector::{Vector, scale_unit};
use super::{Functions, kernel, spin};
use crate::pack::{PANEL, SCALES, UP_CODES};

/// Eight features in arrays.
#[derive(Clone, Copy)]
struct Portable;

impl Vector for Portable {
    const LANES: usize = 8;
    type Quads = [[i16; 8]; 4];
    type Quad = [i16; 4];
    type Sums = [i16; 8];
    type Floats = [f32; 8];

    fn bias_word(_sum: i32) -> i32 {
        0
    }

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize) -> [Self::Quads; 4] {
        let first = column / PANEL * UP_CODES + column % PANEL * 4;
        std::array::from_fn(|quad| {
            std::array::from_fn(|k| {
                std::array::from_fn(|feature| {
                    // SAFETY: inside the chunk's 256 code bytes: 128·half + 64·line + 4·feature + k.
                    let byte = unsafe { *chunk.add(first + quad / 2 * 64 + 4 * feature + k) };
                    i16::from(DOUBLED[usize::from(byte >> (quad % 2 * 4) & 15)])
                })
            })
        })
    }

    #[inline(always)]
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> [f32; 8] {
        std::array::from_fn(|feature| {
            // SAFETY: inside the chunk's 32 scale bytes.
            let byte = unsafe { *chunk.add(SCALES + column + feature) };
            format.decode_scale(byte) * scale_unit(format)
        })
    }

    #[inline(always)]
    unsafe fn quad(quad: *const i8) -> [i16; 4] {
        // SAFETY: the caller passes four codes.
        std::array::from_fn(|k| i16::from(unsafe { *quad.add(k) }))
    }

    #[inline(always)]
    unsafe fn start(_word: *const i32) -> [i16; 8] {
        [0; 8]
    }

    #[inline(always)]
    unsafe fn dot(mut sums: [i16; 8], weights: Self::Quads, quad: [i16; 4]) -> [i16; 8] {
        for (weights, a) in weights.iter().zip(quad) {
            for (sum, w) in sums.iter_mut().zip(weights) {
                // At most 2304 in all: wrapping arithmetic, which is what vectors do, never wraps.
                *sum = sum.wrapping_add(w.wrapping_mul(a));
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn order(_: &mut [i16; 8], _: &mut [i16; 8]) {}

    #[inline(always)]
    unsafe fn floats(sums: [i16; 8]) -> [f32; 8] {
        sums.map(f32::from)
    }

    #[inline(always)]
    unsafe fn splat(value: *const f32) -> [f32; 8] {
        // SAFETY: the caller passes a value.
        [unsafe { *value }; 8]
    }

    #[inline(always)]
    unsafe fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn mul_add(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 8] {
        // SAFETY: the caller passes eight values.
        unsafe { from.cast::<[f32; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: [f32; 8]) {
        // SAFETY: the caller passes room for eight values.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(value) };
    }

    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}
}

/// What is compiled for any machine.
pub(super) const FUNCTIONS: Functions = Functions {
    multiply: kernel::multiply::<Portable>,
    multiply_digits: kernel::multiply_digits::<Portable>,
    integer_dots: spin::integer_dots::<Portable>,
    multiply_adds: spin::multiply_adds::<Portable>,
    read: spin::read::<Portable>,
    bias_word: Portable::bias_word,
};
