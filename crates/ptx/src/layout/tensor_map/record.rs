//! The 128 bytes that stand for a tensor map in the simulator, where the driver's own are opaque.

use super::{Interleave, L2Promotion, OutOfBounds, Swizzle, TENSOR_MAP_BYTES, TensorDataType, TensorMap};
use crate::layout::{Im2col, LayoutError, require};

const MAGIC: &[u8; 8] = b"tensmap1";

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
        bytes[16..24].copy_from_slice(&self.address.to_le_bytes());
        for (i, dim) in self.dims.iter().enumerate() {
            bytes[24 + 8 * i..][..8].copy_from_slice(&dim.to_le_bytes());
        }
        for (i, stride) in self.strides.iter().enumerate() {
            bytes[64 + 8 * i..][..8].copy_from_slice(&stride.to_le_bytes());
        }
        for (i, extent) in self.box_dims.iter().enumerate() {
            bytes[96 + 2 * i..][..2].copy_from_slice(&(*extent as u16).to_le_bytes());
        }
        for (i, step) in self.element_strides.iter().enumerate() {
            bytes[106 + i] = *step as u8;
        }
        if let Some(im2col) = &self.im2col {
            bytes[14] = 1;
            bytes[112..118].copy_from_slice(&Im2col::to_bytes(&im2col.lower));
            bytes[118..124].copy_from_slice(&Im2col::to_bytes(&im2col.upper));
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
        let u64_at = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let rank = bytes[9] as usize;
        require((1..=5).contains(&rank), "tensor map rank", rank, "1 to 5 possible")?;
        let corners = |at: usize| Im2col::from_bytes(&bytes[at..at + 6], rank.saturating_sub(2));
        let im2col = (bytes[14] != 0).then(|| Im2col { lower: corners(112), upper: corners(118) });
        let map = TensorMap {
            data_type: TensorDataType::from_code(bytes[8]).ok_or_else(|| code(8, "tensor map data type"))?,
            interleave: Interleave::from_code(bytes[10]).ok_or_else(|| code(10, "tensor map interleave"))?,
            swizzle: Swizzle::from_code(bytes[11]).ok_or_else(|| code(11, "tensor map swizzle"))?,
            l2_promotion: L2Promotion::from_code(bytes[12])
                .ok_or_else(|| code(12, "tensor map L2 promotion"))?,
            out_of_bounds: OutOfBounds::from_code(bytes[13]).ok_or_else(|| code(13, "out-of-bounds fill"))?,
            address: u64_at(16),
            dims: (0..rank).map(|i| u64_at(24 + 8 * i)).collect(),
            strides: (0..rank - 1).map(|i| u64_at(64 + 8 * i)).collect(),
            box_dims: (0..if im2col.is_some() { 2 } else { rank })
                .map(|i| u32::from(u16::from_le_bytes([bytes[96 + 2 * i], bytes[97 + 2 * i]])))
                .collect(),
            element_strides: (0..rank).map(|i| u32::from(bytes[106 + i])).collect(),
            im2col,
        };
        map.validate()?;
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Swizzle;

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
