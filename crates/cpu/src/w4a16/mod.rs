//! W4A16: floats against 4-bit weights, which are decoded exactly; sums are f32.
//!
//! Only sums round: f32, f16 and bf16 activations are exact in f32, and so is a code times its scale. (A weight of mxfp4 can
//! be 6 · 2¹²⁷. Kernels compute with a quarter of it, see [`sum_unit`], so that none exceeds f32.)
//!
//! [`Kernel::prepare`] looks at the numbers of a tile and chooses one of seven ways to multiply: docs/kernels/cpu.md says when each
//! is taken, and why there are so many. Each has one order of sums, which all instruction sets that have it share.
//!
//! | module | what |
//! |---|---|
//! | [`digits`] | one row: integers of two digits, or of three, for the kernels of W4A4 |
//! | [`few_rows`] | floats; weights go from register to register |
//! | [`many_rows`] | floats; weights are decoded into a buffer first |
//! | [`pairs`] | several rows of bf16 or f16: activations and weights as 16-bit integers |
//! | [`tiles`] | many rows on processors with AMX: activations and weights as bf16 |
//! | [`ahead`] | A for them, written by the product before |
//! | `dots` | the same of bf16 with AVX512-BF16, or on ARM64 |
//! | [`kernel`], [`vector`] | what the ways with floats share, and the operations an instruction set has to provide for them |
//! | [`blocks`], [`split`] | writes the activations of many rows; splits floats into integers and rests |
//! | [`portable`], [`x86`], [`avx2`], [`avx512`], `neon` | the instruction sets |
//!
//! However large or small the factors are, a sum is right, within the rounding of K additions in f32, if the magnitudes of its
//! products add up to less than 2¹²⁷: no intermediate value overflows before the sum does, and in particular nothing that is
//! multiplied by a code of zero. Products below 2⁻¹²⁶ lose as many bits as f32 loses there (two more in mxfp4).

pub(crate) mod ahead;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod digits;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dots;
#[cfg(target_arch = "aarch64")]
#[path = "dots_neon.rs"]
pub(crate) mod dots;
mod few_rows;
mod kernel;
mod many_rows;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pairs;
mod portable;
mod split;
#[cfg(test)]
mod tests;
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64", test)),
    allow(dead_code, reason = "no other architecture multiplies bf16, and tests emulate it")
)]
pub(crate) mod tiles;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::in_order;
use dualgemm_formats::{BlockFormat, FloatMatrix, FloatType};
use dualgemm_gemm::{AFormat, DualGemmDesc};
use few_rows::{TOO_LARGE, max_few_rows};
use half::slice::HalfFloatSliceExt;
pub(crate) use kernel::groups;
use kernel::{BLOCK_K, Layout, Task};
pub(crate) use many_rows::for_rows;
pub(crate) use pairs::Pairs;
pub(crate) use vector::Vector;

use crate::aligned::Aligned;
use crate::amx::{TILE_K, Tiles};
use crate::isa::Available;
use crate::pack::{CHUNK, CHUNK_K, PackedGateUp};
use crate::threads::SharedSlice;
use crate::tile::{MAX_TILE_ROWS, Prepare, RowTile, RowsOfA, TILE_COLS, TileKernel};
use crate::w4a4;

/// The kernels of one instruction set for weights of one format.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    isa: Available,
    format: BlockFormat,
}

/// Most rows of a tile. Decoding weights takes 7 % of the time with 64 rows, and a quarter of that with 256.
pub(crate) const TILE_ROWS: usize = 256;

/// Rows of a tile of a plan. Those of one block of K share weights that are widened once.
pub(crate) fn tile_rows(isa: crate::Isa, desc: &DualGemmDesc) -> usize {
    match tile_terms(isa.tiles(), desc.a, desc.b, desc.m, desc.k) {
        Some(terms) if tiles::is_whole(isa.tiles(), terms, desc.k) => MAX_TILE_ROWS,
        _ => TILE_ROWS,
    }
}

/// Elements of K that are prepared at a time.
const SPAN_K: usize = 4 * BLOCK_K;

