//! All kernels but the fused Hopper kernel, in the simulator with all checkers on.

mod common;
mod pack;
mod rowwise;
