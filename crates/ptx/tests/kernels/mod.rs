//! Kernels that use the builder as real ones do, one per GPU generation.

pub mod blackwell;
pub mod geforce;
pub mod hopper;

use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::Builder;
use dualgemm_ptx::{Error, Target};

/// A kernel: name, target, version, and what builds it.
pub type Kernel = (&'static str, Target, Version, fn(&mut Builder));

pub const KERNELS: [Kernel; 6] = [
    ("hopper", Target::Sm90a, Version::new(8, 6), hopper::build),
    ("blackwell", Target::Sm100a, Version::new(8, 8), blackwell::build),
    ("blackwell", Target::Sm100f, Version::new(8, 8), blackwell::build),
    ("blackwell", Target::Sm103a, Version::new(8, 8), blackwell::build),
    ("geforce", Target::Sm120a, Version::new(8, 7), geforce::build),
    ("geforce", Target::Sm121a, Version::new(8, 8), geforce::build),
];

pub fn module(kernel: &Kernel) -> Result<Module, Error> {
    let mut builder = Builder::new(kernel.1, kernel.2);
    kernel.3(&mut builder);
    builder.finish()
}
