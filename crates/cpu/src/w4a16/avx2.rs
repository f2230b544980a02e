//! W4A16 with 256-bit vectors. For few rows, two byte shuffles turn codes into bf16, and a shift or a mask turns bf16 into f32. For
//! many rows, one shuffle turns codes into integers, which are then converted to f32.

use std::arch::x86_64::*;

use dualgemm_formats::BlockFormat;
use half::{bf16, f16};

use super::many_rows;
use super::pairs::{self, Pairs};
use super::vector::{DOUBLED, Vector, scale_factor};
use super::x86::{operations, separate_pass, x86_pairs};
use crate::fetch::AHEAD;
use crate::isa::{Avx2, AvxVnni, compiled_for, unsafe_methods};
use crate::pack::{PANEL, UP_CODES};
use crate::w4a4::avx2::{self, in_order};
use crate::w4a4::scale_unit;

/// The low or the high bytes (`shift` 16 or 24) of the f32 values of twice the codes, whose lower half is zero.
const fn code_bytes(shift: u32) -> [u8; 16] {
    let (mut bytes, mut code) = ([0; 16], 0);
    while code < 16 {
        assert!(DOUBLED[code].to_bits() as u16 == 0);
        bytes[code] = (DOUBLED[code].to_bits() >> shift) as u8;
        code += 1;
    }
    bytes
}

/// A byte-shuffle table.
#[inline(always)]
unsafe fn table(bytes: &[u8; 16]) -> __m256i {
    // SAFETY: reads the 16 bytes.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

/// Codes of eight features × four k, a byte each.
#[inline(always)]
unsafe fn codes(chunk: *const u8, column: usize, quad: usize) -> __m256i {
    // SAFETY: reads half of a line of 64 bytes: 128 · half + 64 · line + 32 + 32 ≤ 256, the chunk's code bytes.
    unsafe {
        let from = chunk.add(column / PANEL * UP_CODES + quad / 2 * 64 + column % PANEL * 4);
        let line = _mm256_loadu_si256(from.cast());
        let codes = if quad.is_multiple_of(2) { line } else { _mm256_srli_epi16::<4>(line) };
        _mm256_and_si256(codes, _mm256_set1_epi8(15))
    }
}

/// Eight features × four k as pairs of bf16, k in the low and k + 1 in the high half of a lane: the lanes of the first
/// vector hold k = 0, 2, 0, 2, … of features 0, 0, 1, 1, 4, 4, 5, 5; those of the second, of 2, 2, 3, 3, 6, 6, 7, 7.
#[inline(always)]
unsafe fn pairs(chunk: *const u8, column: usize, quad: usize) -> [__m256i; 2] {
    const TABLES: [[u8; 16]; 2] = [code_bytes(16), code_bytes(24)];
    // SAFETY: `codes` reads 32 bytes of the chunk, to which `chunk` points.
    unsafe {
        let codes = codes(chunk, column, quad);
        let [low, high] = [0, 1].map(|byte| _mm256_shuffle_epi8(table(&TABLES[byte]), codes));
        [_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)]
    }
}

/// Both halves of pairs of bf16, as f32.
#[inline(always)]
unsafe fn split(pairs: __m256i) -> [__m256; 2] {
    // SAFETY: arithmetic in registers needs AVX2 alone.
    unsafe {
        let high = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000_u32 as i32));
        [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(high)]
    }
}

/// Codes of eight features × four k, doubled, as i16: k = 0 and 2, and k = 1 and 3.
#[inline(always)]
unsafe fn halves(chunk: *const u8, column: usize, quad: usize) -> [__m256i; 2] {
    const INTEGERS: [u8; 16] = {
        let (mut bytes, mut code) = ([0; 16], 0);
        while code < 16 {
            bytes[code] = DOUBLED[code] as i8 as u8;
            code += 1;
        }
        bytes
    };
    // SAFETY: `codes` reads 32 bytes of the chunk, to which `chunk` points.
    unsafe {
        let bytes = _mm256_shuffle_epi8(table(&INTEGERS), codes(chunk, column, quad));
        // The low and the high byte of each 16 bits, sign-extended.
        [_mm256_maddubs_epi16(_mm256_set1_epi16(1), bytes), _mm256_srai_epi16::<8>(bytes)]
    }
}

