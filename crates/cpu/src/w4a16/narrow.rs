//! Few rows: each weight is used as soon as it is decoded. See [`kernel`](super::kernel) for the order of sums.

use super::kernel::{NARROW_ROWS, Task};
use super::vector::Vector;
use crate::fetch::fetch;
use crate::pack::{CHUNK, CHUNK_K};
use crate::tile::TILE_COLS;

/// Panels that are read at once, since one stream of addresses does not keep the memory busy.
const STREAMS: usize = 4;

/// What tells that a block of K is in the order of [`narrow`]; see [`blocks`](super::blocks) for others.
pub(super) const AS_NARROW: f32 = -2.0;

/// From here on numbers are left to [`wide`](super::wide): a chain of eight products with codes doubled, which are up to 12,
/// reaches 96 times as far before its scale is applied.
pub(super) const TOO_LARGE: f32 = f32::from_bits((121 + 127) << 23);

/// At most [`NARROW_ROWS`] rows. Activations are `[chunk][row][quad][4]`, k of a quad in the order 0, 2, 1, 3.
///
/// # Safety
/// The machine has the instruction set of `V`, and the pointers of the task point to as much as it says.
#[inline(always)]
pub(super) unsafe fn narrow<V: Vector>(task: &Task) {
    const { assert!(TILE_COLS / V::LANES <= 4) };
    // SAFETY: the caller's promises.
    unsafe {
        match task.rows {
            1 => rows::<V, 1, 2>(task),
            2 => rows::<V, 2, 2>(task),
            3 => rows::<V, 3, 1>(task),
            _ => rows::<V, NARROW_ROWS, 1>(task),
        }
    }
}

/// `ROWS` rows, `WIDTH` vectors of features at a time: four to eight chains, which hide the latency of the multipliers
/// and leave registers for decoding.
#[inline(always)]
unsafe fn rows<V: Vector, const ROWS: usize, const WIDTH: usize>(task: &Task) {
    for panel in (0..task.panels).step_by(STREAMS) {
        let count = STREAMS.min(task.panels - panel);
        // SAFETY: all offsets stay inside what the caller promises: panel < panels, chunk < chunks, row < ROWS,
        // column < 32.
        unsafe {
            let first = task.panel.add(panel * task.panel_stride);
            let mut totals = [[[[V::zero(); 2]; ROWS]; 4]; STREAMS];
            for c in 0..task.chunks {
                let a = task.a.add(c * ROWS * CHUNK_K);
                for (panel, totals) in totals.iter_mut().enumerate().take(count) {
                    let chunk = first.add(panel * task.panel_stride + c * CHUNK);
                    fetch(chunk.wrapping_add(V::AHEAD / STREAMS));
                    let vectors = totals[..TILE_COLS / V::LANES].chunks_mut(WIDTH).enumerate();
                    for (i, totals) in vectors {
                        add_chunk::<V, ROWS, WIDTH>(task, chunk, i * WIDTH * V::LANES, a, totals);
                    }
                }
            }
            for (i, totals) in totals[..count].iter().enumerate() {
                for (v, totals) in totals.iter().enumerate().take(TILE_COLS / V::LANES) {
                    for (row, &totals) in totals.iter().enumerate() {
                        let to = ((panel + i) * ROWS + row) * TILE_COLS + v * V::LANES;
                        V::join_chains(totals, task.sums.add(to));
                    }
                }
            }
        }
    }
}

/// Adds the products of up to `WIDTH` vectors of features from `column` on with one chunk of all rows.
#[inline(always)]
unsafe fn add_chunk<V: Vector, const ROWS: usize, const WIDTH: usize>(
    task: &Task,
    chunk: *const u8,
    column: usize,
    a: *const f32,
    totals: &mut [[[V; 2]; ROWS]],
) {
    let width = totals.len().min(WIDTH);
    // SAFETY: the caller passes a chunk, columns inside it, and `ROWS` chunks of activations.
    unsafe {
        let mut chains = [[[V::zero(); 2]; ROWS]; WIDTH];
        for quad in 0..CHUNK_K / 4 {
            for (v, chains) in chains.iter_mut().enumerate().take(width) {
                let weights = V::chain_weights(chunk, column + v * V::LANES, quad);
                for (row, chains) in chains.iter_mut().enumerate() {
                    let a = a.add(row * CHUNK_K + 4 * quad);
                    for (x, y) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
                        let a = V::chain_activations(a, x, y);
                        chains[x] = V::mul_add(weights[x][y], a, chains[x]);
                    }
                }
            }
        }
        for (v, (totals, chains)) in totals.iter_mut().zip(chains).enumerate() {
            let scales = V::chain_scales(chunk, column + v * V::LANES, task.format);
            for (totals, chains) in totals.iter_mut().zip(chains) {
                for x in 0..2 {
                    totals[x] = V::mul_add(chains[x], scales[x], totals[x]);
                }
            }
        }
    }
}
