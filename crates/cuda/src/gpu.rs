//! An opened GPU: memory, modules, launches.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use cudarc::driver::{result, sys};
use dualgemm_device::{Device, DeviceInfo, DevicePtr, Error, FunctionId, LaunchSpec, ModuleId, Stream};
use dualgemm_ptx::layout::{TENSOR_MAP_BYTES, TensorMap};

use crate::context::{Context, OwnedStream};
use crate::driver::{check, explain, info, init};
use crate::module::{Function, Module};
use crate::ready::{attributes, pointers, start};
use crate::tensor_map;

/// One NVIDIA GPU, through its primary context. Shareable among threads.
#[derive(Debug)]
pub struct Cuda {
    ordinal: i32,
    info: DeviceInfo,
    state: RwLock<State>,
    context: Arc<Context>,
}

#[derive(Debug, Default)]
struct State {
    modules: BTreeMap<u64, Module>,
    ranges: BTreeMap<u64, Range>,
    next_module: u64,
}

/// Device memory that host copies may touch.
#[derive(Debug, Clone, Copy)]
struct Range {
    bytes: usize,
    /// Allocated here, so to be freed; otherwise a global variable of a module.
    allocated: bool,
}

impl Cuda {
    /// Opens the GPU of that number, 0 first.
    ///
    /// # Errors
    /// [`Error::Driver`] if there is no driver, no GPU, or none of that number.
    pub fn open(ordinal: i32) -> Result<Self, Error> {
        init()?;
        let count = result::device::get_count().map_err(|e| explain("cuDeviceGetCount", e))?;
        if !(0..count).contains(&ordinal) {
            return Err(Error::Driver {
                call: "cuDeviceGet",
                reason: format!("there is no GPU {ordinal}; this machine has {count}"),
            });
        }
        let device = result::device::get(ordinal).map_err(|e| explain("cuDeviceGet", e))?;
        let context = Arc::new(Context::retain(device)?);
        Ok(Self { ordinal, info: info(device)?, state: RwLock::default(), context })
    }

    /// GPUs of this machine; 0 without a driver.
    pub fn count() -> usize {
        init().ok().and_then(|()| result::device::get_count().ok()).map_or(0, |n| n.max(0) as usize)
    }

    /// The number this GPU was opened by.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The driver's version as it counts: 13000 is CUDA 13.0.
    pub fn driver_version() -> Result<i32, Error> {
        init()?;
        let mut version = 0;
        // SAFETY: the result outlives the call.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) }).map(|()| version)
    }

    /// Another stream of this GPU.
    pub fn new_stream(&self) -> Result<OwnedStream, Error> {
        OwnedStream::new(&self.context)
    }

    /// The driver's handle of a stream, for libraries that take one.
    pub fn raw_stream(&self, stream: Stream) -> *mut c_void {
        self.context.stream(stream).cast()
    }

    /// Makes this GPU the one that this thread's calls to libraries go to.
    pub fn enter(&self) -> Result<(), Error> {
        self.context.enter()
    }

    /// Copies between device memories, after what the device's own stream was given before.
    ///
    /// # Errors
    /// [`Error::BadPointer`] if a range is not inside one allocation; the failure of an earlier launch.
    pub fn copy_within(&self, dst: DevicePtr, src: DevicePtr, bytes: usize) -> Result<(), Error> {
        self.enter()?;
        self.check_range(dst, bytes)?;
        self.check_range(src, bytes)?;
        let stream = self.context.stream(Stream::Own);
        // SAFETY: both ranges lie in one live allocation each.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes, stream) })
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    // Every change of the state is a single insertion or removal, so a panic elsewhere cannot leave it torn.
    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The kernel of a launch, which may use as much shared memory and takes the arguments that it is given.
    pub(crate) fn checked_kernel(&self, spec: &LaunchSpec) -> Result<Arc<Function>, Error> {
        let id = spec.function;
        let found = self.state().modules.get(&id.module.0).and_then(|module| module.get(id.index));
        let function = found.ok_or(Error::BadHandle { what: "function" })?;
        function.check_arguments(&spec.args)?;
        function.allow_shared(spec.dynamic_shared)?;
        Ok(function)
    }

    /// Refuses a range that is not inside one live allocation, which the driver itself would not notice.
    fn check_range(&self, ptr: DevicePtr, bytes: usize) -> Result<(), Error> {
        let state = self.state();
        let bad = |reason: String| Err(Error::BadPointer { ptr, bytes: bytes as u64, reason });
        let Some((&start, range)) = state.ranges.range(..=ptr.0).next_back() else {
            return bad("it lies before every allocation".into());
        };
        let end = start + range.bytes as u64;
        if ptr.0.checked_add(bytes as u64).is_none_or(|last| last > end) {
            return bad(format!("the nearest allocation is {start:#x}..{end:#x}"));
        }
        Ok(())
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            let state = std::mem::take(&mut *self.state_mut());
            state.modules.into_values().for_each(Module::unload);
            for (ptr, _) in state.ranges.into_iter().filter(|(_, range)| range.allocated) {
                // SAFETY: allocated here and not freed; a failure means a dead context, which frees everything.
                let _ = unsafe { sys::cuMemFree_v2(ptr) };
            }
        }
    }
}

