//! W4A4: both operands in 4-bit blocks, multiplied as integers, exact up to one f32 addition per block.
//!
//! | module | what |
//! |---|---|
//! | [`activations`] | A as the kernel reads it |
//! | [`vector`] | the operations an instruction set has to provide |
//! | [`kernel`] | the product, written once over them |
//! | [`digits`] | the same of one row of longer integers, for W4A16 |
//! | `pipelined` | that with AVX2, instruction by instruction |
//! | [`spin`] | loops that measure the machine |
//! | [`portable`], [`x86`], [`avx2`], [`avx512`] | the instruction sets |

mod activations;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod digits;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod pipelined;
mod portable;
mod spin;
#[cfg(test)]
mod tests;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

pub(crate) use activations::{Block, Source};
pub(crate) use digits::DigitBlock;
use digits::DigitTask;
use dualgemm_formats::BlockFormat;
use kernel::Task;
use vector::raw_scale_unit;
pub(crate) use vector::scale_unit;

use crate::isa::FUSED;
use crate::pack::{CHUNK, CHUNK_K, PackedGateUp};
use crate::threads::{self, SharedSlice};
use crate::tile::{RowTile, TILE_COLS, TileKernel};
use crate::{Error, Isa};

/// What is compiled once per instruction set, and needs a machine that has it.
#[derive(Debug, Clone, Copy)]
struct Functions {
    /// [`Source::prepare`].
    prepare: unsafe fn(&Source<'_>, &RowTile, Range<usize>, &mut [Block]),
    /// [`kernel::multiply`].
    multiply: unsafe fn(&Task),
    /// [`digits::multiply`].
    multiply_digits: unsafe fn(&DigitTask, &[DigitBlock]),
    /// [`spin::integer_dots`].
    integer_dots: unsafe fn() -> usize,
    /// [`spin::multiply_adds`].
    multiply_adds: unsafe fn() -> usize,
    /// [`spin::read`].
    read: unsafe fn(*const f32, usize) -> usize,
}

/// Most rows of a tile: beyond, decoding weights takes no time that counts.
pub(crate) const TILE_ROWS: usize = 64;

/// Blocks of A, 24 bytes each, that are multiplied with several panels in turn: 192 KiB, which leaves room for sums
/// and passing weights in a second-level cache of 512 KiB.
const CACHED_BLOCKS: usize = 8192;

/// The kernel of one instruction set, which the machine has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    functions: Functions,
}

