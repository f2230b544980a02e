//! Products of matrices of bf16 (`bfmmla`) in the place of [`tiles`](super::tiles): the same layouts, and this order of sums.
//!
//! ```text
//! per block of K, one chain from 0: for each pair of k ascending, chain + (a[k]·w[k] + a[k + 1]·w[k + 1])
//! sum += chain                                                             blocks ascending
//! ```
//!
//! Both additions of a pair round to odd: towards zero, and then to the neighbour whose last bit is 1 if anything is lost. Products
//! are exact. What is below 2⁻¹²⁶ counts as zero, as in tiles. So does FEAT_BF16 add, unless FPCR.EBF is set, which no system does.
//!
//! Reference: Arm Architecture Reference Manual, DDI 0487, "BFMMLA" and "BFDotAdd".

use std::arch::aarch64::*;
use std::arch::asm;

use super::kernel::groups;
use super::many_rows::for_rows;
use crate::amx::{Pass, TILE_K};
use crate::isa::compiled_for;
use crate::pack::PANEL;
use crate::tile::TILE_COLS;

/// Pairs of rows whose sums of eight features are in registers at a time: 16 of 32.
const PAIRS: usize = 4;

compiled_for!(NeonBf16, {
    /// Multiplies one group of rows, as [`Unit::pass`](crate::amx::Unit::pass) does.
    ///
    /// # Safety
    /// The machine has the instructions, and the pointers are valid for the steps and rows of the pass.
    pub(crate) unsafe fn multiply_group(pass: &Pass) {
        let Pass { a, rows, sums, .. } = *pass;
        for part in groups(rows, 2 * PAIRS) {
            // SAFETY: parts are inside the group, and columns inside its sums.
            unsafe {
                let (a, sums) = (a.add(part.start * TILE_K), sums.add(part.start * TILE_COLS));
                for column in (0..TILE_COLS).step_by(8) {
                    let sums = sums.add(column);
                    for_rows!(part.len().div_ceil(2), PAIRS, |COUNT| {
                        multiply::<COUNT>(pass, a, rows * TILE_K, part.len(), column, sums)
                    });
                }
            }
        }
    }
});

compiled_for!(NeonBf16, {
    /// Adds the products of two rows and two features, four k each: row by row.
    #[inline]
    fn bfmmla(mut sums: float32x4_t, rows: uint32x4_t, features: uint32x4_t) -> float32x4_t {
        // SAFETY: the instruction is part of the set that this is compiled for.
        unsafe {
            asm!(
                "bfmmla {sums:v}.4s, {rows:v}.8h, {features:v}.8h",
                sums = inout(vreg) sums, rows = in(vreg) rows, features = in(vreg) features,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sums
    }
});

/// Eight features from `column` on and `rows` rows of A, two for each of `COUNT`, whose steps are `stride` bf16 apart. The last pair
/// may be one row twice.
#[inline(always)]
unsafe fn multiply<const COUNT: usize>(
    pass: &Pass,
    a: *const u16,
    stride: usize,
    rows: usize,
    column: usize,
    sums: *mut f32,
) {
    let second = |pair: usize| (2 * pair + 1).min(rows - 1);
    // SAFETY: the caller's machine has the instructions, and its pointers are valid for the steps of the pass and so many rows.
    unsafe {
        let halves = |[left, right]: [uint32x4_t; 2]| {
            let [left, right] = [vreinterpretq_u64_u32(left), vreinterpretq_u64_u32(right)];
            [vreinterpretq_u32_u64(vzip1q_u64(left, right)), vreinterpretq_u32_u64(vzip2q_u64(left, right))]
        };
        let mut chains = [[vdupq_n_f32(0.0); 4]; COUNT];
        for step in 0..pass.steps {
            let a = a.add(step * stride);
            let b = pass.b.add((step * TILE_COLS + column / PANEL * PANEL) * TILE_K + column % PANEL * 2);
            for k in (0..TILE_K).step_by(8) {
                // Eight k of both rows: four, and the other four.
                let a: [[uint32x4_t; 2]; COUNT] = std::array::from_fn(|pair| {
                    halves([2 * pair, second(pair)].map(|row| vld1q_u32(a.add(row * TILE_K + k).cast())))
                });
                for four in 0..2 {
                    for two in 0..2 {
                        // Four features, and two pairs of k.
                        let load = |pair: usize| {
                            vld1q_u32(b.add((k / 2 + 2 * four + pair) * 2 * PANEL + 8 * two).cast())
                        };
                        let (even, odd) = (load(0), load(1));
                        let features = [vzip1q_u32(even, odd), vzip2q_u32(even, odd)];
                        for (chains, a) in chains.iter_mut().zip(&a) {
                            for (chain, features) in chains[2 * two..].iter_mut().zip(features) {
                                *chain = bfmmla(*chain, a[four], features);
                            }
                        }
                    }
                }
            }
        }
        for (pair, chains) in chains.iter().enumerate() {
            for (four, chains) in chains.as_chunks().0.iter().enumerate() {
                let chains = halves(chains.map(|chain| vreinterpretq_u32_f32(chain)));
                // One row if the pair is one row twice.
                for (row, chain) in (2 * pair..rows).zip(chains) {
                    let to = sums.add(row * TILE_COLS + 4 * four);
                    let before = if pass.add { vld1q_f32(to) } else { vdupq_n_f32(0.0) };
                    vst1q_f32(to, vaddq_f32(before, vreinterpretq_f32_u32(chain)));
                }
            }
        }
    }
}
