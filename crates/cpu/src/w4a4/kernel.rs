//! The W4A4 product of a few rows with one packed panel, generic over the instruction set.
//!
//! ```text
//! for each chunk of 16 k:
//!     decode 16 × 16 weights into registers          nibble → table → byte, once for all rows
//!     for each row:
//!         integer dot products over the chunk         exact
//!         sum += dot as f32 · (scale_a · scale_b)      one rounding
//!   or    sum += (dot as f32 · scale_a) · scale_b      same value; weights in mxfp4
//!   or    sum += (dot · scale_a) as f32 · scale_b      same value; the instruction set multiplies there anyway
//! ```
//!
//! The order of the f32 sums is fixed: one accumulator per output, chunks in ascending order, from 0. `dot` (12
//! bits) times the two scales (4 bits each) fits f32, so only the addition rounds, with or without a fused
//! multiply-add, and every instruction set gives the same bits.
//!
//! The product of two extreme scales of mxfp4 may overflow or underflow f32 where the dot product is small or zero. So these
//! scales are not multiplied with each other first. A sum is right, within the rounding of its additions, if the magnitudes of
//! its products add up to less than 2¹²⁷ (2¹²⁵ if only the weights are mxfp4). Products below 2⁻¹¹⁴ may lose as many bits as f32
//! loses below 2⁻¹²⁶, and portable kernels without a fused multiply-add may lose one more. Bits are equal within these bounds,
//! which no model comes near.

use std::mem::MaybeUninit;

use dualgemm_formats::BlockFormat;

use super::activations::{Block, INTEGER_UNIT};
use super::vector::Vector;
use crate::fetch::{Ahead, fetch};
use crate::isa::{InstructionSet, Work};
use crate::pack::{CHUNK, PANEL};
use crate::tile::TILE_COLS;
use crate::w4a16::{for_rows, groups};

/// Panels that [`one_row`] reads at once: 14 % faster from DRAM than one on a single Zen 3 core.
pub(super) const STREAMS: usize = 4;

/// Some rows of A and a stretch of K of some panels. Its products are added to the sums.
#[derive(Debug)]
pub(super) struct Task<'a> {
    /// Block format of the weights.
    pub(super) format: BlockFormat,
    /// Packed weights, from the first chunk of the first panel on.
    pub(super) packed: &'a [u8],
    /// Bytes from panel to panel.
    pub(super) panel_stride: usize,
    pub(super) panels: usize,
    /// Number of chunks of each panel.
    pub(super) chunks: usize,
    /// Activations, `[chunks][rows]`.
    pub(super) blocks: &'a [Block],
    pub(super) rows: usize,
    /// Whether block scales of A are e4m3.
    pub(super) e4m3: bool,
    /// Sums, `[panels][rows][32]`.
    pub(super) sums: &'a mut [f32],
}

impl Work for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        assert!(
            self.panels.saturating_sub(1) * self.panel_stride + self.chunks * CHUNK <= self.packed.len(),
            "weights"
        );
        assert!(self.chunks * self.rows <= self.blocks.len(), "activations");
        assert_eq!(self.panels * self.rows * TILE_COLS, self.sums.len(), "sums");
        // The loops are compiled for each format, so that they do not branch on it for every vector of scales.
        // SAFETY: the machine has the instruction set, since `run` got its token, and the slices were just checked.
        unsafe {
            match self.format {
                BlockFormat::Nvfp4 => multiply::<S>(Task { format: BlockFormat::Nvfp4, ..self }),
                BlockFormat::Mxfp4 => multiply::<S>(Task { format: BlockFormat::Mxfp4, ..self }),
            }
        }
    }
}

