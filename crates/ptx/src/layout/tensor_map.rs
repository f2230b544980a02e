//! What a TMA instruction knows of a tensor in global memory: the arguments of `cuTensorMapEncodeTiled`.
//!
//! The driver turns them into its opaque 128 bytes; the simulator reads the record
//! [`TensorMap::to_bytes`] writes. Rules: the comment of that function in `cuda.h`
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html>.

use super::{Im2col, LayoutError, Swizzle, require};

/// Size of a tensor map in bytes. A kernel parameter that holds one is aligned to 64.
pub const TENSOR_MAP_BYTES: usize = 128;

macro_rules! driver_enum {
    ($(#[$meta:meta])* $name:ident { $($variant:ident = $value:literal $doc:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $(#[doc = $doc] $variant = $value,)* }

        impl $name {
            /// Every value, in the order of the driver's enumeration.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// The value with the driver's number `code`.
            pub fn from_code(code: u8) -> Option<$name> {
                match code { $($value => Some($name::$variant),)* _ => None }
            }
        }
    };
}

driver_enum! {
    /// Element type; the numbers are those of `CUtensorMapDataType`.
    TensorDataType {
        U8 = 0 "8 bits.",
        U16 = 1 "16 bits.",
        U32 = 2 "32 bits.",
        S32 = 3 "32 bits, signed in reductions.",
        U64 = 4 "64 bits.",
        S64 = 5 "64 bits, signed in reductions.",
        F16 = 6 "Binary16.",
        F32 = 7 "Binary32.",
        F64 = 8 "Binary64.",
        Bf16 = 9 "bfloat16.",
        F32Ftz = 10 "Binary32, subnormals flushed.",
        Tf32 = 11 "TF32.",
        Tf32Ftz = 12 "TF32, subnormals flushed.",
        U4Align8 = 13 "16 nibbles in 8 bytes, no gaps; sm_100 and later.",
        U4Align16 = 14 "16 nibbles in 8 bytes, each followed by 8 bytes of gap in shared memory; sm_100 and later.",
        U6Align16 = 15 "16 six-bit values in 12 bytes, each followed by 4 bytes of gap; sm_100 and later.",
    }
}

impl TensorDataType {
    /// Bits of an element in global memory.
    pub const fn bits(self) -> u32 {
        use TensorDataType::*;
        match self {
            U8 => 8,
            U16 | F16 | Bf16 => 16,
            U32 | S32 | F32 | F32Ftz | Tf32 | Tf32Ftz => 32,
            U64 | S64 | F64 => 64,
            U4Align8 | U4Align16 => 4,
            U6Align16 => 6,
        }
    }

    /// Whether out-of-bounds elements can be NaN.
    pub const fn is_float(self) -> bool {
        use TensorDataType::*;
        matches!(self, F16 | F32 | F64 | Bf16 | F32Ftz | Tf32 | Tf32Ftz)
    }

    /// Whether groups of 16 elements take 16 bytes of shared memory, whatever their size.
    pub const fn is_padded(self) -> bool {
        matches!(self, TensorDataType::U4Align16 | TensorDataType::U6Align16)
    }
}

driver_enum! {
    /// `CUtensorMapInterleave`.
    Interleave {
        None = 0 "Dense rows.",
        B16 = 1 "NC/8HWC8.",
        B32 = 2 "NC/16HWC16.",
    }
}

driver_enum! {
    /// `CUtensorMapSwizzle`: how chunks are permuted in shared memory.
    TensorSwizzle {
        None = 0 "Not.",
        B32 = 1 "16-byte chunks within 32 bytes.",
        B64 = 2 "16-byte chunks within 64 bytes.",
        B128 = 3 "16-byte chunks within 128 bytes.",
        B128Atom32 = 4 "32-byte chunks within 128 bytes.",
        B128Atom32Flip8 = 5 "As `B128Atom32`, 8-byte halves swapped in alternate rows.",
        B128Atom64 = 6 "64-byte chunks within 128 bytes.",
    }
}

impl TensorSwizzle {
    /// Longest box row in bytes; `None`: no limit.
    pub const fn span(self) -> Option<u32> {
        match self {
            TensorSwizzle::None => None,
            TensorSwizzle::B32 => Some(32),
            TensorSwizzle::B64 => Some(64),
            _ => Some(128),
        }
    }
}

impl From<Swizzle> for TensorSwizzle {
    fn from(swizzle: Swizzle) -> TensorSwizzle {
        match swizzle {
            Swizzle::None => TensorSwizzle::None,
            Swizzle::B32 => TensorSwizzle::B32,
            Swizzle::B64 => TensorSwizzle::B64,
            Swizzle::B128 => TensorSwizzle::B128,
        }
    }
}

driver_enum! {
    /// `CUtensorMapL2promotion`: how much L2 fetches at once. No effect on results.
    L2Promotion {
        None = 0 "As little as needed.",
        B64 = 1 "64 bytes.",
        B128 = 2 "128 bytes.",
        B256 = 3 "256 bytes.",
    }
}

driver_enum! {
    /// `CUtensorMapFloatOOBfill`: what elements outside the tensor read as.
    OutOfBounds {
        Zero = 0 "Zero.",
        Nan = 1 "A NaN that a following FMA treats as zero; floating-point types only.",
    }
}

/// A tensor in global memory and the box a TMA instruction moves. Dimension 0 is the contiguous one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorMap {
    /// Element type.
    pub data_type: TensorDataType,
    /// Device address of element 0.
    pub address: u64,
    /// Size of each dimension in elements; as many as the rank.
    pub dims: Vec<u64>,
    /// Bytes from one element to the next of dimensions 1 and up; one fewer than `dims`.
    pub strides: Vec<u64>,
    /// Elements the box spans in each dimension; in im2col mode channels per pixel and pixels per column.
    pub box_dims: Vec<u32>,
    /// Step in each dimension; 1 takes every element.
    pub element_strides: Vec<u32>,
    /// Interleaving.
    pub interleave: Interleave,
    /// Permutation in shared memory.
    pub swizzle: TensorSwizzle,
    /// L2 fetch size.
    pub l2_promotion: L2Promotion,
    /// What elements outside read as.
    pub out_of_bounds: OutOfBounds,
    /// The bounding box of im2col mode; `None` in tiled mode.
    pub im2col: Option<Im2col>,
}

