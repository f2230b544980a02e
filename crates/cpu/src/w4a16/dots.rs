//! Vectors of bf16 in the place of [`tiles`](super::tiles), on processors with AVX512-BF16: the same layouts, and this order of sums,
//! as VDPBF16PS adds (DAZ and FTZ, rounded to even).
//!
//! ```text
//! per block of K, one chain from 0: for each pair of k ascending, first a[k + 1]·w[k + 1], then a[k]·w[k], fused
//! sum += chain                                                                  blocks ascending
//! ```
//!
//! A product of 16-bit pairs takes as many instructions, but each 16 k of a sum take four more, to scale it. On Zen 4 the
//! loop is 1.3 times as fast, and a whole product of 16 to 256 rows 1.1 to 1.2 times. On Intel's processors VDPBF16PS is slow, see
//! [`Isa::best`](crate::Isa::best).

use std::arch::x86_64::*;

use half::bf16;

use super::kernel::groups;
use super::many_rows::for_rows;
use crate::amx::{Pass, TILE_K};
use crate::float_linear::Products;
use crate::isa::{compiled_for, unsafe_methods};
use crate::tile::TILE_COLS;

/// Rows whose sums of 32 features are in registers at a time. More would save loads, which are not what bounds this.
const ROWS: usize = 8;

compiled_for!(Avx512Bf16, {
    /// Multiplies one group of rows, as [`Unit::pass`](crate::amx::Unit::pass) does.
    ///
    /// # Safety
    /// The machine has the instructions, and the pointers are valid for the steps and rows of the pass.
    pub(crate) unsafe fn multiply_group(pass: &Pass) {
        let Pass { a, rows, sums, .. } = *pass;
        for part in groups(rows, ROWS) {
            // SAFETY: parts are inside the group.
            unsafe {
                let (a, sums) = (a.add(part.start * TILE_K), sums.add(part.start * TILE_COLS));
                for_rows!(part.len(), ROWS, |COUNT| multiply::<COUNT>(pass, a, rows * TILE_K, sums));
            }
        }
    }
});

/// `COUNT` rows of A, whose steps are `stride` bf16 apart.
#[inline(always)]
unsafe fn multiply<const COUNT: usize>(pass: &Pass, a: *const u16, stride: usize, sums: *mut f32) {
    // SAFETY: the caller's machine has the instructions, and its pointers are valid for the steps of the pass and so many rows. A
    // `__m512bh` is 512 bits, and any bits are bf16.
    unsafe {
        let load = |at: *const u16| std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(at.cast()));
        let mut chains = [[_mm512_setzero_ps(); 2]; COUNT];
        for step in 0..pass.steps {
            let (a, b) = (a.add(step * stride), pass.b.add(step * TILE_COLS * TILE_K));
            for pair in 0..TILE_K / 2 {
                let weights = [load(b.add(pair * 32)), load(b.add((pair + TILE_K / 2) * 32))];
                for (row, chains) in chains.iter_mut().enumerate() {
                    let a = _mm512_set1_epi32(a.add(row * TILE_K + 2 * pair).cast::<i32>().read_unaligned());
                    let a = std::mem::transmute::<__m512i, __m512bh>(a);
                    for (chain, weights) in chains.iter_mut().zip(weights) {
                        *chain = _mm512_dpbf16_ps(*chain, a, weights);
                    }
                }
            }
        }
        for (row, chains) in chains.into_iter().enumerate() {
            for (half, chain) in chains.into_iter().enumerate() {
                let to = sums.add(row * TILE_COLS + half * 16);
                let before = if pass.add { _mm512_loadu_ps(to) } else { _mm512_setzero_ps() };
                _mm512_storeu_ps(to, _mm512_add_ps(before, chain));
            }
        }
    }
}

/// Products of bf16 with weights that are bf16, too.
pub(crate) struct Dots;

impl Products for Dots {
    type A = bf16;
    type W = bf16;
    type Factor = __m512i;
    type Sum = __m512;
    const STEP: usize = 32;

    unsafe_methods! {
        fn a(from: *const bf16) -> __m512i { _mm512_loadu_si512(from.cast()) }
        fn w(from: *const bf16) -> __m512i { _mm512_loadu_si512(from.cast()) }
        fn add(a: __m512i, w: __m512i, sum: __m512) -> __m512 {
            // Any bits are bf16.
            _mm512_dpbf16_ps(sum, std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(w))
        }
    }
}
