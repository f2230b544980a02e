//! All kernels but the fused ones, in the simulator with all checkers on; on a GPU with
//! `DUALGEMM_TEST_DEVICE=cuda`.

mod anatomy;
mod atoms;
mod common;
mod cutlass;
mod limits;
mod mixture;
mod pack;
mod rowwise;
#[path = "../fused/words.rs"]
mod words;
