//! The fused dual GEMM on e4m3 operands for sm_90a, to compare with: what Hopper multiplies natively.
//!
//! Operands are e4m3 codes with one f32 scale per tensor. Same fusion as with 4-bit weights; nothing is decoded, so both
//! operands come from shared memory. Hopper adds e4m3 products with fewer bits than f32 has (about 14), so results differ
//! more from exact ones than with f16.

pub mod config;
pub mod fused;
