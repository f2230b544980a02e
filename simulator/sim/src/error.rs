//! Why PTX text cannot be loaded.

use dualgemm_ptx::legal::Illegal;
use std::fmt::Display;
use thiserror::Error;

/// Every error of loading a module.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// The text is not PTX.
    #[error(transparent)]
    Syntax(#[from] dualgemm_ptx::Error),
    /// An instruction that has no form of the table, whether or not an assembler takes it.
    #[error("the simulator has no such form: {0}")]
    Form(#[from] Illegal),
    /// An instruction that the simulator does not execute, or a declaration that it cannot lay out.
    #[error("line {line}: `{what}`: {reason}")]
    Refused { line: u32, what: String, reason: String },
    /// A name that nothing in scope declares.
    #[error("line {line}: `{name}` is not declared in this scope")]
    Undeclared { line: u32, name: String },
}

impl Error {
    /// [`Error::Refused`]: `reason` says what is wrong, and what would be valid.
    pub(crate) fn refused(line: u32, what: impl Display, reason: impl Into<String>) -> Error {
        Error::Refused { line, what: what.to_string(), reason: reason.into() }
    }
}
