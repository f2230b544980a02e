//! What can be wrong with quantized data.

use crate::{BlockFormat, ScaleLayout};

/// A rule of the format that some data breaks. Every message names the tensor, the rule and the value found.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// K does not hold a whole number of blocks.
    #[error("{tensor}: K = {k} is not a positive multiple of {}, the {format} block length", format.block_len())]
    KNotWholeBlocks {
        /// Tensor at fault.
        tensor: String,
        /// Its format.
        format: BlockFormat,
        /// K found, in elements.
        k: usize,
    },
    /// A matrix without rows.
    #[error("{tensor}: has 0 rows; at least 1 is needed")]
    NoRows {
        /// Tensor at fault.
        tensor: String,
    },
    /// The code buffer does not hold what rows, K and stride ask for.
    #[error(
        "{tensor}: codes hold {found} bytes; [{rows}, {k}] with a row stride of {row_stride} bytes needs {needed}"
    )]
    CodesLen {
        /// Tensor at fault.
        tensor: String,
        /// Rows.
        rows: usize,
        /// Elements per row.
        k: usize,
        /// Bytes from row to row.
        row_stride: usize,
        /// Bytes found.
        found: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// The scale buffer has the wrong size for its layout.
    #[error(
        "{tensor}: scales hold {found} bytes; {rows} rows of {blocks} blocks in {layout} layout need {needed}"
    )]
    ScalesLen {
        /// Tensor at fault.
        tensor: String,
        /// Rows.
        rows: usize,
        /// Blocks per row.
        blocks: usize,
        /// Scale layout.
        layout: ScaleLayout,
        /// Bytes found.
        found: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// A scale byte that no healthy producer writes.
    #[error("{tensor}: block scale {byte:#04x} at row {row}, block {block} is {what}; valid are {valid}")]
    ScaleByte {
        /// Tensor at fault.
        tensor: String,
        /// Row of the block.
        row: usize,
        /// Index of the block along K.
        block: usize,
        /// The byte found.
        byte: u8,
        /// What is wrong with it.
        what: &'static str,
        /// What would be right.
        valid: &'static str,
    },
    /// A tensor scale that cannot be a scale.
    #[error("{tensor}: tensor scale {value} is not a positive finite number")]
    GlobalScale {
        /// Tensor at fault.
        tensor: String,
        /// Value found.
        value: f32,
    },
    /// Rows that would overlap.
    #[error("{tensor}: a row stride of {row_stride} {unit}; a row has {row}, so at least that is needed")]
    RowStride {
        /// Tensor at fault.
        tensor: String,
        /// From row to row.
        row_stride: usize,
        /// What a row has.
        row: usize,
        /// Elements of floats, bytes of codes.
        unit: &'static str,
    },
    /// A float matrix whose buffer does not fit its shape.
    #[error(
        "{tensor}: holds {found} elements; [{rows}, {cols}] with a row stride of {row_stride} needs {needed}"
    )]
    MatrixLen {
        /// Tensor at fault.
        tensor: String,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// Elements from row to row.
        row_stride: usize,
        /// Elements found.
        found: usize,
        /// Elements needed.
        needed: usize,
    },
    /// Sizes whose product does not fit the address space.
    #[error("{tensor}: {rows} rows of {row_stride} do not fit the address space")]
    TooLarge {
        /// Tensor at fault.
        tensor: String,
        /// Rows.
        rows: usize,
        /// From one row to the next: bytes of quantized matrices, elements of float ones.
        row_stride: usize,
    },
    /// K that GGUF's larger blocks cannot hold.
    #[error("{tensor}: K = {k} is not a positive multiple of 64, the GGUF nvfp4 block length")]
    KNotGgufBlocks {
        /// Tensor at fault.
        tensor: String,
        /// K found, in elements.
        k: usize,
    },
    /// GGUF tensor data of the wrong size.
    #[error("{tensor}: GGUF data holds {found} bytes; [{rows}, {k}] in blocks of 64 elements needs {needed}")]
    GgufLen {
        /// Tensor at fault.
        tensor: String,
        /// Rows.
        rows: usize,
        /// Elements per row.
        k: usize,
        /// Bytes found.
        found: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// Sizes that a six-dimensional scale view cannot have.
    #[error(
        "{tensor}: {batch} × {rows} rows of {blocks} blocks make no scale view; each must be at least 1 and the bytes fit the address space"
    )]
    GpuModeShape {
        /// Tensor at fault.
        tensor: String,
        /// Rows.
        rows: usize,
        /// Blocks per row.
        blocks: usize,
        /// Batch entries.
        batch: usize,
    },
    /// A batch of scales of the wrong size.
    #[error("{tensor}: scales hold {found} bytes; {batch} × {rows} rows of {blocks} blocks need {needed}")]
    GpuModeLen {
        /// Tensor at fault.
        tensor: String,
        /// Rows.
        rows: usize,
        /// Blocks per row.
        blocks: usize,
        /// Batch entries.
        batch: usize,
        /// Bytes found.
        found: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// An mxfp4 matrix whose scales span more than nvfp4's.
    #[error(
        "{tensor}: the scale 2^{exponent} at row {row}, block {block} is more than 2^17 below the largest, 2^{largest}; nvfp4 cannot hold both"
    )]
    Mxfp4Range {
        /// Tensor at fault.
        tensor: String,
        /// Row of the block.
        row: usize,
        /// Index of the block along K.
        block: usize,
        /// Exponent of its scale.
        exponent: i32,
        /// Largest exponent in the matrix.
        largest: i32,
    },
    /// A rank outside its group.
    #[error("{tensor}: rank {rank} of {ranks} does not exist; ranks count from 0")]
    ShardRank {
        /// Tensor at fault.
        tensor: String,
        /// Rank asked for.
        rank: usize,
        /// Ranks in all.
        ranks: usize,
    },
    /// Rows that do not divide evenly.
    #[error("{tensor}: {rows} rows cannot be split evenly over {ranks} ranks")]
    ShardRows {
        /// Tensor at fault.
        tensor: String,
        /// Rows.
        rows: usize,
        /// Ranks.
        ranks: usize,
    },
    /// A split along K that would cut a block.
    #[error(
        "{tensor}: K = {k} cannot be split over {ranks} ranks: its {} {format} blocks of {} are not a multiple of {ranks}",
        k / format.block_len(), format.block_len()
    )]
    ShardSplitsBlock {
        /// Tensor at fault.
        tensor: String,
        /// K, in elements.
        k: usize,
        /// Ranks.
        ranks: usize,
        /// Block format.
        format: BlockFormat,
    },
}