/// The same for one row of bf16. Rows of f16 and f32 are written at once: most of them have a float somewhere that takes two blocks of
/// digits, so that spans cannot be joined.
const ROW_SPAN_K: usize = 2 * BLOCK_K;

/// Rows that are prepared for [`tiles`] at a time: with whole tiles, a prompt would have too few items for many threads.
const PART_ROWS: usize = 2 * crate::amx::TILE_ROWS;

/// Activations that are multiplied with several panels in turn: 256 KiB. A second-level cache of 512 KiB then has room for
/// sums and for the weights that stream through.
const CACHED: usize = 64 << 10;

/// The value that a sum of 1 stands for: 4 in mxfp4, so that the largest weight, 6 · 2¹²⁷, is an f32. The smallest, 2⁻¹²⁸, stays
/// exact.
const fn sum_unit(format: BlockFormat) -> f32 {
    match format {
        BlockFormat::Nvfp4 => 1.0,
        BlockFormat::Mxfp4 => 4.0,
    }
}

/// Plans of up to this many rows have room for every digit block that can be worthwhile; others have room for one per chunk.
const MAX_ROOMY_ROWS: usize = 64;

/// The activations of some rows, in tiles of any size.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Four-byte words, [`row_len`](Self::row_len) for each row, which hold what `layouts` says.
    words: Aligned<f32>,
    row_len: usize,
    /// How each block of [`BLOCK_K`] of k of each tile is written: as many for each row as it has blocks. A tile uses those of
    /// its first row.
    layouts: Vec<Layout>,
}

/// The number of bf16 that [`tiles`] cut each float of A into, if there may be tiles that take so many rows and this K.
pub(crate) fn tile_terms(tiles: Tiles, a: AFormat, b: BlockFormat, rows: usize, k: usize) -> Option<usize> {
    let terms = match a {
        AFormat::F32 => 3,
        AFormat::F16 => 2,
        AFormat::Bf16 | AFormat::Nvfp4 | AFormat::Mxfp4 => 1,
    };
    let fits = b == BlockFormat::Nvfp4 && k.is_multiple_of(TILE_K) && rows >= tiles::min_rows(tiles, terms)?;
    fits.then_some(terms)
}

impl Buffer {
    /// Room for `span` rows of a plan that has `rows`, and for so many [terms](tiles) of each float, or `None` if the system cannot
    /// give so much memory.
    pub(crate) fn try_new(span: usize, rows: usize, k: usize, terms: usize) -> Option<Self> {
        let digits = if rows <= MAX_ROOMY_ROWS { digits::useful_words(k) } else { digits::words(k) };
        let (row_len, mut layouts) = (digits.max(k).max(k.checked_mul(terms)?.div_ceil(2)), Vec::new());
        let words = Aligned::try_zeroed(span.checked_mul(row_len)?)?;
        layouts.try_reserve_exact(span * k.div_ceil(BLOCK_K)).ok()?;
        layouts.resize(span * k.div_ceil(BLOCK_K), Layout::Floats);
        Some(Self { words, row_len, layouts })
    }
}

impl Kernel {
    /// The kernels for an instruction set and weights of a format.
    pub(crate) fn new(isa: Available, format: BlockFormat) -> Self {
        Self { isa, format }
    }

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

    /// The kernels bound to rows that were written, from `first_row` on.
    pub(crate) fn bind(self, first_row: usize, k: usize, buffer: &Buffer) -> Bound<'_> {
        let Buffer { row_len, ref words, ref layouts } = *buffer;
        Bound { kernel: self, first_row, k, row_len, words, layouts }
    }

    /// The number of terms of each float if the rows are for [`tiles`].
    fn tile_terms(self, a: &FloatMatrix<'_>, rows: usize) -> Option<usize> {
        let format = match a.float_type() {
            FloatType::F32 => AFormat::F32,
            FloatType::F16 => AFormat::F16,
            FloatType::Bf16 => AFormat::Bf16,
        };
        tile_terms(self.isa.tiles, format, self.format, rows, a.cols())
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

/// The kernels and the activations they multiply.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound<'a> {
    kernel: Kernel,
    first_row: usize,
    k: usize,
    row_len: usize,
    words: &'a [f32],
    layouts: &'a [Layout],
}