/// Adds the products of a task to its sums.
///
/// # Safety
/// The machine has the instruction set of `V`, and the slices of the task are as long as its numbers say: `run` checks that.
/// The functions below rely on the same.
#[inline(always)]
unsafe fn multiply<V: Vector>(task: Task<'_>) {
    let (mut panel, mut sums, mut left) = (task.packed.as_ptr(), task.sums.as_mut_ptr(), task.panels);
    while left > 0 {
        // SAFETY: `left` panels and their sums start at the pointers, which advance by the panels that are done.
        unsafe {
            let done = match task.rows {
                1 if left >= STREAMS => one_row::<V, STREAMS>(&task, panel, sums, left),
                1 if left == 2 => one_row::<V, 2>(&task, panel, sums, left),
                1 => one_row::<V, 1>(&task, panel, sums, left),
                rows if V::ROWS > 0 && rows > 2 * V::ROWS => groups_of_rows::<V>(&task, panel, sums),
                _ => many_rows::<V>(&task, panel, sums),
            };
            left -= done;
            panel = panel.wrapping_add(done * task.panel_stride);
            sums = sums.add(done * task.rows * TILE_COLS);
        }
    }
}

/// One row: each weight is used as soon as it is decoded. Several panels are read at once, since one stream of
/// addresses does not keep the memory busy. Returns the number of panels.
#[inline(always)]
unsafe fn one_row<V: Vector, const PANELS: usize>(
    task: &Task<'_>,
    panel: *const u8,
    sums: *mut f32,
    left: usize,
) -> usize {
    const { assert!(TILE_COLS / V::LANES <= 4 && PANEL.is_multiple_of(V::LANES)) };
    let (vectors, blocks) = (TILE_COLS / V::LANES, task.blocks.as_ptr());
    // SAFETY: `PANELS` panels and their sums start at the pointers, and the task has `chunks` chunks of each and of A. Loops
    // keep p < PANELS, c < chunks and column < 32.
    unsafe {
        let at = |panel: usize, v: usize| sums.add(panel * TILE_COLS + v * V::LANES);
        let mut accumulators: [[V::Floats; 4]; PANELS] =
            std::array::from_fn(|panel| std::array::from_fn(|v| V::load(at(panel, v % vectors))));
        let ahead = Ahead::new(V::AHEAD / PANELS, task.panel_stride, PANELS, left);
        for c in 0..task.chunks {
            let block = blocks.add(c);
            for (p, accumulators) in accumulators.iter_mut().enumerate() {
                let chunk = panel.add(p * task.panel_stride + c * CHUNK);
                ahead.fetch(chunk, c * CHUNK);
                for (i, pair) in accumulators[..vectors].chunks_exact_mut(2).enumerate() {
                    let column = 2 * i * V::LANES;
                    let weights = [V::weights(chunk, column), V::weights(chunk, column + V::LANES)];
                    let dots = dots::<V>(block, &weights);
                    for (v, (accumulator, dots)) in pair.iter_mut().zip(dots).enumerate() {
                        let scales = V::scales(chunk, column + v * V::LANES, task.format);
                        let scale = V::splat((&raw const (*block).scale).cast());
                        *accumulator =
                            add_scaled::<V>(task.format, V::floats(dots), scale, scales, *accumulator);
                    }
                }
            }
        }
        for (panel, accumulators) in accumulators.iter().enumerate() {
            for (v, &accumulator) in accumulators.iter().enumerate().take(vectors) {
                V::store(at(panel, v), accumulator);
            }
        }
    }
    PANELS
}

/// `dots · scale · scales + sum`, with weights of `format`. The first product is exact, so that only the last step rounds. With
/// nvfp4 it does not wait for the dot products.
///
/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn add_scaled<V: Vector>(
    format: BlockFormat,
    dots: V::Floats,
    scale: V::Floats,
    scales: V::Floats,
    sum: V::Floats,
) -> V::Floats {
    // SAFETY: arithmetic in registers needs the instruction set alone.
    unsafe {
        match format {
            BlockFormat::Nvfp4 => V::mul_add(dots, V::mul(scale, scales), sum),
            BlockFormat::Mxfp4 => V::mul_add(V::mul(dots, scale), scales, sum),
        }
    }
}

/// Dot products of the weights of two vectors of features and a block.
///
/// # Safety
/// The machine has the instruction set of `V`, and `block` points to a block.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector>(block: *const Block, weights: &[[V::Quads; 4]; 2]) -> [V::Sums; 2] {
    // SAFETY: `block` points to a block, which has a word of bias and 16 codes.
    unsafe {
        let start = V::start(&raw const (*block).bias);
        V::block_dots([start; 2], weights, (&raw const (*block).codes).cast())
    }
}

