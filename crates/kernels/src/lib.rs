//! GPU kernels as Rust programs.
//!
//! One folder per architecture. What a kernel reads is fixed before the kernel is: the weight pack
//! ([`sm90a::pack`]) is part of its interface, tested on its own. [`registry::KERNELS`] lists them all.

pub mod error;
pub mod fp8;
pub mod generic;
pub mod limits;
pub mod parts;
pub mod plain;
pub mod probe;
pub mod registry;
pub mod sm100a;
pub mod sm120a;
pub mod sm80;
pub mod sm90a;
pub mod warpwise;

pub use error::Error;
