//! What a kernel cannot take.

use dualgemm_formats::BlockFormat;

/// A problem or an operand that a kernel cannot take.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// Weights in a format the pack does not hold.
    #[error("{tensor} is {format}; the sm_90a pack holds nvfp4")]
    PackFormat {
        /// The weight.
        tensor: String,
        /// Its format.
        format: BlockFormat,
    },
    /// Operands that break a rule of the operation.
    #[error(transparent)]
    Gemm(#[from] dualgemm_gemm::Error),
}
