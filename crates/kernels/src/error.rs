//! What a kernel cannot take.

use crate::limits::Valid;

/// A problem or an operand that a kernel cannot take.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// mxfp4 weights whose scales the pack cannot hold exactly.
    #[error("{tensor}: its mxfp4 scales span {found} octaves; the sm_90a pack holds at most {most}")]
    PackRange { tensor: String, found: u8, most: u8 },
    #[error("no configuration {found:?}; there are {valid}")]
    NoConfig { found: String, valid: String },
    /// A configuration that does not fit the architecture.
    #[error("{kernel}: {what}: {found} asked for; valid: {valid}")]
    Unsupported { kernel: &'static str, what: &'static str, found: u64, valid: Valid },
    /// Features of a kernel that exclude each other.
    #[error("{kernel}: {rule}")]
    Combination { kernel: &'static str, rule: &'static str },
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

/// What refuses an operand.
pub(crate) fn refused<T>(
    tensor: &str,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> Result<T, Error> {
    let (found, expected) = (found.into(), expected.into());
    Err(dualgemm_gemm::Error::Operand { tensor: tensor.into(), found, expected }.into())
}

/// The one of `all` that has this name, or the names there are.
pub(crate) fn one_of<T>(
    name: &str,
    all: impl IntoIterator<Item = T>,
    name_of: impl Fn(&T) -> String,
) -> Result<T, Error> {
    let mut names = Vec::new();
    for one in all {
        let its = name_of(&one);
        if its == name {
            return Ok(one);
        }
        names.push(its);
    }
    Err(Error::NoConfig { found: name.into(), valid: names.join(", ") })
}
