//! The machine: a grid of clusters of CTAs of warps, and the engines beside them.
//!
//! Flow: `grid` admits clusters and runs them in rounds on several threads; `cluster` picks warps and completes
//! asynchronous operations; `step` executes instructions of a warp; `warp` keeps its lanes together.

pub mod cluster;
pub mod cta;
pub mod engine;
pub mod exit;
pub mod grid;
pub mod groups;
pub mod ids;
pub mod regs;
pub mod rng;
pub mod step;
pub mod warp;
