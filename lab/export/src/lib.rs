//! Kernels with their launches as files that run elsewhere, without this library.
//!
//! ```text
//! shapes ─► hosts of dualgemm-kernels on a Recorder ─► Recording: modules, kernels, launches with places for addresses
//!                                                        └─► submission.py
//! ```
//!
//! Nothing here computes a grid, a tensor map or an argument: the hosts that launch kernels on cards and in the simulator
//! launch them on a [`Recorder`], which writes down what they say.

mod error;
pub mod gpumode;
pub mod recorder;

pub use error::Error;
pub use recorder::{Argument, Launch, Place, Recorder, Recording};
