//! W4A4 with 512-bit integers: `vpdpbusd` with VNNI, `vpmaddubsw` without.
//!
//! One vector holds the 16 features of half a panel.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use dualgemm_formats::BlockFormat;

use super::activations::Block;
use super::digits::{self, DIGITS, DigitBlock, DigitTask};
use super::kernel::{Pass, dots};
use super::vector::{BIASED, Vector};
use super::x86::{self, bias_halves, bias_whole, chunk_readers, in_order, x86_vector};
use crate::fetch::AHEAD_AVX512;
use crate::isa::{AmxBf16, Avx512, Avx512Bf16, Avx512Vnni, compiled_for, unsafe_methods};
use crate::pack::{CHUNK_K, PANEL, SCALE_EXPONENT, SCALES, UP_CODES};
use crate::tile::TILE_COLS;

chunk_readers! {
    __m512i, __m512;
    table: _mm512_broadcast_i32x4, load: _mm512_loadu_si512, byte: _mm512_set1_epi8, word: _mm512_set1_epi32;
    and: _mm512_and_si512, max: _mm512_max_epi32, add: _mm512_add_epi32, shuffle: _mm512_shuffle_epi8;
    right: _mm512_srli_epi16, left: _mm512_slli_epi32, floats: _mm512_castsi512_ps;
    bytes: _mm512_cvtepu8_epi32, _mm_loadu_si128;
}
in_order!(Avx512, __m512i, zmm_reg);

/// [`weights`] where there is `vpermb`, which looks at the low six bits of each index: the table repeats, so that the other nibble need
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

/// Fewest rows that pay for a table of products.
const TABLE_ROWS: usize = 16;

/// All rows of a pass, if they are many, without a multiplication for the product of scales: dot products and multiplications share two
/// units on Zen 4 and Zen 5, which bounds many rows.
///
/// An e4m3 scale of A is 2^e · (1 + m/8). The table has each scale of the weights times (1 + m/8), as bits from which m and the bias of
/// the exponent are taken off, so that adding the bits of the scale of A makes the product: exact.
///
/// # Safety
/// As [`Vector::first_rows`].
#[inline(always)]
unsafe fn rows_by_table<V: Vector<Sums = __m512i, Floats = __m512>>(
    pass: &Pass<V>,
    rows: usize,
    mut block: *const Block,
    mut sums: *mut f32,
) -> usize {
    if !pass.e4m3 || rows < TABLE_ROWS {
        return 0;
    }
    let mut table = MaybeUninit::<[[__m512i; 2]; 8]>::uninit();
    let table = table.as_mut_ptr().cast::<[__m512i; 2]>();
    // SAFETY: m is below 8, `rows` blocks and the sums of as many rows, two vectors each, start at the pointers, and scales are not
    // negative. `Block` has a scale of 32 bits.
    unsafe {
        // Sums, which are other units' work than products; exact.
        let mut factors = pass.scales;
        let eighths = factors.map(|scales| _mm512_mul_ps(scales, _mm512_set1_ps(0.125)));
        for m in 0..8 {
            let bits = _mm512_set1_epi32(127 << 23 | m << 20);
            let row = factors.map(|factors| _mm512_sub_epi32(_mm512_castps_si512(factors), bits));
            table.add(m as usize).write(row);
            factors = [_mm512_add_ps(factors[0], eighths[0]), _mm512_add_ps(factors[1], eighths[1])];
        }
        for _ in 0..rows {
            let scale = *(&raw const (*block).scale).cast::<i32>();
            let row = table.add((scale >> 20 & 7) as usize);
            for (v, dots) in dots::<V>(block, &pass.weights).into_iter().enumerate() {
                let product = _mm512_castsi512_ps(_mm512_add_epi32((*row)[v], _mm512_set1_epi32(scale)));
                let to = sums.add(v * V::LANES);
                V::store(to, V::mul_add(V::floats(dots), product, V::load(to)));
            }
            (block, sums) = (block.add(1), sums.add(TILE_COLS));
        }
    }
    rows
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
    ($($isa:ident $weights:ident $(rows: $rows:literal)? $(first_rows: $first_rows:path)?;)*) => {$(
        x86_vector! {
            $isa, lanes: 16, $(rows: $rows,)? ahead: AHEAD_AVX512, __m512i, __m512;
            weights: $weights, scales: scales, raw_scales: raw_scales, bias_word: bias_whole;
            broadcast: _mm512_set1_epi32, splat: _mm512_set1_ps;
            mul: _mm512_mul_ps, mul_add: _mm512_fmadd_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps;
            dots: |sums, weights, a| in_order([
                _mm512_dpbusd_epi32(sums[0], weights[0], a),
                _mm512_dpbusd_epi32(sums[1], weights[1], a),
            ]);
            floats: |dots| _mm512_cvtepi32_ps(dots);
            scaled_floats: false, |dots, scale| _mm512_cvtepi32_ps(_mm512_mullo_epi32(dots, _mm512_srai_epi32::<16>(scale)));
            join: |joined, sums, digit| match digit {
                2 => sums,
                1 => _mm512_sub_epi32(sums, _mm512_slli_epi32::<7>(joined)),
                _ => _mm512_add_epi32(sums, _mm512_slli_epi32::<8>(joined)),
            };
            whole_bias: false, joined_floats: _mm512_cvtepi32_ps, multiply_blocks: digits;
            $(first_rows: $first_rows;)?
        }
    )*};
}
vnni_vector! {
    Avx512Vnni weights rows: 7;
    Avx512Bf16 weights_vbmi first_rows: rows_by_table;
    AmxBf16 weights_vbmi rows: 7;
}
