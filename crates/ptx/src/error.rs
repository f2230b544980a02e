//! What can go wrong when PTX text is read or built, in words that say where and what would be valid.

use thiserror::Error;

/// Every error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// The text is not PTX. Lines and columns count from 1; columns count characters.
    #[error("line {line}, column {column}: found {found}, expected {expected}")]
    Syntax { line: u32, column: u32, found: String, expected: String },
    /// A layout cannot exist.
    #[error(transparent)]
    Layout(#[from] crate::layout::LayoutError),
    /// A built module has what its target lacks.
    #[error("{}", list(.0))]
    Illegal(Vec<crate::legal::Illegal>),
    /// The builder was told to write a register of another class than the instruction gives.
    #[error("kernel {kernel}: {register} is declared .{declared}, the instruction gives .{result}")]
    Destination { kernel: String, register: String, declared: crate::Type, result: crate::Type },
    /// The builder was told to write a register by an instruction that gives nothing.
    #[error(
        "kernel {kernel}: {register} (.{declared}) cannot be written by {opcode}, which gives no single result"
    )]
    NoResult { kernel: String, register: String, declared: crate::Type, opcode: String },
}

/// One per line.
fn list(illegal: &[crate::legal::Illegal]) -> String {
    illegal.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}