impl Device for Cuda {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn alloc(&self, bytes: usize) -> Result<DevicePtr, Error> {
        self.enter()?;
        // The driver refuses empty allocations.
        let bytes = bytes.max(1);
        let mut ptr = 0;
        // SAFETY: the result outlives the call.
        let result = unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free, _) = result::mem_get_info().map_err(|e| explain("cuMemGetInfo", e))?;
            return Err(Error::OutOfMemory { requested: bytes as u64, available: free as u64 });
        }
        check("cuMemAlloc", result)?;
        self.state_mut().ranges.insert(ptr, Range { bytes, allocated: true });
        Ok(DevicePtr(ptr))
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), Error> {
        self.enter()?;
        {
            let mut state = self.state_mut();
            if !state.ranges.get(&ptr.0).is_some_and(|range| range.allocated) {
                let reason = "it is not the start of a live allocation".into();
                return Err(Error::BadPointer { ptr, bytes: 0, reason });
            }
            state.ranges.remove(&ptr.0);
        }
        // SAFETY: allocated by us, removed from the list, so freed once.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(ptr.0) })
    }

    fn copy_to(&self, dst: DevicePtr, src: &[u8]) -> Result<(), Error> {
        self.enter()?;
        self.check_range(dst, src.len())?;
        // SAFETY: the range lies in one live allocation; `src` holds that many bytes.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(dst.0, src.as_ptr().cast(), src.len()) })
    }

    fn copy_from(&self, dst: &mut [u8], src: DevicePtr) -> Result<(), Error> {
        self.enter()?;
        self.check_range(src, dst.len())?;
        // SAFETY: the range lies in one live allocation; `dst` has room for that many bytes.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(dst.as_mut_ptr().cast(), src.0, dst.len()) })
    }

    fn memset(&self, dst: DevicePtr, value: u8, bytes: usize) -> Result<(), Error> {
        self.enter()?;
        self.check_range(dst, bytes)?;
        // SAFETY: the range lies in one live allocation.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(dst.0, value, bytes) })
    }

    fn load(&self, ptx: &str) -> Result<ModuleId, Error> {
        self.enter()?;
        let module = Module::load(ptx)?;
        let mut state = self.state_mut();
        let id = state.next_module;
        state.next_module += 1;
        state.modules.insert(id, module);
        Ok(ModuleId(id))
    }

    fn function(&self, module: ModuleId, name: &str) -> Result<FunctionId, Error> {
        self.enter()?;
        let mut state = self.state_mut();
        let found = state.modules.get_mut(&module.0).ok_or(Error::BadHandle { what: "module" })?;
        Ok(FunctionId { module, index: found.function(name)? })
    }

    fn symbol(&self, module: ModuleId, name: &str) -> Result<(DevicePtr, usize), Error> {
        self.enter()?;
        let mut state = self.state_mut();
        let found = state.modules.get(&module.0).ok_or(Error::BadHandle { what: "module" })?;
        let (address, bytes) = found.symbol(name)?;
        // Copies to and from it are ranges like any other.
        state.ranges.insert(address, Range { bytes, allocated: false });
        Ok((DevicePtr(address), bytes))
    }

    fn tensor_map(&self, map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], Error> {
        tensor_map::encode(map)
    }

    unsafe fn launch_on(&self, stream: Stream, spec: &LaunchSpec) -> Result<(), Error> {
        self.enter()?;
        let function = self.checked_kernel(spec)?;
        let (attributes, pointers) = (attributes(spec), pointers(spec));
        // SAFETY: the kernel belongs to this context, which was entered; `checked_kernel` made sure that the arguments are
        // what it declares. The stream is ours, or was promised to be there; so was the memory.
        unsafe { start(&function, spec, &attributes, &pointers, self.context.stream(stream)) }
    }

    fn synchronize(&self) -> Result<(), Error> {
        self.enter()?;
        result::ctx::synchronize().map_err(|e| explain("cuCtxSynchronize", e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_gets_a_reason() {
        if Cuda::count() > 0 {
            let error = Cuda::open(1000).unwrap_err().to_string();
            assert!(error.contains("there is no GPU 1000"), "{error}");
            return;
        }
        let error = Cuda::open(0).unwrap_err().to_string();
        assert!(
            error.contains("driver") || error.contains("no GPU 0") || error.contains("cuInit"),
            "{error}"
        );
    }
}