/// Several rows: the weights of two vectors of features stay in registers while all rows pass. The sums, which one
/// chunk needs only once, live in the first-level cache. Multiplies one panel and returns 1.
#[inline(always)]
unsafe fn many_rows<V: Vector>(task: &Task<'_>, panel: *const u8, sums: *mut f32) -> usize {
    // SAFETY: a panel of `chunks` chunks and its sums start at the pointers, and the task has `rows` blocks of each chunk of A.
    // Loops keep c < chunks and column < 32.
    unsafe {
        V::swap_pairs(task.rows, sums);
        for c in 0..task.chunks {
            let (chunk, blocks) = (panel.add(c * CHUNK), task.blocks.as_ptr().add(c * task.rows));
            fetch(chunk.wrapping_add(V::AHEAD));
            let integers = V::SCALES_INTEGERS && (*blocks).scale.is_integer();
            for column in (0..TILE_COLS).step_by(2 * V::LANES) {
                let (pass, sums) = (Pass::<V>::new(task, chunk, column), sums.add(column));
                if integers {
                    pass.scaled_by(INTEGER_UNIT).rows::<true>(task.rows, blocks, sums);
                } else {
                    pass.rows::<false>(task.rows, blocks, sums);
                }
            }
        }
        V::swap_pairs(task.rows, sums);
    }
    1
}

/// Chunks whose decoded weights lie in the first-level cache while [`groups_of_rows`] pass.
const CHUNKS: usize = 16;

/// Many rows in groups of up to [`Vector::ROWS`]: their sums stay in registers over some chunks, whose weights live in the
/// first-level cache. On an Ice Lake, 64 rows take a quarter less time than if sums of 512 bits were loaded and stored for each chunk.
/// Multiplies one panel and returns 1.
#[inline(always)]
unsafe fn groups_of_rows<V: Vector>(task: &Task<'_>, panel: *const u8, sums: *mut f32) -> usize {
    const { assert!(V::ROWS == 0 || 2 * V::LANES == TILE_COLS && !V::SCALES_INTEGERS) };
    let mut passes = [const { MaybeUninit::<Pass<V>>::uninit() }; CHUNKS];
    for first in (0..task.chunks).step_by(CHUNKS) {
        let count = CHUNKS.min(task.chunks - first);
        // SAFETY: a panel of `chunks` chunks and its sums start at the pointers, and the task has `rows` blocks of each chunk of A.
        // The first `count` passes are written before they are read, and groups lie inside `rows`.
        unsafe {
            let blocks = task.blocks.as_ptr().add(first * task.rows);
            for (c, to) in passes[..count].iter_mut().enumerate() {
                let chunk = panel.add((first + c) * CHUNK);
                fetch(chunk.wrapping_add(V::AHEAD));
                to.write(Pass::new(task, chunk, 0));
            }
            let passes = std::slice::from_raw_parts(passes.as_ptr().cast::<Pass<V>>(), count);
            for group in groups(task.rows, V::ROWS) {
                let (blocks, sums) = (blocks.add(group.start), sums.add(group.start * TILE_COLS));
                for_rows!(group.len(), V::ROWS, |ROWS| group_of_rows::<V, ROWS>(task, passes, blocks, sums));
            }
        }
    }
    1
}

/// `ROWS` rows and the chunks of some passes.
#[inline(always)]
unsafe fn group_of_rows<V: Vector, const ROWS: usize>(
    task: &Task<'_>,
    passes: &[Pass<V>],
    mut blocks: *const Block,
    to: *mut f32,
) {
    // SAFETY: `groups_of_rows` passes the first of `ROWS` blocks of each chunk, and of as many rows of sums.
    unsafe {
        let at = |row: usize, v: usize| to.add(row * TILE_COLS + v * V::LANES);
        let mut sums = [[V::splat(&0.0); 2]; ROWS];
        for (row, sums) in sums.iter_mut().enumerate() {
            *sums = [V::load(at(row, 0)), V::load(at(row, 1))];
        }
        for pass in passes {
            let mut dots = [[V::start(&0); 2]; ROWS];
            for (row, dots) in dots.iter_mut().enumerate() {
                *dots = [V::start(&raw const (*blocks.add(row)).bias); 2];
            }
            for (q, (&left, &right)) in pass.weights[0].iter().zip(&pass.weights[1]).enumerate() {
                for (row, dots) in dots.iter_mut().enumerate() {
                    let codes = (&raw const (*blocks.add(row)).codes).cast::<i8>();
                    *dots = V::dots(*dots, [left, right], V::quad(codes.add(4 * q)));
                }
            }
            for (row, (sums, dots)) in sums.iter_mut().zip(dots).enumerate() {
                let scale = V::splat((&raw const (*blocks.add(row)).scale).cast());
                for ((sum, dots), scales) in sums.iter_mut().zip(dots).zip(pass.scales) {
                    *sum = add_scaled::<V>(task.format, V::floats(dots), scale, scales, *sum);
                }
            }
            blocks = blocks.add(task.rows);
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                V::store(at(row, v), sum);
            }
        }
    }
}

