//! Targets by name, and memory of their own for programs that have no CUDA of theirs.

use std::ffi::{CStr, c_char, c_void};

use dualgemm::Target;
use dualgemm::device::{Device as _, DevicePtr, Stream};
use dualgemm::strategies::{Error as GpuError, Gpu};

use crate::status::{Failure, dualgemm_status, report};

/// The target of a name from C.
///
/// # Safety
/// `name` is null or a string that ends with a zero.
pub(crate) unsafe fn target(name: *const c_char) -> Result<Target, Failure> {
    if name.is_null() {
        return Ok(Target::default());
    }
    // SAFETY: not null, so a string, by the caller's word.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    Ok(name.parse()?)
}

/// The GPU of a name from C.
///
/// # Safety
/// As [`target`].
unsafe fn gpu(name: *const c_char) -> Result<&'static Gpu, Failure> {
    // SAFETY: the caller promises what `target` asks for.
    match unsafe { target(name) }? {
        Target::Gpu(id, _) => Ok(id.open()?),
        _ => Err(Failure::argument("target: is the processor; a GPU is needed".into())),
    }
}

/// The device address of a pointer from C.
pub(crate) fn address(pointer: *const c_void) -> DevicePtr {
    DevicePtr(pointer.addr() as u64)
}

/// The stream of a handle from C.
///
/// # Safety
/// As [`Stream::raw`].
pub(crate) unsafe fn stream(handle: *mut c_void) -> Stream {
    // SAFETY: the caller's promise.
    unsafe { Stream::raw(handle.addr() as u64) }
}

/// `len` bytes of the host at a pointer from C; none where there is no byte.
///
/// # Safety
/// A pointer that is not null points at that many bytes.
unsafe fn bytes<'a>(name: &str, pointer: *const c_void, len: usize) -> Result<&'a [u8], Failure> {
    match (pointer.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Failure::argument(format!("{name}: is null"))),
        // SAFETY: not null, so `len` bytes are there, by the caller's word.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), len) }),
    }
}

fn device(result: Result<(), dualgemm::device::Error>) -> Result<(), Failure> {
    Ok(result.map_err(GpuError::from)?)
}

/// Takes memory of a GPU, at a multiple of 256 bytes. Only for programs that do not use CUDA themselves: memory of
/// `cuMemAlloc`, `cudaMalloc` and whatever is made of them is as good.
///
/// # Safety
/// `target` is a string; `out` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_device_alloc(
    target: *const c_char,
    bytes: usize,
    out: *mut *mut c_void,
) -> dualgemm_status {
    report(|| {
        // SAFETY: `out` is null or can be written, by the caller's word.
        let out = unsafe { out.as_mut() }.ok_or_else(|| Failure::argument("out: is null".into()))?;
        *out = std::ptr::null_mut();
        // SAFETY: `target` is a string, by the caller's word.
        let ptr = unsafe { gpu(target) }?.alloc(bytes).map_err(GpuError::from)?;
        *out = std::ptr::without_provenance_mut(ptr.0 as usize);
        Ok(())
    })
}

/// Gives back what `dualgemm_device_alloc` gave; null is fine. Runs that use it have ended.
///
/// # Safety
/// `target` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_device_free(target: *const c_char, memory: *mut c_void) -> dualgemm_status {
    report(|| {
        if memory.is_null() {
            return Ok(());
        }
        // SAFETY: `target` is a string, by the caller's word.
        device(unsafe { gpu(target) }?.free(address(memory)))
    })
}

/// Copies from the host to memory that `dualgemm_device_alloc` gave. Not ordered with streams of the caller.
///
/// # Safety
/// `target` is a string; `from` points at `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_device_write(
    target: *const c_char,
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
) -> dualgemm_status {
    report(|| {
        // SAFETY: `target` is a string, by the caller's word.
        let gpu = unsafe { gpu(target) }?;
        // SAFETY: `from` points at `bytes` bytes, by the caller's word.
        let from = unsafe { self::bytes("from", from, bytes) }?;
        device(gpu.copy_to(address(to), from))
    })
}

/// Copies to the host from memory that `dualgemm_device_alloc` gave. Not ordered with streams of the caller.
///
/// # Safety
/// `target` is a string; `to` can be written for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_device_read(
    target: *const c_char,
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
) -> dualgemm_status {
    report(|| {
        if to.is_null() && bytes > 0 {
            return Err(Failure::argument("to: is null".into()));
        }
        // SAFETY: `target` is a string, by the caller's word.
        let gpu = unsafe { gpu(target) }?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: not null, and can be written for `bytes` bytes, by the caller's word.
        unsafe { to.write_bytes(0, bytes) };
        // SAFETY: not null, `bytes` bytes by the caller's word, all just written.
        let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
        device(gpu.copy_from(to, address(from)))
    })
}

/// Waits for all streams of a GPU; a failure of a kernel is reported here at the latest.
///
/// # Safety
/// `target` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dualgemm_device_synchronize(target: *const c_char) -> dualgemm_status {
    report(|| {
        // SAFETY: `target` is a string, by the caller's word.
        device(unsafe { gpu(target) }?.synchronize())
    })
}
