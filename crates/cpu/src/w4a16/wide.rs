//! Many rows: decodes a block of K into the first-level cache and passes all rows over it. See
//! [`kernel`](super::kernel) for the order of sums.

use std::mem::MaybeUninit;

use dualgemm_formats::BlockFormat;

use super::kernel::{BLOCK_K, Task, fetch, group_start};
use super::vector::Vector;
use crate::pack::{CHUNK, CHUNK_K};
use crate::tile::TILE_COLS;

/// Most features that are decoded at a time.
const MAX_WIDTH: usize = 32;

/// Chunks of a block.
const CHUNKS: usize = BLOCK_K / CHUNK_K;

/// Decoded weights, `[k][features of a pass]`.
#[repr(align(64))]
struct Decoded(MaybeUninit<[f32; BLOCK_K * MAX_WIDTH]>);

/// Any number of rows. Activations are `[block][group of rows][k][row of group]`, see [`group_start`]: a pass reads them
/// in order.
///
/// # Safety
/// The machine has the instruction set of `V`, and the pointers of the task point to as much as it says.
#[inline(always)]
pub(super) unsafe fn wide<V: Vector>(task: &Task) {
    const { assert!(2 * V::LANES <= MAX_WIDTH) };
    let Task { chunks, rows, .. } = *task;
    let mut decoded = Decoded(MaybeUninit::uninit());
    let decoded = decoded.0.as_mut_ptr().cast::<f32>();
    let groups = rows.div_ceil(V::ROWS);
    for panel in 0..task.panels {
        for first in (0..chunks).step_by(CHUNKS) {
            let count = CHUNKS.min(chunks - first);
            for column in (0..TILE_COLS).step_by(2 * V::LANES) {
                // SAFETY: all offsets stay inside what the caller promises: panel < panels, first + count ≤ chunks, start
                // < rows, column < 32; `decoded` is written up to `count` chunks before it is read that far.
                unsafe {
                    let packed = task.panel.add(panel * task.panel_stride + first * CHUNK);
                    for c in 0..count {
                        let chunk = packed.add(c * CHUNK);
                        if column == 0 {
                            fetch::<V>(chunk.wrapping_add(CHUNKS * CHUNK));
                        }
                        decode::<V>(task.format, chunk, column, decoded.add(c * CHUNK_K * 2 * V::LANES));
                    }
                    for group in 0..groups {
                        let [start, end] = [group, group + 1].map(|g| group_start(rows, V::ROWS, g));
                        V::pass(&Pass {
                            rows: end - start,
                            weights: decoded,
                            k: count * CHUNK_K,
                            a: task.a.add((first * rows + start * count) * CHUNK_K),
                            sums: task.sums.add((panel * rows + start) * TILE_COLS + column),
                            add: task.add || first > 0,
                        });
                    }
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
                for (k, weights) in V::weights(chunk, column, quad).into_iter().enumerate() {
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
    rows: usize,
    /// `[k][2 · LANES]`.
    weights: *const f32,
    /// Elements of K.
    k: usize,
    /// `[k][rows]`.
    a: *const f32,
    /// Two vectors of the first row, 32 values before those of the next one.
    sums: *mut f32,
    /// Whether to add to the sums or to overwrite them.
    add: bool,
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
