//! Many rows: decodes a block of K into the first-level cache and multiplies all rows with it. See
//! [`kernel`](super::kernel) for the order of sums.

use std::mem::MaybeUninit;

use dualgemm_formats::BlockFormat;

use super::kernel::{BLOCK_K, Layout, Task, groups};
use super::pairs::{self, Pairs};
use super::vector::Vector;
use crate::fetch::fetch;
use crate::isa::{InstructionSet, Work};
use crate::pack::{CHUNK, CHUNK_K};
use crate::tile::TILE_COLS;

/// Most features that are decoded at a time.
const MAX_WIDTH: usize = 32;

const CHUNKS: usize = BLOCK_K / CHUNK_K;

/// Room for decoded weights.
#[repr(align(64))]
pub(super) struct Decoded {
    /// `[k][features of a pass]`, or pairs in the order of [`pairs`].
    pub(super) weights: MaybeUninit<[f32; BLOCK_K * MAX_WIDTH]>,
    /// For pairs: `[chunk][features of a pass]`.
    pub(super) scales: MaybeUninit<[f32; CHUNKS * MAX_WIDTH]>,
}

/// Two vectors of features of a block of K, and all rows of a tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    /// Block format of the weights.
    pub(super) format: BlockFormat,
    /// First chunk of the weights.
    pub(super) packed: *const u8,
    /// Chunks, up to [`BLOCK_K`] of k.
    pub(super) chunks: usize,
    /// First feature of the panel that is multiplied.
    pub(super) column: usize,
    pub(super) rows: usize,
    /// Activations, as [`blocks`](super::blocks) writes them.
    pub(super) a: *const f32,
    /// Two vectors of the first row, 32 values before those of the next one.
    pub(super) sums: *mut f32,
    /// Whether to add to the sums or to overwrite them.
    pub(super) add: bool,
}

impl Block {
    /// Fetches the chunk one block after this one: once, while the first features are decoded.
    #[inline(always)]
    pub(super) fn fetch_next(&self, chunk: *const u8) {
        if self.column == 0 {
            fetch(chunk.wrapping_add(CHUNKS * CHUNK));
        }
    }
}

/// Any number of rows, as [`blocks`](super::blocks) writes them.
pub(super) struct Multiply<'a>(pub(super) Task<'a>);

impl Work for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let Self(task) = self;
        task.check();
        // The loops are compiled for each format, so that they do not branch on it for every vector of scales.
        // SAFETY: the machine has the instruction set, since `run` got its token; `check` compared the slices with the numbers of
        // the task; and `Kernel::prepare`, the only author of layouts, had `blocks::Write` write these activations.
        unsafe {
            match task.format {
                BlockFormat::Nvfp4 => multiply_task::<S>(Task { format: BlockFormat::Nvfp4, ..task }),
                BlockFormat::Mxfp4 => multiply_task::<S>(Task { format: BlockFormat::Mxfp4, ..task }),
            }
        }
    }
}

/// [`Multiply`], where the compiler knows the format.
#[inline(always)]
unsafe fn multiply_task<P: Pairs>(task: Task<'_>) {
    const { assert!(2 * P::Floats::LANES <= MAX_WIDTH) };
    let Task { format, chunks, rows, .. } = task;
    let (packed, a, sums) = (task.packed.as_ptr(), task.a.as_ptr(), task.sums.as_mut_ptr());
    let mut decoded = Decoded { weights: MaybeUninit::uninit(), scales: MaybeUninit::uninit() };
    for panel in 0..task.panels {
        for first in (0..chunks).step_by(CHUNKS) {
            let chunks = CHUNKS.min(chunks - first);
            let layout = task.layouts[first / CHUNKS];
            // SAFETY: `Task::check` compared the slices with these bounds: panel < panels, first + chunks ≤ the task's,
            // column < 32.
            unsafe {
                let packed = packed.add(panel * task.panel_stride + first * CHUNK);
                let a = a.add(first * rows * CHUNK_K);
                for column in (0..TILE_COLS).step_by(2 * P::Floats::LANES) {
                    let sums = sums.add(panel * rows * TILE_COLS + column);
                    let block =
                        Block { format, packed, chunks, column, rows, a, sums, add: task.add || first > 0 };
                    match layout {
                        Layout::Pairs { rests } => pairs::multiply::<P>(&block, rests, &mut decoded),
                        Layout::Floats => multiply::<P::Floats>(&block, &mut decoded),
                        other => unreachable!("{other:?} is multiplied elsewhere"),
                    }
                }
            }
        }
    }
}

