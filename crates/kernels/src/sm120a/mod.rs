//! Blackwell workstation and consumer GPUs (sm_120a, sm_121a): block-scaled FP4 `mma.sync`, sums in registers.
//!
//! Not yet run on silicon: written against the PTX ISA, assembled by ptxas, executed in the simulator.

pub mod config;
pub mod fused;
mod store;
