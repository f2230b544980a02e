//! What can go wrong when launches are written down.

use thiserror::Error;

/// Every error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// A kernel refuses the shape.
    #[error("{shape}: {source}")]
    Kernel { shape: String, source: dualgemm_kernels::Error },
    /// No kernel takes the shape.
    #[error("{shape}: {source}")]
    Plan { shape: String, source: dualgemm_plan::Error },
    /// There is no export for the architecture.
    #[error("nothing is exported for {found}; valid are {valid}")]
    Arch { found: String, valid: String },
    /// A launch that cannot be written down.
    #[error("a launch cannot be written down: {0}")]
    Recording(String),
}
