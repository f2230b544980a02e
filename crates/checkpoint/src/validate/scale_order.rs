//! A heuristic for block scales read in the wrong order.
//!
//! Rows of a weight differ in size, so the scales of one row are alike: the variance of row means stands out
//! against the variance inside rows. Read in the wrong order, scales of many rows mix and the row means draw
//! together. Both orders are tried where the bytes would fit either; the other order must fit far better before
//! anything is said.

use dualgemm_formats::{BlockFormat, ScaleLayout};

use crate::packed::BlockScales;

/// The other order must explain this many times as much variance.
const FACTOR: f64 = 2.0;

/// Share of the scales' variance that lies between rows, in `layout`.
fn between_rows(scales: &BlockScales<'_>, layout: ScaleLayout) -> f64 {
    let (rows, blocks) = (scales.rows, scales.blocks);
    // A scale byte is close to the logarithm of its value, which is what weights' sizes spread over.
    let at = |r, b| f64::from(scales.bytes[layout.offset(r, b, blocks)]);
    let (mut sum, mut squares, mut means) = (0.0, 0.0, 0.0);
    for r in 0..rows {
        let (mut row, mut row_squares) = (0.0, 0.0);
        for b in 0..blocks {
            row += at(r, b);
            row_squares += at(r, b) * at(r, b);
        }
        sum += row;
        squares += row_squares;
        means += row * row / blocks as f64;
    }
    let n = (rows * blocks) as f64;
    let total = squares - sum * sum / n;
    if total <= 0.0 { 0.0 } else { (means - sum * sum / n) / total }
}

/// The layout that the bytes fit far better than the one they are read in, if there is one.
pub(super) fn better_layout(scales: &BlockScales<'_>) -> Option<ScaleLayout> {
    let (rows, blocks) = (scales.rows, scales.blocks);
    let other = match scales.layout {
        ScaleLayout::Linear => ScaleLayout::Sf128x4,
        ScaleLayout::Sf128x4 | ScaleLayout::Sf8x4 => ScaleLayout::Linear,
    };
    let comparable = scales.format == BlockFormat::Nvfp4
        && rows >= 128
        && blocks >= 8
        && other.checked_len(rows, blocks) == Some(scales.bytes.len());
    if !comparable {
        return None;
    }
    // By chance alone row means hold 1 / blocks of the variance.
    let floor = 2.0 / blocks as f64;
    let (as_read, as_other) = (between_rows(scales, scales.layout), between_rows(scales, other));
    (as_other > floor && as_other > FACTOR * as_read).then_some(other)
}
