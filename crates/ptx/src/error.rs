//! What can go wrong when PTX text is read or built, in words that say where and what would be valid.

use thiserror::Error;

/// Every error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not PTX. Lines and columns count from 1; columns count characters.
    #[error("line {line}, column {column}: found {found}, expected {expected}")]
    Syntax {
        /// Line of the offending token.
        line: u32,
        /// Column of the offending token's first character.
        column: u32,
        /// The offending token, quoted, or "end of file".
        found: String,
        /// What would be valid there.
        expected: String,
    },
    /// A layout cannot exist.
    #[error(transparent)]
    Layout(#[from] crate::layout::LayoutError),
}
