//! What can go wrong between a problem and a GPU.

use std::path::PathBuf;

/// A problem, an operand or a machine that a GPU plan cannot take.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// A strategy that does not fit the problem or the machine.
    #[error("strategy {strategy} cannot take this: {reason}")]
    Unsupported { strategy: &'static str, reason: String },
    /// Activations, or weights in floats, that no kernel multiplies.
    #[error("{reason}")]
    Activations { reason: String },
    #[error("no strategy is called {found:?}; there are {valid}")]
    NoStrategy { found: String, valid: String },
    /// A kernel configuration that a strategy does not have.
    #[error("strategy {strategy} has no kernel {found:?}; it has {valid}")]
    NoKernel { strategy: &'static str, found: String, valid: String },
    /// No strategy takes the problem on this machine.
    #[error("no GPU strategy can take {problem} on {device}: {reasons}")]
    NothingFits { problem: String, device: String, reasons: String },
    /// A device address that is not aligned as kernels need it.
    #[error("{tensor}: device address {address:#x} is not a multiple of {align} bytes")]
    Misaligned { tensor: &'static str, address: u64, align: u64 },
    /// An operand that is not what the plan was made for.
    #[error("{tensor} is {found}; the plan asks for {expected}")]
    Operand { tensor: &'static str, found: String, expected: String },
    /// Scales that together leave the range in which GPU kernels multiply by them.
    #[error(
        "{half}: tensor scales of {half} and of A and the epilogue's alpha_{half} multiply its sums by {found:e}; on a GPU \
         valid are magnitudes of {:e} to {:e} (on the CPU, all)",
        f32::MIN_POSITIVE,
        f32::MAX
    )]
    SumFactor { half: &'static str, found: f64 },
    /// Weights in device memory that are brought to an order on the host alone.
    #[error(
        "{format} weights in device memory are not brought to the order that the plan asks for, {form}; give them in the \
         host's memory"
    )]
    MadeOnHost { format: dualgemm_formats::BlockFormat, form: crate::WeightForm },
    /// A call on rows in groups by a plan for one pair of weights a call.
    #[error("the plan is for one pair of weights a call; plan with GpuOptions::groups, which {takers} take")]
    OneGroup { takers: String },
    /// A tuned configuration gave a wrong result and was not taken.
    #[error("{kernel} is wrong on {problem}: relative L2 error {rel_l2:e}; please report it")]
    Wrong { kernel: String, problem: String, rel_l2: f64 },
    /// The file of tuned choices cannot be written.
    #[error("{}: {reason}", path.display())]
    Cache { path: PathBuf, reason: String },
    /// A kernel that cannot be made or launched.
    #[error(transparent)]
    Kernel(#[from] dualgemm_kernels::Error),
    #[error(transparent)]
    Device(#[from] dualgemm_device::Error),
    /// A problem or its operands.
    #[error(transparent)]
    Gemm(#[from] dualgemm_gemm::Error),
    /// Quantized data.
    #[error(transparent)]
    Format(#[from] dualgemm_formats::Error),
}
