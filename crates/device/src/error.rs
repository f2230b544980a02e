//! What can go wrong between a host program and a device.

use crate::DevicePtr;
use thiserror::Error;

/// Every error of a [`Device`](crate::Device).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message says what each field is")]
pub enum Error {
    /// An allocation does not fit.
    #[error("cannot allocate {requested} bytes of device memory: {available} are free")]
    OutOfMemory { requested: u64, available: u64 },
    /// An address range does not lie inside one live allocation.
    #[error("{bytes} bytes at device address {ptr}: {reason}")]
    BadPointer { ptr: DevicePtr, bytes: u64, reason: String },
    /// PTX text was refused.
    #[error("cannot load the PTX: {0}")]
    Load(String),
    /// The module has no kernel of that name.
    #[error("the module has no kernel `{name}`; it has: {available}")]
    NoFunction { name: String, available: String },
    /// The module has no global variable of that name.
    #[error("the module has no global variable `{name}`; it has: {available}")]
    NoSymbol { name: String, available: String },
    /// A module or function handle that this device did not give out.
    #[error("unknown {what} handle: it belongs to another device, or its module was unloaded")]
    BadHandle { what: &'static str },
    /// A tensor map breaks a rule of `cuTensorMapEncodeTiled`.
    #[error("cannot encode the tensor map: {0}")]
    TensorMap(String),
    /// The launch configuration or the arguments do not fit the kernel.
    #[error("cannot launch `{kernel}`: {reason}")]
    Launch { kernel: String, reason: String },
    /// A kernel failed while it ran.
    #[error("{0}")]
    Kernel(String),
    /// The driver reported something else.
    #[error("{call} failed: {reason}")]
    Driver { call: &'static str, reason: String },
}
