//! What can be wrong with a problem or its operands.

use dualgemm_formats::BlockFormat;

use crate::AFormat;

/// A rule of the operation that a description or an operand breaks.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// A dimension without extent.
    #[error("{dim} is 0; it must be at least 1")]
    ZeroDim { dim: &'static str },
    /// An operand larger than any memory.
    #[error(
        "{tensor} [{rows}, {cols}]{} does not fit the memory; a smaller problem is needed",
        times(*batch)
    )]
    TooLarge { tensor: &'static str, batch: usize, rows: usize, cols: usize },
    /// A text that names no activation.
    #[error(
        "activation `{found}` is unknown; valid are silu, clamped-silu[:LIMIT], swiglustep[:LIMIT], \
         swigluoai[:ALPHA,BETA,LIMIT], gelu-tanh, relu, relu2, identity, with finite numbers and positive limits"
    )]
    UnknownActivation { found: String },
    #[error("{function}: {number} is {value}; {valid} is needed")]
    EpilogueNumber { function: String, number: &'static str, value: f32, valid: &'static str },
    /// K does not hold a whole number of blocks.
    #[error("K = {k} is not a multiple of {}, the block length of {tensor} in {format}", format.block_len())]
    KNotWholeBlocks { tensor: &'static str, format: BlockFormat, k: usize },
    /// N does not hold a whole number of blocks of a re-quantized C.
    #[error("N = {n} is not a multiple of 16, which nvfp4 output needs")]
    NNotWholeBlocks { n: usize },
    /// Asked to quantize what is quantized already.
    #[error("A is {a} already; only f32, f16 or bf16 can be quantized on the way in")]
    AlreadyQuantized { a: AFormat },
    /// The two halves of the weights do not belong together.
    #[error("gate and up must have one format and shape, but {gate} and {up}")]
    HalvesDiffer { gate: String, up: String },
    /// A bias of the wrong length.
    #[error("{tensor}: its bias has {found} values; N = {n} are needed")]
    BiasLen { tensor: String, found: usize, n: usize },
    /// An operand that the description does not describe.
    #[error("{tensor} is {found}; the problem asks for {expected}")]
    Operand { tensor: String, found: String, expected: String },
    /// Two results of different size cannot be compared.
    #[error("cannot compare {found} values with {expected} reference values")]
    CompareLen { found: usize, expected: usize },
    /// Wrong bytes.
    #[error(transparent)]
    Format(#[from] dualgemm_formats::Error),
}

impl Error {
    /// An operand that is not the one that was planned for.
    pub fn operand(tensor: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self::Operand { tensor: tensor.into(), found: found.into(), expected: expected.into() }
    }
}

/// How often an operand is there, where that is more than once.
fn times(batch: usize) -> String {
    if batch > 1 { format!(" × {batch}") } else { String::new() }
}
