//! A on its way into the order that kernels read: which way each tile will be multiplied, and what is written for it.

use std::ops::Range;

use dualgemm_formats::FloatMatrix;
use half::slice::HalfFloatSliceExt;

use super::few_rows::{TOO_LARGE, max_few_rows};
use super::kernel::{BLOCK_K, Layout};
use super::{Bound, Buffer, Kernel, blocks, digits, sum_unit, tile_terms, tiles};
use crate::pack::CHUNK_K;
use crate::threads::SharedSlice;
use crate::tile::{Prepare, RowTile, RowsOfA};
use crate::w4a4;

/// Elements of K that are prepared at a time.
pub(super) const SPAN_K: usize = 4 * BLOCK_K;

/// The same for one row of bf16. Rows of f16 and f32 are written at once: most of them have a float somewhere that takes two blocks of
/// digits, so that spans cannot be joined.
const ROW_SPAN_K: usize = 2 * BLOCK_K;

/// Rows that are prepared for [`tiles`] at a time: with whole tiles, a prompt would have too few items for many threads.
const PART_ROWS: usize = 2 * crate::amx::TILE_ROWS;

impl Kernel {
    /// What writes the rows of some tiles of A, which are places in `list` if there is one, into `buffer`, as the kernels read them, on
    /// `threads` threads.
    ///
    /// # Panics
    /// While it writes, if `buffer` is for fewer rows than the tiles span, or for another K.
    pub(crate) fn prepare<'a>(
        self,
        threads: usize,
        a: &'a FloatMatrix<'a>,
        list: Option<&'a [u32]>,
        tiles: &'a [RowTile],
        buffer: &'a mut Buffer,
    ) -> Preparation<'a> {
        let most_rows = tiles.iter().fold(0, |most, tile| most.max(tile.rows));
        let terms = self.tile_terms(a, most_rows);
        let whole = terms.is_some_and(|terms| tiles::is_whole(self.isa.tiles, terms, a.cols()));
        Preparation {
            kernel: self,
            a,
            list,
            tiles,
            block: tiles::block_k(whole, a.cols()),
            span: match (most_rows, a) {
                (1, FloatMatrix::Bf16(_)) if threads > 1 => ROW_SPAN_K,
                (1, _) => a.cols(),
                _ if whole => a.cols(),
                _ => SPAN_K,
            },
            parts_of_tile: terms.map_or(1, |_| most_rows.div_ceil(PART_ROWS)),
            row_len: buffer.row_len,
            words: SharedSlice::new(&mut buffer.words),
            layouts: SharedSlice::new(&mut buffer.layouts),
        }
    }

    /// The number of terms of each float if the rows are for [`tiles`].
    fn tile_terms(self, a: &FloatMatrix<'_>, rows: usize) -> Option<usize> {
        tile_terms(self.isa.tiles, a.float_type().into(), self.format.into(), rows, a.cols())
    }

    /// Makes one row of spans that were written alone: they are, if each has one block of digits for each chunk. Otherwise the row is
    /// written again.
    fn join_row(
        self,
        a: &FloatMatrix<'_>,
        rows: RowsOfA<'_>,
        span: usize,
        out: &mut [f32],
        layouts: &mut [Layout],
    ) {
        let chunks = a.cols() / CHUNK_K;
        let spans = layouts.chunks(span / BLOCK_K).zip((0..chunks).step_by(span / CHUNK_K));
        let whole = |(layouts, first): (&[Layout], usize)| {
            layouts[0] == Layout::Digits { blocks: (span / CHUNK_K).min(chunks - first) }
        };
        if spans.fold(true, |all, span| all & whole(span)) {
            layouts.fill(Layout::Digits { blocks: chunks });
        } else {
            self.write_row(a, rows, out, layouts);
        }
    }

    /// [`digits::Write`].
    fn write_digits(
        self,
        a: &FloatMatrix<'_>,
        rows: RowsOfA<'_>,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Option<usize> {
        let unit = w4a4::digit_unit(self.format) / sum_unit(self.format);
        self.isa.dispatch(digits::Write { unit, a, row: rows.row(0), range, out })
    }

    /// Writes a tile of one row, as digits if it can.
    fn write_row(self, a: &FloatMatrix<'_>, rows: RowsOfA<'_>, out: &mut [f32], layouts: &mut [Layout]) {
        match self.write_digits(a, rows, 0..a.cols(), out) {
            Some(blocks) => layouts.fill(Layout::Digits { blocks }),
            None => self.write_span(a, rows, 0, &mut out[..a.cols()], layouts),
        }
    }

    /// Writes some of the elements `first ..` of the rows of one tile as floats or pairs: `out.len()` words in the order that the
    /// kernels read, and the layout of each block of them.
    fn write_span(
        self,
        a: &FloatMatrix<'_>,
        rows: RowsOfA<'_>,
        first: usize,
        out: &mut [f32],
        layouts: &mut [Layout],
    ) {
        if rows.len() <= max_few_rows(a) && write_few_rows(a, rows, first, out) {
            layouts.fill(Layout::FewRows);
        } else {
            self.write_blocks(a, rows, first, out, layouts);
        }
    }

    /// The same in the order of [`many_rows`] and [`pairs`].
    fn write_blocks(
        self,
        a: &FloatMatrix<'_>,
        rows: RowsOfA<'_>,
        first: usize,
        out: &mut [f32],
        layouts: &mut [Layout],
    ) {
        let firsts = (first..).step_by(BLOCK_K);
        for ((first, out), layout) in firsts.zip(out.chunks_mut(BLOCK_K * rows.len())).zip(layouts) {
            *layout = self.isa.dispatch(blocks::Write { a, rows, first, out });
        }
    }
}

