//! Tensor maps, which programs encode with a function of the driver that the runtime hands out.

use crate::abi::{INVALID_VALUE, SUCCESS, Status, put, string};
use crate::runtime::{call, complain};
use dualgemm_device::Device;
use dualgemm_ptx::layout::{Interleave, L2Promotion, OutOfBounds, Swizzle, TensorDataType, TensorMap};
use std::ffi::{c_char, c_int, c_uint, c_void};

exports! {
    fn cudaGetDriverEntryPoint(
        name: *const c_char,
        to: *mut *const c_void,
        _flags: u64,
        found: *mut c_int,
    ) -> Status {
        let known = string(name) == "cuTensorMapEncodeTiled";
        put(to, if known { cuTensorMapEncodeTiled as *const c_void } else { std::ptr::null() });
        // `cudaDriverEntryPointSuccess`, `cudaDriverEntryPointSymbolNotFound`
        put(found, c_int::from(!known));
        SUCCESS
    }
    fn cudaGetDriverEntryPointByVersion(
        name: *const c_char,
        to: *mut *const c_void,
        _version: c_uint,
        flags: u64,
        found: *mut c_int,
    ) -> Status {
        cudaGetDriverEntryPoint(name, to, flags, found)
    }
    fn cuTensorMapEncodeTiled(
        map: *mut [u8; 128],
        data_type: c_uint,
        rank: c_uint,
        address: u64,
        dims: *const u64,
        strides: *const u64,
        box_dims: *const u32,
        element_strides: *const u32,
        interleave: c_uint,
        swizzle: c_uint,
        promotion: c_uint,
        fill: c_uint,
    ) -> Status {
        let n = rank as usize;
        // None of the driver's numbers reaches 256.
        let code = |v: c_uint| u8::try_from(v).unwrap_or(u8::MAX);
        let described = (|| {
            Some(TensorMap {
                data_type: TensorDataType::from_code(code(data_type))?,
                address,
                dims: std::slice::from_raw_parts(dims, n).to_vec(),
                strides: std::slice::from_raw_parts(strides, n.saturating_sub(1)).to_vec(),
                box_dims: std::slice::from_raw_parts(box_dims, n).to_vec(),
                element_strides: std::slice::from_raw_parts(element_strides, n).to_vec(),
                interleave: Interleave::from_code(code(interleave))?,
                swizzle: Swizzle::from_code(code(swizzle))?,
                l2_promotion: L2Promotion::from_code(code(promotion))?,
                out_of_bounds: OutOfBounds::from_code(code(fill))?,
                im2col: None,
            })
        })();
        call(|r| {
            let described = described.ok_or(INVALID_VALUE)?;
            let bytes = r.gpu().tensor_map(&described).map_err(|e| complain(&e, INVALID_VALUE))?;
            put(map, bytes);
            Ok(())
        })
    }
}
