//! What can be wrong with quantized data.

use crate::{BlockFormat, ScaleLayout};

/// A rule of the format that some data breaks. Every message names the tensor, the rule and the value found.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// K does not hold a whole number of blocks.
    #[error("{tensor}: K = {k} is not a positive multiple of {}, the {format} block length", format.block_len())]
    KNotWholeBlocks { tensor: String, format: BlockFormat, k: usize },
    /// A matrix without rows.
    #[error("{tensor}: has 0 rows; at least 1 is needed")]
    NoRows { tensor: String },
    /// The code buffer does not hold what rows, K and stride ask for.
    #[error(
        "{tensor}: codes hold {found} bytes; [{rows}, {k}] with a row stride of {row_stride} bytes needs {needed}"
    )]
    CodesLen { tensor: String, rows: usize, k: usize, row_stride: usize, found: usize, needed: usize },
    /// The scale buffer has the wrong size for its layout.
    #[error(
        "{tensor}: scales hold {found} bytes; {rows} rows of {blocks} blocks in {layout} layout need {needed}"
    )]
    ScalesLen { tensor: String, rows: usize, blocks: usize, layout: ScaleLayout, found: usize, needed: usize },
    /// A scale byte that no healthy producer writes.
    #[error("{tensor}: block scale {byte:#04x} at row {row}, block {block} is {what}; valid are {valid}")]
    ScaleByte { tensor: String, row: usize, block: usize, byte: u8, what: &'static str, valid: &'static str },
    /// A tensor scale that cannot be a scale.
    #[error("{tensor}: tensor scale {value} and its reciprocal must be positive finite numbers")]
    GlobalScale { tensor: String, value: f32 },
    /// Rows that would overlap; strides are in elements of floats, in bytes of codes.
    #[error("{tensor}: a row stride of {row_stride} {unit}; a row has {row}, so at least that is needed")]
    RowStride { tensor: String, row_stride: usize, row: usize, unit: &'static str },
    /// A float matrix whose buffer does not fit its shape.
    #[error(
        "{tensor}: holds {found} elements; [{rows}, {cols}] with a row stride of {row_stride} needs {needed}"
    )]
    MatrixLen { tensor: String, rows: usize, cols: usize, row_stride: usize, found: usize, needed: usize },
    /// Sizes whose product does not fit the address space; strides as in `RowStride`.
    #[error("{tensor}: {rows} rows of {row_stride} do not fit the address space")]
    TooLarge { tensor: String, rows: usize, row_stride: usize },
    /// K that GGUF's larger blocks cannot hold.
    #[error("{tensor}: K = {k} is not a positive multiple of 64, the GGUF nvfp4 block length")]
    KNotGgufBlocks { tensor: String, k: usize },
    /// GGUF tensor data of the wrong size.
    #[error("{tensor}: GGUF data holds {found} bytes; [{rows}, {k}] in blocks of 64 elements needs {needed}")]
    GgufLen { tensor: String, rows: usize, k: usize, found: usize, needed: usize },
    /// Sizes that a six-dimensional scale view cannot have.
    #[error(
        "{tensor}: {batch} × {rows} rows of {blocks} blocks make no scale view; each must be at least 1 and the bytes fit the address space"
    )]
    GpuModeShape { tensor: String, rows: usize, blocks: usize, batch: usize },
    /// A batch of scales of the wrong size.
    #[error("{tensor}: scales hold {found} bytes; {batch} × {rows} rows of {blocks} blocks need {needed}")]
    GpuModeLen { tensor: String, rows: usize, blocks: usize, batch: usize, found: usize, needed: usize },
    /// An mxfp4 matrix whose scales span more than nvfp4's.
    #[error(
        "{tensor}: the scale 2^{exponent} at row {row}, block {block} is more than 2^17 below the largest, 2^{largest}; nvfp4 cannot hold both"
    )]
    Mxfp4Range { tensor: String, row: usize, block: usize, exponent: i32, largest: i32 },
    /// A rank outside its group.
    #[error(
        "{tensor}: {}",
        match ranks {
            0 => "cannot be split over 0 ranks; at least 1 is needed".to_string(),
            _ => format!("rank {rank} of {ranks} does not exist; ranks count from 0"),
        }
    )]
    ShardRank { tensor: String, rank: usize, ranks: usize },
    /// Rows that do not divide evenly.
    #[error("{tensor}: {rows} rows cannot be split evenly over {ranks} ranks")]
    ShardRows { tensor: String, rows: usize, ranks: usize },
    /// A split along K that would cut a block.
    #[error(
        "{tensor}: K = {k} cannot be split over {ranks} ranks: its {} {format} blocks of {} are not a multiple of {ranks}",
        k / format.block_len(), format.block_len()
    )]
    ShardSplitsBlock { tensor: String, k: usize, ranks: usize, format: BlockFormat },
}
