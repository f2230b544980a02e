//! What can go wrong between a host program and a device.

use crate::DevicePtr;
use thiserror::Error;

/// Every error of a [`Device`](crate::Device).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Error {
    /// An allocation does not fit.
    #[error("cannot allocate {requested} bytes of device memory: {available} are free")]
    OutOfMemory {
        /// Bytes asked for.
        requested: u64,
        /// Bytes free.
        available: u64,
    },
    /// An address range does not lie inside one live allocation.
    #[error("{bytes} bytes at device address {ptr}: {reason}")]
    BadPointer {
        /// Start of the range.
        ptr: DevicePtr,
        /// Its length.
        bytes: u64,
        /// What is wrong, and which allocation is nearest.
        reason: String,
    },
    /// PTX text was refused.
    #[error("cannot load the PTX: {0}")]
    Load(String),
    /// The module has no kernel of that name.
    #[error("the module has no kernel `{name}`; it has: {available}")]
    NoFunction {
        /// The name asked for.
        name: String,
        /// The kernels there are, separated by commas.
        available: String,
    },
    /// The module has no global variable of that name.
    #[error("the module has no global variable `{name}`; it has: {available}")]
    NoSymbol {
        /// The name asked for.
        name: String,
        /// The variables there are, separated by commas.
        available: String,
    },
    /// A module or function handle that this device did not give out.
    #[error("unknown {what} handle: it belongs to another device, or its module was unloaded")]
    BadHandle {
        /// "module" or "function".
        what: &'static str,
    },
    /// A tensor map breaks a rule of `cuTensorMapEncodeTiled`.
    #[error("cannot encode the tensor map: {0}")]
    TensorMap(String),
    /// The launch configuration or the arguments do not fit the kernel.
    #[error("cannot launch `{kernel}`: {reason}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// The rule, the value found, what would be valid.
        reason: String,
    },
    /// A kernel failed while it ran.
    #[error("{0}")]
    Kernel(String),
    /// The driver reported something else.
    #[error("{call} failed: {reason}")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// Its error name and text.
        reason: String,
    },
}