impl TileKernel for Bound<'_> {
    fn multiply(
        &self,
        tile: &RowTile,
        part: Range<usize>,
        weights: &PackedGateUp,
        panels: Range<usize>,
        room: &mut [f32],
        mut done: impl FnMut(usize, Range<usize>, &mut [f32]),
    ) {
        let Kernel { isa, format } = self.kernel;
        let (rows, row, chunks) = (tile.rows, tile.first_row - self.first_row, self.k / CHUNK_K);
        let a = &self.words[row * self.row_len..][..rows * self.row_len];
        let blocks = self.k.div_ceil(BLOCK_K);
        let layouts = &self.layouts(tile)[..blocks];
        assert_eq!((weights.k(), weights.format()), (self.k, format), "K and format that A was prepared for");
        let (of_tile, sums) = (rows, &mut room[..panels.len() * part.len() * TILE_COLS]);
        let packed = weights.panel_range(panels.clone());
        if let Layout::Tiles { terms } = layouts[0] {
            let (tiles, count, a) = (isa.tiles, panels.len(), bytemuck::cast_slice(a));
            let whole = tiles::is_whole(tiles, terms, self.k);
            let done = |panel, rows, sums: &mut [f32]| done(panels.start + panel, rows, sums);
            return isa.dispatch(tiles::Multiply {
                tiles,
                packed,
                panels: count,
                chunks,
                a,
                of_tile,
                rows: part,
                terms,
                whole,
                sums,
                done,
            });
        }
        assert_eq!(part, 0..rows, "a whole tile");
        if let Layout::Digits { blocks } = layouts[0] {
            let blocks = digits::read(blocks, a);
            // SAFETY: `digits::Write` wrote these blocks for chunks of a row of K, and the weights have the same K.
            unsafe { w4a4::Kernel::new(isa).multiply_digits(weights, panels.clone(), blocks, sums) };
        } else {
            self.multiply_floats(packed, layouts, a, rows, sums);
        }
        for (panel, sums) in panels.zip(sums.chunks_exact_mut(rows * TILE_COLS)) {
            done(panel, 0..rows, sums);
        }
    }

    fn of_bf16(&self, tile: &RowTile) -> bool {
        matches!(self.layouts(tile)[0], Layout::Tiles { .. })
    }

    fn sum_unit(&self, weights: &PackedGateUp) -> f32 {
        sum_unit(weights.format())
    }
}

impl Bound<'_> {
    /// Those of a tile.
    fn layouts(&self, tile: &RowTile) -> &[Layout] {
        &self.layouts[(tile.first_row - self.first_row) * self.k.div_ceil(BLOCK_K)..]
    }

    /// The ways with floats and pairs.
    fn multiply_floats(&self, packed: &[u8], layouts: &[Layout], a: &[f32], rows: usize, sums: &mut [f32]) {
        let (Kernel { isa, format }, chunks) = (self.kernel, self.k / CHUNK_K);
        let few = layouts[0] == Layout::FewRows;
        // All panels take one stretch of K before the next one, so that its activations stay in the second-level cache.
        let stretch = if few { chunks } else { (CACHED / rows / BLOCK_K).max(1) * BLOCK_K / CHUNK_K };
        for first in (0..chunks).step_by(stretch) {
            let task = Task {
                format,
                packed: &packed[first * CHUNK..],
                panel_stride: chunks * CHUNK,
                panels: sums.len() / (rows * TILE_COLS),
                chunks: stretch.min(chunks - first),
                a: &a[first * CHUNK_K * rows..],
                layouts: &layouts[first * CHUNK_K / BLOCK_K..],
                rows,
                sums,
                add: first > 0,
            };
            if few {
                isa.dispatch(few_rows::Multiply(task));
            } else {
                isa.dispatch(many_rows::Multiply(task));
            }
        }
    }
}
