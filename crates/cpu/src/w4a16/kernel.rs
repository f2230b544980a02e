//! The W4A16 product of some rows with one packed panel, generic over the instruction set.
//!
//! Two algorithms, chosen by the number of rows; either has one order of f32 sums, the same on every instruction set.
//! All multiply-adds are fused, but for [`portable`](super::portable) on machines without:
//!
//! ```text
//! narrow, up to NARROW_ROWS rows: bound by decoding; weights go from register to register
//!     per chunk of 16 k, two chains: chain x sums a[k] · code[k] over k mod 4 = 2x, 2x+1, ascending, from 0
//!     sum[x] += chain[x] · scale                       chunks ascending, from 0
//!     sum = sum[0] + sum[1]
//!
//! wide: bound by multiplication; weights are decoded once per tile into a buffer in the first-level cache
//!     per BLOCK_K of k, one chain: a[k] · (code[k] · scale), ascending, from 0; code · scale is exact in f32
//!     sum = the first chain, then += chain             blocks ascending
//! ```

use std::mem::MaybeUninit;

use dualgemm_formats::BlockFormat;

use super::vector::Vector;
use crate::pack::{CHUNK, CHUNK_K};
use crate::tile::TILE_COLS;

/// Rows that [`narrow`] handles: with more, their sums leave the registers of AVX2.
pub(super) const NARROW_ROWS: usize = 4;

/// Elements of K that [`wide`] decodes at a time: 16 features of them are half a first-level cache of 32 KiB.
pub(super) const BLOCK_K: usize = 256;

/// Most features that [`wide`] decodes at a time.
const MAX_WIDTH: usize = 32;

/// How far ahead of use [`narrow`] fetches weights.
const PREFETCH: usize = 8 * CHUNK;

/// Where a group of rows of a wide tile starts. Groups are as even as whole rows allow, none of more than `most` rows; each ends
/// where the next one starts.
pub(super) fn group_start(rows: usize, most: usize, group: usize) -> usize {
    rows * group / rows.div_ceil(most)
}

/// A product of some rows with one panel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    /// Block format of the weights.
    pub(super) format: BlockFormat,
    /// The panel.
    pub(super) panel: *const u8,
    /// Its chunks.
    pub(super) chunks: usize,
    /// `rows · chunks · 16` activations, in an order of each algorithm.
    pub(super) a: *const f32,
    /// Rows.
    pub(super) rows: usize,
    /// What becomes `[rows][32]` sums.
    pub(super) sums: *mut f32,
}

/// Few rows, at most [`NARROW_ROWS`]: each weight is used as soon as it is decoded. Activations are `[row][quad][4]`, k
/// of a quad in the order 0, 2, 1, 3.
///
/// # Safety
/// The machine has the instruction set of `V`, and the pointers of the task point to as much as it says.
#[inline(always)]
pub(super) unsafe fn narrow<V: Vector>(task: &Task) {
    // SAFETY: the caller's promises.
    unsafe {
        match task.rows {
            1 => narrow_rows::<V, 1>(task),
            2 => narrow_rows::<V, 2>(task),
            3 => narrow_rows::<V, 3>(task),
            _ => narrow_rows::<V, NARROW_ROWS>(task),
        }
    }
}

/// `ROWS` rows. Bound by instructions, not by memory: eight features × 16 k take 63 vector operations for one row, 18
/// more for each further one.
#[inline(always)]
unsafe fn narrow_rows<V: Vector, const ROWS: usize>(task: &Task) {
    const { assert!(TILE_COLS / V::LANES <= 4) };
    let Task { format, panel, chunks, a, sums, .. } = *task;
    // SAFETY: all offsets stay inside what the caller promises: chunk < chunks, row < ROWS, column < 32.
    unsafe {
        let mut totals = [[[V::zero(); 2]; 4]; ROWS];
        for c in 0..chunks {
            let chunk = panel.add(c * CHUNK);
            fetch::<V>(chunk.wrapping_add(PREFETCH));
            for v in 0..TILE_COLS / V::LANES {
                let mut chains = [[V::zero(); 2]; ROWS];
                for quad in 0..CHUNK_K / 4 {
                    let weights = V::chain_weights(chunk, v * V::LANES, quad, format);
                    for (row, chains) in chains.iter_mut().enumerate() {
                        let a = a.add((row * chunks + c) * CHUNK_K + 4 * quad);
                        for (x, y) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
                            let a = V::chain_activations(a, x, y);
                            chains[x] = V::mul_add(weights[x][y], a, chains[x]);
                        }
                    }
                }
                let scales = V::chain_scales(chunk, v * V::LANES, format);
                for (totals, chains) in totals.iter_mut().zip(chains) {
                    for x in 0..2 {
                        totals[v][x] = V::mul_add(chains[x], scales[x], totals[v][x]);
                    }
                }
            }
        }
        for (row, totals) in totals.iter().enumerate() {
            for (v, &chains) in totals.iter().enumerate().take(TILE_COLS / V::LANES) {
                V::join_chains(chains, sums.add(row * TILE_COLS + v * V::LANES));
            }
        }
    }
}

/// Decoded weights, `[k][features of a pass]`.
#[repr(align(64))]
struct Decoded(MaybeUninit<[f32; BLOCK_K * MAX_WIDTH]>);

