//! W4A16: float activations as they are, 4-bit weights decoded exactly, f32 sums.
//!
//! Only sums round: f32, f16 and bf16 activations are exact in f32, and so is a code times its scale. (A weight of mxfp4 can
//! be 6 · 2¹²⁷. So kernels compute with a quarter of them, see [`sum_unit`], and none exceeds f32.) One row, few rows and many
//! rows, of bf16 or of others, go different ways, chosen from the activations of a tile alone, each with one order of sums for
//! all instruction sets.
//!
//! However large or small the factors are, a sum is right, within the rounding of K additions in f32, if the magnitudes
//! of its products add up to less than 2¹²⁷: nothing on the way exceeds f32 before them, in particular not what is multiplied
//! with a code of zero. Of products below 2⁻¹²⁶ as many bits are lost as f32 loses there (two more in mxfp4).
//!
//! | module | what |
//! |---|---|
//! | [`digits`] | one row: activations as integers, for the kernels of W4A4 |
//! | [`kernel`] | any rows: weights as f32, by one of two algorithms |
//! | [`narrow`], [`wide`] | for few rows, for many |
//! | [`vector`] | the operations an instruction set has to provide for that |
//! | [`pairs`] | many rows of bf16 or f16: activations and weights as 16-bit integers |
//! | [`blocks`] | the activations of many rows, as floats or integers |
//! | [`split`] | floats as integers times a power of two |
//! | [`portable`], [`x86`], [`avx2`], [`avx512`] | the instruction sets |

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod digits;
mod kernel;
mod narrow;
mod pairs;
mod portable;
mod split;
#[cfg(test)]
mod tests;
mod vector;
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use dualgemm_formats::{BlockFormat, FloatMatrix};
use half::slice::HalfFloatSliceExt;
use kernel::{BLOCK_K, Task, narrow_rows};
use narrow::{AS_NARROW, TOO_LARGE};

use crate::isa::FUSED;
use crate::pack::{CHUNK, CHUNK_K, PackedGateUp};
use crate::threads::{self, SharedSlice};
use crate::tile::{RowTile, TILE_COLS, TileKernel};
use crate::{Error, Isa, w4a4};

/// What is compiled once per instruction set, and needs a machine that has it.
#[derive(Debug, Clone, Copy)]
struct Functions {
    /// [`narrow::narrow`].
    narrow: unsafe fn(&Task),
    /// [`wide::wide`].
    wide: unsafe fn(&Task),
    /// Most rows of a group of a wide tile as floats.
    group_rows: usize,
    /// The same as integers.
    pair_rows: usize,
}

/// The kernels of one instruction set, which the machine has, for weights of one format.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    isa: Isa,
    format: BlockFormat,
    digits: w4a4::Kernel,
    functions: Functions,
}

/// Most rows of a tile: decoding weights takes 7 % of the time with 64 rows, and a quarter of that with 256.
pub(crate) const TILE_ROWS: usize = 256;

/// Elements of K that are prepared at a time.
const SPAN_K: usize = 4 * BLOCK_K;

/// Activations that are multiplied with several panels in turn: 256 KiB, which leaves room for sums and passing weights
/// in a second-level cache of 512 KiB.
const CACHED: usize = 64 << 10;

/// Words in front of each tile in the buffer of activations: one cache line. Of a tile of one row, the first word tells
/// how it is written, and the second is the bits of the number of blocks if as digits.
const HEADER: usize = 16;
const AS_FLOATS: f32 = 0.0;
const AS_DIGITS: f32 = 1.0;

/// What a sum of 1 stands for: 4 in mxfp4, so that the largest weight, 6 · 2¹²⁷, is an f32. The smallest, 2⁻¹²⁸, stays exact.
const fn sum_unit(format: BlockFormat) -> f32 {
    match format {
        BlockFormat::Nvfp4 => 1.0,
        BlockFormat::Mxfp4 => 4.0,
    }
}

/// Plans of up to this many rows have room for any number of blocks that is of use, others for one per chunk.
const MAX_ROOMY_ROWS: usize = 64;

/// Words that the activations of `span` rows take, in tiles of any size, if the plan has `rows`.
pub(crate) fn buffer_len(span: usize, rows: usize, k: usize) -> usize {
    span * row_len(rows, k)
}

fn row_len(rows: usize, k: usize) -> usize {
    let digits = if rows <= MAX_ROOMY_ROWS { digits::useful_words(k) } else { digits::words(k) };
    HEADER + digits.max(k + k.div_ceil(BLOCK_K))
}

