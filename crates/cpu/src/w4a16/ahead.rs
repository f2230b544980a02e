//! A of the next product, written by the epilogue of the one before it in the order in which tiles read it.

use std::sync::atomic::{AtomicBool, Ordering};

use super::tiles::{block_k, fits_bf16, is_whole};
use super::{Buffer, Kernel, Layout};
use crate::amx::{TILE_K, TILE_ROWS};
use crate::lanes;
use crate::pack::PANEL;
use crate::threads::SharedSlice;
use crate::tile::RowTile;
use crate::vmath::bf16_bits;

/// Where values of A go.
#[derive(Debug)]
pub(crate) struct Ahead<'a> {
    words: SharedSlice<'a, u16>,
    /// All rows of A, from the first one on.
    tiles: &'a [RowTile],
    row_len: usize,
    k: usize,
    block: usize,
    misfits: AtomicBool,
}

impl<'a> Ahead<'a> {
    /// For the rows of some tiles, which are written as tiles read them.
    pub(crate) fn new(kernel: Kernel, tiles: &'a [RowTile], k: usize, buffer: &'a mut Buffer) -> Self {
        buffer.layouts.fill(Layout::Tiles { terms: 1 });
        let (row_len, block) = (2 * buffer.row_len, block_k(is_whole(kernel.isa.tiles, 1, k), k));
        let words = SharedSlice::new(bytemuck::cast_slice_mut(&mut buffer.words));
        Self { words, tiles, row_len, k, block, misfits: AtomicBool::new(false) }
    }

    /// The place of 16 elements of K, and of the rows behind them of the same tile.
    pub(crate) fn place(&self, row: usize, first: usize) -> Place {
        let tile = &self.tiles[self.tiles.partition_point(|tile| tile.first_row + tile.rows <= row)];
        let block = first / self.block * self.block;
        Place {
            start: tile.first_row * self.row_len + block * tile.rows + first % TILE_K,
            len: self.block.min(self.k - block),
            step: (first - block) / TILE_K,
            row: row - tile.first_row,
            rows: tile.rows,
        }
    }

    /// Writes 16 values.
    ///
    /// # Safety
    /// Nobody else may write these elements at the same time.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, at: usize, values: &[f32; PANEL]) {
        let bits = lanes::map(values, bf16_bits);
        if !bits.iter().fold(true, |all, &bits| all & fits_bf16(bits)) {
            self.misfits.store(true, Ordering::Relaxed);
        }
        // SAFETY: the caller vouches that this part is not in use elsewhere.
        unsafe { self.words.part(at, PANEL) }.copy_from_slice(&bits);
    }

    /// Fetches the lines of 16 values.
    pub(crate) fn fetch(&self, at: usize) {
        self.words.fetch(at, PANEL);
    }

    /// Whether tiles multiply all that was written.
    pub(crate) fn fits(&self) -> bool {
        !self.misfits.load(Ordering::Relaxed)
    }
}

/// Elements of a row of a tile and of those behind it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    start: usize,
    /// Elements of K of the block.
    len: usize,
    step: usize,
    row: usize,
    rows: usize,
}

impl Place {
    /// The first of them, of a row so many rows on.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize) -> usize {
        let row = self.row + row;
        let group = row / TILE_ROWS * TILE_ROWS;
        let of_group = TILE_ROWS.min(self.rows - group);
        self.start + group * self.len + (self.step * of_group + row - group) * TILE_K
    }
}
