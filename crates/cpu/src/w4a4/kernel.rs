//! The W4A4 product of a few rows with one packed panel, generic over the instruction set.
//!
//! ```text
//! for each chunk of 16 k:
//!     decode 16 × 16 weights into registers          nibble → table → byte, once for all rows
//!     for each row:
//!         integer dot products over the chunk         exact
//!         sum += dot as f32 · (scale_a · scale_b)      one rounding
//!   or    sum += (dot as f32 · scale_a) · scale_b      the same, for weights of mxfp4
//!   or    sum += (dot · scale_a) as f32 · scale_b      the same, if the instruction set multiplies there anyway
//! ```
//!
//! The order of the f32 sums is fixed: one accumulator per output, chunks in ascending order, from 0. `dot` (12
//! bits) times the two scales (4 bits each) fits f32, so only the addition rounds, with or without a fused
//! multiply-add, and every instruction set gives the same bits.
//!
//! Two extreme scales of mxfp4 may leave f32 together, where the dot product is small, or zero. So they are not multiplied with
//! each other, and a sum is right, within the rounding of its additions, if the magnitudes of its products add up to less than
//! 2¹²⁷, or 2¹²⁵ where only the weights are mxfp4. Of products below 2⁻¹¹⁴ as many bits may be lost as f32 loses below 2⁻¹²⁶,
//! and portable without a fused multiply-add may lose one more. Within these bounds, which no model comes near, bits are equal.

use dualgemm_formats::BlockFormat;

use super::activations::{Block, INTEGER_UNIT};
use super::vector::Vector;
use crate::fetch::fetch;
use crate::pack::{CHUNK, PANEL};
use crate::tile::TILE_COLS;

/// Panels that [`single`] reads at once: 14 % faster from DRAM than one on a single Zen 3 core.
pub(super) const STREAMS: usize = 4;

/// A few rows of A against a stretch of K of some panels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task {
    /// Block format of the weights.
    pub(super) format: BlockFormat,
    /// First chunk of the first panel.
    pub(super) panel: *const u8,
    /// Bytes from panel to panel.
    pub(super) panel_stride: usize,
    /// Panels.
    pub(super) panels: usize,
    /// Chunks of each panel.
    pub(super) chunks: usize,
    /// Activations, `[chunks][rows]`.
    pub(super) blocks: *const Block,
    /// Rows.
    pub(super) rows: usize,
    /// What the products are added to, `[panels][rows][32]`.
    pub(super) sums: *mut f32,
}

/// Adds the products of a task to its sums.
///
/// # Safety
/// The machine has the instruction set of `V`, and the pointers of the task point to as much as it says.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector>(task: &Task) {
    // Loops are compiled for each format, so that they do not ask for it with every vector of scales.
    let of_format = |format| Task { format, ..*task };
    // SAFETY: the caller's promises.
    unsafe {
        match task.format {
            BlockFormat::Nvfp4 => multiply_format::<V>(&of_format(BlockFormat::Nvfp4)),
            BlockFormat::Mxfp4 => multiply_format::<V>(&of_format(BlockFormat::Mxfp4)),
        }
    }
}

/// [`multiply`], where the compiler knows the format.
#[inline(always)]
unsafe fn multiply_format<V: Vector>(task: &Task) {
    let (mut panel, mut sums, mut left) = (task.panel, task.sums, task.panels);
    while left > 0 {
        // SAFETY: the caller's promises, for panel after panel.
        unsafe {
            let done = match task.rows {
                1 if left >= STREAMS => single::<V, STREAMS>(task, panel, sums),
                1 => single::<V, 1>(task, panel, sums),
                _ => wide::<V>(task, panel, sums),
            };
            left -= done;
            panel = panel.wrapping_add(done * task.panel_stride);
            sums = sums.add(done * task.rows * TILE_COLS);
        }
    }
}

