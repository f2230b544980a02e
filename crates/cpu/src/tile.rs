//! The interface between a kernel and its epilogue: a tile of f32 sums, handed over while it is in the cache.
//!
//! ```text
//! [`TileKernel::multiply`]  →  sums[rows][32]  →  [`TileSink::store`]
//!  W4A4 or W4A16               16 gate, 16 up      scale, bias, activation, convert or re-quantize, write
//! ```
//!
//! A tile covers up to [`MAX_TILE_ROWS`] rows and one packed panel: a row of a tile is one block of a re-quantized C, or two if
//! the panel is of a linear layer, whose 32 sums are 32 columns of C.

use std::ops::Range;

use crate::pack::{PANEL, PackedGateUp};
use crate::threads;
use crate::w4a16::tiles::Bf16Tile;

/// Most rows that a tile may have. A plan's tiles have at most [`CpuPlan::tile_rows`](crate::CpuPlan::tile_rows).
pub const MAX_TILE_ROWS: usize = 512;

/// f32 sums per row of a tile: 16 gate features, then the same 16 up features, or 32 features of a linear layer.
pub const TILE_COLS: usize = 2 * PANEL;

/// Consecutive rows of A (and C) that are multiplied with the same weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowTile {
    /// Index of the group (expert or batch entry) whose weights the rows belong to.
    pub group: usize,
    /// First row in A and in C.
    pub first_row: usize,
    /// Rows, 1 to [`MAX_TILE_ROWS`].
    pub rows: usize,
}

/// The rows of A that a tile takes: consecutive ones, or those that a list names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowsOfA<'a> {
    tile: RowTile,
    list: Option<&'a [u32]>,
}

impl<'a> RowsOfA<'a> {
    /// Those of a tile, whose rows are places in the list if there is one.
    pub(crate) fn new(tile: &RowTile, list: Option<&'a [u32]>) -> Self {
        Self { tile: *tile, list }
    }

    /// How many.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.tile.rows
    }

    /// One of them.
    #[inline(always)]
    pub(crate) fn row(&self, index: usize) -> usize {
        let at = self.tile.first_row + index;
        self.list.map_or(at, |list| list[at] as usize)
    }
}

/// Sums of one tile.
#[derive(Debug)]
pub struct Tile<'a> {
    /// Rows, and the group that they belong to.
    pub rows: RowTile,
    /// First column of C, a multiple of 16.
    pub first_col: usize,
    /// Columns that exist, 1 to 16, or to 32 in a linear layer; sums beyond them have no meaning.
    pub cols: usize,
    /// The value that a sum of 1 stands for, without tensor scales: a power of two.
    pub unit: f32,
    /// Whether bf16 were multiplied: such sums differ from one instruction set to the other, and so may what is made of them.
    pub of_bf16: bool,
    /// `[rows][32]` sums, each half on its own cache line. The sink may overwrite them.
    pub sums: &'a mut [f32],
}

/// Computes tiles.
pub(crate) trait TileKernel: Sync {
    /// A of a tile that is multiplied as bf16. Its rows may be shared among threads, in parts that start at multiples of 16.
    fn bf16(&self, tile: &RowTile) -> Option<Bf16Tile<'_>>;

    /// Overwrites `sums`, `[panels][rows][32]`, with the products of a tile that is not, and some panels of `weights`.
    fn multiply_whole(&self, tile: &RowTile, weights: &PackedGateUp, panels: Range<usize>, sums: &mut [f32]);

    /// The value that a sum of 1 stands for: a power of two. Sinks multiply it into their alpha without loss.
    fn sum_unit(&self, weights: &PackedGateUp) -> f32;

    /// Multiplies some rows of a tile, which are all unless it is [`bf16`](Self::bf16), with some panels of `weights`. As soon
    /// as sums are complete, those of a panel and of all these rows or a part of them go to `done`: `[rows][32]`, in units of
    /// [`sum_unit`](Self::sum_unit), without tensor scales. They lie in `room`, which has room for all.
    fn multiply(
        &self,
        tile: &RowTile,
        rows: Range<usize>,
        weights: &PackedGateUp,
        panels: Range<usize>,
        room: &mut [f32],
        mut done: impl FnMut(usize, Range<usize>, &mut [f32]),
    ) {
        let sums = &mut room[..panels.len() * rows.len() * TILE_COLS];
        if let Some(a) = self.bf16(tile) {
            let done = |panel, rows, sums: &mut [f32]| done(panels.start + panel, rows, sums);
            return a.multiply(rows, weights, panels.clone(), sums, done);
        }
        assert_eq!(rows, 0..tile.rows, "a whole tile");
        self.multiply_whole(tile, weights, panels.clone(), sums);
        for (panel, sums) in panels.zip(sums.chunks_exact_mut(tile.rows * TILE_COLS)) {
            done(panel, rows.clone(), sums);
        }
    }
}

/// A wave of rows of A that threads write in the order of a kernel, part by part.
pub(crate) trait Prepare: Sync + Sized {
    /// What multiplies them.
    type Kernel: TileKernel + Send;

    /// The number of parts.
    fn parts(&self) -> usize;

    /// Writes a part.
    ///
    /// # Safety
    /// Each part is written once.
    unsafe fn write(&self, part: usize);

    /// The kernel, bound to what was written.
    ///
    /// # Safety
    /// All parts are written, and this is called once.
    unsafe fn bind(&self) -> Self::Kernel;

    /// Writes all parts on up to `threads` threads.
    fn all(self, threads: usize) -> Self::Kernel {
        // SAFETY: `for_each` hands out each part once, and returns when all are written.
        unsafe {
            threads::for_each(threads, self.parts(), |_| (), |(), part| self.write(part));
            self.bind()
        }
    }
}

/// Rows that were written before.
pub(crate) struct Written<K>(pub K);

impl<K: TileKernel + Copy + Send> Prepare for Written<K> {
    type Kernel = K;

    fn parts(&self) -> usize {
        1
    }

    unsafe fn write(&self, _: usize) {}

    unsafe fn bind(&self) -> K {
        self.0
    }
}

/// Consumes tiles. Several threads call it at once, in any order, and every element of C comes once.
pub trait TileSink: Sync {
    /// Finishes and writes one tile.
    fn store(&self, tile: &mut Tile<'_>);

    /// Asks for the memory that [`store`](Self::store) will write soon, of so many columns from `first_col` on. By default does nothing.
    fn fetch(&self, _rows: &RowTile, _first_col: usize, _cols: usize) {}
}
