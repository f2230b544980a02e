//! W4A16 with 512-bit vectors: one register is the table of all 16 code values, indexed by the codes as they lie.

use std::arch::x86_64::*;

use dualgemm_formats::BlockFormat;

use super::Functions;
use super::kernel::{self, Pass, Task};
use super::vector::{DOUBLED, Vector};
use super::x86::{functions, operations};
use crate::pack::{PANEL, UP_CODES};
use crate::w4a4::{avx512, scale_unit};

impl Vector for __m512 {
    const LANES: usize = 16;
    /// 28 of 32 registers.
    const ROWS: usize = 14;

    #[inline(always)]
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [Self; 4] {
        // SAFETY: reads one line of the chunk's half.
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
        // SAFETY: the caller's promises.
        unsafe { Self::mul(avx512::scales(chunk, column, format), _mm512_set1_ps(0.5 / scale_unit(format))) }
    }

    operations! {
        __m512, features: "avx2,fma,f16c,avx512f,avx512bw,avx512vl";
        zero: _mm512_setzero_ps, splat: _mm512_set1_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps;
        add: _mm512_add_ps, mul: _mm512_mul_ps, mul_add: _mm512_fmadd_ps;
    }
}

/// [`kernel::narrow`] and [`kernel::wide`] with AVX-512 F, BW and VL.
pub(super) const FUNCTIONS: Functions =
    functions!(__m512, features: "avx2,fma,f16c,avx512f,avx512bw,avx512vl");