/// Many rows: decodes a block of K into the first-level cache, then passes all rows over it. Activations are `[group
/// of rows][k][row of group]`, see [`group_start`].
///
/// # Safety
/// The machine has the instruction set of `V`, and the pointers of the task point to as much as it says.
#[inline(always)]
pub(super) unsafe fn wide<V: Vector>(task: &Task) {
    const { assert!(2 * V::LANES <= MAX_WIDTH) };
    const CHUNKS: usize = BLOCK_K / CHUNK_K;
    let Task { format, panel, chunks, a, rows, sums } = *task;
    let mut decoded = Decoded(MaybeUninit::uninit());
    let decoded = decoded.0.as_mut_ptr().cast::<f32>();
    let groups = rows.div_ceil(V::ROWS);
    // SAFETY: all offsets stay inside what the caller promises: first + count ≤ chunks, row < rows, column < 32;
    // `decoded` is written up to `count` chunks before it is read that far.
    unsafe {
        for first in (0..chunks).step_by(CHUNKS) {
            let count = CHUNKS.min(chunks - first);
            for column in (0..TILE_COLS).step_by(2 * V::LANES) {
                for c in 0..count {
                    let chunk = panel.add((first + c) * CHUNK);
                    if column == 0 {
                        fetch::<V>(chunk.wrapping_add(CHUNKS * CHUNK));
                    }
                    decode::<V>(format, chunk, column, decoded.add(c * CHUNK_K * 2 * V::LANES));
                }
                for group in 0..groups {
                    let [start, end] = [group, group + 1].map(|g| group_start(rows, V::ROWS, g));
                    V::pass(&Pass {
                        rows: end - start,
                        weights: decoded,
                        k: count * CHUNK_K,
                        a: a.add(start * chunks * CHUNK_K + first * CHUNK_K * (end - start)),
                        sums: sums.add(start * TILE_COLS + column),
                        add: first > 0,
                    });
                }
            }
        }
    }
}

/// Two vectors of features of one chunk: 16 rows of `2 · LANES` weights.
#[inline(always)]
unsafe fn decode<V: Vector>(format: BlockFormat, chunk: *const u8, column: usize, to: *mut f32) {
    for v in 0..2 {
        let column = column + v * V::LANES;
        // SAFETY: the caller passes a chunk, a column two vectors before its end, and room for the weights.
        unsafe {
            let scales = V::scales(chunk, column, format);
            for quad in 0..CHUNK_K / 4 {
                let weights = V::weights(chunk, column, quad, format);
                for (k, weights) in weights.into_iter().enumerate() {
                    V::store(to.add(((4 * quad + k) * 2 + v) * V::LANES), V::mul(weights, scales));
                }
            }
        }
    }
}

/// One group of rows over a decoded block of K.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    /// Rows, at most [`Vector::ROWS`].
    pub(super) rows: usize,
    /// `[k][2 · LANES]`.
    pub(super) weights: *const f32,
    /// Elements of K.
    pub(super) k: usize,
    /// `[k][rows]`.
    pub(super) a: *const f32,
    /// Two vectors of the first row, 32 values before those of the next one.
    pub(super) sums: *mut f32,
    /// Whether to add to the sums or to overwrite them.
    pub(super) add: bool,
}

/// Multiplies one group of rows.
///
/// Instruction sets compile this as a function of its own: inlined, its accumulators would share the registers with
/// what decoding keeps there, and some would be spilled (a third of the speed, on Zen 3).
///
/// # Safety
/// The machine has the instruction set of `V`, and the pointers point to as much as they say.
#[inline(always)]
pub(super) unsafe fn pass<V: Vector>(pass: &Pass) {
    macro_rules! pass_rows {
        ($($rows:literal)*) => {
            match pass.rows {
                // SAFETY: the caller's promises.
                $($rows if $rows <= V::ROWS => unsafe { pass_rows::<V, $rows>(pass) },)*
                _ => unreachable!("groups have up to {} rows", V::ROWS),
            }
        };
    }
    pass_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14)
}

/// `ROWS` rows × two vectors of features: the accumulators stay in registers over the whole block.
#[inline(always)]
unsafe fn pass_rows<V: Vector, const ROWS: usize>(pass: &Pass) {
    let (mut weights, mut a) = (pass.weights, pass.a);
    // SAFETY: the pass has `k` rows of weights, `[k][ROWS]` activations, and `ROWS` rows of sums.
    unsafe {
        let mut accumulators = [[V::zero(); 2]; ROWS];
        for _ in 0..pass.k {
            let pair = [V::load(weights), V::load(weights.add(V::LANES))];
            for (row, accumulators) in accumulators.iter_mut().enumerate() {
                let a = V::splat(a.add(row));
                for (accumulator, weights) in accumulators.iter_mut().zip(pair) {
                    *accumulator = V::mul_add(a, weights, *accumulator);
                }
            }
            (weights, a) = (weights.add(2 * V::LANES), a.add(ROWS));
        }
        for (row, accumulators) in accumulators.into_iter().enumerate() {
            for (v, sum) in accumulators.into_iter().enumerate() {
                let to = pass.sums.add(row * TILE_COLS + v * V::LANES);
                V::store(to, if pass.add { V::add(V::load(to), sum) } else { sum });
            }
        }
    }
}

/// Prefetches the lines of a chunk, which may lie past the last panel.
#[inline(always)]
unsafe fn fetch<V: Vector>(chunk: *const u8) {
    for line in 0..CHUNK.div_ceil(64) {
        // SAFETY: prefetching reads nothing.
        unsafe { V::prefetch(chunk.wrapping_add(64 * line)) };
    }
}
