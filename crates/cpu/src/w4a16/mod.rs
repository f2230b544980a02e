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
//! | [`preparation`] | which way a tile goes, and its activations as that way reads them |
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
mod preparation;
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

use dualgemm_formats::BlockFormat;
use dualgemm_gemm::{AFormat, DualGemmDesc};
pub(crate) use kernel::groups;
use kernel::{BLOCK_K, Layout, Task};
pub(crate) use many_rows::for_rows;
pub(crate) use pairs::Pairs;
pub(crate) use preparation::widen;
use tiles::Bf16Tile;
pub(crate) use vector::Vector;

use crate::aligned::Aligned;
use crate::amx::{TILE_K, Tiles};
use crate::isa::Available;
use crate::pack::{CHUNK, CHUNK_K, PackedGateUp};
use crate::tile::{MAX_TILE_ROWS, RowTile, TILE_COLS, TileKernel};
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
pub(crate) fn tile_terms(tiles: Tiles, a: AFormat, b: AFormat, rows: usize, k: usize) -> Option<usize> {
    let terms = match a {
        AFormat::F32 => 3,
        AFormat::F16 => 2,
        AFormat::Bf16 | AFormat::Nvfp4 | AFormat::Mxfp4 => 1,
    };
    let fits = b == AFormat::Nvfp4 && k.is_multiple_of(TILE_K) && rows >= tiles::min_rows(tiles, terms)?;
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

    /// The kernels bound to rows that were written, from `first_row` on.
    pub(crate) fn bind(self, first_row: usize, k: usize, buffer: &Buffer) -> Bound<'_> {
        let Buffer { row_len, ref words, ref layouts } = *buffer;
        Bound { kernel: self, first_row, k, row_len, words, layouts }
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
    fn bf16(&self, tile: &RowTile) -> Option<Bf16Tile<'_>> {
        let Layout::Tiles { terms } = self.layouts(tile)[0] else { return None };
        let (isa, a) = (self.kernel.isa, bytemuck::cast_slice(self.words(tile)));
        let whole = tiles::is_whole(isa.tiles, terms, self.k);
        Some(Bf16Tile { isa, a, rows: tile.rows, chunks: self.k / CHUNK_K, terms, whole })
    }

    fn multiply_whole(&self, tile: &RowTile, weights: &PackedGateUp, panels: Range<usize>, sums: &mut [f32]) {
        let (Kernel { isa, format }, a) = (self.kernel, self.words(tile));
        assert_eq!((weights.k(), weights.format()), (self.k, format), "K and format that A was prepared for");
        let layouts = &self.layouts(tile)[..self.k.div_ceil(BLOCK_K)];
        if let Layout::Digits { blocks } = layouts[0] {
            let blocks = digits::read(blocks, a);
            // SAFETY: `digits::Write` wrote these blocks for chunks of a row of K, and the weights have the same K.
            unsafe { w4a4::Kernel::new(isa).multiply_digits(weights, panels, blocks, sums) };
        } else {
            self.multiply_floats(weights.panel_range(panels), layouts, a, tile.rows, sums);
        }
    }

    fn sum_unit(&self, weights: &PackedGateUp) -> f32 {
        sum_unit(weights.format())
    }
}

impl Bound<'_> {
    /// Those of a tile.
    fn words(&self, tile: &RowTile) -> &[f32] {
        &self.words[(tile.first_row - self.first_row) * self.row_len..][..tile.rows * self.row_len]
    }

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
