//! W4A4 without intrinsics: loops over eight f32 lanes, which LLVM turns into SSE2, NEON or other vectors.
//!
//! Dot products of doubled codes are integers below 2²⁴, and so exact in f32. Integers would be narrower, but LLVM
//! regroups their sums across lanes and adds shuffles, which is ten times slower. It may not regroup float sums.

use dualgemm_formats::BlockFormat;
use dualgemm_formats::scalar::e2m1::DOUBLED;

use super::digits::{self, DigitBlock, DigitTask};
use super::vector::{Vector, raw_scale_unit, scale_unit};
use crate::fetch::AHEAD;
use crate::isa::Portable;
use crate::pack::{CHUNK_K, PANEL, SCALES, UP_CODES, unpack_scale};

/// The doubled value of the code in the low four bits, as lanes without tables compute it.
#[inline(always)]
fn doubled(code: u32) -> f32 {
    let above = |x: f32, limit: f32| if x > limit { x - limit } else { 0.0 };
    let magnitude = (code & 7) as i32 as f32;
    // 0 to 4 are themselves; 5, 6, 7 are 6, 8, 12.
    let value = magnitude + above(magnitude, 4.0) + 2.0 * above(magnitude, 6.0);
    f32::from_bits(value.to_bits() | (code & 8) << 28)
}

/// One vector's sums. A loop over both is not vectorized by LLVM.
#[inline(always)]
fn add_dot(mut sums: [f32; 8], weights: [[f32; 8]; 4], quad: [f32; 4]) -> [f32; 8] {
    for (weights, a) in weights.iter().zip(quad) {
        for (sum, w) in sums.iter_mut().zip(weights) {
            *sum += w * a;
        }
    }
    sums
}

impl<const FUSED: bool> Vector for Portable<FUSED> {
    const LANES: usize = 8;
    const AHEAD: usize = AHEAD;
    type Quads = [[f32; 8]; 4];
    type Quad = [f32; 4];
    type Sums = [f32; 8];
    type Floats = [f32; 8];

    fn bias_word(_sum: i32) -> i32 {
        0
    }

    #[inline(always)]
    unsafe fn doubled(codes: [u8; CHUNK_K]) -> ([i8; CHUNK_K], i32) {
        let doubled = codes.map(|code| DOUBLED[usize::from(code & 15)]);
        (doubled, doubled.iter().map(|&code| i32::from(code)).sum())
    }

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize) -> [Self::Quads; 4] {
        let first = column / PANEL * UP_CODES + column % PANEL * 4;
        let lines = [0, 1].map(|line| -> [u32; 8] {
            // SAFETY: inside the chunk's 256 code bytes: 128·half + 64·line + 4·feature + k.
            let bytes = unsafe { chunk.add(first + 64 * line).cast::<[[u8; 4]; 8]>().read_unaligned() };
            bytes.map(u32::from_le_bytes)
        });
        std::array::from_fn(|quad| {
            std::array::from_fn(|k| lines[quad / 2].map(|line| doubled(line >> (8 * k + quad % 2 * 4))))
        })
    }

    #[inline(always)]
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> [f32; 8] {
        std::array::from_fn(|feature| {
            // SAFETY: inside the chunk's 32 scale bytes.
            let byte = unsafe { *chunk.add(SCALES + column + feature) };
            unpack_scale(format, byte) * scale_unit(format)
        })
    }

    #[inline(always)]
    unsafe fn raw_scales(chunk: *const u8, column: usize, format: BlockFormat) -> [f32; 8] {
        // SAFETY: reads the chunk's scales, as this method may.
        let scales = unsafe { Self::scales(chunk, column, format) };
        scales.map(|scale| scale * (raw_scale_unit(format) / scale_unit(format)))
    }

    #[inline(always)]
    unsafe fn quad(quad: *const i8) -> [f32; 4] {
        // SAFETY: the trait has `quad` point to four codes.
        std::array::from_fn(|k| f32::from(unsafe { *quad.add(k) }))
    }

    #[inline(always)]
    unsafe fn start(_word: *const i32) -> [f32; 8] {
        [0.0; 8]
    }

    #[inline(always)]
    unsafe fn dots(sums: [[f32; 8]; 2], weights: [Self::Quads; 2], quad: [f32; 4]) -> [[f32; 8]; 2] {
        [add_dot(sums[0], weights[0], quad), add_dot(sums[1], weights[1], quad)]
    }

    #[inline(always)]
    unsafe fn floats(sums: [f32; 8]) -> [f32; 8] {
        sums
    }

    const SCALES_INTEGERS: bool = false;

    #[inline(always)]
    unsafe fn scaled_floats(sums: [f32; 8], scale: *const i32) -> [f32; 8] {
        // SAFETY: the trait has `scale` point to a word.
        let scale = f32::from(unsafe { *scale } as i16);
        sums.map(|sum| sum * scale)
    }

    type Joined = [f32; 8];

    #[inline(always)]
    unsafe fn joined(_bias: *const i32) -> [f32; 8] {
        [0.0; 8]
    }

    #[inline(always)]
    unsafe fn start_digit(_bias: *const i32, _digit: usize) -> [f32; 8] {
        [0.0; 8]
    }

    #[inline(always)]
    unsafe fn join(joined: [f32; 8], sums: [f32; 8], digit: usize) -> [f32; 8] {
        let unit = if digit == 0 { 256.0 } else { -128.0 };
        std::array::from_fn(|i| joined[i] * unit + sums[i])
    }

    #[inline(always)]
    unsafe fn joined_floats(joined: [f32; 8]) -> [f32; 8] {
        joined
    }

    #[inline(always)]
    unsafe fn multiply_blocks(task: &DigitTask, blocks: &[DigitBlock]) {
        // SAFETY: both demand the same of the task and of the blocks.
        unsafe { digits::multiply_blocks::<Self>(task, blocks) }
    }

    #[inline(always)]
    unsafe fn splat(value: *const f32) -> [f32; 8] {
        // SAFETY: the trait has `value` point to an f32.
        [unsafe { *value }; 8]
    }

    #[inline(always)]
    unsafe fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn mul_add(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| if FUSED { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 8] {
        // SAFETY: the trait has `from` point to `LANES` values, eight.
        unsafe { from.cast::<[f32; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: [f32; 8]) {
        // SAFETY: the trait has `to` point to room for `LANES` values, eight.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::{DOUBLED, doubled};

    #[test]
    fn doubled_codes_are_those_of_the_format_exact() {
        for code in 0..64 {
            assert_eq!(doubled(code), f32::from(DOUBLED[code as usize % 16]));
        }
    }
}
