//! Checkpoints read, checked and written.

#[path = "../common/mod.rs"]
mod common;

mod activations;
mod cases;
mod families;
mod fused_experts;
mod gguf;
mod golden;
mod layers;
mod producers;
mod real;
mod refusals;
mod validate;
mod whole;
mod write;