impl TensorMap {
    /// A row-major matrix of `rows` rows, `row_stride` bytes apart, of `columns` elements, moved in boxes of
    /// `box_rows` by `box_columns`.
    pub fn matrix(
        data_type: TensorDataType,
        address: u64,
        (rows, columns): (u64, u64),
        row_stride: u64,
        (box_rows, box_columns): (u32, u32),
        swizzle: impl Into<TensorSwizzle>,
    ) -> TensorMap {
        TensorMap {
            data_type,
            address,
            dims: vec![columns, rows],
            strides: vec![row_stride],
            box_dims: vec![box_columns, box_rows],
            element_strides: vec![1, 1],
            interleave: Interleave::None,
            swizzle: swizzle.into(),
            l2_promotion: L2Promotion::B256,
            out_of_bounds: OutOfBounds::Zero,
            im2col: None,
        }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Elements the box takes in dimension `i`: its span divided by the step.
    pub fn box_elements(&self, i: usize) -> u32 {
        self.box_dims[i].div_ceil(self.element_strides[i].max(1))
    }

    /// Bytes the box fills in shared memory, which is what an mbarrier counts, elements outside the tensor
    /// included.
    pub fn box_bytes(&self) -> u64 {
        let elements: u64 = match self.im2col {
            Some(_) => self.box_dims.iter().map(|n| u64::from(*n)).product(),
            None => (0..self.rank()).map(|i| u64::from(self.box_elements(i))).product(),
        };
        // Padded types: 16 elements take 16 bytes.
        let bits = if self.data_type.is_padded() { 8 } else { self.data_type.bits() };
        elements * u64::from(bits) / 8
    }

    /// Checks every rule of `cuTensorMapEncodeTiled`, or of `cuTensorMapEncodeIm2col`.
    ///
    /// # Errors
    /// The first rule that is broken, with the value found.
    pub fn validate(&self) -> Result<(), LayoutError> {
        let rank = self.rank();
        let padded = self.data_type.is_padded();
        let wide = padded || self.interleave == Interleave::B32;
        require((1..=5).contains(&rank), "tensor map rank", rank, "1 to 5 possible")?;
        require(
            rank >= 3 || self.interleave == Interleave::None,
            "tensor map rank",
            rank,
            "at least 3 needed with interleave",
        )?;
        let counts = [
            ("strides", self.strides.len() + 1),
            ("box dimensions", if self.im2col.is_some() { rank } else { self.box_dims.len() }),
            ("element strides", self.element_strides.len()),
        ];
        for (what, found) in counts {
            let found_text = format!("{found} for rank {rank}");
            require(
                found == rank,
                format!("number of tensor map {what}"),
                found_text,
                "one per dimension needed",
            )?;
        }
        require(self.address.is_multiple_of(16), "tensor address", self.address, "a multiple of 16 needed")?;
        require(
            !wide || self.address.is_multiple_of(32),
            "tensor address",
            self.address,
            "a multiple of 32 needed for padded types and 32-byte interleave",
        )?;
        for (i, &dim) in self.dims.iter().enumerate() {
            require(
                (1..=1 << 32).contains(&dim),
                format!("tensor dimension {i}"),
                dim,
                "1 to 2^32 possible",
            )?;
        }
        require(
            !padded || self.dims[0].is_multiple_of(128),
            "tensor dimension 0",
            self.dims[0],
            "a multiple of 128 needed for padded types",
        )?;
        require(
            self.data_type != TensorDataType::U4Align8 || self.dims[0].is_multiple_of(2),
            "tensor dimension 0",
            self.dims[0],
            "a multiple of 2 needed for nibbles",
        )?;
        for (i, &stride) in self.strides.iter().enumerate() {
            let what = || format!("tensor stride {i}");
            require(stride.is_multiple_of(16), what(), stride, "a multiple of 16 needed")?;
            require(stride < 1 << 40, what(), stride, "less than 2^40 needed")?;
            let rule = "a multiple of 32 needed for padded types and 32-byte interleave";
            require(!wide || stride.is_multiple_of(32), what(), stride, rule)?;
        }
        if let Some(im2col) = &self.im2col {
            im2col.validate(rank, &self.box_dims)?;
        }
        let tiled = self.box_dims.iter().enumerate().filter(|_| self.im2col.is_none());
        for (i, &extent) in tiled {
            require((1..=256).contains(&extent), format!("box dimension {i}"), extent, "1 to 256 possible")?;
        }
        for (i, &step) in self.element_strides.iter().enumerate() {
            require((1..=8).contains(&step), format!("element stride {i}"), step, "1 to 8 possible")?;
        }
        require(
            !padded || self.box_dims[0] == 128,
            "box dimension 0",
            self.box_dims[0],
            "128 needed for padded types",
        )?;
        // Padded types fill 16 bytes per 16 elements.
        let row_bits = self.box_dims[0] * if padded { 8 } else { self.data_type.bits() };
        if self.interleave == Interleave::None {
            let what = "box row in bits";
            require(row_bits.is_multiple_of(128), what, row_bits, "a multiple of 128 (16 bytes) needed")?;
            if let Some(span) = self.swizzle.span() {
                let rule = "at most the swizzle span possible";
                require(row_bits <= span * 8, what, row_bits, rule)?;
            }
        }
        require(
            self.interleave != Interleave::B32 || self.swizzle == TensorSwizzle::B32,
            "tensor map swizzle",
            format!("{:?}", self.swizzle),
            "B32 needed with 32-byte interleave",
        )?;
        require(
            self.data_type != TensorDataType::U6Align16 || self.interleave == Interleave::None,
            "tensor map interleave",
            format!("{:?}", self.interleave),
            "none possible for six-bit values",
        )?;
        let padded_swizzles = [TensorSwizzle::None, TensorSwizzle::B128, TensorSwizzle::B128Atom32];
        require(
            !padded
                || padded_swizzles.contains(&self.swizzle)
                || self.data_type == TensorDataType::U6Align16 && self.swizzle == TensorSwizzle::B128Atom64,
            "tensor map swizzle",
            format!("{:?}", self.swizzle),
            "none or a 128-byte mode the padded type supports needed",
        )?;
        require(
            self.out_of_bounds == OutOfBounds::Zero || self.data_type.is_float(),
            "out-of-bounds fill",
            format!("{:?}", self.out_of_bounds),
            "zero needed for types that are not floating-point",
        )
    }

    /// The simulator's record of the arguments, in little-endian order: "tensmap1", five enumerations and the
    /// rank (1 byte each), whether im2col and a zero (1 each), address (8), dims (5 x 8), strides (4 x 8), box
    /// (5 x 2), element strides (5 x 1), a zero, lower and upper corner (3 x 2 each), zeros.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
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
            swizzle: TensorSwizzle::from_code(bytes[11]).ok_or_else(|| code(11, "tensor map swizzle"))?,
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

const MAGIC: &[u8; 8] = b"tensmap1";

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> TensorMap {
        TensorMap::matrix(TensorDataType::F16, 0x1000, (100, 72), 144, (64, 64), Swizzle::B128)
    }

    /// Each rule of the driver, broken alone.
    #[test]
    fn every_rule_is_checked() {
        type Break = fn(&mut TensorMap);
        let cases: [(Break, &str); 18] = [
            (|m| m.dims = vec![], "tensor map rank: 0 found, 1 to 5 possible"),
            (
                |m| m.interleave = Interleave::B16,
                "tensor map rank: 2 found, at least 3 needed with interleave",
            ),
            (
                |m| m.strides = vec![],
                "number of tensor map strides: 1 for rank 2 found, one per dimension needed",
            ),
            (
                |m| m.box_dims.push(1),
                "number of tensor map box dimensions: 3 for rank 2 found, one per dimension needed",
            ),
            (|m| m.address = 8, "tensor address: 8 found, a multiple of 16 needed"),
            (|m| m.dims[1] = 0, "tensor dimension 1: 0 found, 1 to 2^32 possible"),
            (|m| m.dims[0] = (1 << 32) + 1, "tensor dimension 0: 4294967297 found, 1 to 2^32 possible"),
            (|m| m.strides[0] = 136, "tensor stride 0: 136 found, a multiple of 16 needed"),
            (|m| m.strides[0] = 1 << 40, "tensor stride 0: 1099511627776 found, less than 2^40 needed"),
            (|m| m.box_dims[1] = 257, "box dimension 1: 257 found, 1 to 256 possible"),
            (|m| m.box_dims[0] = 0, "box dimension 0: 0 found, 1 to 256 possible"),
            (|m| m.element_strides[1] = 9, "element stride 1: 9 found, 1 to 8 possible"),
            (|m| m.box_dims[0] = 4, "box row in bits: 64 found, a multiple of 128 (16 bytes) needed"),
            (|m| m.box_dims[0] = 72, "box row in bits: 1152 found, at most the swizzle span possible"),
            (
                |m| (m.data_type, m.out_of_bounds) = (TensorDataType::U16, OutOfBounds::Nan),
                "out-of-bounds fill: Nan found, zero needed for types that are not floating-point",
            ),
            (
                |m| (m.data_type, m.dims[0]) = (TensorDataType::U4Align8, 71),
                "tensor dimension 0: 71 found, a multiple of 2 needed for nibbles",
            ),
            (
                |m| (m.data_type, m.address) = (TensorDataType::U4Align16, 16),
                "tensor address: 16 found, a multiple of 32 needed for padded types and 32-byte interleave",
            ),
            (
                |m| m.data_type = TensorDataType::U4Align16,
                "tensor dimension 0: 72 found, a multiple of 128 needed for padded types",
            ),
        ];
        assert_eq!(good().validate(), Ok(()));
        for (change, message) in cases {
            let mut map = good();
            change(&mut map);
            assert_eq!(map.validate().unwrap_err().to_string(), message);
        }
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
            swizzle: TensorSwizzle::B64,
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

    #[test]
    fn box_bytes_count_what_arrives_in_shared_memory_exact() {
        assert_eq!(good().box_bytes(), 64 * 128);
        let nibbles =
            TensorMap::matrix(TensorDataType::U4Align8, 0, (128, 256), 128, (128, 256), Swizzle::B128);
        assert_eq!((nibbles.validate(), nibbles.box_bytes()), (Ok(()), 128 * 128));
        let padded =
            TensorMap::matrix(TensorDataType::U4Align16, 0, (128, 256), 128, (128, 128), Swizzle::B128);
        assert_eq!((padded.validate(), padded.box_bytes()), (Ok(()), 128 * 128));
    }
}
