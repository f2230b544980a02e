//! What a TMA instruction knows of a tensor in global memory: the arguments of `cuTensorMapEncodeTiled`.
//!
//! The driver turns them into its opaque 128 bytes; the simulator reads the record
//! [`TensorMap::to_bytes`] writes. Rules: the comment of that function in `cuda.h`
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html>.

mod enums;
mod record;

pub use enums::{Interleave, L2Promotion, OutOfBounds, Swizzle, TensorDataType};

use super::{Im2col, LayoutError, require};

/// Size of a tensor map in bytes. A kernel parameter that holds one is aligned to 64.
pub const TENSOR_MAP_BYTES: usize = 128;

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
    pub swizzle: Swizzle,
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
        swizzle: Swizzle,
    ) -> TensorMap {
        TensorMap {
            data_type,
            address,
            dims: vec![columns, rows],
            strides: vec![row_stride],
            box_dims: vec![box_columns, box_rows],
            element_strides: vec![1, 1],
            interleave: Interleave::None,
            swizzle,
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
        self.validate_kinds()
    }

    /// Checks the rules of types, interleave, swizzle and fill for a map whose arrays are in order.
    fn validate_kinds(&self) -> Result<(), LayoutError> {
        let padded = self.data_type.is_padded();
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
            let fits = self.swizzle == Swizzle::None || row_bits <= self.swizzle.span() * 8;
            require(fits, what, row_bits, "at most the swizzle span possible")?;
        }
        require(
            self.interleave != Interleave::B32 || self.swizzle == Swizzle::B32,
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
        let padded_swizzles = [Swizzle::None, Swizzle::B128, Swizzle::B128Atom32];
        require(
            !padded
                || padded_swizzles.contains(&self.swizzle)
                || self.data_type == TensorDataType::U6Align16 && self.swizzle == Swizzle::B128Atom64,
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
}

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
