//! GPU kernels as Rust programs.
//!
//! One folder per architecture. What a kernel reads is fixed before the kernel is: the weight pack
//! ([`sm90a::pack`]) is part of its interface, tested on its own. [`registry::KERNELS`] lists them all.
//!
//! Where functions do not say when they fail: `named` if there is no such configuration, by the names there are;
//! `layout` and `generate` if a configuration or its variant breaks a rule, by the rule and the value, or the target
//! lacks an instruction; `new` for the same, and if the device refuses the text; `spec` if operands do not belong
//! together, or a size, a stride or an address breaks a rule; what reads, by the failure of an earlier launch.

pub mod error;
pub mod fp8;
pub mod fused;
pub mod generic;
pub mod limits;
pub mod operands;
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
