//! The W4A16 product of some rows with packed panels, generic over the instruction set.
//!
//! Two algorithms, chosen by the number of rows; either has one order of f32 sums, the same on every instruction set.
//! All multiply-adds are fused, but for [`portable`](super::portable) on machines without:
//!
//! ```text
//! narrow, up to narrow_rows, all below 2¹²¹: bound by decoding; weights go from register to register
//!     per chunk of 16 k, two chains: chain x sums a[k] · code[k] over k mod 4 = 2x, 2x+1, ascending, from 0
//!     sum[x] += chain[x] · scale                       chunks ascending, from 0
//!     sum = sum[0] + sum[1]
//!
//! wide: bound by multiplication; weights are decoded once per tile into a buffer in the first-level cache
//!     per BLOCK_K of k, one chain: a[k] · (code[k] · scale), ascending, from 0; code · scale is exact in f32
//!     sum = the first chain, then += chain             blocks ascending
//!   or, if this block of the tile is integers, what pairs states
//! ```

use std::ops::Range;

use dualgemm_formats::{BlockFormat, FloatMatrix};

pub(super) use super::narrow::narrow;
pub(super) use super::wide::{Pass, pass, wide};

/// Most rows that [`narrow`] handles.
pub(super) const NARROW_ROWS: usize = 4;

/// The most rows of an A that it is used for: from two rows of bf16 on, integers are faster.
pub(super) fn narrow_rows(a: &FloatMatrix<'_>) -> usize {
    if matches!(a, FloatMatrix::Bf16(_)) { 1 } else { NARROW_ROWS }
}

/// Elements of K that [`wide`] decodes at a time: 16 features of them are half a first-level cache of 32 KiB.
pub(super) const BLOCK_K: usize = 256;

/// The groups of rows of a wide tile: as even as whole rows allow, none of more than `most` rows.
#[inline(always)]
pub(super) fn groups(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = rows.div_ceil(most);
    let (len, larger) = (rows / count, rows % count);
    (0..count).map(move |group| {
        let start = group * len + group.min(larger);
        start..start + len + usize::from(group < larger)
    })
}

/// A product of some rows with a stretch of K of some panels.
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
    /// `rows · chunks · 16` activations, in an order of each algorithm.
    pub(super) a: *const f32,
    /// What each block of BLOCK_K of k of the activations is, see [`blocks`](super::blocks).
    pub(super) kinds: *const f32,
    /// Rows.
    pub(super) rows: usize,
    /// `[panels][rows][32]` sums.
    pub(super) sums: *mut f32,
    /// Whether to add to the sums or to overwrite them; only [`wide`] can add.
    pub(super) add: bool,
}
