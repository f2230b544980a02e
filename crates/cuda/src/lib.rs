//! NVIDIA GPUs through the CUDA driver alone.
//!
//! The driver library is loaded at run time, so everything builds and tests without CUDA, and a machine without a
//! GPU gets an error that says what is missing. Kernels come as PTX text, the same text that the simulator runs.
//!
//! ```no_run
//! use dualgemm_device::Device;
//!
//! let gpu = dualgemm_cuda::Cuda::open(0)?;
//! println!("{} ({})", gpu.info().name, gpu.info().arch);
//! # Ok::<(), dualgemm_device::Error>(())
//! ```
//!
//! | layer | where |
//! |---|---|
//! | `sys`, `result`: the driver's functions | cudarc |
//! | error texts, attributes | `driver.rs` |
//! | the primary context, [`OwnedStream`], [`Event`] | `context.rs` |
//! | modules and functions by handle, tensor maps | `module.rs`, `tensor_map.rs` |
//! | [`Graph`]: recorded launches; the GPU's stopwatch | `graph.rs` |
//! | [`Cuda`]: memory, launches, [`Device`](dualgemm_device::Device) | `gpu.rs` |
//! | [`ReadyLaunch`]: a launch checked and laid out once | `ready.rs` |
//! | [`Blas`]: NVIDIA's library products, as peers to measure against | `cublaslt.rs` |
//!
//! A method that does not say when it fails does so by [`Error::Driver`](dualgemm_device::Error::Driver), in the
//! driver's words.
//!
//! The driver keeps what it assembled from PTX on disk (`~/.nv/ComputeCache`), so that only the first program on a
//! machine that loads a kernel waits for the assembler.

mod context;
mod cublaslt;
mod driver;
mod gpu;
mod graph;
mod module;
mod ready;
mod tensor_map;

pub use context::{Event, OwnedStream};
pub use cublaslt::{Blas, HalfType, Matmul};
pub use gpu::Cuda;
pub use graph::Graph;
pub use ready::ReadyLaunch;
