//! What can go wrong before a kernel runs. A running kernel cannot fail.

use crate::Isa;

/// A rule that a plan, packed weights or a call breaks.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A name that no instruction set has.
    #[error("there is no instruction set {name:?}; known are {}", Isa::ALL.map(Isa::name).join(", "))]
    UnknownIsa {
        /// The name found.
        name: String,
    },
    /// An instruction set that this machine lacks.
    #[error("this machine has no {isa}; its best is {best}")]
    IsaUnavailable {
        /// The instruction set asked for.
        isa: Isa,
        /// The best one that the machine has.
        best: Isa,
    },
    /// Buffers that do not fit the memory.
    #[error(
        "A of up to {rows} rows of {k} needs buffers that do not fit the memory; fewer rows at a time are needed"
    )]
    NoMemory {
        /// Rows that were planned for.
        rows: usize,
        /// K.
        k: usize,
    },
    /// Row ranges of experts that do not fit A.
    #[error(
        "group {group}: rows {start}..{end} do not fit; they must follow row {previous_end} and end by {rows}"
    )]
    GroupRows {
        /// Index of the group.
        group: usize,
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
        /// Where the group before ends.
        previous_end: usize,
        /// Rows of A.
        rows: usize,
    },
    /// Something handed to a plan that was made for something else.
    #[error("{what} is {found}; the plan was made for {expected}")]
    NotPlanned {
        /// Which argument.
        what: &'static str,
        /// What it is.
        found: String,
        /// What it has to be.
        expected: String,
    },
    /// A problem that breaks a rule of the operation.
    #[error(transparent)]
    Problem(#[from] dualgemm_gemm::Error),
    /// Wrong bytes.
    #[error(transparent)]
    Format(#[from] dualgemm_formats::Error),
}
