//! W4A4: both operands in 4-bit blocks, multiplied as integers, exact up to one f32 addition per block.
//!
//! | module | what |
//! |---|---|
//! | [`activations`] | A in the layout that the kernel reads |
//! | [`vector`] | the operations an instruction set has to provide |
//! | [`kernel`] | the product, written once with these operations |
//! | [`digits`] | one row of longer integers, for W4A16 |
//! | `pipelined` | the same with AVX2, in assembly |
//! | [`spin`] | loops that measure the machine |
//! | [`portable`], [`x86`], [`avx2`], [`avx512`], `neon` | the instruction sets |
//!
//! docs/kernels/cpu.md says which way a product takes.

mod activations;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod digits;
mod kernel;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
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
use dualgemm_gemm::AFormat;
use kernel::Task;
use vector::raw_scale_unit;
pub(crate) use vector::{Vector, scale_unit};

use crate::Isa;
use crate::amx::TILE_K;
use crate::isa::Available;
use crate::pack::{CHUNK, CHUNK_K, PackedGateUp};
use crate::threads::SharedSlice;
use crate::tile::{Prepare, RowTile, RowsOfA, TILE_COLS, TileKernel};
use crate::w4a16::tiles::{self, Bf16Tile};

/// Most rows of a tile. With this many, decoding weights already takes a negligible share of the time.
pub(crate) const TILE_ROWS: usize = 64;

/// Blocks of A, 24 bytes each, that are multiplied with several panels in turn: 192 KiB. A second-level cache of 512 KiB
/// then has room for sums and for the weights that stream through.
const CACHED_BLOCKS: usize = 8192;

/// Fewest rows that tiles of AMX multiply.
pub(crate) const MIN_TILE_ROWS: usize = 48;

/// Whether tiles can hold numbers of these formats.
fn fit_tiles(a: AFormat, b: AFormat, k: usize) -> bool {
    (a, b) == (AFormat::Nvfp4, AFormat::Nvfp4) && k.is_multiple_of(TILE_K)
}

/// Whether tiles multiply so many rows of a problem.
pub(crate) fn takes_tiles(isa: Isa, a: AFormat, b: AFormat, rows: usize, k: usize) -> bool {
    isa.tiles().are_real() && fit_tiles(a, b, k) && rows >= MIN_TILE_ROWS
}

/// Most rows of a tile for a problem. Tiles of AMX take as many rows as in W4A16, since they widen weights as well.
pub(crate) fn tile_rows(isa: Isa, a: AFormat, b: AFormat, k: usize) -> usize {
    if isa == Isa::AmxBf16 && fit_tiles(a, b, k) { crate::w4a16::TILE_ROWS } else { TILE_ROWS }
}

/// The kernel of one instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    isa: Available,
    /// Whether tiles multiply [`MIN_TILE_ROWS`] rows and more.
    tiles: bool,
}

impl Kernel {
    /// The kernel for an instruction set, without tiles.
    pub(crate) fn new(isa: Available) -> Self {
        Self { isa, tiles: false }
    }

    /// The same with [`tiles`], where there are tiles and they hold numbers of these formats.
    pub(crate) fn with_tiles(self, a: AFormat, b: AFormat, k: usize) -> Self {
        Self { tiles: fit_tiles(a, b, k) && self.isa.tiles.are_real(), ..self }
    }

    /// Blocks that hold a row of so many chunks. For tiles they are a whole number of lines: loading a row of a tile from two takes twice
    /// as long.
    pub(crate) fn row_blocks(self, chunks: usize) -> usize {
        const LINES: usize = 3 * 64 / size_of::<Block>();
        let bytes = chunks * CHUNK_K * size_of::<u16>();
        if self.tiles { bytes.div_ceil(size_of::<Block>()).next_multiple_of(LINES) } else { chunks }
    }

    /// Whether tiles multiply so many rows.
    fn takes_tiles(self, rows: usize) -> bool {
        self.tiles && rows >= MIN_TILE_ROWS
    }

    /// Does dot products from registers and returns how many products.
    pub(crate) fn spin_integer_dots(self) -> usize {
        self.isa.dispatch(spin::IntegerDots)
    }

    /// Does f32 multiply-adds from registers and returns how many.
    pub(crate) fn spin_multiply_adds(self) -> usize {
        self.isa.dispatch(spin::MultiplyAdds)
    }

    /// Reads all whole lines of 64 bytes and returns how many bytes.
    pub(crate) fn spin_read(self, memory: &[f32]) -> usize {
        self.isa.dispatch(spin::Read(memory))
    }

    /// Overwrites `sums`, `[panel][32]`, with the products of some panels and one row of integers, in units of
    /// [`digit_unit`]. Blocks are added in their order, from 0: each is an exact integer dot product, which is rounded to
    /// f32, multiplied by the scales and added; a fused multiply-add rounds the last two steps once.
    ///
    /// # Safety
    /// [`chunk`](DigitBlock::chunk) of every block is below the number of chunks of the weights.
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
            left: panels.len(),
            sums: sums.as_mut_ptr(),
        };
        // SAFETY: `panel_range` returned that many panels, the assertion checked the sums, and the caller vouches for the
        // chunks of the blocks.
        self.isa.dispatch(unsafe { digits::Multiply::new(task, blocks) });
    }

    /// What writes the rows of some tiles of A, which are places in `list` if there is one, into `blocks`,
    /// [`row_blocks`](Self::row_blocks) for each. Tiles are `[chunk][row of tile]` blocks, or what [`tiles`] says.
    pub(crate) fn prepare<'a>(
        self,
        a: &'a Source<'a>,
        list: Option<&'a [u32]>,
        tiles: &'a [RowTile],
        blocks: &'a mut [Block],
    ) -> Preparation<'a> {
        let span = match self.tiles {
            _ if tiles.iter().all(|tile| tile.rows == 1) => ROW_SPAN,
            true => TILES_SPAN,
            false => activations::SPAN,
        };
        Preparation { kernel: self, a, list, tiles, span, blocks: SharedSlice::new(blocks) }
    }
}

