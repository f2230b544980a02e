//! Checkpoints read, checked and written.

#[path = "../common/mod.rs"]
mod common;

mod activations;
mod alone;
mod cases;
mod conventions;
mod dialects;
mod families;
mod features;
mod fused_experts;
mod gguf;
mod golden;
mod layers;
mod producers;
mod published;
mod real;
mod refusals;
mod storage;
mod validate;
mod whole;
mod write;
