#![doc = include_str!("../README.md")]
//!
//! Text and program meet in one value, [`ast::Module`]: [`parse::module`] reads it, the [`builder`] makes it,
//! its `Display` writes it. Specification: <https://docs.nvidia.com/cuda/parallel-thread-execution/>.

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
