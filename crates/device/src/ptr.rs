//! Names for things that live on a device.

use std::fmt;

/// An address in a device's global memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The null address, which no allocation has.
    pub const NULL: DevicePtr = DevicePtr(0);

    /// The address `bytes` further on.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0.wrapping_add(bytes))
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A module loaded on one device; meaningless on another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleId(pub u64);

/// A kernel of a module loaded on one device; meaningless on another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FunctionId {
    /// The module it belongs to.
    pub module: ModuleId,
    /// Its position among the module's kernels.
    pub index: u32,
}

/// A queue of work on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Stream {
    /// The device's own.
    #[default]
    Own,
    /// One of the caller's.
    Raw(RawStream),
}

impl Stream {
    /// One of the caller's, as the driver calls it (a `CUstream`; 0 is the legacy default stream).
    ///
    /// # Safety
    /// As [`RawStream::new`].
    pub const unsafe fn raw(handle: u64) -> Self {
        // SAFETY: the caller's promise.
        Self::Raw(unsafe { RawStream::new(handle) })
    }
}

/// The driver's handle of a stream, which it follows without a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawStream(u64);

impl RawStream {
    /// Takes the handle at its word.
    ///
    /// # Safety
    /// On a card it is a stream of the device's primary context, as every stream of the CUDA runtime and of PyTorch is, or
    /// 0, and it is there as long as this is used.
    pub const unsafe fn new(handle: u64) -> Self {
        Self(handle)
    }

    /// The handle.
    pub const fn handle(self) -> u64 {
        self.0
    }
}
