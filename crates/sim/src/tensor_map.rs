//! Tensor maps: from the record a kernel passes to the plan of a copy.
//!
//! A driver's `CUtensorMap` is opaque; here it is the record that [`TensorMap::to_bytes`] writes, so that a
//! kernel can pass it through parameters, constant or global memory like the real one.

use crate::semantics::swizzle::Swizzle;
use crate::semantics::tma::{Fill, TensorType, TiledTensor};
use crate::trap::{Check, Fault};
use dualgemm_ptx::layout::{Interleave, OutOfBounds, TensorDataType, TensorMap, TensorSwizzle};

fn element(ty: TensorDataType) -> TensorType {
    match ty {
        TensorDataType::U8 => TensorType::U8,
        TensorDataType::U16 => TensorType::U16,
        TensorDataType::U32 => TensorType::U32,
        TensorDataType::S32 => TensorType::S32,
        TensorDataType::U64 => TensorType::U64,
        TensorDataType::S64 => TensorType::S64,
        TensorDataType::F16 => TensorType::F16,
        TensorDataType::F32 => TensorType::F32,
        TensorDataType::F64 => TensorType::F64,
        TensorDataType::Bf16 => TensorType::Bf16,
        TensorDataType::F32Ftz => TensorType::F32Ftz,
        TensorDataType::Tf32 => TensorType::Tf32,
        TensorDataType::Tf32Ftz => TensorType::Tf32Ftz,
        TensorDataType::U4Align8 => TensorType::U4Align8,
        TensorDataType::U4Align16 => TensorType::U4Align16,
        TensorDataType::U6Align16 => TensorType::U6Align16,
    }
}

fn swizzle(s: TensorSwizzle) -> Swizzle {
    match s {
        TensorSwizzle::None => Swizzle::None,
        TensorSwizzle::B32 => Swizzle::B32,
        TensorSwizzle::B64 => Swizzle::B64,
        TensorSwizzle::B128 => Swizzle::B128,
        TensorSwizzle::B128Atom32 => Swizzle::B128Atom32,
        TensorSwizzle::B128Atom32Flip8 => Swizzle::B128Atom32Flip8,
        TensorSwizzle::B128Atom64 => Swizzle::B128Atom64,
    }
}

/// What the 128 bytes at a tensor map's address describe.
///
/// # Errors
/// Bytes that are no tensor map; a map that breaks a rule; interleaved layouts, which are not executed.
pub fn decode(bytes: &[u8; 128]) -> Result<TiledTensor, Fault> {
    let map = TensorMap::from_bytes(bytes).map_err(|e| {
        Fault::new(Check::Illegal, format!("the address does not hold a tensor map of this device: {e}"))
            .help("pass the bytes that Device::tensor_map returns, as a 64-byte aligned parameter or copy")
    })?;
    if map.interleave != Interleave::None {
        return Err(Fault::new(Check::Illegal, "interleaved tensor maps are not executed"));
    }
    let mut t = TiledTensor {
        ty: element(map.data_type),
        rank: map.rank(),
        base: map.address,
        dims: [1; 5],
        strides: [0; 5],
        box_dims: [1; 5],
        element_strides: [1; 5],
        swizzle: swizzle(map.swizzle),
        fill: if map.out_of_bounds == OutOfBounds::Nan { Fill::Nan } else { Fill::Zero },
    };
    t.dims[..map.rank()].copy_from_slice(&map.dims);
    t.strides[1..map.rank()].copy_from_slice(&map.strides);
    t.box_dims[..map.rank()].copy_from_slice(&map.box_dims);
    t.element_strides[..map.rank()].copy_from_slice(&map.element_strides);
    t.check()?;
    Ok(t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_becomes_the_plan_it_describes_exact() {
        let map = TensorMap::matrix(
            TensorDataType::F16,
            0x7000_0000_0100,
            (300, 128),
            256,
            (64, 64),
            TensorSwizzle::B128,
        );
        let t = decode(&map.to_bytes().unwrap()).unwrap();
        assert_eq!((t.ty, t.rank, t.swizzle), (TensorType::F16, 2, Swizzle::B128));
        assert_eq!((t.dims[..2].to_vec(), t.strides[1]), (vec![128, 300], 256));
        assert_eq!(t.box_bytes(), 64 * 128);
        assert!(decode(&[0; 128]).is_err());
    }
}
