//! The fused Blackwell kernels in the simulator, all checkers on, against the f64 reference.

mod common;
mod exact;
mod formats;
mod fused;
