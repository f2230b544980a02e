//! Blackwell data-centre GPUs (sm_100a, sm_103a): block-scaled FP4 tensor cores, accumulators in tensor memory.
//!
//! Not yet run on silicon: written against the PTX ISA, assembled by ptxas, executed in the simulator.

pub mod config;
pub mod fused;
mod half_atoms;
mod roles;
mod scales;
mod store;
mod widen;
