//! The command end to end, as a user or a script calls it.

mod bad_inputs;
mod commands;
mod common;
mod estimate;
mod export;
mod gpu_kernels;
mod memory;
mod operations;
mod quantize;
mod quantize_experts;
mod readme;
mod reproduce;
mod verify;
