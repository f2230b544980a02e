//! W4A4 with 512-bit integers: `vpdpbusd` with VNNI, `vpmaddubsw` without.
//!
//! One vector holds the 16 features of half a panel.

use std::arch::x86_64::*;

use dualgemm_formats::BlockFormat;

use super::digits::{self, DIGITS, DigitBlock, DigitTask};
use super::vector::{BIASED, Vector};
use super::x86::{self, bias_halves, bias_whole, x86_vector};
use crate::fetch::AHEAD_AVX512;
use crate::isa::{AmxBf16, Avx512, Avx512Bf16, Avx512Vnni, unsafe_methods};
use crate::pack::{CHUNK_K, PANEL, SCALE_EXPONENT, SCALES, UP_CODES};

/// Sixteen features × four weights, from the two lines of one half of a chunk.
#[inline(always)]
unsafe fn weights(chunk: *const u8, column: usize) -> [__m512i; 4] {
    // SAFETY: reads two lines of 64 bytes: 128 · half + 128 ≤ 256, the chunk's code bytes.
    unsafe {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(BIASED.as_ptr().cast()));
        let nibble = _mm512_set1_epi8(15);
        let first = chunk.add(column / PANEL * UP_CODES);
        let (line0, line1) = (_mm512_loadu_si512(first.cast()), _mm512_loadu_si512(first.add(64).cast()));
        let (high0, high1) = (_mm512_srli_epi16::<4>(line0), _mm512_srli_epi16::<4>(line1));
        [
            _mm512_shuffle_epi8(table, _mm512_and_si512(line0, nibble)),
            _mm512_shuffle_epi8(table, _mm512_and_si512(high0, nibble)),
            _mm512_shuffle_epi8(table, _mm512_and_si512(line1, nibble)),
            _mm512_shuffle_epi8(table, _mm512_and_si512(high1, nibble)),
        ]
    }
}

/// The same where there is `vpermb`, which looks at the low six bits of each index: the table repeats, so that the other nibble need
/// not be cleared. One row of bf16 on 16 threads of an Emerald Rapids, two to a core, takes 3 to 9 % less time.
#[inline(always)]
unsafe fn weights_vbmi(chunk: *const u8, column: usize) -> [__m512i; 4] {
    // SAFETY: as in `weights`.
    unsafe {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(BIASED.as_ptr().cast()));
        let first = chunk.add(column / PANEL * UP_CODES);
        let (line0, line1) = (_mm512_loadu_si512(first.cast()), _mm512_loadu_si512(first.add(64).cast()));
        let (high0, high1) = (_mm512_srli_epi16::<4>(line0), _mm512_srli_epi16::<4>(line1));
        [line0, high0, line1, high1].map(|codes| _mm512_permutexvar_epi8(codes, table))
    }
}

/// The bits of sixteen scales as f32; scales of nvfp4 are multiplied by 2 to the power of -[`SCALE_EXPONENT`].
#[inline(always)]
unsafe fn scale_bits(chunk: *const u8, column: usize, format: BlockFormat) -> __m512i {
    // SAFETY: reads 16 of the chunk's 32 scale bytes, since `column` is 0 or 16.
    unsafe {
        let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(chunk.add(SCALES + column).cast()));
        match format {
            BlockFormat::Nvfp4 => _mm512_slli_epi32::<20>(bytes),
            // Byte 0 is 2⁻¹²⁷, a subnormal.
            BlockFormat::Mxfp4 => {
                _mm512_max_epi32(_mm512_slli_epi32::<23>(bytes), _mm512_set1_epi32(1 << 22))
            }
        }
    }
}

/// [`Vector::raw_scales`].
///
/// # Safety
/// The machine has the instruction set, and `chunk` points to a chunk of a panel.
#[inline(always)]
unsafe fn raw_scales(chunk: *const u8, column: usize, format: BlockFormat) -> __m512 {
    // SAFETY: `scale_bits` reads the scales of a chunk, to which `chunk` points.
    unsafe { _mm512_castsi512_ps(scale_bits(chunk, column, format)) }
}

/// [`Vector::scales`].
///
/// # Safety
/// The machine has the instruction set, and `chunk` points to a chunk of a panel.
#[inline(always)]
pub(crate) unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> __m512 {
    // SAFETY: `scale_bits` reads the scales of a chunk, to which `chunk` points.
    unsafe {
        let bits = scale_bits(chunk, column, format);
        _mm512_castsi512_ps(match format {
            BlockFormat::Nvfp4 => {
                _mm512_add_epi32(bits, _mm512_set1_epi32((SCALE_EXPONENT as i32 - 1) << 23))
            }
            BlockFormat::Mxfp4 => bits,
        })
    }
}

// `vpmaddubsw` and i16 sums: two lanes per feature, of at most 4 · 2 · 24 · 12 = 2304 each.
x86_vector! {
    Avx512, lanes: 16, ahead: AHEAD_AVX512, __m512i, __m512;
    weights: weights, scales: scales, raw_scales: raw_scales, bias_word: bias_halves;
    broadcast: _mm512_set1_epi32, splat: _mm512_set1_ps;
    mul: _mm512_mul_ps, mul_add: _mm512_fmadd_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps;
    dots: |sums, weights, a| [
        _mm512_add_epi16(sums[0], _mm512_maddubs_epi16(weights[0], a)),
        _mm512_add_epi16(sums[1], _mm512_maddubs_epi16(weights[1], a)),
    ];
    floats: |dots| _mm512_cvtepi32_ps(_mm512_madd_epi16(dots, _mm512_set1_epi16(1)));
    scaled_floats: true, |dots, scale| _mm512_cvtepi32_ps(_mm512_madd_epi16(dots, scale));
    join: |joined, sums, digit| {
        _mm512_add_epi32(joined, _mm512_madd_epi16(sums, _mm512_set1_epi16(DIGITS[digit])))
    };
    whole_bias: true, joined_floats: _mm512_cvtepi32_ps, multiply_blocks: digits;
}

// `vpdpbusd`: i32 sums, one lane per feature.
macro_rules! vnni_vector {
    ($($isa:ident $weights:ident)*) => {$(
        x86_vector! {
            $isa, lanes: 16, ahead: AHEAD_AVX512, __m512i, __m512;
            weights: $weights, scales: scales, raw_scales: raw_scales, bias_word: bias_whole;
            broadcast: _mm512_set1_epi32, splat: _mm512_set1_ps;
            mul: _mm512_mul_ps, mul_add: _mm512_fmadd_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps;
            dots: |sums, weights, a| [
                _mm512_dpbusd_epi32(sums[0], weights[0], a),
                _mm512_dpbusd_epi32(sums[1], weights[1], a),
            ];
            floats: |dots| _mm512_cvtepi32_ps(dots);
            scaled_floats: false, |dots, scale| _mm512_cvtepi32_ps(_mm512_mullo_epi32(dots, _mm512_srai_epi32::<16>(scale)));
            join: |joined, sums, digit| match digit {
                2 => sums,
                1 => _mm512_sub_epi32(sums, _mm512_slli_epi32::<7>(joined)),
                _ => _mm512_add_epi32(sums, _mm512_slli_epi32::<8>(joined)),
            };
            whole_bias: false, joined_floats: _mm512_cvtepi32_ps, multiply_blocks: digits;
        }
    )*};
}
vnni_vector!(Avx512Vnni weights Avx512Bf16 weights_vbmi AmxBf16 weights_vbmi);