impl Kernel {
    /// The kernel for an instruction set.
    ///
    /// # Errors
    /// If this machine lacks it.
    pub(crate) fn new(isa: Isa) -> Result<Self, Error> {
        isa.require()?;
        #[cfg(target_arch = "x86_64")]
        let functions = match isa {
            Isa::Portable => portable::functions::<FUSED>(),
            Isa::Avx2 => avx2::MADDUBS,
            Isa::AvxVnni => avx2::VNNI,
            Isa::Avx512 => avx512::MADDUBS,
            Isa::Avx512Vnni => avx512::VNNI,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let functions = portable::functions::<FUSED>();
        Ok(Self { functions })
    }

    /// The portable kernel, with or without fused multiply-adds.
    #[cfg(test)]
    pub(crate) fn portable<const FUSED: bool>() -> Self {
        Self { functions: portable::functions::<FUSED>() }
    }

    /// Does dot products from registers; returns how many products.
    pub(crate) fn spin_integer_dots(self) -> usize {
        // SAFETY: the machine has the instruction set, or `new` would have failed.
        unsafe { (self.functions.integer_dots)() }
    }

    /// Does f32 multiply-adds from registers; returns how many.
    pub(crate) fn spin_multiply_adds(self) -> usize {
        // SAFETY: the machine has the instruction set, or `new` would have failed.
        unsafe { (self.functions.multiply_adds)() }
    }

    /// Reads all whole lines of 64 bytes; returns how many bytes.
    pub(crate) fn spin_read(self, memory: &[f32]) -> usize {
        // SAFETY: as above, and the lines are inside the slice.
        unsafe { (self.functions.read)(memory.as_ptr(), memory.len() / 16) }
    }

    /// Overwrites `sums`, `[panel][32]`, with the products of some panels and one row of integers, in units of
    /// [`digit_unit`]. Blocks are added in their order, from 0: each is an exact integer dot product, which is rounded to
    /// f32, multiplied with the scales and added, with one rounding for both where multiply-adds are fused.
    ///
    /// # Safety
    /// The weights have the chunks of all blocks.
    ///
    /// # Panics
    /// If `sums` has another size.
    pub(crate) unsafe fn multiply_digits(
        self,
        weights: &PackedGateUp,
        panels: Range<usize>,
        blocks: &[DigitBlock],
        sums: &mut [f32],
    ) {
        assert_eq!(sums.len(), panels.len() * TILE_COLS, "sums of a digit product");
        let task = DigitTask {
            format: weights.format(),
            panel: weights.panel_range(panels.clone()).as_ptr(),
            panel_stride: weights.chunks() * CHUNK,
            panels: panels.len(),
            sums: sums.as_mut_ptr(),
        };
        // SAFETY: the machine has the instruction set, or `new` would have failed; the slices are as long as the task
        // says, and the caller promises the chunks.
        unsafe { (self.functions.multiply_digits)(&task, blocks) };
    }

    /// Writes A into `blocks`, `[tile][chunk][row of tile]`, and returns the kernel bound to it.
    ///
    /// # Panics
    /// If `blocks` is too short for the tiles.
    pub(crate) fn prepare<'a>(
        self,
        threads: usize,
        a: &Source<'_>,
        tiles: &[RowTile],
        blocks: &'a mut [Block],
    ) -> Bound<'a> {
        let chunks = a.k() / CHUNK_K;
        let spans = chunks.div_ceil(activations::SPAN);
        let shared = SharedSlice::new(blocks);
        // One row takes a few microseconds, less than waking a thread.
        let threads = if a.rows() == 1 { 1 } else { threads };
        threads::for_each(
            threads,
            tiles.len() * spans,
            |_| (),
            |(), item| {
                let (tile, first) = (&tiles[item / spans], item % spans * activations::SPAN);
                let span = first..chunks.min(first + activations::SPAN);
                let start = (tile.first_row - tiles[0].first_row) * chunks + span.start * tile.rows;
                // SAFETY: each span of each tile is claimed once, and tiles have no row in common.
                let out = unsafe { shared.part(start, span.len() * tile.rows) };
                // SAFETY: the machine has the instruction set, or `new` would have failed.
                unsafe { (self.functions.prepare)(a, tile, span, out) };
            },
        );
        let first_row = tiles.first().map_or(0, |tile| tile.first_row);
        Bound { kernel: self, unit: a.unit(), first_row, chunks, blocks }
    }
}

/// A kernel and the activations it multiplies.
#[derive(Debug)]
pub(crate) struct Bound<'a> {
    kernel: Kernel,
    unit: f32,
    first_row: usize,
    chunks: usize,
    blocks: &'a [Block],
}

impl TileKernel for Bound<'_> {
    fn multiply(&self, tile: &RowTile, weights: &PackedGateUp, panel: usize, sums: &mut [f32]) {
        self.multiply_panels(tile, weights, panel..panel + 1, sums);
    }

    fn multiply_panels(
        &self,
        tile: &RowTile,
        weights: &PackedGateUp,
        panels: Range<usize>,
        sums: &mut [f32],
    ) {
        let (chunks, rows) = (self.chunks, tile.rows);
        assert_eq!(weights.chunks(), chunks, "K of A and of the weights");
        let blocks = &self.blocks[(tile.first_row - self.first_row) * chunks..][..chunks * rows];
        let packed = weights.panel_range(panels.clone());
        let sums = &mut sums[..panels.len() * rows * TILE_COLS];
        sums.fill(0.0);
        // A stretch of K of all panels before the next one: its activations stay in the second-level cache.
        let stretch = CACHED_BLOCKS / rows;
        for first in (0..chunks).step_by(stretch) {
            let task = Task {
                format: weights.format(),
                panel: packed[first * CHUNK..].as_ptr(),
                panel_stride: chunks * CHUNK,
                panels: panels.len(),
                chunks: stretch.min(chunks - first),
                blocks: blocks[first * rows..].as_ptr(),
                rows,
                sums: sums.as_mut_ptr(),
            };
            // SAFETY: the machine has the instruction set, or `new` would have failed; the slices hold all chunks of
            // all panels and rows; the task covers `first..first + stretch`.
            unsafe { (self.kernel.functions.multiply)(&task) };
        }
    }

    fn sum_unit(&self, weights: &PackedGateUp) -> f32 {
        // Both codes are doubled.
        0.25 * self.unit / scale_unit(weights.format())
    }
}

/// What a sum of [`Kernel::multiply_digits`] of 1 stands for: only the codes of the weights are doubled.
pub(crate) const fn digit_unit(format: BlockFormat) -> f32 {
    0.5 / raw_scale_unit(format)
}
