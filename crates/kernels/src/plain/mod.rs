//! The fused dual GEMM for sm_90a on weights as a checkpoint has them: no prepack.
//!
//! Row-major codes and e4m3 scales go to the tensor core's registers without a shuffle, because the order of K is free as
//! long as both operands agree on it. A lane loads 16 contiguous bytes of a row, 32 elements of K, and calls them its
//! fragment elements of eight k16 steps; A is brought into the same order by the kernel that expands or copies it
//! ([`order`]).

pub mod config;
pub mod fused;
pub mod order;
