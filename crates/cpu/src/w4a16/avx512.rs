//! W4A16 with 512-bit vectors: one register is the table of all 16 code values, indexed by the codes as they lie.

use std::arch::x86_64::*;

use dualgemm_formats::BlockFormat;

use super::Functions;
use super::kernel::{self, Pass, Task};
use super::vector::{Vector, code_values};
use crate::pack::{PANEL, UP_CODES};
use crate::w4a4::avx512;

impl Vector for __m512 {
    const LANES: usize = 16;
    /// 28 of 32 registers.
    const ROWS: usize = 14;

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize, format: BlockFormat) -> [Self; 4] {
        const VALUES: [[f32; 16]; 2] = [code_values(BlockFormat::Nvfp4), code_values(BlockFormat::Mxfp4)];
        // SAFETY: reads one line of the chunk's half.
        unsafe {
            let values = Self::load(VALUES[format as usize].as_ptr());
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
        // SAFETY: the caller's promises.
        unsafe { avx512::scales(chunk, column, format) }
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the machine has AVX-512.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: *const f32) -> Self {
        // SAFETY: the caller passes a value.
        unsafe { _mm512_set1_ps(*value) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller passes 16 values.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self) {
        // SAFETY: the caller passes room for 16 values.
        unsafe { _mm512_storeu_ps(to, value) };
    }

    #[inline(always)]
    unsafe fn add(a: Self, b: Self) -> Self {
        // SAFETY: the machine has AVX-512.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self, b: Self) -> Self {
        // SAFETY: the machine has AVX-512.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self {
        // SAFETY: the machine has AVX-512.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(never)]
    unsafe fn pass(pass: &Pass) {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
        unsafe fn compiled(pass: &Pass) {
            // SAFETY: the caller's promises.
            unsafe { kernel::pass::<__m512>(pass) }
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

/// [`kernel::narrow`] and [`kernel::wide`] with AVX-512 F, BW and VL.
pub(super) const FUNCTIONS: Functions = {
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
    unsafe fn narrow(task: &Task) {
        // SAFETY: the caller's promises.
        unsafe { kernel::narrow::<__m512>(task) }
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
    unsafe fn wide(task: &Task) {
        // SAFETY: the caller's promises.
        unsafe { kernel::wide::<__m512>(task) }
    }

    Functions { narrow, wide, group_rows: <__m512 as Vector>::ROWS }
};
