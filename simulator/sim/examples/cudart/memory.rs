//! Memory of the card: taken, copied to and from, set, freed. Everything is done when the call returns.

use crate::abi::{INVALID_VALUE, OUT_OF_MEMORY, Status, put};
use crate::runtime::{call, complain, with};
use dualgemm_device::{Device, DevicePtr, Error};
use std::ffi::{c_int, c_uint, c_void};

/// Whether an address is the device's. They lie where no program has its own, so that the direction that a copy
/// names need not be believed: simulated memory starts here, libraries and stacks of the process much higher.
fn on_device(p: *const u8) -> bool {
    (0x7000_0000_0000..0x7800_0000_0000).contains(&(p as u64))
}

exports! {
    fn cudaMalloc(to: *mut u64, bytes: usize) -> Status {
        call(|r| {
            let at = r.gpu().alloc(bytes.max(1)).map_err(|e| complain(&e, OUT_OF_MEMORY))?;
            put(to, at.0);
            Ok(())
        })
    }
    fn cudaMallocAsync(to: *mut u64, bytes: usize, _stream: *mut c_void) -> Status {
        cudaMalloc(to, bytes)
    }
    fn cudaMemcpy(to: *mut u8, from: *const u8, bytes: usize, _kind: c_int) -> Status {
        let refused = |e: Error| complain(&e, INVALID_VALUE);
        call(|r| {
            let mut buffer = Vec::new();
            let source = if on_device(from) {
                buffer.resize(bytes, 0);
                r.gpu().copy_from(&mut buffer, DevicePtr(from as u64)).map_err(refused)?;
                buffer.as_slice()
            } else {
                std::slice::from_raw_parts(from, bytes)
            };
            if on_device(to) {
                return r.gpu().copy_to(DevicePtr(to as u64), source).map_err(refused);
            }
            std::ptr::copy(source.as_ptr(), to, bytes);
            Ok(())
        })
    }
    fn cudaMemcpyAsync(to: *mut u8, from: *const u8, bytes: usize, kind: c_int, _stream: *mut c_void) -> Status {
        cudaMemcpy(to, from, bytes, kind)
    }
    fn cudaMemcpyToSymbol(
        symbol: *const c_void,
        from: *const u8,
        bytes: usize,
        offset: usize,
        kind: c_int,
    ) -> Status {
        match with(|r| r.variable(symbol)) {
            Ok(at) => cudaMemcpy((at.0 + offset as u64) as *mut u8, from, bytes, kind),
            Err(status) => status,
        }
    }
    fn cudaMemcpyFromSymbol(
        to: *mut u8,
        symbol: *const c_void,
        bytes: usize,
        offset: usize,
        kind: c_int,
    ) -> Status {
        match with(|r| r.variable(symbol)) {
            Ok(at) => cudaMemcpy(to, (at.0 + offset as u64) as *const u8, bytes, kind),
            Err(status) => status,
        }
    }
    fn cudaGetSymbolAddress(to: *mut u64, symbol: *const c_void) -> Status {
        call(|r| r.variable(symbol).map(|at| put(to, at.0)))
    }
    fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> Status {
        call(|r| {
            let bytes = r.gpu().info().memory_bytes as usize;
            put(free, bytes);
            put(total, bytes);
            Ok(())
        })
    }
}

safe_exports! {
    fn cudaFree(at: u64) -> Status {
        call(|r| match at {
            0 => Ok(()),
            _ => r.gpu().free(DevicePtr(at)).map_err(|e| complain(&e, INVALID_VALUE)),
        })
    }
    fn cudaFreeAsync(at: u64, _stream: *mut c_void) -> Status {
        cudaFree(at)
    }
    fn cuMemsetD32Async(at: u64, value: c_uint, count: usize, _stream: *mut c_void) -> Status {
        let refused = |e: Error| complain(&e, INVALID_VALUE);
        call(|r| r.gpu().copy_to(DevicePtr(at), &value.to_le_bytes().repeat(count)).map_err(refused))
    }
    fn cudaMemset(at: u64, value: c_int, bytes: usize) -> Status {
        let refused = |e: Error| complain(&e, INVALID_VALUE);
        call(|r| r.gpu().memset(DevicePtr(at), value as u8, bytes).map_err(refused))
    }
    fn cudaMemsetAsync(at: u64, value: c_int, bytes: usize, _stream: *mut c_void) -> Status {
        cudaMemset(at, value, bytes)
    }
}
