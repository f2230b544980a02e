//! Why PTX text cannot be loaded.

use dualgemm_ptx::legal::Illegal;
use thiserror::Error;

/// Every error of loading a module.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not PTX.
    #[error(transparent)]
    Syntax(#[from] dualgemm_ptx::Error),
    /// An instruction that has no form of the table, whether or not an assembler takes it.
    #[error("the simulator has no such form: {0}")]
    Form(#[from] Illegal),
    /// An instruction, modifier or operand that the simulator does not execute.
    #[error("line {line}: `{instruction}`: {reason}")]
    Instruction {
        /// Line of the text.
        line: u32,
        /// The opcode.
        instruction: String,
        /// What is not known, and what would be.
        reason: String,
    },
    /// A name that nothing in scope declares.
    #[error("line {line}: `{name}` is not declared in this scope")]
    Undeclared {
        /// Line of the text.
        line: u32,
        /// The name.
        name: String,
    },
    /// A declaration that the simulator cannot lay out.
    #[error("line {line}: `{name}`: {reason}")]
    Declaration {
        /// Line of the text.
        line: u32,
        /// The variable or function.
        name: String,
        /// What is wrong, and what would be valid.
        reason: String,
    },
}