impl Kernel {
    /// The kernels for an instruction set and weights of a format.
    ///
    /// # Errors
    /// If this machine lacks it.
    pub(crate) fn new(isa: Isa, format: BlockFormat) -> Result<Self, Error> {
        let digits = w4a4::Kernel::new(isa)?;
        #[cfg(target_arch = "x86_64")]
        let functions = match isa {
            Isa::Portable => portable::functions::<FUSED>(),
            Isa::Avx2 => avx2::MADD,
            Isa::AvxVnni => avx2::VNNI,
            Isa::Avx512 => avx512::MADD,
            Isa::Avx512Vnni => avx512::VNNI,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let functions = portable::functions::<FUSED>();
        Ok(Self { isa, format, digits, functions })
    }

    /// Writes the rows of some tiles of A into `buffer`, as the kernels read them, and returns the kernels bound to it. `rows`
    /// are those of the plan.
    ///
    /// # Panics
    /// If `buffer` is shorter than [`buffer_len`] of the rows that the tiles span.
    pub(crate) fn prepare<'a>(
        self,
        threads: usize,
        a: &FloatMatrix<'_>,
        rows: usize,
        tiles: &[RowTile],
        buffer: &'a mut [f32],
    ) -> Bound<'a> {
        let (k, row_len) = (a.cols(), row_len(rows, a.cols()));
        let first_row = tiles.first().map_or(0, |tile| tile.first_row);
        let shared = SharedSlice::new(buffer);
        // One row takes a few microseconds, less than waking a thread.
        let threads = if a.rows() == 1 { 1 } else { threads };
        let spans = k.div_ceil(SPAN_K);
        threads::for_each(
            threads,
            tiles.len() * spans,
            |_| (),
            |(), item| {
                let (tile, first) = (&tiles[item / spans], item % spans * SPAN_K);
                let start = (tile.first_row - first_row) * row_len;
                if tile.rows > 1 {
                    let len = SPAN_K.min(k - first);
                    let kinds = start + HEADER + k * tile.rows + first / BLOCK_K;
                    // SAFETY: each span of each tile is claimed once, and tiles have no row in common.
                    let (out, kinds) = unsafe {
                        (
                            shared.part(start + HEADER + first * tile.rows, len * tile.rows),
                            shared.part(kinds, len.div_ceil(BLOCK_K)),
                        )
                    };
                    self.write_span(a, tile, first, out, kinds);
                } else if first == 0 {
                    // SAFETY: as above; this takes all spans of the tile.
                    let (header, out) = unsafe { shared.part(start, row_len) }.split_at_mut(HEADER);
                    let unit = w4a4::digit_unit(self.format) / sum_unit(self.format);
                    // SAFETY: the machine has the instruction set, or `new` would have failed.
                    let written = unsafe { digits::write(self.isa, unit, a, tile.first_row, out) };
                    if let Some(count) = written {
                        (header[0], header[1]) = (AS_DIGITS, f32::from_bits(count as u32));
                    } else {
                        header[0] = AS_FLOATS;
                        let (out, kinds) = out.split_at_mut(k);
                        self.write_span(a, tile, 0, out, &mut kinds[..k.div_ceil(BLOCK_K)]);
                    }
                }
            },
        );
        for tile in tiles.iter().filter(|tile| (2..=narrow_rows(a)).contains(&tile.rows)) {
            let start = (tile.first_row - first_row) * row_len + HEADER;
            let (out, kinds) = buffer[start..].split_at_mut(k * tile.rows);
            let kinds = &mut kinds[..k.div_ceil(BLOCK_K)];
            let narrow = kinds.iter().filter(|kind| **kind == AS_NARROW).count();
            if (1..kinds.len()).contains(&narrow) {
                // Numbers in some spans are too large for the order of the others.
                self.write_blocks(a, tile, 0, out, kinds);
            }
        }
        Bound { kernel: self, first_row, row_len, k, a: buffer }
    }

    /// Some of the elements `first ..` of the rows of one tile, `out.len()` values in the order that the kernels read, and
    /// what each block of them is.
    fn write_span(
        self,
        a: &FloatMatrix<'_>,
        tile: &RowTile,
        first: usize,
        out: &mut [f32],
        kinds: &mut [f32],
    ) {
        if tile.rows <= narrow_rows(a) && write_narrow(a, tile, first, out) {
            kinds.fill(AS_NARROW);
        } else {
            self.write_blocks(a, tile, first, out, kinds);
        }
    }

    /// The same in the order of [`wide`].
    fn write_blocks(
        self,
        a: &FloatMatrix<'_>,
        tile: &RowTile,
        first: usize,
        out: &mut [f32],
        kinds: &mut [f32],
    ) {
        let firsts = (first..).step_by(BLOCK_K);
        for ((first, out), kind) in firsts.zip(out.chunks_mut(BLOCK_K * tile.rows)).zip(kinds) {
            let Functions { group_rows, pair_rows, .. } = self.functions;
            let block = blocks::Write { a, tile, first, group_rows, pair_rows, out };
            // SAFETY: the machine has the instruction set, or `new` would have failed.
            *kind = unsafe { blocks::write(self.isa, block) };
        }
    }
}

