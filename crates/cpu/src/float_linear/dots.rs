//! Rows of bf16 by VDPBF16PS, many at once: 32 rows of A in two vectors, or 16 in one, times weights that are broadcast, a pair of k
//! at a time. Sums are those of [`w4a16::dots`](crate::w4a16::dots): one chain per block of K.
//!
//! A is as [`write_blocks`](super::FloatLinear::write_blocks) writes it: a stretch of K of all rows stays in the second-level cache
//! for some panels of 32 features. Weights are read where they lie, and fetched a block of K ahead while those before are
//! multiplied.

use std::arch::x86_64::*;

use dualgemm_formats::Matrix;
use half::bf16;

use super::{BLOCK_ROWS, Multiply};
use crate::amx::{TILE_K, TILE_ROWS};
use crate::fetch::prefetch;
use crate::isa::compiled_for;
use crate::tile::TILE_COLS;

/// Elements of K of a block: all but the last have as many, so that each has as many lines to fetch as there are steps before. At
/// most 512; 256 for many rows, whose A then stays in the first-level cache for all features of a panel.
pub(super) fn block_k(rows: usize, k: usize) -> usize {
    let most = if rows <= 2 * BLOCK_ROWS { 512 } else { 256 };
    k.div_ceil(k.div_ceil(most)).next_multiple_of(TILE_K)
}

/// Elements of A of a stretch of K: 256 KiB.
const STRETCH: usize = 128 << 10;

/// Features whose sums are in registers at a time.
const FEATURES: usize = 8;

/// Memory for a step of 32 features.
type Tail = [[bf16; TILE_K]; TILE_COLS];

impl Multiply<'_> {
    /// Sums of panels of 32 features, `[panel][row][feature]`.
    ///
    /// # Safety
    /// The machine has the instructions.
    pub(super) unsafe fn dots(&mut self, w: &Matrix<'_, bf16>) {
        let Self { rows, k, first_col, cols, tile, of_wave, .. } = *self;
        let (blocks, of_block) = (rows.div_ceil(BLOCK_ROWS), block_k(of_wave, k));
        let words = bytemuck::cast_slice::<f32, u16>(self.words);
        // Steps of a block of K of the rows of a block, from one on.
        let steps = |at: usize, block: usize| {
            let first = at / of_block * of_block;
            let len = (k.min(first + of_block) - first).next_multiple_of(TILE_K);
            let row = tile + block * BLOCK_ROWS;
            words[first * of_wave.next_multiple_of(BLOCK_ROWS) + row * len..][..BLOCK_ROWS * len]
                [(at - first) * BLOCK_ROWS..]
                .as_ptr()
        };
        let panels = cols.div_ceil(TILE_COLS);
        let sums = &mut self.room[..panels * blocks * BLOCK_ROWS * TILE_COLS];
        sums.fill(0.0);
        let sums = sums.as_chunks_mut::<{ BLOCK_ROWS * TILE_COLS }>().0;
        // Elements of 32 features from one on, at most as many as there are.
        let at = |panel: usize, k: usize| -> [*const bf16; TILE_COLS] {
            let row = |feature: usize| w.row((first_col + panel * TILE_COLS + feature).min(w.rows() - 1));
            std::array::from_fn(|feature| row(feature)[k..].as_ptr())
        };
        let (whole, stretch) = (k / TILE_K * TILE_K, (STRETCH / rows / of_block).max(1) * of_block);
        for start in (0..whole).step_by(stretch) {
            let stop = whole.min(start + stretch);
            for (panel, sums) in sums.chunks_exact_mut(blocks).enumerate() {
                for first in (start..stop).step_by(of_block) {
                    let end = stop.min(first + of_block);
                    let next = match (end < stop, panel + 1 < panels) {
                        (true, _) => at(panel, end),
                        (false, true) => at(panel + 1, start),
                        (false, false) => at(if stop < whole { 0 } else { panels }, stop % whole),
                    };
                    let weights = &at(panel, first);
                    for (block, sums) in sums.iter_mut().enumerate() {
                        let (a, next) = (steps(first, block), (block == 0).then_some(&next));
                        let steps = (end - first) / TILE_K;
                        let rows = rows - block * BLOCK_ROWS;
                        // SAFETY: the caller's machine has the instructions, and A and each feature have so many steps.
                        unsafe { multiply(Block { weights, next, a, steps, rows, sums }) };
                    }
                }
            }
        }
        for (panel, sums) in sums.chunks_exact_mut(blocks).enumerate().filter(|_| whole < k) {
            let mut tail: Tail = [[bf16::ZERO; TILE_K]; TILE_COLS];
            for (to, from) in tail.iter_mut().zip(at(panel, whole)) {
                // SAFETY: so many elements of the feature are left.
                let from = unsafe { std::slice::from_raw_parts(from, k - whole) };
                to[..from.len()].copy_from_slice(from);
            }
            let weights = &tail.each_ref().map(|feature| feature.as_ptr());
            for (block, sums) in sums.iter_mut().enumerate() {
                let (a, rows) = (steps(whole, block), rows - block * BLOCK_ROWS);
                // SAFETY: as above, with zeros behind what is left.
                unsafe { multiply(Block { weights, next: None, a, steps: 1, rows, sums }) };
            }
        }
        for sums in sums {
            // SAFETY: as above.
            unsafe { transpose(sums) };
        }
    }
}

/// A block of K of 32 features and up to 32 rows.
struct Block<'a> {
    /// Of each feature.
    weights: &'a [*const bf16; TILE_COLS],
    /// What will be read next, a line for each step.
    next: Option<&'a [*const bf16; TILE_COLS]>,
    /// A: steps of all rows.
    a: *const u16,
    steps: usize,
    rows: usize,
    /// `[feature][32 rows]`.
    sums: &'a mut [f32; BLOCK_ROWS * TILE_COLS],
}

