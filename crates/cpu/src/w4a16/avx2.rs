//! W4A16 with 256-bit vectors. Codes become bf16 by two byte shuffles, and bf16 f32 by a shift or a mask.

use std::arch::x86_64::*;

use dualgemm_formats::BlockFormat;

use super::Functions;
use super::kernel::{self, Pass, Task};
use super::vector::{Vector, code_values};
use crate::pack::{PANEL, UP_CODES};
use crate::w4a4::avx2;

/// The low or the high bytes (`shift` 16 or 24) of the f32 values of the codes, whose lower half is zero.
const fn code_bytes(format: BlockFormat, shift: u32) -> [u8; 16] {
    let (values, mut bytes, mut code) = (code_values(format), [0; 16], 0);
    while code < 16 {
        assert!(values[code].to_bits() as u16 == 0);
        bytes[code] = (values[code].to_bits() >> shift) as u8;
        code += 1;
    }
    bytes
}

/// Low and high byte tables of a format.
const fn tables(format: BlockFormat) -> [[u8; 16]; 2] {
    [code_bytes(format, 16), code_bytes(format, 24)]
}

/// Eight features × four k as pairs of bf16, k in the low and k + 1 in the high half of a lane: the lanes of the first
/// vector hold k = 0, 2, 0, 2, … of features 0, 0, 1, 1, 4, 4, 5, 5; those of the second, of 2, 2, 3, 3, 6, 6, 7, 7.
#[inline(always)]
unsafe fn pairs(chunk: *const u8, column: usize, quad: usize, format: BlockFormat) -> [__m256i; 2] {
    const TABLES: [[[u8; 16]; 2]; 2] = [tables(BlockFormat::Nvfp4), tables(BlockFormat::Mxfp4)];
    // SAFETY: reads 32 bytes of one line of the chunk's half.
    unsafe {
        let [low, high] = &TABLES[format as usize];
        let low = _mm256_broadcastsi128_si256(_mm_loadu_si128(low.as_ptr().cast()));
        let high = _mm256_broadcastsi128_si256(_mm_loadu_si128(high.as_ptr().cast()));
        let from = chunk.add(column / PANEL * UP_CODES + quad / 2 * 64 + column % PANEL * 4);
        let line = _mm256_loadu_si256(from.cast());
        let codes = if quad.is_multiple_of(2) { line } else { _mm256_srli_epi16::<4>(line) };
        let codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
        let (low, high) = (_mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
        [_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)]
    }
}

/// Both halves of pairs of bf16, as f32.
#[inline(always)]
unsafe fn split(pairs: __m256i) -> [__m256; 2] {
    // SAFETY: the machine has AVX2.
    unsafe {
        let high = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000_u32 as i32));
        [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(high)]
    }
}

impl Vector for __m256 {
    const LANES: usize = 8;
    /// 12 of 16 registers: two accumulators each, which is also what hides the latency of two multipliers.
    const ROWS: usize = 6;

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize, format: BlockFormat) -> [Self; 4] {
        // SAFETY: the caller's promises.
        unsafe {
            let [left, right] = pairs(chunk, column, quad, format);
            let (left, right) = (_mm256_castsi256_ps(left), _mm256_castsi256_ps(right));
            let k01 = split(_mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(left, right)));
            let k23 = split(_mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(left, right)));
            [k01[0], k01[1], k23[0], k23[1]]
        }
    }

    #[inline(always)]
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self {
        // SAFETY: the caller's promises.
        unsafe { avx2::scales(chunk, column, format) }
    }

    #[inline(always)]
    unsafe fn chain_weights(
        chunk: *const u8,
        column: usize,
        quad: usize,
        format: BlockFormat,
    ) -> [[Self; 2]; 2] {
        // SAFETY: the caller's promises.
        unsafe {
            let [left, right] = pairs(chunk, column, quad, format);
            [split(left), split(right)]
        }
    }

    #[inline(always)]
    unsafe fn chain_scales(chunk: *const u8, column: usize, format: BlockFormat) -> [Self; 2] {
        // SAFETY: the caller's promises.
        unsafe {
            let scales = Self::scales(chunk, column, format);
            [_mm256_unpacklo_ps(scales, scales), _mm256_unpackhi_ps(scales, scales)]
        }
    }

    #[inline(always)]
    unsafe fn chain_activations(a: *const f32, _x: usize, y: usize) -> Self {
        // SAFETY: the caller passes four values, of which this reads two.
        unsafe { _mm256_castpd_ps(_mm256_set1_pd(a.add(2 * y).cast::<f64>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn join_chains(chains: [Self; 2], to: *mut f32) {
        // SAFETY: the caller passes room for eight values.
        unsafe { Self::store(to, _mm256_hadd_ps(chains[0], chains[1])) };
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the machine has AVX.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: *const f32) -> Self {
        // SAFETY: the caller passes a value.
        unsafe { _mm256_set1_ps(*value) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller passes eight values.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self) {
        // SAFETY: the caller passes room for eight values.
        unsafe { _mm256_storeu_ps(to, value) };
    }

    #[inline(always)]
    unsafe fn add(a: Self, b: Self) -> Self {
        // SAFETY: the machine has AVX.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self, b: Self) -> Self {
        // SAFETY: the machine has AVX.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self {
        // SAFETY: the machine has FMA.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(never)]
    unsafe fn pass(pass: &Pass) {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn compiled(pass: &Pass) {
            // SAFETY: the caller's promises.
            unsafe { kernel::pass::<__m256>(pass) }
        }
        // SAFETY: the caller's promises.
        unsafe { compiled(pass) }
    }

    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        // SAFETY: prefetching reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
}

/// [`kernel::narrow`] and [`kernel::wide`] with AVX2, FMA and F16C.
pub(super) const FUNCTIONS: Functions = {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn narrow(task: &Task) {
        // SAFETY: the caller's promises.
        unsafe { kernel::narrow::<__m256>(task) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn wide(task: &Task) {
        // SAFETY: the caller's promises.
        unsafe { kernel::wide::<__m256>(task) }
    }

    Functions { narrow, wide, group_rows: <__m256 as Vector>::ROWS }
};