/// The same in the order of [`narrow`]. Returns false if a number is too large for it.
fn write_narrow(a: &FloatMatrix<'_>, tile: &RowTile, first: usize, out: &mut [f32]) -> bool {
    let rows = tile.rows;
    let mut wide = [0.0; BLOCK_K];
    for (first, out) in (first..).step_by(BLOCK_K).zip(out.chunks_mut(BLOCK_K * rows)) {
        let wide = &mut wide[..out.len() / rows];
        for row in 0..rows {
            let values = widen(a, tile.first_row + row, first, wide);
            let too_large = |x: f32| (x.abs() >= TOO_LARGE) & (x.abs() < f32::INFINITY);
            if values.iter().fold(false, |any, &x| any | too_large(x)) {
                return false;
            }
            for (quads, out) in values.as_chunks::<4>().0.chunks(4).zip(out.chunks_exact_mut(CHUNK_K * rows))
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

/// The elements `first ..` of a row as f32, as many as `wide` has room for.
#[inline(always)]
fn widen<'a>(a: &'a FloatMatrix<'_>, row: usize, first: usize, wide: &'a mut [f32]) -> &'a [f32] {
    let range = first..first + wide.len();
    match a {
        FloatMatrix::F32(a) => return &a.row(row)[range],
        FloatMatrix::F16(a) => a.row(row)[range].convert_to_f32_slice(wide),
        FloatMatrix::Bf16(a) => a.row(row)[range].convert_to_f32_slice(wide),
    }
    wide
}

/// The kernels and the activations they multiply.
#[derive(Debug)]
pub(crate) struct Bound<'a> {
    kernel: Kernel,
    first_row: usize,
    row_len: usize,
    k: usize,
    a: &'a [f32],
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
        let (rows, chunks) = (tile.rows, self.k / CHUNK_K);
        let start = (tile.first_row - self.first_row) * self.row_len;
        let (header, a) = self.a[start..][..rows * self.row_len].split_at(HEADER);
        assert_eq!((weights.k(), weights.format()), (self.k, self.kernel.format), "what A was prepared for");
        let sums = &mut sums[..panels.len() * rows * TILE_COLS];
        if rows == 1 && header[0] == AS_DIGITS {
            let blocks = digits::read(header[1].to_bits() as usize, a);
            // SAFETY: `digits::write` wrote blocks of these chunks.
            return unsafe { self.kernel.digits.multiply_digits(weights, panels, blocks, sums) };
        }
        let packed = weights.panel_range(panels.clone());
        let (a, kinds) = a.split_at(rows * self.k);
        let Functions { narrow, wide, .. } = self.kernel.functions;
        let (function, stretch) = if kinds[0] == AS_NARROW {
            (narrow, chunks)
        } else {
            // A stretch of K of all panels before the next one: its activations stay in the second-level cache.
            (wide, (CACHED / rows / BLOCK_K).max(1) * BLOCK_K / CHUNK_K)
        };
        for first in (0..chunks).step_by(stretch) {
            let task = Task {
                format: weights.format(),
                panel: packed[first * CHUNK..].as_ptr(),
                panel_stride: chunks * CHUNK,
                panels: panels.len(),
                chunks: stretch.min(chunks - first),
                a: a[first * CHUNK_K * rows..].as_ptr(),
                kinds: kinds[first * CHUNK_K / BLOCK_K..].as_ptr(),
                rows,
                sums: sums.as_mut_ptr(),
                add: first > 0,
            };
            // SAFETY: the machine has the instruction set, or `new` would have failed; the slices hold all chunks of
            // all panels and rows; the task covers `first..first + stretch`.
            unsafe { function(&task) };
        }
    }

    fn sum_unit(&self, weights: &PackedGateUp) -> f32 {
        sum_unit(weights.format())
    }
}
