//! Tensor maps: from the record a kernel passes to the plan of a copy.
//!
//! A driver's `CUtensorMap` is opaque; here it is the record that [`TensorMap::to_bytes`] writes, so that a
//! kernel can pass it through parameters, constant or global memory like the real one. Of zeros, `tensormap.replace`
//! makes the same record: [`replace`].

use crate::names::modifiers;
use crate::semantics::misuse::{not_modelled, require};
use crate::semantics::tma::{Bounds, TiledTensor};
use crate::trap::{Check, Fault, fault};
use dualgemm_ptx::layout::{Interleave, OutOfBounds, TensorDataType, TensorMap};

/// What the 128 bytes at a tensor map's address describe.
pub fn decode(bytes: &[u8; 128]) -> Result<TiledTensor, Fault> {
    let map = TensorMap::from_bytes(bytes).map_err(|e| {
        fault!(Check::Illegal, "the address does not hold a tensor map of this device: {e}")
            .help("pass the bytes that Device::tensor_map returns, as a 64-byte aligned parameter or copy")
    })?;
    if map.interleave != Interleave::None {
        return Err(Fault::new(Check::Illegal, "interleaved tensor maps are not executed"));
    }
    use TensorDataType::*;
    if matches!(map.data_type, F32Ftz | Tf32 | Tf32Ftz) {
        let rule = "types copied bit for bit: 0 to 9 and those of 4 and 6 bits";
        return Err(not_modelled("tensor map", "data type", map.data_type as u64, rule));
    }
    let rule = "a CTA has at most 227 KiB of shared memory";
    require(map.box_bytes() <= 227 << 10, "tensor map", "bytes of the box", map.box_bytes(), rule)?;
    if map.out_of_bounds == OutOfBounds::Nan {
        return Err(not_modelled("tensor map", "out-of-bound fill", 1, "zero fill"));
    }
    let mut t = TiledTensor {
        ty: map.data_type,
        rank: map.rank(),
        base: map.address,
        dims: [1; 5],
        strides: [0; 5],
        box_dims: [1; 5],
        element_strides: [1; 5],
        swizzle: map.swizzle,
        bounds: None,
    };
    t.dims[..map.rank()].copy_from_slice(&map.dims);
    t.strides[1..map.rank()].copy_from_slice(&map.strides);
    t.box_dims[..map.box_dims.len()].copy_from_slice(&map.box_dims);
    t.element_strides[..map.rank()].copy_from_slice(&map.element_strides);
    if let Some(corners) = &map.im2col {
        let (mut lower, mut upper) = ([0; 3], [0; 3]);
        lower[..corners.lower.len()].copy_from_slice(&corners.lower);
        upper[..corners.upper.len()].copy_from_slice(&corners.upper);
        t.bounds = Some(Bounds { lower, upper });
    }
    Ok(t)
}

modifiers! {
    /// A field that `tensormap.replace` sets. PTX ISA 9.7.9.28, tables 33 to 37.
    Field {
        Address "global_address",
        /// The number of dimensions less one.
        Rank "rank",
        BoxDim "box_dim", Dim "global_dim",
        /// In bytes.
        Stride "global_stride",
        ElementStride "element_stride", ElementType "elemtype", Interleave "interleave_layout", Swizzle "swizzle_mode",
        Fill "fill_mode",
    }
}

impl Field {
    /// Values a map has of this field.
    pub const fn values(self) -> usize {
        match self {
            Field::BoxDim | Field::Dim | Field::ElementStride => 5,
            Field::Stride => 4,
            _ => 1,
        }
    }
}

