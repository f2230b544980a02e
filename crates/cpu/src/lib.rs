//! The fused dual GEMM on CPUs: packed weights, and kernels for AMX, AVX-512, AVX2, NEON and any processor.
//!
//! In the order of processing:
//!
//! | module | what |
//! |---|---|
//! | [`isa`] | [`Isa`]: which kernels this machine can run |
//! | [`pack`] | [`PackedGateUp`]: weights in kernel order, packed once |
//! | [`tile`] | [`Tile`], [`TileSink`]: sums of up to 512 rows by 16 features, between kernel and epilogue |
//! | [`plan`] | [`CpuPlan`]: kernel, tile and threads for a problem |
//! | [`workspace`] | [`Workspace`]: the buffers of a plan, and the runs that use them |
//! | [`limits`] | [`limits::Limits`]: the most that the machine can do, measured |
//! | [`team`] | [`Team`]: threads that stay awake between calls |
//! | [`epilogue`] | [`TileEpilogue`]: from sums to values of C |
//! | [`gemm`] | [`CpuGemm`]: the whole operation, from operands to C |
//! | [`float_linear`] | [`FloatLinear`]: linear layers with weights that stay floats |
//! | [`attention`] | a prompt's causal attention in bf16 |
//! | [`token`] | [`TokenLayer`]: a decoder layer's norms, rotation and attention, for one token or a prompt |

#![warn(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]

mod aligned;
#[cfg_attr(
    not(any(target_arch = "x86_64", test)),
    allow(dead_code, reason = "x86 alone has tiles, and tests emulate them")
)]
mod amx;
pub mod attention;
pub mod epilogue;
pub mod error;
mod fetch;
#[cfg(test)]
mod fixtures;
#[cfg_attr(
    not(any(target_arch = "x86_64", test)),
    allow(dead_code, unused_variables, reason = "x86 alone has tiles, and tests emulate them")
)]
pub mod float_linear;
pub mod gemm;
pub mod isa;
mod lanes;
pub mod limits;
mod output;
pub mod pack;
pub mod plan;
mod schedule;
pub mod team;
mod threads;
pub mod tile;
pub mod token;
mod vmath;
mod w4a16;
mod w4a4;
pub mod workspace;

pub use aligned::Aligned;
pub use epilogue::TileEpilogue;
pub use error::Error;
pub use float_linear::FloatLinear;
pub use gemm::{CpuGemm, Product};
pub use isa::Isa;
pub use pack::PackedGateUp;
pub use plan::{CpuOptions, CpuPlan};
pub use team::Team;
pub use tile::{RowTile, Tile, TileSink};
pub use token::TokenLayer;
pub use workspace::{Group, Input, Workspace};