compiled_for!(Avx512Bf16, {
    /// Adds the products of a block.
    ///
    /// # Safety
    /// The machine has the instructions, and the pointers are valid for the steps of the block.
    unsafe fn multiply(block: Block<'_>) {
        let Block { weights, next, a, steps, rows, sums } = block;
        let groups = weights.as_chunks::<FEATURES>().0.iter().enumerate();
        for ((group, weights), sums) in groups.zip(sums.as_chunks_mut::<{ FEATURES * BLOCK_ROWS }>().0) {
            let next = next.map(|next| &next.as_chunks::<FEATURES>().0[group]);
            // SAFETY: the caller vouches for the pointers and the instructions.
            unsafe {
                match (rows <= TILE_ROWS, next) {
                    (true, Some(next)) => group_of::<1, true>(weights, next, a, steps, sums),
                    (true, None) => group_of::<1, false>(weights, weights, a, steps, sums),
                    (false, Some(next)) => group_of::<2, true>(weights, next, a, steps, sums),
                    (false, None) => group_of::<2, false>(weights, weights, a, steps, sums),
                }
            }
        }
    }
});

#[inline(always)]
unsafe fn group_of<const HALVES: usize, const FETCH: bool>(
    weights: &[*const bf16; FEATURES],
    next: &[*const bf16; FEATURES],
    a: *const u16,
    steps: usize,
    sums: &mut [f32; FEATURES * BLOCK_ROWS],
) {
    // SAFETY: the caller's machine has the instructions, and its pointers are valid for the steps. A `__m512bh` is 512 bits, and
    // any bits are bf16.
    unsafe {
        let bits = |x: __m512i| std::mem::transmute::<__m512i, __m512bh>(x);
        let mut chains = [[_mm512_setzero_ps(); HALVES]; FEATURES];
        for step in 0..steps {
            if FETCH {
                next.iter().for_each(|next| prefetch(next.wrapping_add(step * TILE_K).cast()));
            }
            let a = a.add(step * BLOCK_ROWS * TILE_K);
            for pair in 0..TILE_K / 2 {
                let mut rows = [bits(_mm512_setzero_si512()); HALVES];
                for (half, rows) in rows.iter_mut().enumerate() {
                    *rows = bits(_mm512_loadu_si512(a.add((half * TILE_ROWS + pair) * TILE_K).cast()));
                }
                for (chains, weights) in chains.iter_mut().zip(weights) {
                    let pair = weights.add(step * TILE_K + 2 * pair).cast::<i32>().read_unaligned();
                    let pair = bits(_mm512_set1_epi32(pair));
                    for (chain, rows) in chains.iter_mut().zip(rows) {
                        *chain = _mm512_dpbf16_ps(*chain, rows, pair);
                    }
                }
            }
        }
        for (chains, sums) in chains.into_iter().zip(sums.as_chunks_mut::<BLOCK_ROWS>().0) {
            for (half, chain) in chains.into_iter().enumerate() {
                let to = sums[half * TILE_ROWS..].as_mut_ptr();
                _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), chain));
            }
        }
    }
}

compiled_for!(Avx512Bf16, {
    /// Turns `[feature][row]` into `[row][feature]`.
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn transpose(sums: &mut [f32; BLOCK_ROWS * TILE_COLS]) {
        const { assert!(BLOCK_ROWS == TILE_COLS) };
        let mut quarters = [[_mm512_setzero_ps(); 16]; 4];
        for (quarter, vectors) in quarters.iter_mut().enumerate() {
            for (i, vector) in vectors.iter_mut().enumerate() {
                let from = &sums[(quarter / 2 * 16 + i) * 32 + quarter % 2 * 16..][..16];
                // SAFETY: these are 16 values.
                *vector = unsafe { _mm512_loadu_ps(from.as_ptr()) };
            }
            *vectors = transposed(*vectors);
        }
        for (quarter, vectors) in quarters.into_iter().enumerate() {
            for (i, vector) in vectors.into_iter().enumerate() {
                let to = &mut sums[(quarter % 2 * 16 + i) * 32 + quarter / 2 * 16..][..16];
                // SAFETY: as above.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), vector) };
            }
        }
    }
});

compiled_for!(Avx512Bf16, {
    /// 16 vectors of 16: first pairs of values change places with those of the vector beside, then pairs of pairs, and so on.
    #[inline]
    fn transposed(v: [__m512; 16]) -> [__m512; 16] {
        let (mut ones, mut pairs) = (v, v);
        for i in 0..8 {
            ones[2 * i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]);
            ones[2 * i + 1] = _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
        }
        for i in 0..4 {
            for j in 0..2 {
                let (low, high) = (_mm512_castps_pd(ones[4 * i + j]), _mm512_castps_pd(ones[4 * i + 2 + j]));
                pairs[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
                pairs[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
            }
        }
        // Now vector 4·i + c has, in its quarter q, the values 4·q + c of vectors 4·i to 4·i + 3.
        let mut out = v;
        for c in 0..4 {
            let [a, b, e, f] = [pairs[c], pairs[4 + c], pairs[8 + c], pairs[12 + c]];
            let even = [_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(e, f)];
            let odd = [_mm512_shuffle_f32x4::<0xDD>(a, b), _mm512_shuffle_f32x4::<0xDD>(e, f)];
            out[c] = _mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
            out[8 + c] = _mm512_shuffle_f32x4::<0xDD>(even[0], even[1]);
            out[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
            out[12 + c] = _mm512_shuffle_f32x4::<0xDD>(odd[0], odd[1]);
        }
        out
    }
});
