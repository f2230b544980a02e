//! All kernels but the fused Hopper and Blackwell ones, in the simulator with all checkers on; on a GPU with
//! `DUALGEMM_TEST_DEVICE=cuda`.

mod anatomy;
mod atoms;
mod common;
mod cutlass;
mod fp8;
mod limits;
mod mixture;
mod pack;
mod plain;
mod rowwise;
mod sm80;
mod warpwise;
