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
    /// Weights with a bias, which the kernel would not add.
    #[error("{tensor} has a bias; the sm_90a pack holds none")]
    PackBias {
        /// The weight.
        tensor: String,
    },
    /// A name that no configuration has.
    #[error("no configuration {found:?}; there are {valid}")]
    NoConfig {
        /// The name asked for.
        found: String,
        /// The names there are, separated by commas.
        valid: String,
    },
    /// A configuration that does not fit the architecture.
    #[error("{kernel}: {rule}: {value} asked for, {limit} at most")]
    Unsupported {
        /// The kernel.
        kernel: &'static str,
        /// What is limited.
        rule: &'static str,
        /// The value asked for.
        value: u32,
        /// The limit.
        limit: u32,
    },
    /// A tile or descriptor that the hardware does not have.
    #[error(transparent)]
    Layout(#[from] dualgemm_ptx::layout::LayoutError),
    /// A kernel that its target cannot run.
    #[error(transparent)]
    Ptx(#[from] dualgemm_ptx::Error),
    /// What a device refused, or how a kernel failed on it.
    #[error(transparent)]
    Device(#[from] dualgemm_device::Error),
    /// Operands that break a rule of the operation.
    #[error(transparent)]
    Gemm(#[from] dualgemm_gemm::Error),
}
