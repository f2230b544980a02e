//! A functional simulator of NVIDIA GPUs that runs PTX text on a CPU and checks it for races and misuse.

pub mod semantics;
