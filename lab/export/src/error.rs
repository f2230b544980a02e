//! What can go wrong when launches are written down.

use thiserror::Error;

/// Every error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A kernel refuses the shape.
    #[error("{shape}: {source}")]
    Kernel {
        /// The shape, `MxNxK`.
        shape: String,
        /// Why.
        source: dualgemm_kernels::Error,
    },
    /// No kernel takes the shape.
    #[error("{shape}: {source}")]
    Plan {
        /// The shape, `MxNxK`.
        shape: String,
        /// Why.
        source: dualgemm_plan::Error,
    },
    /// There is no export for the architecture.
    #[error("nothing is exported for {found}; valid are {valid}")]
    Arch {
        /// What was asked for.
        found: String,
        /// What there is.
        valid: String,
    },
    /// A launch that cannot be written down.
    #[error("a launch cannot be written down: {0}")]
    Recording(String),
}