/// Sets one field of a record as `tensormap.replace` does. The record may be incomplete: it is checked when a
/// copy uses it. What a driver would have to write besides these fields counts as zero.
pub fn replace(bytes: &mut [u8; 128], field: Field, dimension: usize, value: u64) -> Result<(), Fault> {
    if bytes[..8] == [0; 8] {
        bytes[..8].copy_from_slice(MAGIC);
    }
    if bytes[..8] != *MAGIC {
        return Err(Fault::new(Check::Illegal, "the address does not hold a tensor map of this device")
            .help("start from 128 zero bytes, or from a copy of what Device::tensor_map returns"));
    }
    let bad = || {
        let name = Field::NAMES.iter().find(|(_, f)| *f == field).map_or("", |(name, _)| name);
        fault!(Check::Illegal, "tensormap.replace .{name}: {value} is not a value of this field")
    };
    let code = |codes: &[u8]| codes.get(value as usize).copied().ok_or_else(bad);
    // PTX numbers element types in another order than the driver.
    use TensorDataType::*;
    let elements = [
        U8, U16, U32, S32, U64, S64, F16, F32, F32Ftz, F64, Bf16, Tf32, Tf32Ftz, U4Align8, U4Align16,
        U6Align16,
    ]
    .map(|t| t as u8);
    let (at, len, value) = match field {
        Field::ElementType => (8, 1, code(&elements)?.into()),
        Field::Rank => (9, 1, if value < 5 { value + 1 } else { return Err(bad()) }),
        Field::Interleave => (10, 1, code(&[0, 1, 2])?.into()),
        Field::Swizzle => (11, 1, code(&[0, 1, 2, 3])?.into()),
        Field::Fill => (13, 1, code(&[0, 1])?.into()),
        Field::Address => (16, 8, value),
        Field::Dim => (24 + 8 * dimension, 8, value & u64::from(u32::MAX)),
        Field::Stride => (64 + 8 * dimension, 8, value),
        Field::BoxDim if value <= 256 => (96 + 2 * dimension, 2, value),
        Field::ElementStride if value <= 8 => (106 + dimension, 1, value),
        Field::BoxDim | Field::ElementStride => return Err(bad()),
    };
    bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
    Ok(())
}

/// What the record of [`TensorMap::to_bytes`] begins with.
const MAGIC: &[u8; 8] = b"tensmap1";

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_ptx::layout::Swizzle;

    #[test]
    fn a_record_made_field_by_field_is_that_of_the_host_exact() {
        let map = TensorMap {
            data_type: TensorDataType::Bf16,
            address: 0x7000_0000_0100,
            dims: vec![128, 300, 7],
            strides: vec![256, 256 * 300],
            box_dims: vec![64, 256, 1],
            element_strides: vec![1, 2, 1],
            interleave: Interleave::None,
            swizzle: Swizzle::B128,
            l2_promotion: dualgemm_ptx::layout::L2Promotion::None,
            out_of_bounds: OutOfBounds::Nan,
            im2col: None,
        };
        let mut bytes = [0; 128];
        let mut set = |field, i, value| replace(&mut bytes, field, i, value).unwrap();
        set(Field::Address, 0, map.address);
        set(Field::Rank, 0, 2);
        set(Field::ElementType, 0, 10);
        set(Field::Interleave, 0, 0);
        set(Field::Swizzle, 0, 3);
        set(Field::Fill, 0, 1);
        for i in 0..3 {
            set(Field::Dim, i, map.dims[i]);
            set(Field::BoxDim, i, map.box_dims[i].into());
            set(Field::ElementStride, i, map.element_strides[i].into());
        }
        set(Field::Stride, 0, map.strides[0]);
        set(Field::Stride, 1, map.strides[1]);
        assert_eq!(bytes, map.to_bytes().unwrap());
        for (field, value) in
            [(Field::Rank, 5), (Field::BoxDim, 257), (Field::ElementStride, 9), (Field::Fill, 2)]
        {
            assert!(replace(&mut bytes, field, 0, value).is_err(), "{field:?} {value}");
        }
        assert!(replace(&mut [1; 128], Field::Rank, 0, 1).is_err());
    }

    #[test]
    fn a_record_becomes_the_plan_it_describes_exact() {
        let map = TensorMap::matrix(
            TensorDataType::F16,
            0x7000_0000_0100,
            (300, 128),
            256,
            (64, 64),
            Swizzle::B128,
        );
        let t = decode(&map.to_bytes().unwrap()).unwrap();
        assert_eq!((t.ty, t.rank, t.swizzle), (TensorDataType::F16, 2, Swizzle::B128));
        assert_eq!((t.dims[..2].to_vec(), t.strides[1]), (vec![128, 300], 256));
        assert_eq!(t.box_bytes(), 64 * 128);
        assert!(decode(&[0; 128]).is_err());
        let refused = |map: TensorMap, text: &str| {
            assert!(decode(&map.to_bytes().unwrap()).unwrap_err().message.contains(text), "{text}");
        };
        let tf32 = TensorMap { data_type: TensorDataType::Tf32, box_dims: vec![32, 64], ..map.clone() };
        refused(tf32, "data type 0xb");
        refused(TensorMap { out_of_bounds: OutOfBounds::Nan, ..map }, "out-of-bound fill");
    }
}