/// Chunks of one row that are prepared at a time: half a microsecond.
const ROW_SPAN: usize = 4 * activations::SPAN;

/// Three blocks of tiles are as long as a whole number of blocks for each row.
const TILES_SPAN: usize = 3 * tiles::BLOCK_K / CHUNK_K;
const TILES_BLOCKS: usize = TILES_SPAN * CHUNK_K * size_of::<u16>() / size_of::<Block>();
const _: () = assert!(TILES_BLOCKS * size_of::<Block>() == TILES_SPAN * CHUNK_K * size_of::<u16>());

/// Rows of A that become blocks.
#[derive(Debug)]
pub(crate) struct Preparation<'a> {
    kernel: Kernel,
    a: &'a Source<'a>,
    list: Option<&'a [u32]>,
    tiles: &'a [RowTile],
    /// Chunks of a part.
    span: usize,
    blocks: SharedSlice<'a, Block>,
}

impl Preparation<'_> {
    fn spans(&self) -> usize {
        (self.a.k() / CHUNK_K).div_ceil(self.span)
    }

    fn first_row(&self) -> usize {
        self.tiles.first().map_or(0, |tile| tile.first_row)
    }
}

impl<'a> Prepare for Preparation<'a> {
    type Kernel = Bound<'a>;

    fn parts(&self) -> usize {
        self.tiles.len() * self.spans()
    }

    unsafe fn write(&self, part: usize) {
        let Self { kernel, a, .. } = *self;
        let (span, chunks) = (self.span, a.k() / CHUNK_K);
        let (tile, at) = (&self.tiles[part / self.spans()], part % self.spans());
        let rows = RowsOfA::new(tile, self.list);
        let (row, chunks) = (tile.first_row - self.first_row(), at * span..chunks.min((at + 1) * span));
        // SAFETY: each part is written once, and two of them are disjoint: they are different spans of one tile, or of tiles without
        // a common row.
        let blocks =
            |first, len| unsafe { self.blocks.part(row * kernel.row_blocks(a.k() / CHUNK_K) + first, len) };
        if kernel.takes_tiles(tile.rows) {
            let words = chunks.len() * CHUNK_K * tile.rows;
            let len = (words * size_of::<u16>()).div_ceil(size_of::<Block>());
            let out = blocks(at * TILES_BLOCKS * tile.rows, len);
            let out = &mut bytemuck::cast_slice_mut(out)[..words];
            kernel.isa.dispatch(activations::PrepareTiles { a, rows, chunks, out });
            return;
        }
        for first in chunks.clone().step_by(activations::SPAN) {
            let chunks = first..chunks.end.min(first + activations::SPAN);
            let out = blocks(first * tile.rows, chunks.len() * tile.rows);
            kernel.isa.dispatch(activations::Prepare { a, rows, chunks, out });
        }
    }

    unsafe fn bind(&self) -> Bound<'a> {
        let Self { kernel, a, .. } = *self;
        // SAFETY: nobody writes any more.
        let blocks = unsafe { self.blocks.all() };
        Bound { kernel, unit: a.unit(), first_row: self.first_row(), chunks: a.k() / CHUNK_K, blocks }
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

impl Bound<'_> {
    /// Those of a tile.
    fn blocks(&self, tile: &RowTile) -> &[Block] {
        let of_row = self.kernel.row_blocks(self.chunks);
        &self.blocks[(tile.first_row - self.first_row) * of_row..][..of_row * tile.rows]
    }
}

impl TileKernel for Bound<'_> {
    fn bf16(&self, tile: &RowTile) -> Option<Bf16Tile<'_>> {
        let (isa, rows, chunks) = (self.kernel.isa, tile.rows, self.chunks);
        let a = || bytemuck::cast_slice(self.blocks(tile));
        self.kernel.takes_tiles(rows).then(|| Bf16Tile { isa, a: a(), rows, chunks, terms: 1, whole: false })
    }

    fn multiply_whole(&self, tile: &RowTile, weights: &PackedGateUp, panels: Range<usize>, sums: &mut [f32]) {
        let (chunks, rows, blocks) = (self.chunks, tile.rows, self.blocks(tile));
        assert_eq!(weights.chunks(), chunks, "K of A and of the weights");
        let packed = weights.panel_range(panels.clone());
        sums.fill(0.0);
        // All panels take one stretch of K before the next one, so that its activations stay in the second-level cache.
        let stretch = CACHED_BLOCKS / rows;
        for first in (0..chunks).step_by(stretch) {
            self.kernel.isa.dispatch(Task {
                format: weights.format(),
                packed: &packed[first * CHUNK..],
                panel_stride: chunks * CHUNK,
                panels: panels.len(),
                chunks: stretch.min(chunks - first),
                blocks: &blocks[first * rows..],
                rows,
                // What is not has a unit of its own.
                e4m3: self.unit == 1.0,
                sums,
            });
        }
    }

    fn sum_unit(&self, weights: &PackedGateUp) -> f32 {
        // Both codes are doubled.
        0.25 * self.unit / scale_unit(weights.format())
    }
}

/// The value that a sum of 1 of [`Kernel::multiply_digits`] stands for: only the codes of the weights are doubled.
pub(crate) const fn digit_unit(format: BlockFormat) -> f32 {
    0.5 / raw_scale_unit(format)
}