/// Two vectors of features of one chunk, decoded.
pub(crate) struct Pass<V: Vector> {
    /// Block format of the weights.
    format: BlockFormat,
    /// Whether all block scales are e4m3.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "x86 alone has a way that needs them")
    )]
    pub(super) e4m3: bool,
    /// By vector and quad.
    pub(super) weights: [[V::Quads; 4]; 2],
    /// By vector.
    pub(super) scales: [V::Floats; 2],
}

impl<V: Vector> Pass<V> {
    /// Decodes two vectors of features of a chunk, from `column` on.
    ///
    /// # Safety
    /// The machine has the instruction set of `V`, `chunk` points to a chunk, and two vectors from `column` on are inside of its 32
    /// features.
    #[inline(always)]
    pub(super) unsafe fn new(task: &Task<'_>, chunk: *const u8, column: usize) -> Self {
        let format = task.format;
        // SAFETY: `many_rows` passes a whole chunk, and a column at least two vectors before its end.
        unsafe {
            Self {
                format,
                e4m3: task.e4m3 && format == BlockFormat::Nvfp4,
                weights: [V::weights(chunk, column), V::weights(chunk, column + V::LANES)],
                scales: [V::scales(chunk, column, format), V::scales(chunk, column + V::LANES, format)],
            }
        }
    }

    /// The same with all scales multiplied by `factor`, a power of two.
    #[inline(always)]
    unsafe fn scaled_by(self, factor: f32) -> Self {
        let Self { scales: [left, right], .. } = self;
        // SAFETY: arithmetic in registers needs the instruction set alone, and `splat` reads a reference.
        unsafe {
            let factor = V::splat(&factor);
            Self { scales: [V::mul(left, factor), V::mul(right, factor)], ..self }
        }
    }

    /// Adds the products of all rows to their sums. `INTEGERS` says how the blocks hold their scales.
    #[inline(always)]
    unsafe fn rows<const INTEGERS: bool>(&self, rows: usize, mut block: *const Block, mut sums: *mut f32) {
        // SAFETY: `many_rows` passes the blocks of `rows` rows and their sums at this column.
        unsafe {
            let done = V::first_rows(self, rows, block, sums);
            (block, sums) = (block.add(done), sums.add(done * TILE_COLS));
            for _ in done..rows {
                self.row::<INTEGERS>(block, sums);
                (block, sums) = (block.add(1), sums.add(TILE_COLS));
            }
        }
    }

    /// Adds one row's products to its sums.
    #[inline(always)]
    unsafe fn row<const INTEGERS: bool>(&self, block: *const Block, sums: *mut f32) {
        // SAFETY: `rows` passes one block and the row's sums at this column: two vectors.
        unsafe {
            let scale = &raw const (*block).scale;
            for (v, dots) in dots::<V>(block, &self.weights).into_iter().enumerate() {
                let to = sums.add(v * V::LANES);
                let sum = if INTEGERS {
                    V::mul_add(V::scaled_floats(dots, scale.cast()), self.scales[v], V::load(to))
                } else {
                    add_scaled::<V>(
                        self.format,
                        V::floats(dots),
                        V::splat(scale.cast()),
                        self.scales[v],
                        V::load(to),
                    )
                };
                V::store(to, sum);
            }
        }
    }
}