/// The same in the order of [`few_rows`]. Returns false if a number is too large for it.
fn write_few_rows(a: &FloatMatrix<'_>, rows: RowsOfA<'_>, first: usize, out: &mut [f32]) -> bool {
    let count = rows.len();
    let mut widened = [0.0; BLOCK_K];
    for (first, out) in (first..).step_by(BLOCK_K).zip(out.chunks_mut(BLOCK_K * count)) {
        let widened = &mut widened[..out.len() / count];
        for row in 0..count {
            let values = widen(a, rows.row(row), first, widened);
            let too_large = |x: f32| (x.abs() >= TOO_LARGE) & (x.abs() < f32::INFINITY);
            if values.iter().fold(false, |any, &x| any | too_large(x)) {
                return false;
            }
            for (quads, out) in values.as_chunks::<4>().0.chunks(4).zip(out.chunks_exact_mut(CHUNK_K * count))
            {
                let out = out[row * CHUNK_K..][..CHUNK_K].as_chunks_mut::<4>().0;
                for (quad, out) in quads.iter().zip(out) {
                    *out = [quad[0], quad[2], quad[1], quad[3]];
                }
            }
        }
    }
    true
}

/// The elements `first ..` of a row as f32, as many as `room` holds: in place if they are f32, or else in `room`.
#[inline(always)]
pub(crate) fn widen<'a>(a: &'a FloatMatrix<'_>, row: usize, first: usize, room: &'a mut [f32]) -> &'a [f32] {
    let range = first..first + room.len();
    match a {
        FloatMatrix::F32(a) => return &a.row(row)[range],
        FloatMatrix::F16(a) => a.row(row)[range].convert_to_f32_slice(room),
        FloatMatrix::Bf16(a) => a.row(row)[range].convert_to_f32_slice(room),
    }
    room
}

/// Rows of A that are written as the kernels read them.
#[derive(Debug)]
pub(crate) struct Preparation<'a> {
    kernel: Kernel,
    a: &'a FloatMatrix<'a>,
    list: Option<&'a [u32]>,
    tiles: &'a [RowTile],
    /// Elements of K of a block of [`tiles`], and of a part.
    block: usize,
    span: usize,
    /// Parts of [`PART_ROWS`] rows of each tile.
    parts_of_tile: usize,
    row_len: usize,
    words: SharedSlice<'a, f32>,
    layouts: SharedSlice<'a, Layout>,
}

impl Preparation<'_> {
    fn spans(&self) -> usize {
        self.a.cols().div_ceil(self.span)
    }

    fn first_row(&self) -> usize {
        self.tiles.first().map_or(0, |tile| tile.first_row)
    }
}

impl<'a> Prepare for Preparation<'a> {
    type Kernel = Bound<'a>;

    fn parts(&self) -> usize {
        self.tiles.len() * self.spans() * self.parts_of_tile
    }

