//! The command end to end, as a user or a script calls it.

mod bad_inputs;
mod commands;
mod common;
#[cfg(feature = "lab")]
mod estimate;
#[cfg(feature = "lab")]
mod export;
mod gpu_kernels;
mod memory;
mod operations;
mod quantize;
mod quantize_experts;
mod readme;
mod reproduce;
mod sessions;
mod verify;
