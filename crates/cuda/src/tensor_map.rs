//! Tensor maps, encoded by the driver into its opaque 128 bytes.

use cudarc::driver::sys;
use dualgemm_device::Error;
use dualgemm_ptx::layout::{
    Interleave, L2Promotion, OutOfBounds, Swizzle, TENSOR_MAP_BYTES, TensorDataType, TensorMap,
};

use crate::driver::check;

/// One variant of ours for one of the driver's, with nothing left over on our side.
macro_rules! same {
    ($value:expr, $ours:ident => $theirs:ident { $($variant:ident $name:ident),* $(,)? }) => {
        match $value { $($ours::$variant => sys::$theirs::$name),* }
    };
}

/// Encodes a map that obeys the rules of [`TensorMap::validate`].
pub(crate) fn encode(map: &TensorMap) -> Result<[u8; TENSOR_MAP_BYTES], Error> {
    map.validate().map_err(|e| Error::TensorMap(e.to_string()))?;
    let data_type = same!(map.data_type, TensorDataType => CUtensorMapDataType {
        U8 CU_TENSOR_MAP_DATA_TYPE_UINT8,
        U16 CU_TENSOR_MAP_DATA_TYPE_UINT16,
        U32 CU_TENSOR_MAP_DATA_TYPE_UINT32,
        S32 CU_TENSOR_MAP_DATA_TYPE_INT32,
        U64 CU_TENSOR_MAP_DATA_TYPE_UINT64,
        S64 CU_TENSOR_MAP_DATA_TYPE_INT64,
        F16 CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        F32 CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        F64 CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
        Bf16 CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        F32Ftz CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ,
        Tf32 CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        Tf32Ftz CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ,
        U4Align8 CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B,
        U4Align16 CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B,
        U6Align16 CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B,
    });
    let interleave = same!(map.interleave, Interleave => CUtensorMapInterleave {
        None CU_TENSOR_MAP_INTERLEAVE_NONE,
        B16 CU_TENSOR_MAP_INTERLEAVE_16B,
        B32 CU_TENSOR_MAP_INTERLEAVE_32B,
    });
    let swizzle = same!(map.swizzle, Swizzle => CUtensorMapSwizzle {
        None CU_TENSOR_MAP_SWIZZLE_NONE,
        B32 CU_TENSOR_MAP_SWIZZLE_32B,
        B64 CU_TENSOR_MAP_SWIZZLE_64B,
        B128 CU_TENSOR_MAP_SWIZZLE_128B,
        B128Atom32 CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B,
        B128Atom32Flip8 CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B_FLIP_8B,
        B128Atom64 CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B,
    });
    let l2 = same!(map.l2_promotion, L2Promotion => CUtensorMapL2promotion {
        None CU_TENSOR_MAP_L2_PROMOTION_NONE,
        B64 CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
        B128 CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        B256 CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    });
    let fill = same!(map.out_of_bounds, OutOfBounds => CUtensorMapFloatOOBfill {
        Zero CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        Nan CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
    });
    let mut encoded = sys::CUtensorMap { opaque: [0; TENSOR_MAP_BYTES / 8] };
    let rank = map.rank() as u32;
    let (dims, strides, steps) = (map.dims.as_ptr(), map.strides.as_ptr(), map.element_strides.as_ptr());
    let address = map.address as *mut _;
    match &map.im2col {
        None => {
            // SAFETY: `validate` made sure that each array has as many entries as the rank (strides one fewer); they
            // and the result outlive the call; the address is only stored.
            let result = unsafe {
                sys::cuTensorMapEncodeTiled(
                    &mut encoded,
                    data_type,
                    rank,
                    address,
                    dims,
                    strides,
                    map.box_dims.as_ptr(),
                    steps,
                    interleave,
                    swizzle,
                    l2,
                    fill,
                )
            };
            check("cuTensorMapEncodeTiled", result)?;
        }
        Some(corners) => {
            // SAFETY: `validate` made sure that arrays have as many entries as the rank, strides one and corners two
            // fewer, and the box two; they and the result outlive the call; the address is only stored.
            let result = unsafe {
                sys::cuTensorMapEncodeIm2col(
                    &mut encoded,
                    data_type,
                    rank,
                    address,
                    dims,
                    strides,
                    corners.lower.as_ptr(),
                    corners.upper.as_ptr(),
                    map.box_dims[0],
                    map.box_dims[1],
                    steps,
                    interleave,
                    swizzle,
                    l2,
                    fill,
                )
            };
            check("cuTensorMapEncodeIm2col", result)?;
        }
    }
    let mut bytes = [0; TENSOR_MAP_BYTES];
    for (part, word) in bytes.chunks_exact_mut(8).zip(encoded.opaque) {
        part.copy_from_slice(&word.to_ne_bytes());
    }
    Ok(bytes)
}
