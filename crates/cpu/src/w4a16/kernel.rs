//! What the two ways with floats share: see [`few_rows`](super::few_rows) and [`many_rows`](super::many_rows).
//!
//! Each has one order of f32 sums, the same on every instruction set. All multiply-adds are fused, except in
//! [`portable`](super::portable) kernels on machines that cannot:
//!
//! ```text
//! few rows, all numbers below 2¹²¹: bound by decoding; weights go from register to register
//!     per chunk of 16 k, two chains: chain x sums a[k] · code[k] over k mod 4 = 2x, 2x+1, ascending, from 0
//!     sum[x] += chain[x] · scale                       chunks ascending, from 0
//!     sum = sum[0] + sum[1]
//!
//! many rows: bound by multiplication; weights are decoded once per tile into a buffer in the first-level cache
//!     per BLOCK_K of k, one chain: a[k] · (code[k] · scale), ascending, from 0; code · scale is exact in f32
//!     sum = the first chain, then += chain             blocks ascending
//!   or, if this block of the tile is integers, the order that pairs.rs states
//! ```

use std::ops::Range;

use dualgemm_formats::BlockFormat;

use crate::pack::{CHUNK, CHUNK_K};
use crate::tile::TILE_COLS;

/// Elements of K that [`many_rows`](super::many_rows) decodes at a time: 16 features of them are half a first-level cache of
/// 32 KiB.
pub(super) const BLOCK_K: usize = 256;

/// How the activations of a tile are written in one block of [`BLOCK_K`] of k.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Layout {
    /// Floats, `[chunk][row][k]`, in the order of [`few_rows`](super::few_rows).
    FewRows,
    /// Floats, `[group of rows][k][row of group]`.
    Floats,
    /// Pairs of integers, and behind them so many rests: see [`blocks`](super::blocks).
    Pairs { rests: usize },
    /// So many bf16 for each float: see [`tiles`](super::tiles). All blocks of a tile are this, or none.
    Tiles { terms: usize },
    /// The whole of a single row as so many [`digits`](super::digits) blocks.
    Digits { blocks: usize },
}

/// Splits the rows of a tile into groups, as even as whole rows allow, of at most `most` rows.
#[inline(always)]
pub(crate) fn groups(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = rows.div_ceil(most);
    let (len, larger) = (rows / count, rows % count);
    (0..count).map(move |group| {
        let start = group * len + group.min(larger);
        start..start + len + usize::from(group < larger)
    })
}

/// Some rows of floats and a stretch of K of some panels.
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
    /// `rows · chunks · 16` words of activations.
    pub(super) a: &'a [f32],
    /// How each block of them is written.
    pub(super) layouts: &'a [Layout],
    pub(super) rows: usize,
    /// `[panels][rows][32]` sums.
    pub(super) sums: &'a mut [f32],
    /// Whether to add to the sums or to overwrite them; only [`many_rows`](super::many_rows) can add.
    pub(super) add: bool,
}

impl Task<'_> {
    /// Asserts that the slices are as long as the numbers say, for kernels that go on with pointers.
    #[inline(always)]
    pub(super) fn check(&self) {
        let last_panel = self.panels.saturating_sub(1) * self.panel_stride;
        assert!(last_panel + self.chunks * CHUNK <= self.packed.len(), "weights");
        assert!(self.rows * self.chunks * CHUNK_K <= self.a.len(), "activations");
        assert!((self.chunks * CHUNK_K).div_ceil(BLOCK_K) <= self.layouts.len(), "layouts");
        assert_eq!(self.panels * self.rows * TILE_COLS, self.sums.len(), "sums");
    }
}