    unsafe fn write(&self, part: usize) {
        let Self { kernel, a, .. } = *self;
        let (item, start) = (part / self.parts_of_tile, part % self.parts_of_tile * PART_ROWS);
        let (tile, first) = (&self.tiles[item / self.spans()], item % self.spans() * self.span);
        let (rows, row) = (RowsOfA::new(tile, self.list), tile.first_row - self.first_row());
        let (k, blocks) = (a.cols(), a.cols().div_ceil(BLOCK_K));
        let len = self.span.min(k - first);
        let blocks_of = |len: usize| len.div_ceil(BLOCK_K);
        let part = |at: usize, words_len: usize, layouts_len: usize| {
            // SAFETY: each part is written once, and two of them are disjoint: they are different spans, or rows for tiles, of one tile,
            // or of tiles without a common row.
            unsafe {
                (
                    self.words.part(row * self.row_len + at, words_len),
                    self.layouts.part((row + start) * blocks + first / BLOCK_K, layouts_len),
                )
            }
        };
        if start >= tile.rows {
            return;
        }
        if tile.rows == 1 && self.spans() == 1 {
            let (out, layouts) = part(0, self.row_len, blocks);
            kernel.write_row(a, rows, out, layouts);
            return;
        }
        if tile.rows == 1 {
            // A row has room for a block for each chunk.
            let (out, layouts) = part(digits::words(first), digits::words(len), blocks_of(len));
            let written = kernel.write_digits(a, rows, first..first + len, out);
            layouts.fill(written.map_or(Layout::Floats, |blocks| Layout::Digits { blocks }));
            return;
        }
        if let Some(terms) = kernel.tile_terms(a, tile.rows) {
            let (first_row, rows) = (tile.first_row + start, PART_ROWS.min(tile.rows - start));
            let rows = RowsOfA::new(&RowTile { first_row, rows, ..*tile }, self.list);
            let write = |first: usize| {
                let len = self.block.min(k - first);
                let words_of = |rows: usize, k: usize| rows * k * terms / 2;
                let at = words_of(tile.rows, first) + words_of(start, len);
                let (out, _) = part(at, words_of(rows.len(), len), 0);
                let out = bytemuck::cast_slice_mut(out);
                kernel.isa.dispatch(tiles::Write { a, terms, block: self.block, rows, first, out })
            };
            // What does not fit is written below.
            let fits = (first..first + len).step_by(self.block).all(write);
            let (_, layouts) = part(0, 0, blocks_of(len));
            layouts.fill(if fits { Layout::Tiles { terms } } else { Layout::Floats });
            return;
        }
        let (out, layouts) = part(first * tile.rows, len * tile.rows, blocks_of(len));
        kernel.write_span(a, rows, first, out, layouts);
    }

    unsafe fn bind(&self) -> Bound<'a> {
        let Self { kernel, a, row_len, .. } = *self;
        let (first_row, k, blocks) = (self.first_row(), a.cols(), a.cols().div_ceil(BLOCK_K));
        for tile in self.tiles {
            let (rows, row) = (RowsOfA::new(tile, self.list), tile.first_row - first_row);
            // SAFETY: nobody else writes any more, and tiles have no row in common.
            let (out, layouts) = unsafe {
                (
                    self.words.part(row * row_len, tile.rows * row_len),
                    self.layouts.part(row * blocks, tile.rows * blocks),
                )
            };
            if tile.rows == 1 && self.spans() == 1 {
                continue;
            }
            if tile.rows == 1 {
                kernel.join_row(a, rows, self.span, out, layouts);
                continue;
            }
            let (whole, rows_of_part) = kernel
                .tile_terms(a, tile.rows)
                .map_or((Layout::FewRows, tile.rows), |terms| (Layout::Tiles { terms }, PART_ROWS));
            let of_parts = layouts.chunks(rows_of_part * blocks).flat_map(|part| &part[..blocks]);
            let are_whole = || of_parts.clone().map(|&layout| layout == whole);
            let (any, all) = (are_whole().any(|is| is), are_whole().all(|is| is));
            if any && !all || whole != Layout::FewRows && !any {
                // Some spans hold numbers too large or too small for the order of the others.
                kernel.write_blocks(a, rows, 0, &mut out[..k * tile.rows], &mut layouts[..blocks]);
            }
        }
        // SAFETY: nobody writes any more.
        let (words, layouts) = unsafe { (self.words.all(), self.layouts.all()) };
        Bound { kernel, first_row, k, row_len, words, layouts }
    }
}
