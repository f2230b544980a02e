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
use crate::pack::{PANEL, SCALE_EXPONENT, SCALES, UP_CODES};
use crate::w4a4::avx512::{self, in_order};
use crate::w4a4::scale_unit;

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

    /// A code is 0, 2^e or 1.5 · 2^e. So once for sixteen weights the scale and one and a half of it are made, as bf16 times the largest
    /// 2^e. One table selects between them, and has the sign; another has what to subtract from the exponent. It leaves
    /// zero of a code of zero, since the subtraction saturates.
    #[inline(always)]
    unsafe fn widen(chunk: *const u8, column: usize, to: *mut u32) {
        // SAFETY: reads 16 of the chunk's 32 scale bytes and two lines of 64 bytes, 128 · half + 128 ≤ 256. The caller has room for
        // eight times sixteen words.
        unsafe {
            let table = |table: &[u16; 32]| _mm512_loadu_si512(table.as_ptr().cast());
            let bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(chunk.add(SCALES + column).cast()));
            let twice = _mm512_shuffle_epi8(bytes, table(&widening::SCALES_TWICE));
            let exponents = _mm512_and_si512(_mm512_srli_epi16::<4>(twice), _mm512_set1_epi16(0xFF << 4));
            let scales = _mm512_add_epi16(exponents, _mm512_set1_epi16(widening::LARGEST));
            let half_more = _mm512_permutexvar_epi16(twice, table(&widening::HALF_MORE));
            let one_and_a_half = _mm512_add_epi16(scales, half_more);
            let store = |pair: usize, codes| {
                let select = _mm512_permutexvar_epi16(codes, table(&widening::SELECT));
                let less = _mm512_permutexvar_epi16(codes, table(&widening::LESS));
                // Bits of the second where `select` is 1, of the third elsewhere.
                let scaled = _mm512_ternarylogic_epi32::<0xCA>(select, one_and_a_half, scales);
                _mm512_storeu_si512(to.add(pair * PANEL).cast(), _mm512_subs_epu16(scaled, less));
            };
            for line in 0..2 {
                let codes = _mm512_loadu_si512(chunk.add(column / PANEL * UP_CODES + line * 64).cast());
                for pair in 0..2 {
                    let codes = _mm512_shuffle_epi8(codes, table(&widening::PAIRS[pair]));
                    store(4 * line + pair, codes);
                    store(4 * line + 2 + pair, _mm512_srli_epi16::<4>(codes));
                }
            }
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
        add: _mm512_add_ps, max: _mm512_max_ps, mul: _mm512_mul_ps, mul_add: _mm512_fmadd_ps;
    }
}

/// Tables of [`Vector::widen`]. `vpermw` looks at the low five bits of an index: a code takes four of them, the significand of a scale
/// three.
mod widening {
    use super::SCALE_EXPONENT;

    /// What makes the bits of a scale of a pack, at their place in a bf16, those of the scale times 4.
    pub(super) const LARGEST: i16 = (SCALE_EXPONENT as i16 + 2) << 7;

    const SIGN: u16 = 1 << 15;

    /// By code: from the exponent of 4.
    pub(super) const LESS: [u16; 32] = by_code([u16::MAX, 3 << 7, 2 << 7, 2 << 7, 1 << 7, 1 << 7, 0, 0], 0);

    /// By code: ones where one and a half times the scale is wanted, and the sign.
    pub(super) const SELECT: [u16; 32] = by_code([0, 0, 0, !SIGN, 0, !SIGN, 0, !SIGN], SIGN);

    /// By the low bits of a scale: the bits of 1.5 times that, less its own, and the sign that [`SELECT`] selects.
    pub(super) const HALF_MORE: [u16; 32] = {
        let (mut table, mut scale) = ([0; 32], 0);
        while scale < 32 {
            let value = f32::from_bits((127 << 23) + ((scale as u32 % 8) << 20));
            let bits = (1.5 * value).to_bits() - value.to_bits();
            table[scale] = (bits >> 16) as u16 | SIGN;
            scale += 1;
        }
        table
    };

    /// The bytes of `vpshufb` that put each scale four times into the place of its feature.
    pub(super) const SCALES_TWICE: [u16; 32] = {
        let (mut bytes, mut word) = ([0; 32], 0);
        while word < 32 {
            bytes[word] = word as u16 / 2 * 0x101;
            word += 1;
        }
        bytes
    };

    /// The bytes that put both codes of each of two k into the two words of a feature: k = 0 and 1, and k = 2 and 3.
    pub(super) const PAIRS: [[u16; 32]; 2] = {
        let (mut bytes, mut word) = ([[0; 32]; 2], 0);
        while word < 32 {
            let first = word as u16 % 8 / 2 * 4 + word as u16 % 2;
            bytes[0][word] = first * 0x101;
            bytes[1][word] = (first + 2) * 0x101;
            word += 1;
        }
        bytes
    };

    const fn by_code(magnitudes: [u16; 8], negative: u16) -> [u16; 32] {
        let (mut table, mut code) = ([0; 32], 0);
        while code < 32 {
            table[code] = magnitudes[code % 8] | if code % 16 < 8 { 0 } else { negative };
            code += 1;
        }
        table
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

// `vpmaddwd`.
x86_pairs! {
    Avx512, rows: 7, __m512, __m512i;
    weights: halves, splat: _mm512_set1_epi32, scaled: _mm512_mul_ps, floats: _mm512_cvtepi32_ps;
    dot: _mm512_madd_epi16, add_dots: |sums, weights, a| in_order([
        _mm512_add_epi32(sums[0], _mm512_madd_epi16(weights[0], a)),
        _mm512_add_epi32(sums[1], _mm512_madd_epi16(weights[1], a)),
    ]);
}

// `vpdpwssd`, which also adds.
macro_rules! vnni_pairs {
    ($($isa:ident $scaled:path;)*) => {$(
        x86_pairs! {
            $isa, rows: 7, __m512, __m512i;
            weights: halves, splat: _mm512_set1_epi32, scaled: $scaled, floats: _mm512_cvtepi32_ps;
            dot: _mm512_madd_epi16, add_dots: |sums, weights, a| in_order([
                _mm512_dpwssd_epi32(sums[0], weights[0], a),
                _mm512_dpwssd_epi32(sums[1], weights[1], a),
            ]);
        }
    )*};
}
vnni_pairs!(Avx512Vnni _mm512_mul_ps; Avx512Bf16 scaled; AmxBf16 _mm512_mul_ps;);
