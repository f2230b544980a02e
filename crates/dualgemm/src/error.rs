//! Everything that can go wrong, whichever crate finds it.

/// An error of any layer. Its message names the tensor or argument, the rule and what would be valid.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or its contents.
    #[error(transparent)]
    Checkpoint(#[from] dualgemm_checkpoint::Error),
    /// A problem or its operands.
    #[error(transparent)]
    Gemm(#[from] dualgemm_gemm::Error),
    /// Quantized data.
    #[error(transparent)]
    Format(#[from] dualgemm_formats::Error),
    /// The CPU kernels.
    #[error(transparent)]
    Cpu(#[from] dualgemm_cpu::Error),
}
