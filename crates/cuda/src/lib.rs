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
//! | modules and functions by handle, tensor maps | `module.rs`, `tensor_map.rs` |
//! | [`Graph`]: recorded launches; the GPU's stopwatch | `timing.rs` |
//! | [`Cuda`]: memory, launches, [`Device`](dualgemm_device::Device) | `context.rs` |

mod context;
mod driver;
mod module;
mod tensor_map;
mod timing;

pub use context::Cuda;
pub use timing::Graph;
