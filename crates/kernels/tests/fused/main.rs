//! The fused kernels of every architecture in the simulator, all checkers on, against the f64 reference.

mod blackwell;
mod cases;
mod exact;
mod few_tokens;
mod hopper;
mod others;
mod problem;
mod words;
