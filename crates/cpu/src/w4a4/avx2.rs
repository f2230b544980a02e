//! W4A4 with 256-bit integers: `vpmaddubsw` (AVX2), or `vpdpbusd` where AVX-VNNI adds it.

use std::arch::x86_64::*;

use dualgemm_formats::BlockFormat;

use super::digits::{self, DIGITS, DigitBlock, DigitTask};
use super::pipelined;
use super::vector::{BIASED, Vector};
use super::x86::{self, bias_halves, bias_whole, chunk_readers, in_order, x86_vector};
use crate::fetch::AHEAD;
use crate::isa::{Avx2, AvxVnni, compiled_for, unsafe_methods};
use crate::pack::{CHUNK_K, PANEL, SCALE_EXPONENT, SCALES, UP_CODES};

chunk_readers! {
    __m256i, __m256;
    table: _mm256_broadcastsi128_si256, load: _mm256_loadu_si256, byte: _mm256_set1_epi8, word: _mm256_set1_epi32;
    and: _mm256_and_si256, max: _mm256_max_epi32, add: _mm256_add_epi32, shuffle: _mm256_shuffle_epi8;
    right: _mm256_srli_epi16, left: _mm256_slli_epi32, floats: _mm256_castsi256_ps;
    bytes: _mm256_cvtepu8_epi32, _mm_loadl_epi64;
}
in_order!(Avx2, __m256i, ymm_reg);

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
