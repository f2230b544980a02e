//! Everything that can go wrong, whichever crate finds it.

/// An error of any layer. Its message names the tensor or argument, the rule and what would be valid.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message says what each field is")]
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
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] dualgemm_plan::Error),
    /// A name that no device has.
    #[error("no device is called {found:?}; valid are cpu, {valid}")]
    NoTarget { found: String, valid: String },
    /// Weights that were packed for another kind of target than the plan's.
    #[error("these weights were packed for {weights}; the plan is for {plan}")]
    OtherTarget { weights: &'static str, plan: &'static str },
    /// Device memory given to a plan for the processor.
    #[error("the plan is for the processor, which cannot read device memory")]
    NotOnGpu,
    /// What the kernels of GPUs do not do.
    #[error("{tensor} is {found}; on a GPU {expected} is needed")]
    NotForGpu { tensor: &'static str, found: String, expected: &'static str },
    /// Several groups of rows with something that belongs to all of them.
    #[error("these groups of rows run one by one on a GPU, and {reason}")]
    GroupsOnGpu { reason: &'static str },
}

impl Error {
    /// As [`dualgemm_gemm::Error::operand`].
    pub fn operand(tensor: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Gemm(dualgemm_gemm::Error::operand(tensor, found, expected))
    }
}

#[cfg(feature = "cuda")]
impl From<dualgemm_device::Error> for Error {
    fn from(error: dualgemm_device::Error) -> Self {
        Self::Gpu(error.into())
    }
}
