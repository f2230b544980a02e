//! The fused dual GEMM for few tokens on sm_90a, on the pack of [`sm90a`](crate::sm90a): every warp brings and decodes
//! weights of its own and multiplies by `mma.sync`.
//!
//! In reading order: [`config`] (which rows and which K a warp takes, and launching it), [`fused`]
//! (the kernel), `tokens` (A's fragments).

pub mod config;
pub mod fused;
mod tokens;
