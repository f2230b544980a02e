//! W4A16 with 512-bit vectors: one register holds the table of all 16 code values, and packed codes are its indices.

use std::arch::x86_64::*;

use dualgemm_formats::BlockFormat;
use half::{bf16, f16};

use super::many_rows;
use super::pairs::{self, Pairs};
use super::vector::{DOUBLED, Vector, scale_factor};
use super::x86::{operations, separate_pass, x86_pairs};
use crate::fetch::AHEAD_AVX512;
use crate::isa::{AmxBf16, Avx512, Avx512Bf16, Avx512Vnni, compiled_for, unsafe_methods};
use crate::pack::{PANEL, UP_CODES};
use crate::w4a4::{avx512, scale_unit};

impl Vector for __m512 {
    const LANES: usize = 16;
    /// Two accumulators each take 28 of 32 registers.
    const ROWS: usize = 14;
    const AHEAD: usize = AHEAD_AVX512;

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [Self; 4] {
        // SAFETY: reads a line of 64 bytes: 128 · half + 64 · line + 64 ≤ 256, the chunk's code bytes.
        unsafe {
            let values = Self::load(DOUBLED.as_ptr());
            let line = _mm512_loadu_si512(chunk.add(column / PANEL * UP_CODES + quad / 2 * 64).cast());
            // `vpermps` looks at the low four bits of each index.
            let line = if quad.is_multiple_of(2) { line } else { _mm512_srli_epi32::<4>(line) };
            [
                _mm512_permutexvar_ps(line, values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<8>(line), values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<16>(line), values),
                _mm512_permutexvar_ps(_mm512_srli_epi32::<24>(line), values),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self {
        // SAFETY: reads the scales of the chunk, to which `chunk` points.
        unsafe {
            let factor = scale_factor(format) / scale_unit(format);
            Self::mul(avx512::scales(chunk, column, format), _mm512_set1_ps(factor))
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(to: *mut u32, low: Self, high: Self) {
        // SAFETY: `to` points to room for 16 words; the rest is arithmetic in registers.
        unsafe {
            let (low, high) = (_mm512_srli_epi32::<16>(_mm512_castps_si512(low)), _mm512_castps_si512(high));
            // Takes bits of `high` where the mask is set, and of `low` elsewhere.
            let words =
                _mm512_ternarylogic_epi32::<0xCA>(_mm512_set1_epi32(0xFFFF_0000_u32 as i32), high, low);
            _mm512_storeu_si512(to.cast(), words);
        }
    }

    unsafe_methods! {
        fn load_bf16(from: *const bf16) -> Self {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))
        }
        fn load_f16(from: *const f16) -> Self { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn sums(vectors: [Self; 4]) -> [f32; 4] {
        // SAFETY: arithmetic in registers.
        unsafe {
            let high = |v| _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
            let [a, b, c, d] = vectors;
            let half = |v| _mm256_add_ps(_mm512_castps512_ps256(v), high(v));
            __m256::sums([half(a), half(b), half(c), half(d)])
        }
    }

    operations! {
        __m512, isa: Avx512;
        zero: _mm512_setzero_ps, splat: _mm512_set1_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps;
        add: _mm512_add_ps, mul: _mm512_mul_ps, mul_add: _mm512_fmadd_ps;
    }
}

/// Codes of sixteen features × four k, doubled, as i16: k = 0 and 2, and k = 1 and 3.
#[inline(always)]
unsafe fn halves(chunk: *const u8, column: usize, quad: usize) -> [__m512i; 2] {
    const INTEGERS: [i16; 32] = {
        let (mut integers, mut code) = ([0; 32], 0);
        while code < 32 {
            integers[code] = DOUBLED[code % 16] as i16;
            code += 1;
        }
        integers
    };
    // SAFETY: reads a line of 64 bytes: 128 · half + 64 · line + 64 ≤ 256, the chunk's code bytes.
    unsafe {
        let table = _mm512_loadu_si512(INTEGERS.as_ptr().cast());
        let line = _mm512_loadu_si512(chunk.add(column / PANEL * UP_CODES + quad / 2 * 64).cast());
        // `vpermw` looks at the low five bits of each index: both halves of the table are the same.
        let line = if quad.is_multiple_of(2) { line } else { _mm512_srli_epi16::<4>(line) };
        [_mm512_permutexvar_epi16(line, table), _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(line), table)]
    }
}

/// [`Pairs::scaled`] by adding exponents. Zen 5 multiplies floats with the two units that multiply integers, and adds with two
/// others. This saves 4 to 7 % of the time.
#[inline(always)]
unsafe fn scaled(scales: __m512, unit: __m512) -> __m512 {
    // SAFETY: arithmetic in registers needs AVX-512 alone.
    unsafe {
        let exponent = _mm512_sub_epi32(_mm512_castps_si512(unit), _mm512_castps_si512(_mm512_set1_ps(1.0)));
        _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(scales), exponent))
    }
}

compiled_for!(Avx512, {
    /// [`avx2::in_order`](crate::w4a4::avx2::in_order) for vectors of 512 bits.
    #[inline]
    fn in_order([mut left, mut right]: [__m512i; 2]) -> [__m512i; 2] {
        // SAFETY: the block holds a comment and no instruction.
        unsafe {
            std::arch::asm!(
                "/* {0} {1} */",
                inout(zmm_reg) left,
                inout(zmm_reg) right,
                options(nomem, nostack, preserves_flags)
            );
        }
        [left, right]
    }
});

// `vpmaddwd`.
x86_pairs! {
    Avx512, __m512, __m512i;
    weights: halves, splat: _mm512_set1_epi32, scaled: scaled, floats: _mm512_cvtepi32_ps;
    dot: _mm512_madd_epi16, add_dots: |sums, weights, a| in_order([
        _mm512_add_epi32(sums[0], _mm512_madd_epi16(weights[0], a)),
        _mm512_add_epi32(sums[1], _mm512_madd_epi16(weights[1], a)),
    ]);
}

// `vpdpwssd`, which also adds.
macro_rules! vnni_pairs {
    ($($isa:ident)*) => {$(
        x86_pairs! {
            $isa, __m512, __m512i;
            weights: halves, splat: _mm512_set1_epi32, scaled: scaled, floats: _mm512_cvtepi32_ps;
            dot: _mm512_madd_epi16, add_dots: |sums, weights, a| in_order([
                _mm512_dpwssd_epi32(sums[0], weights[0], a),
                _mm512_dpwssd_epi32(sums[1], weights[1], a),
            ]);
        }
    )*};
}
vnni_pairs!(Avx512Vnni Avx512Bf16 AmxBf16);
