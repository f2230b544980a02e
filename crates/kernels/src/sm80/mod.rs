//! The fused dual GEMM for GPUs before Hopper: `mma.sync` and `cp.async`, which every GPU since sm_80 has.
//!
//! It reads the weight pack of [`sm90a::pack`](crate::sm90a::pack): the fragments of `mma.m16n8k16` are those of a warp
//! of `wgmma`. Simulated, assembled, and run on H100 and H200; not yet on a card of its own generation.

pub mod config;
pub mod fused;
