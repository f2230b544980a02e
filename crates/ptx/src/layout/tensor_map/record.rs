//! The 128 bytes that stand for a tensor map in the simulator, where the driver's own are opaque.

use super::{Interleave, L2Promotion, OutOfBounds, Swizzle, TENSOR_MAP_BYTES, TensorDataType, TensorMap};
use crate::layout::{Im2col, LayoutError, require};

const MAGIC: &[u8; 8] = b"tensmap1";

/// Writes numbers of `width` bytes, one behind the other.
fn put(bytes: &mut [u8], width: usize, numbers: impl IntoIterator<Item = u64>) {
    for (place, number) in bytes.chunks_exact_mut(width).zip(numbers) {
        place.copy_from_slice(&number.to_le_bytes()[..width]);
    }
}

/// The first `count` of the numbers that [`put`] wrote.
fn get(bytes: &[u8], width: usize, count: usize) -> impl Iterator<Item = u64> {
    let number = |place: &[u8]| place.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte));
    bytes.chunks_exact(width).take(count).map(number)
}

impl TensorMap {
    /// The simulator's record of the arguments, in little-endian order: "tensmap1", five enumerations and the
    /// rank (1 byte each), whether im2col and a zero (1 each), address (8), dims (5 x 8), strides (4 x 8), box
    /// (5 x 2), element strides (5 x 1), a zero, lower and upper corner (3 x 2 each), zeros.
    pub fn to_bytes(&self) -> Result<[u8; TENSOR_MAP_BYTES], LayoutError> {
        self.validate()?;
        let mut bytes = [0; TENSOR_MAP_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..14].copy_from_slice(&[
            self.data_type as u8,
            self.rank() as u8,
            self.interleave as u8,
            self.swizzle as u8,
            self.l2_promotion as u8,
            self.out_of_bounds as u8,
        ]);
        put(&mut bytes[16..], 8, [self.address]);
        put(&mut bytes[24..], 8, self.dims.iter().copied());
        put(&mut bytes[64..], 8, self.strides.iter().copied());
        put(&mut bytes[96..], 2, self.box_dims.iter().map(|&extent| extent.into()));
        put(&mut bytes[106..], 1, self.element_strides.iter().map(|&step| step.into()));
        if let Some(im2col) = &self.im2col {
            bytes[14] = 1;
            put(&mut bytes[112..], 2, im2col.lower.iter().map(|&at| at as u64));
            put(&mut bytes[118..], 2, im2col.upper.iter().map(|&at| at as u64));
        }
        Ok(bytes)
    }

    /// Reads the record [`to_bytes`](Self::to_bytes) writes.
    ///
    /// # Errors
    /// If it is no such record, or a rule is broken.
    pub fn from_bytes(bytes: &[u8; TENSOR_MAP_BYTES]) -> Result<TensorMap, LayoutError> {
        let magic = bytes[..8] == *MAGIC;
        require(magic, "tensor map", format!("{:02x?}", &bytes[..8]), "a record written by the host needed")?;
        let code = |i: usize, what: &str| LayoutError {
            what: what.into(),
            value: bytes[i].to_string(),
            rule: "a value of the driver's enumeration needed",
        };
        let rank = bytes[9] as usize;
        require((1..=5).contains(&rank), "tensor map rank", rank, "1 to 5 possible")?;
        let numbers = |at: usize, count| get(&bytes[at..], 2, count).map(|number| number as u32);
        let corner = |at: usize| numbers(at, rank.saturating_sub(2)).map(|at| i32::from(at as i16)).collect();
        let im2col = (bytes[14] != 0).then(|| Im2col { lower: corner(112), upper: corner(118) });
        let map = TensorMap {
            data_type: TensorDataType::from_code(bytes[8]).ok_or_else(|| code(8, "tensor map data type"))?,
            interleave: Interleave::from_code(bytes[10]).ok_or_else(|| code(10, "tensor map interleave"))?,
            swizzle: Swizzle::from_code(bytes[11]).ok_or_else(|| code(11, "tensor map swizzle"))?,
            l2_promotion: L2Promotion::from_code(bytes[12])
                .ok_or_else(|| code(12, "tensor map L2 promotion"))?,
            out_of_bounds: OutOfBounds::from_code(bytes[13]).ok_or_else(|| code(13, "out-of-bounds fill"))?,
            address: get(&bytes[16..], 8, 1).sum(),
            dims: get(&bytes[24..], 8, rank).collect(),
            strides: get(&bytes[64..], 8, rank - 1).collect(),
            box_dims: numbers(96, if im2col.is_some() { 2 } else { rank }).collect(),
            element_strides: bytes[106..][..rank].iter().map(|&step| step.into()).collect(),
            im2col,
        };
        map.validate()?;
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> TensorMap {
        TensorMap::matrix(TensorDataType::F16, 0x1000, (100, 72), 144, (64, 64), Swizzle::B128)
    }

    #[test]
    fn record_reads_back_exact() {
        let map = good();
        assert_eq!(TensorMap::from_bytes(&map.to_bytes().unwrap()), Ok(map.clone()));
        let five = TensorMap {
            dims: vec![64, 1 << 32, 3, 4, 5],
            strides: vec![128, 256, 512, (1 << 40) - 16],
            box_dims: vec![32, 256, 1, 2, 3],
            element_strides: vec![1, 2, 3, 4, 8],
            out_of_bounds: OutOfBounds::Nan,
            swizzle: Swizzle::B64,
            ..map
        };
        assert_eq!(TensorMap::from_bytes(&five.to_bytes().unwrap()), Ok(five));
    }

    #[test]
    fn foreign_bytes_are_refused() {
        assert!(TensorMap::from_bytes(&[0; 128]).is_err());
        let good = good().to_bytes().unwrap();
        for at in 8..14 {
            let mut bytes = good;
            bytes[at] = 0xFF;
            assert!(TensorMap::from_bytes(&bytes).is_err(), "byte {at}");
        }
    }
}