impl Vector for __m256 {
    const LANES: usize = 8;
    /// Two accumulators each take 12 of 16 registers, and as many chains hide the latency of two multipliers.
    const ROWS: usize = 6;
    const AHEAD: usize = AHEAD;

    /// Codes become integers first, which keeps the shuffle units free: three quarters of the time that two byte shuffles and
    /// unpacking take.
    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [Self; 4] {
        // SAFETY: `halves` reads 32 bytes of the chunk, to which `chunk` points.
        unsafe {
            let [even, odd] = halves(chunk, column, quad);
            // The low and the high half of each 32 bits as i32.
            let low = |halves| _mm256_cvtepi32_ps(_mm256_madd_epi16(halves, _mm256_set1_epi32(1)));
            let high = |halves| _mm256_cvtepi32_ps(_mm256_srai_epi32::<16>(halves));
            [low(even), low(odd), high(even), high(odd)]
        }
    }

    #[inline(always)]
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self {
        // SAFETY: reads the scales of the chunk, to which `chunk` points.
        unsafe {
            let factor = scale_factor(format) / scale_unit(format);
            Self::mul(avx2::scales(chunk, column, format), _mm256_set1_ps(factor))
        }
    }

    #[inline(always)]
    unsafe fn chain_weights(chunk: *const u8, column: usize, quad: usize) -> [[Self; 2]; 2] {
        // SAFETY: `pairs` reads 32 bytes of the chunk, to which `chunk` points.
        unsafe {
            let [left, right] = pairs(chunk, column, quad);
            [split(left), split(right)]
        }
    }

    #[inline(always)]
    unsafe fn chain_scales(chunk: *const u8, column: usize, format: BlockFormat) -> [Self; 2] {
        // SAFETY: reads the scales of the chunk, to which `chunk` points.
        unsafe {
            let scales = Self::scales(chunk, column, format);
            [_mm256_unpacklo_ps(scales, scales), _mm256_unpackhi_ps(scales, scales)]
        }
    }

    #[inline(always)]
    unsafe fn chain_activations(a: *const f32, _x: usize, y: usize) -> Self {
        // SAFETY: `a` points to four values; this reads two of them, from an even index below 4.
        unsafe { _mm256_castpd_ps(_mm256_set1_pd(a.add(2 * y).cast::<f64>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn join_chains(chains: [Self; 2], to: *mut f32) {
        // SAFETY: `to` points to room for eight values.
        unsafe { Self::store(to, _mm256_hadd_ps(chains[0], chains[1])) };
    }

    unsafe_methods! {
        fn load_bf16(from: *const bf16) -> Self {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))))
        }
        fn load_f16(from: *const f16) -> Self { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn sums([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        // SAFETY: arithmetic in registers, and an array is as large as its register.
        unsafe {
            let halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            std::mem::transmute(sums)
        }
    }

    operations! {
        __m256, isa: Avx2;
        zero: _mm256_setzero_ps, splat: _mm256_set1_ps, load: _mm256_loadu_ps, store: _mm256_storeu_ps;
        add: _mm256_add_ps, max: _mm256_max_ps, mul: _mm256_mul_ps, mul_add: _mm256_fmadd_ps;
    }
}

// `vpmaddwd`, which two ports execute, followed by an addition, which four ports do.
x86_pairs! {
    Avx2, rows: 6, __m256, __m256i;
    weights: halves, splat: _mm256_set1_epi32, scaled: _mm256_mul_ps, floats: _mm256_cvtepi32_ps;
    dot: _mm256_madd_epi16, add_dots: |sums, weights, a| {
        let dots = in_order(weights.map(|weights| _mm256_madd_epi16(weights, a)));
        in_order([_mm256_add_epi32(sums[0], dots[0]), _mm256_add_epi32(sums[1], dots[1])])
    };
}

// `vpdpwssd`, which also adds.
x86_pairs! {
    AvxVnni, rows: 6, __m256, __m256i;
    weights: halves, splat: _mm256_set1_epi32, scaled: _mm256_mul_ps, floats: _mm256_cvtepi32_ps;
    dot: _mm256_madd_epi16, add_dots: |sums, weights, a| in_order([
        _mm256_dpwssd_avx_epi32(sums[0], weights[0], a),
        _mm256_dpwssd_avx_epi32(sums[1], weights[1], a),
    ]);
}