/// Multiplies floats, `[group of rows][k][row of group]`, which a pass reads in order.
#[inline(always)]
unsafe fn multiply<V: Vector>(block: &Block, decoded: &mut Decoded) {
    let Block { rows, chunks, .. } = *block;
    let weights = decoded.weights.as_mut_ptr().cast::<f32>();
    // SAFETY: `multiply_task` passes whole chunks and `rows` rows of activations and sums; `decoded` has room for a block.
    unsafe {
        for c in 0..chunks {
            let (chunk, to) = (block.packed.add(c * CHUNK), weights.add(c * CHUNK_K * 2 * V::LANES));
            block.fetch_next(chunk);
            decode::<V>(block.format, chunk, block.column, to);
        }
        for group in groups(rows, V::ROWS) {
            V::pass(&Pass {
                rows: group.len(),
                weights,
                k: chunks * CHUNK_K,
                a: block.a.add(group.start * chunks * CHUNK_K),
                sums: block.sums.add(group.start * TILE_COLS),
                add: block.add,
            });
        }
    }
}

/// Two vectors of features of one chunk: 16 rows of `2 · LANES` weights.
#[inline(always)]
unsafe fn decode<V: Vector>(format: BlockFormat, chunk: *const u8, column: usize, to: *mut f32) {
    for v in 0..2 {
        let column = column + v * V::LANES;
        // SAFETY: `multiply` passes a whole chunk, a column two vectors before its end, and room for the chunk's weights.
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

/// `$body` with a constant `$ROWS` of the value of `$rows`, which is at most `$most`.
macro_rules! for_rows {
    ($rows:expr, $most:expr, |$ROWS:ident| $body:expr) => {
        for_rows!($rows, $most, |$ROWS| $body; 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    };
    ($rows:expr, $most:expr, |$ROWS:ident| $body:expr; $($count:literal)*) => {
        match $rows {
            $($count if const { $count <= $most } => {
                const $ROWS: usize = $count;
                $body
            })*
            _ => unreachable!("groups have up to {} rows", $most),
        }
    };
}
pub(crate) use for_rows;

/// One group of rows and a decoded block of K.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pass {
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
/// Instruction sets compile this as a separate function: inlined, its accumulators would share the registers with the
/// values that decoding keeps there, and some would be spilled (a third of the speed, on Zen 3).
///
/// # Safety
/// The machine has the instruction set of `V`, and the pointers of the pass are valid for what their fields say.
#[inline(always)]
pub(super) unsafe fn pass<V: Vector>(pass: &Pass) {
    // SAFETY: `for_rows` picks the `ROWS` that is `pass.rows`, and the rest of the contract is this function's.
    for_rows!(pass.rows, V::ROWS, |ROWS| unsafe { pass_rows::<V, ROWS>(pass) });
}

/// k of a turn of the loop of [`pass_rows`]. With one, counting takes 3 of 23 instructions. That costs 10 % where the core's
/// other thread is busy and takes half of what the core can issue.
const UNROLL: usize = 4;
const _: () = assert!(CHUNK_K.is_multiple_of(UNROLL));

/// `ROWS` rows × two vectors of features: the accumulators stay in registers over the whole block.
#[inline(always)]
unsafe fn pass_rows<V: Vector, const ROWS: usize>(pass: &Pass) {
    let (mut weights, mut a) = (pass.weights, pass.a);
    // SAFETY: `pass` vouches for `k` rows of weights, `[k][ROWS]` activations, and `ROWS` rows of sums; k is a multiple of
    // `UNROLL`, since chunks are.
    unsafe {
        let mut accumulators = [[V::zero(); 2]; ROWS];
        for _ in 0..pass.k / UNROLL {
            for k in 0..UNROLL {
                let weights = weights.add(k * 2 * V::LANES);
                let pair = [V::load(weights), V::load(weights.add(V::LANES))];
                for (row, accumulators) in accumulators.iter_mut().enumerate() {
                    let a = V::splat(a.add(k * ROWS + row));
                    for (accumulator, weights) in accumulators.iter_mut().zip(pair) {
                        *accumulator = V::mul_add(a, weights, *accumulator);
                    }
                }
            }
            (weights, a) = (weights.add(UNROLL * 2 * V::LANES), a.add(UNROLL * ROWS));
        }
        for (row, accumulators) in accumulators.into_iter().enumerate() {
            for (v, sum) in accumulators.into_iter().enumerate() {
                let to = pass.sums.add(row * TILE_COLS + v * V::LANES);
                V::store(to, if pass.add { V::add(V::load(to), sum) } else { sum });
            }
        }
    }
}
