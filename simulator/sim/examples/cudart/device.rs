//! The card and its limits, versions, errors, and streams and events, which have nothing to do.

use crate::abi::{
    ATTRIBUTES, INVALID_FUNCTION, LAUNCH_FAILURE, OUT_OF_MEMORY, SUCCESS, Status, properties_of, put,
};
use crate::runtime::{call, with};
use dualgemm_device::Device;
use std::ffi::{c_char, c_int, c_uint, c_void};

exports! {
    fn cudaGetDevice(device: *mut c_int) -> Status {
        put(device, 0);
        SUCCESS
    }
    fn cudaGetDeviceCount(count: *mut c_int) -> Status {
        put(count, 1);
        SUCCESS
    }
    fn cudaRuntimeGetVersion(version: *mut c_int) -> Status {
        put(version, 13000);
        SUCCESS
    }
    fn cudaDriverGetVersion(version: *mut c_int) -> Status {
        put(version, 13000);
        SUCCESS
    }
    fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> Status {
        call(|r| {
            let known = ATTRIBUTES.iter().find(|a| a.0 == attribute);
            put(value, known.map_or(0, |a| a.1(r.gpu().info())) as c_int);
            Ok(())
        })
    }
    fn cudaGetDeviceProperties(properties: *mut [u8; 1008], _device: c_int) -> Status {
        call(|r| {
            put(properties, properties_of(r.gpu().info()));
            Ok(())
        })
    }
    fn cuGetErrorString(status: Status, to: *mut *const c_char) -> Status {
        put(to, cudaGetErrorString(status));
        SUCCESS
    }
    fn cudaEventElapsedTime(milliseconds: *mut f32, _from: *mut c_void, _to: *mut c_void) -> Status {
        put(milliseconds, 1.0);
        SUCCESS
    }
    fn cudaEventCreate(event: *mut *mut c_void) -> Status {
        put(event, std::ptr::null_mut());
        SUCCESS
    }
    fn cudaEventCreateWithFlags(event: *mut *mut c_void, _flags: c_uint) -> Status {
        cudaEventCreate(event)
    }
    fn cudaStreamCreate(stream: *mut *mut c_void) -> Status {
        cudaEventCreate(stream)
    }
    fn cudaStreamCreateWithFlags(stream: *mut *mut c_void, _flags: c_uint) -> Status {
        cudaEventCreate(stream)
    }
}

safe_exports! {
    fn cudaGetLastError() -> Status {
        with(|r| std::mem::take(&mut r.last))
    }
    fn cudaPeekAtLastError() -> Status {
        with(|r| r.last)
    }
    fn cudaGetErrorString(status: Status) -> *const c_char {
        match status {
            SUCCESS => c"no error".as_ptr(),
            OUT_OF_MEMORY => c"out of memory".as_ptr(),
            INVALID_FUNCTION => c"invalid device function".as_ptr(),
            LAUNCH_FAILURE => c"the kernel failed".as_ptr(),
            _ => c"invalid value".as_ptr(),
        }
    }
    fn cudaGetErrorName(status: Status) -> *const c_char {
        cudaGetErrorString(status)
    }
}

nothing! {
    cudaSetDevice, cudaDeviceSynchronize, cudaStreamSynchronize, cudaStreamDestroy, cudaStreamWaitEvent,
    cudaEventDestroy, cudaEventRecord, cudaEventSynchronize, cudaDeviceSetLimit, cudaDeviceSetCacheConfig,
}
