//! Few rows of floats: each weight is used as soon as it is decoded. See [`kernel`](super::kernel) for the order of sums.

use dualgemm_formats::{BlockFormat, FloatMatrix};

use super::kernel::Task;
use super::pairs::Pairs;
use super::vector::Vector;
use crate::fetch::fetch;
use crate::isa::{InstructionSet, Work};
use crate::pack::{CHUNK, CHUNK_K};
use crate::tile::TILE_COLS;

/// Panels that are read at once, since one stream of addresses does not keep the memory busy.
const STREAMS: usize = 4;

/// Most rows that [`Multiply`] handles.
pub(super) const FEW_ROWS: usize = 4;

/// The most rows of an A for which [`Multiply`] is the fastest way: from two rows of bf16 on, integers are.
pub(super) fn max_few_rows(a: &FloatMatrix<'_>) -> usize {
    if matches!(a, FloatMatrix::Bf16(_)) { 1 } else { FEW_ROWS }
}

/// From here on numbers are left to [`many_rows`](super::many_rows): a chain of eight products with doubled codes, which are up
/// to 12, reaches 96 times as far before its scale is applied.
pub(super) const TOO_LARGE: f32 = f32::from_bits((121 + 127) << 23);

/// At most [`FEW_ROWS`] rows. Activations are `[chunk][row][quad][4]`, k of a quad in the order 0, 2, 1, 3.
pub(super) struct Multiply<'a>(pub(super) Task<'a>);

impl Work for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let Self(mut task) = self;
        task.check();
        // SAFETY: the machine has the instruction set, since `run` got its token; `check` compared the slices with the numbers of
        // the task, and each arm is for its number of rows.
        unsafe {
            match task.rows {
                1 => rows::<<S as Pairs>::Floats, 1, 2>(&mut task),
                2 => rows::<<S as Pairs>::Floats, 2, 2>(&mut task),
                3 => rows::<<S as Pairs>::Floats, 3, 1>(&mut task),
                FEW_ROWS => rows::<<S as Pairs>::Floats, FEW_ROWS, 1>(&mut task),
                more => unreachable!("{more} rows are not few"),
            }
        }
    }
}

/// `ROWS` rows, `WIDTH` vectors of features at a time: four to eight chains, which hide the latency of the multipliers
/// and leave registers for decoding.
#[inline(always)]
unsafe fn rows<V: Vector, const ROWS: usize, const WIDTH: usize>(task: &mut Task<'_>) {
    const { assert!(TILE_COLS / V::LANES <= 4) };
    let (packed, a, sums) = (task.packed.as_ptr(), task.a.as_ptr(), task.sums.as_mut_ptr());
    for panel in (0..task.panels).step_by(STREAMS) {
        let count = STREAMS.min(task.panels - panel);
        // SAFETY: `Task::check` compared the slices with these bounds: panel < panels, c < chunks, row < ROWS, column < 32.
        unsafe {
            let first = packed.add(panel * task.panel_stride);
            let mut totals = [[[[V::zero(); 2]; ROWS]; 4]; STREAMS];
            for c in 0..task.chunks {
                let a = a.add(c * ROWS * CHUNK_K);
                for (panel, totals) in totals.iter_mut().enumerate().take(count) {
                    let chunk = first.add(panel * task.panel_stride + c * CHUNK);
                    fetch(chunk.wrapping_add(V::AHEAD / STREAMS));
                    let vectors = totals[..TILE_COLS / V::LANES].chunks_mut(WIDTH).enumerate();
                    for (i, totals) in vectors {
                        add_chunk::<V, ROWS, WIDTH>(task.format, chunk, i * WIDTH * V::LANES, a, totals);
                    }
                }
            }
            for (i, totals) in totals[..count].iter().enumerate() {
                for (v, totals) in totals.iter().enumerate().take(TILE_COLS / V::LANES) {
                    for (row, &totals) in totals.iter().enumerate() {
                        let to = ((panel + i) * ROWS + row) * TILE_COLS + v * V::LANES;
                        V::join_chains(totals, sums.add(to));
                    }
                }
            }
        }
    }
}

/// Adds the products of one chunk of all rows and up to `WIDTH` vectors of features, from `column` on.
#[inline(always)]
unsafe fn add_chunk<V: Vector, const ROWS: usize, const WIDTH: usize>(
    format: BlockFormat,
    chunk: *const u8,
    column: usize,
    a: *const f32,
    totals: &mut [[[V; 2]; ROWS]],
) {
    let width = totals.len().min(WIDTH);
    // SAFETY: `rows` passes a whole chunk, as many vectors as fit behind `column`, and 16 activations for each row.
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
            let scales = V::chain_scales(chunk, column + v * V::LANES, format);
            for (totals, chains) in totals.iter_mut().zip(chains) {
                for x in 0..2 {
                    totals[x] = V::mul_add(chains[x], scales[x], totals[x]);
                }
            }
        }
    }
}
