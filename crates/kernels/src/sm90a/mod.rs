//! Hopper (sm_90a): no FP4 units, so weights are widened exactly to f16 in registers and multiplied by `wgmma`.

pub mod config;
pub mod decode;
pub mod fused;
pub mod host;
pub mod pack;
mod store;
