//! What a GPU, real or simulated, must offer a host program: memory, modules, launches.
//!
//! A host program written against [`Device`] runs unchanged on the simulator and on a card. The trait takes PTX
//! *text*, so that what is simulated is what ships. Calls take `&self`: a device is shared, like a driver
//! context. Work is ordered: a copy after a launch sees the launch's results. A launch may return before the
//! kernel ends, and then its failure is reported by a later call, at the latest by [`Device::synchronize`]. Launches on
//! a [`Stream`] of the caller are ordered by that stream alone.
//!
//! ```
//! use dualgemm_device::{Args, Device, Error, LaunchSpec};
//!
//! /// Runs `kernel(x, n)` over `x` on any device.
//! ///
//! /// # Safety
//! /// The kernel reads and writes those bytes only.
//! unsafe fn apply(device: &dyn Device, ptx: &str, kernel: &str, x: &mut [u8]) -> Result<(), Error> {
//!     let module = device.load(ptx)?;
//!     let kernel = device.function(module, kernel)?;
//!     let buffer = device.alloc(x.len())?;
//!     device.copy_to(buffer, x)?;
//!     let args = Args::new().ptr(buffer).u32(x.len() as u32);
//!     // SAFETY: the kernel stays within the `n` bytes at `x`.
//!     unsafe { device.launch(&LaunchSpec::new(kernel, [1, 1, 1], [128, 1, 1]).args(args)) }?;
//!     device.copy_from(x, buffer)?;
//!     device.free(buffer)
//! }
//! ```

#[doc(hidden)]
pub use dualgemm_ptx::layout::{TENSOR_MAP_BYTES, TensorMap};

mod args;
mod error;
mod info;
mod launch;
mod ptr;

pub use args::{Arg, Args};
pub use error::Error;
pub use info::{Arch, DeviceInfo};
pub use launch::LaunchSpec;
pub use ptr::{DevicePtr, FunctionId, ModuleId, RawStream, Stream};

/// A GPU, or something that behaves like one.
pub trait Device: Send + Sync {
    /// What the device is.
    fn info(&self) -> &DeviceInfo;

    /// Reserves `bytes` of global memory, aligned to 256 bytes, with undefined contents.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    fn alloc(&self, bytes: usize) -> Result<DevicePtr, Error>;

    /// Gives back what [`alloc`](Device::alloc) returned.
    ///
    /// # Errors
    /// [`Error::BadPointer`] if `ptr` is not the start of a live allocation.
    fn free(&self, ptr: DevicePtr) -> Result<(), Error>;

    /// Copies `src` to device memory at `dst`.
    ///
    /// # Errors
    /// [`Error::BadPointer`] if the range is not inside one allocation; the failure of an earlier launch.
    fn copy_to(&self, dst: DevicePtr, src: &[u8]) -> Result<(), Error>;

    /// Copies device memory at `src` into `dst`.
    ///
    /// # Errors
    /// As [`copy_to`](Device::copy_to).
    fn copy_from(&self, dst: &mut [u8], src: DevicePtr) -> Result<(), Error>;

    /// Sets `bytes` bytes at `dst` to `value`.
    ///
    /// # Errors
    /// As [`copy_to`](Device::copy_to).
    fn memset(&self, dst: DevicePtr, value: u8, bytes: usize) -> Result<(), Error>;

    /// Compiles PTX text.
    ///
    /// # Errors
    /// [`Error::Load`] with the line and the reason.
    fn load(&self, ptx: &str) -> Result<ModuleId, Error>;

    /// The kernel called `name` of a module.
    ///
    /// # Errors
    /// [`Error::NoFunction`], naming the kernels there are.
    fn function(&self, module: ModuleId, name: &str) -> Result<FunctionId, Error>;

    /// The address and size in bytes of a module's `.global` variable.
    ///
    /// # Errors
    /// [`Error::NoSymbol`].
    fn symbol(&self, module: ModuleId, name: &str) -> Result<(DevicePtr, usize), Error>;

    /// Encodes a tensor map for a kernel parameter. The bytes are opaque and hold for this device only.
    ///
    /// # Errors
    /// [`Error::TensorMap`] with the rule that the map breaks.
    fn tensor_map(&self, map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], Error>;

    /// Starts a kernel on a stream. Allocates nothing and waits for nothing.
    ///
    /// # Safety
    /// A card follows every address that the kernel makes of its arguments, in the memory of this process: until the kernel
    /// has ended, what it reads and writes is live memory that it may read and write, and that nobody uses in between.
    /// (The simulator looks after that itself and fails the launch.)
    ///
    /// # Errors
    /// [`Error::Launch`] if the configuration or the arguments do not fit the kernel, [`Error::Kernel`] if
    /// the kernel failed and the device knows it already.
    unsafe fn launch_on(&self, stream: Stream, spec: &LaunchSpec) -> Result<(), Error>;

    /// Starts a kernel on the device's own stream.
    ///
    /// # Safety
    /// As [`launch_on`](Device::launch_on).
    ///
    /// # Errors
    /// As [`launch_on`](Device::launch_on).
    unsafe fn launch(&self, spec: &LaunchSpec) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_on(Stream::Own, spec) }
    }

    /// Waits for all launches.
    ///
    /// # Errors
    /// [`Error::Kernel`] if one failed.
    fn synchronize(&self) -> Result<(), Error>;
}

/// The methods of [`Device`] that a device around another one, its field of this name, mostly leaves to that: all but those that load
/// and launch.
#[doc(hidden)]
#[macro_export]
macro_rules! leave_to {
    ($inner:ident) => {
        $crate::leave_to! { $inner:
            fn info() -> &$crate::DeviceInfo;
            fn alloc(bytes: usize) -> Result<$crate::DevicePtr, $crate::Error>;
            fn free(ptr: $crate::DevicePtr) -> Result<(), $crate::Error>;
            fn copy_to(dst: $crate::DevicePtr, src: &[u8]) -> Result<(), $crate::Error>;
            fn copy_from(dst: &mut [u8], src: $crate::DevicePtr) -> Result<(), $crate::Error>;
            fn memset(dst: $crate::DevicePtr, value: u8, bytes: usize) -> Result<(), $crate::Error>;
            fn function(module: $crate::ModuleId, name: &str) -> Result<$crate::FunctionId, $crate::Error>;
            fn symbol(module: $crate::ModuleId, name: &str) -> Result<($crate::DevicePtr, usize), $crate::Error>;
            fn tensor_map(map: &$crate::TensorMap) -> Result<[u8; $crate::TENSOR_MAP_BYTES], $crate::Error>;
            fn synchronize() -> Result<(), $crate::Error>;
        }
    };
    ($inner:ident: $(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $result {
            self.$inner.$name($($argument),*)
        })*
    };
}
