//! The fused dual GEMM on CPUs: prepacked weights, AVX-512/VNNI, AVX2 and portable kernels.
//!
//! In the order that data takes:
//!
//! | module | what |
//! |---|---|
//! | [`isa`] | [`Isa`]: which kernels this machine can run |
//! | [`pack`] | [`PackedGateUp`]: weights in kernel order, packed once |
//! | [`tile`] | [`Tile`], [`TileKernel`], [`TileSink`]: sums of up to 64 rows by 16 features, between kernel and epilogue |

mod aligned;
pub mod error;
pub mod isa;
pub mod pack;
mod threads;
pub mod tile;

pub use error::Error;
pub use isa::Isa;
pub use pack::PackedGateUp;
pub use tile::{RowTile, Tile, TileKernel, TileSink};
