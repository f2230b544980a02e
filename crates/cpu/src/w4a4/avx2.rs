//! W4A4 with 256-bit integers: `vpmaddubsw` (AVX2), or `vpdpbusd` where AVX-VNNI adds it.

use std::arch::x86_64::*;

use dualgemm_formats::BlockFormat;

use super::digits::{self, DIGITS, DigitBlock, DigitTask};
use super::pipelined;
use super::vector::{BIASED, Vector};
use super::x86::{self, bias_halves, bias_whole, x86_vector};
use crate::fetch::AHEAD;
use crate::isa::{Avx2, AvxVnni, compiled_for, unsafe_methods};
use crate::pack::{CHUNK_K, PANEL, SCALE_EXPONENT, SCALES, UP_CODES};

/// Eight features × four weights, from one half of each line of a chunk.
#[inline(always)]
unsafe fn weights(chunk: *const u8, column: usize) -> [__m256i; 4] {
    // SAFETY: reads half of each of two lines of 64 bytes: 128 · half + 64 + 32 + 32 ≤ 256, the chunk's code bytes.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(BIASED.as_ptr().cast()));
        let nibble = _mm256_set1_epi8(15);
        let first = chunk.add(column / PANEL * UP_CODES + column % PANEL * 4);
        let (line0, line1) = (_mm256_loadu_si256(first.cast()), _mm256_loadu_si256(first.add(64).cast()));
        let (high0, high1) = (_mm256_srli_epi16::<4>(line0), _mm256_srli_epi16::<4>(line1));
        [
            _mm256_shuffle_epi8(table, _mm256_and_si256(line0, nibble)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(high0, nibble)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(line1, nibble)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(high1, nibble)),
        ]
    }
}

/// The bits of eight scales as f32; scales of nvfp4 are multiplied by 2 to the power of -[`SCALE_EXPONENT`].
#[inline(always)]
unsafe fn scale_bits(chunk: *const u8, column: usize, format: BlockFormat) -> __m256i {
    // SAFETY: reads 8 of the chunk's 32 scale bytes, since `column` is a multiple of 8 below 32.
    unsafe {
        let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(chunk.add(SCALES + column).cast()));
        match format {
            BlockFormat::Nvfp4 => _mm256_slli_epi32::<20>(bytes),
            // Byte 0 is 2⁻¹²⁷, a subnormal.
            BlockFormat::Mxfp4 => {
                _mm256_max_epi32(_mm256_slli_epi32::<23>(bytes), _mm256_set1_epi32(1 << 22))
            }
        }
    }
}

/// [`Vector::raw_scales`].
///
/// # Safety
/// The machine has the instruction set, and `chunk` points to a chunk of a panel.
#[inline(always)]
unsafe fn raw_scales(chunk: *const u8, column: usize, format: BlockFormat) -> __m256 {
    // SAFETY: `scale_bits` reads the scales of a chunk, to which `chunk` points.
    unsafe { _mm256_castsi256_ps(scale_bits(chunk, column, format)) }
}

/// [`Vector::scales`].
///
/// # Safety
/// The machine has the instruction set, and `chunk` points to a chunk of a panel.
#[inline(always)]
pub(crate) unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> __m256 {
    // SAFETY: `scale_bits` reads the scales of a chunk, to which `chunk` points.
    unsafe {
        let bits = scale_bits(chunk, column, format);
        _mm256_castsi256_ps(match format {
            BlockFormat::Nvfp4 => {
                _mm256_add_epi32(bits, _mm256_set1_epi32((SCALE_EXPONENT as i32 - 1) << 23))
            }
            BlockFormat::Mxfp4 => bits,
        })
    }
}

compiled_for!(Avx2, {
    /// Returns the two vectors unchanged, and makes the compiler compute both before anything that follows.
    ///
    /// Otherwise LLVM finishes one vector's sums before the other's, or one row's before the next one's, and spills the operands
    /// of the others meanwhile: sixteen registers are just enough. Empty `asm` blocks keep their order and so prevent that.
    #[inline]
    pub(crate) fn in_order([mut left, mut right]: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: the block holds a comment and no instruction.
        unsafe {
            std::arch::asm!(
                "/* {0} {1} */",
                inout(ymm_reg) left,
                inout(ymm_reg) right,
                options(nomem, nostack, preserves_flags)
            );
        }
        [left, right]
    }
});

// `vpmaddubsw` and i16 sums: two lanes per feature, of at most 4 · 2 · 24 · 12 = 2304 each.
x86_vector! {
    Avx2, lanes: 8, ahead: AHEAD, __m256i, __m256;
    weights: weights, scales: scales, raw_scales: raw_scales, bias_word: bias_halves;
    broadcast: _mm256_set1_epi32, splat: _mm256_set1_ps;
    mul: _mm256_mul_ps, mul_add: _mm256_fmadd_ps, load: _mm256_loadu_ps, store: _mm256_storeu_ps;
    dots: |sums, weights, a| {
        let dots = in_order(weights.map(|weights| _mm256_maddubs_epi16(weights, a)));
        in_order([_mm256_add_epi16(sums[0], dots[0]), _mm256_add_epi16(sums[1], dots[1])])
    };
    floats: |dots| _mm256_cvtepi32_ps(_mm256_madd_epi16(dots, _mm256_set1_epi16(1)));
    scaled_floats: true, |dots, scale| _mm256_cvtepi32_ps(_mm256_madd_epi16(dots, scale));
    join: |joined, sums, digit| {
        _mm256_add_epi32(joined, _mm256_madd_epi16(sums, _mm256_set1_epi16(DIGITS[digit])))
    };
    whole_bias: true, joined_floats: _mm256_cvtepi32_ps, multiply_blocks: pipelined;
}

// `vpdpbusd`: i32 sums, one lane per feature.
x86_vector! {
    AvxVnni, lanes: 8, ahead: AHEAD, __m256i, __m256;
    weights: weights, scales: scales, raw_scales: raw_scales, bias_word: bias_whole;
    broadcast: _mm256_set1_epi32, splat: _mm256_set1_ps;
    mul: _mm256_mul_ps, mul_add: _mm256_fmadd_ps, load: _mm256_loadu_ps, store: _mm256_storeu_ps;
    dots: |sums, weights, a| in_order([
        _mm256_dpbusd_avx_epi32(sums[0], weights[0], a),
        _mm256_dpbusd_avx_epi32(sums[1], weights[1], a),
    ]);
    floats: |dots| _mm256_cvtepi32_ps(dots);
    scaled_floats: false, |dots, scale| _mm256_cvtepi32_ps(_mm256_mullo_epi32(dots, _mm256_srai_epi32::<16>(scale)));
    join: |joined, sums, digit| match digit {
        2 => sums,
        1 => _mm256_sub_epi32(sums, _mm256_slli_epi32::<7>(joined)),
        _ => _mm256_add_epi32(sums, _mm256_slli_epi32::<8>(joined)),
    };
    whole_bias: false, joined_floats: _mm256_cvtepi32_ps, multiply_blocks: digits;
}
