//! What can go wrong before a kernel runs. A running kernel cannot fail.

use crate::Isa;

/// A rule that a plan, packed weights or a call breaks.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// A name that no instruction set has.
    #[error("there is no instruction set {name:?}; known are {}", Isa::ALL.map(Isa::name).join(", "))]
    UnknownIsa { name: String },
    /// An instruction set that this machine lacks.
    #[error("this machine has no {isa}; its best is {best}")]
    IsaUnavailable { isa: Isa, best: Isa },
    /// Buffers that do not fit the memory.
    #[error(
        "A of up to {rows} rows of {k} needs buffers that do not fit the memory; fewer rows at a time are needed"
    )]
    NoMemory { rows: usize, k: usize },
    /// Row ranges of experts that do not fit A.
    #[error(
        "group {group}: rows {start}..{end} do not fit; they must follow row {previous_end} and end by {rows}"
    )]
    GroupRows { group: usize, start: usize, end: usize, previous_end: usize, rows: usize },
    /// Something handed to a plan that was made for something else.
    #[error("{what} is {found}; the plan was made for {expected}")]
    NotPlanned { what: &'static str, found: String, expected: String },
    /// A problem that breaks a rule of the operation.
    #[error(transparent)]
    Problem(#[from] dualgemm_gemm::Error),
    /// Wrong bytes.
    #[error(transparent)]
    Format(#[from] dualgemm_formats::Error),
}
