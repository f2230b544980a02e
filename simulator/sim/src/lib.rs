#![doc = include_str!("../README.md")]
//!
//! # How it works, in the order of processing
//! `decode` turns the syntax tree of `dualgemm-ptx` into a [`program::Kernel`], each instruction by the file of its family in
//! `exec`, which gives a function with its operands; `machine` runs grids, clusters, CTAs and warps, which call these; values
//! are computed by the pure functions of `semantics`; `memory` holds the state spaces; `check` the bookkeeping of races and
//! unwritten memory.
//!
//! What is assumed where PTX leaves it open: `docs/simulator.md` in the repository.

mod check;
mod config;
mod decode;
mod error;
mod exec;
mod gpu;
mod machine;
mod memory;
mod names;
mod program;
mod progress;
pub mod report;
mod semantics;
mod tensor_map;
mod trap;

pub use config::{Checks, Config};
pub use error::Error;
pub use gpu::{Gpu, Outcome, explore};
pub use program::Kernel;
pub use progress::Progress;
pub use report::Card;
pub use trap::{Check, Trap};

/// Where `tcgen05` keeps the elements of its operands in tensor memory.
pub mod tcgen05 {
    pub use crate::semantics::tcgen05::{Cell, DataPath, scale};
}