/// One row: each weight is used as soon as it is decoded. Several panels are read at once, since one stream of
/// addresses does not keep the memory busy. Returns how many.
#[inline(always)]
unsafe fn single<V: Vector, const PANELS: usize>(task: &Task, panel: *const u8, sums: *mut f32) -> usize {
    const { assert!(TILE_COLS / V::LANES <= 4 && PANEL.is_multiple_of(V::LANES)) };
    let vectors = TILE_COLS / V::LANES;
    // SAFETY: all offsets stay inside what the task promises: panel < PANELS, chunk < chunks, column < 32.
    unsafe {
        let at = |panel: usize, v: usize| sums.add(panel * TILE_COLS + v * V::LANES);
        let mut accumulators: [[V::Floats; 4]; PANELS] =
            std::array::from_fn(|panel| std::array::from_fn(|v| V::load(at(panel, v % vectors))));
        for c in 0..task.chunks {
            let block = task.blocks.add(c);
            for (p, accumulators) in accumulators.iter_mut().enumerate() {
                let chunk = panel.add(p * task.panel_stride + c * CHUNK);
                fetch(chunk.wrapping_add(V::AHEAD / PANELS));
                for (i, pair) in accumulators[..vectors].chunks_exact_mut(2).enumerate() {
                    let column = 2 * i * V::LANES;
                    let mut dots = [V::start(&raw const (*block).bias); 2];
                    let weights = [V::weights(chunk, column), V::weights(chunk, column + V::LANES)];
                    for (q, (left, right)) in weights[0].into_iter().zip(weights[1]).enumerate() {
                        dots = V::dots(dots, [left, right], quad::<V>(block, q));
                    }
                    for (v, (accumulator, dots)) in pair.iter_mut().zip(dots).enumerate() {
                        let scales = V::scales(chunk, column + v * V::LANES, task.format);
                        let scale = V::splat(&raw const (*block).scale);
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

/// `dots · scale · scales + sum`, with weights of `format`. What is multiplied first is exact, so that only the rest rounds; of
/// nvfp4 it does not wait for the dot products.
#[inline(always)]
pub(super) unsafe fn add_scaled<V: Vector>(
    format: BlockFormat,
    dots: V::Floats,
    scale: V::Floats,
    scales: V::Floats,
    sum: V::Floats,
) -> V::Floats {
    // SAFETY: the caller promises the instructions.
    unsafe {
        match format {
            BlockFormat::Nvfp4 => V::mul_add(dots, V::mul(scale, scales), sum),
            BlockFormat::Mxfp4 => V::mul_add(V::mul(dots, scale), scales, sum),
        }
    }
}

/// Four activations of a block.
#[inline(always)]
unsafe fn quad<V: Vector>(block: *const Block, quad: usize) -> V::Quad {
    // SAFETY: the caller passes a block, which has quads 0 to 3.
    unsafe { V::quad((&raw const (*block).codes).cast::<i8>().add(4 * quad)) }
}

/// Several rows: the weights of two vectors of features stay in registers while all rows pass; the sums, which one
/// chunk needs only once, live in the first-level cache. Multiplies one panel, and returns that.
#[inline(always)]
unsafe fn wide<V: Vector>(task: &Task, panel: *const u8, sums: *mut f32) -> usize {
    // SAFETY: all offsets stay inside what the task promises: chunk < chunks, row < rows, column < 32.
    unsafe {
        for c in 0..task.chunks {
            let (chunk, blocks) = (panel.add(c * CHUNK), task.blocks.add(c * task.rows));
            fetch(chunk.wrapping_add(V::AHEAD));
            let integers = V::SCALES_INTEGERS && (*blocks).scale_is_integer();
            for column in (0..TILE_COLS).step_by(2 * V::LANES) {
                let (pass, sums) = (Pass::<V>::new(task.format, chunk, column), sums.add(column));
                if integers {
                    pass.scaled_by(INTEGER_UNIT).rows::<true>(task.rows, blocks, sums);
                } else {
                    pass.rows::<false>(task.rows, blocks, sums);
                }
            }
        }
    }
    1
}

/// Two vectors of features of one chunk, decoded.
pub(super) struct Pass<V: Vector> {
    /// Block format of the weights.
    format: BlockFormat,
    /// By vector and quad.
    pub(super) weights: [[V::Quads; 4]; 2],
    /// By vector.
    pub(super) scales: [V::Floats; 2],
}

impl<V: Vector> Pass<V> {
    /// Decodes the features `column ..` of a chunk, in which there are two vectors from there on.
    #[inline(always)]
    pub(super) unsafe fn new(format: BlockFormat, chunk: *const u8, column: usize) -> Self {
        // SAFETY: the caller passes a chunk, and a column at least two vectors before its end.
        unsafe {
            Self {
                format,
                weights: [V::weights(chunk, column), V::weights(chunk, column + V::LANES)],
                scales: [V::scales(chunk, column, format), V::scales(chunk, column + V::LANES, format)],
            }
        }
    }

    /// The same with all scales times `factor`, a power of two.
    #[inline(always)]
    unsafe fn scaled_by(self, factor: f32) -> Self {
        let Self { scales: [left, right], .. } = self;
        // SAFETY: the machine has the instructions.
        unsafe {
            let factor = V::splat(&factor);
            Self { scales: [V::mul(left, factor), V::mul(right, factor)], ..self }
        }
    }

    /// Adds the products of all rows to their sums. `INTEGERS` says how the blocks hold their scales.
    #[inline(always)]
    unsafe fn rows<const INTEGERS: bool>(&self, rows: usize, mut block: *const Block, mut sums: *mut f32) {
        for _ in 0..rows {
            // SAFETY: the caller passes the blocks of as many rows, and their sums of these features.
            unsafe {
                self.row::<INTEGERS>(block, sums);
                (block, sums) = (block.add(1), sums.add(TILE_COLS));
            }
        }
    }

    /// Adds one row's products to its sums.
    #[inline(always)]
    unsafe fn row<const INTEGERS: bool>(&self, block: *const Block, sums: *mut f32) {
        // SAFETY: the caller passes one block and the row's sums of these features.
        unsafe {
            let start = V::start(&raw const (*block).bias);
            let mut sums_of_block = [start; 2];
            for q in 0..4 {
                let weights = [self.weights[0][q], self.weights[1][q]];
                sums_of_block = V::dots(sums_of_block, weights, quad::<V>(block, q));
            }
            let scale = &raw const (*block).scale;
            for (v, dots) in sums_of_block.into_iter().enumerate() {
                let to = sums.add(v * V::LANES);
                let sum = if INTEGERS {
                    V::mul_add(V::scaled_floats(dots, scale.cast()), self.scales[v], V::load(to))
                } else {
                    add_scaled::<V>(
                        self.format,
                        V::floats(dots),
                        V::splat(scale),
                        self.scales[v],
                        V::load(to),
                    )
                };
                V::store(to, sum);
            }
        }
    }
}
