//! PTX as a typed Rust program: syntax tree, parser and printer.
//!
//! Text and program meet in one value, [`ast::Module`]: [`parse::module`] reads it from PTX that anybody
//! wrote (nvcc, Triton, CUTLASS), a kernel written in Rust builds it, and [`print::module`] writes it.
//! No CUDA toolkit is needed anywhere. Specification: <https://docs.nvidia.com/cuda/parallel-thread-execution/>.

pub mod ast;
pub mod builder;
pub mod error;
pub mod isa;
pub mod layout;
pub mod legal;
pub mod name;
pub mod parse;
pub mod print;
pub mod target;
pub mod types;

pub use ast::Module;
pub use error::Error;
pub use name::Name;
pub use target::{Target, Targets};
pub use types::{Space, Type};
