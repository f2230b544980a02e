//! The 32-bit instruction descriptor of `tcgen05.mma`: shapes and formats.
//! PTX ISA "Instruction descriptor"
//! <https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-instruction-descriptor>.

use super::{LayoutError, require};

/// Format of A or B for the kinds without block scaling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperandFormat {
    /// `kind::f16`.
    F16,
    /// `kind::f16`.
    Bf16,
    /// `kind::tf32`.
    Tf32,
    /// `kind::f8f6f4`.
    E4m3,
    /// `kind::f8f6f4`.
    E5m2,
    /// `kind::f8f6f4`.
    E2m3,
    /// `kind::f8f6f4`.
    E3m2,
    /// `kind::f8f6f4`, padded to bytes in shared memory.
    E2m1,
}

impl OperandFormat {
    const fn code(self) -> (u32, &'static str) {
        match self {
            OperandFormat::F16 => (0, "f16"),
            OperandFormat::Bf16 => (1, "f16"),
            OperandFormat::Tf32 => (2, "tf32"),
            OperandFormat::E4m3 => (0, "f8f6f4"),
            OperandFormat::E5m2 => (1, "f8f6f4"),
            OperandFormat::E2m3 => (3, "f8f6f4"),
            OperandFormat::E3m2 => (4, "f8f6f4"),
            OperandFormat::E2m1 => (5, "f8f6f4"),
        }
    }

    /// The `.kind::` modifier it goes with.
    pub const fn kind(self) -> &'static str {
        self.code().1
    }
}

/// Format of the accumulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResultFormat {
    /// Binary16.
    F16,
    /// Binary32.
    F32,
}

/// Descriptor of `kind::f16`, `tf32` and `f8f6f4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InstrDesc {
    /// Rows of A: 64 or 128 with `cta_group::1`, 128 or 256 with `cta_group::2`.
    pub m: u32,
    /// Rows of B (columns of D): 8 to 256.
    pub n: u32,
    /// Accumulator format.
    pub d: ResultFormat,
    /// Format of A.
    pub a: OperandFormat,
    /// Format of B.
    pub b: OperandFormat,
    /// A lies M-contiguous in shared memory.
    pub transpose_a: bool,
    /// B lies N-contiguous in shared memory.
    pub transpose_b: bool,
}

impl InstrDesc {
    /// K-major operands of one format, accumulated in binary32.
    pub const fn new(m: u32, n: u32, format: OperandFormat) -> InstrDesc {
        InstrDesc { m, n, d: ResultFormat::F32, a: format, b: format, transpose_a: false, transpose_b: false }
    }

    /// The descriptor.
    ///
    /// # Errors
    /// If the shape does not exist or the formats belong to different kinds.
    pub fn encode(&self) -> Result<u32, LayoutError> {
        shape(self.m, self.n, &[64, 128, 256])?;
        let ((a, kind_a), (b, kind_b)) = (self.a.code(), self.b.code());
        require(kind_a == kind_b, "kind of B", kind_b, "the kind of A needed")?;
        let d = (self.d == ResultFormat::F32) as u32;
        Ok(d << 4
            | a << 7
            | b << 10
            | (self.transpose_a as u32) << 15
            | (self.transpose_b as u32) << 16
            | (self.n >> 3) << 17
            | (self.m >> 4) << 24)
    }
}

/// Operand format of the block-scaled kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MxFormat {
    /// `kind::mxf8f6f4`.
    E4m3,
    /// `kind::mxf8f6f4`.
    E5m2,
    /// `kind::mxf8f6f4`.
    E2m3,
    /// `kind::mxf8f6f4`.
    E3m2,
    /// `kind::mxf8f6f4`, padded to bytes in shared memory.
    E2m1Padded,
    /// `kind::mxf4` and `kind::mxf4nvf4`, two per byte.
    E2m1,
}

/// Format of the block scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleFormat {
    /// Unsigned e4m3: NVFP4.
    Ue4m3,
    /// Power of two: the MX formats.
    Ue8m0,
}

/// Descriptor of `kind::mxf8f6f4`, `mxf4` and `mxf4nvf4`. Operands are K-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockScaledDesc {
    /// Rows of A: 128 with `cta_group::1`, 128 or 256 with `cta_group::2`.
    pub m: u32,
    /// Rows of B (columns of D): 8 to 256.
    pub n: u32,
    /// Format of A.
    pub a: MxFormat,
    /// Format of B.
    pub b: MxFormat,
    /// Format of both scales.
    pub scale: ScaleFormat,
    /// Byte of the scale word A's scales start at.
    pub sfa_id: u32,
    /// Byte of the scale word B's scales start at.
    pub sfb_id: u32,
}

impl BlockScaledDesc {
    /// NVFP4: e2m1 with a ue4m3 scale per 16 elements.
    pub const fn nvfp4(m: u32, n: u32) -> BlockScaledDesc {
        let (a, b, scale) = (MxFormat::E2m1, MxFormat::E2m1, ScaleFormat::Ue4m3);
        BlockScaledDesc { m, n, a, b, scale, sfa_id: 0, sfb_id: 0 }
    }

    /// MXFP4: e2m1 with a ue8m0 scale per 32 elements; a scale word has two for each instruction, from byte `id` on,
    /// 0 or 2.
    pub const fn mxfp4(m: u32, n: u32, id: u32) -> BlockScaledDesc {
        let nvfp4 = BlockScaledDesc::nvfp4(m, n);
        BlockScaledDesc { scale: ScaleFormat::Ue8m0, sfa_id: id, sfb_id: id, ..nvfp4 }
    }

    /// The descriptor.
    ///
    /// # Errors
    /// If the shape does not exist, or one operand only is packed e2m1.
    pub fn encode(&self) -> Result<u32, LayoutError> {
        shape(self.m, self.n, &[128, 256])?;
        let code = |format| match format {
            MxFormat::E4m3 => 0,
            MxFormat::E5m2 => 1,
            MxFormat::E2m3 => 3,
            MxFormat::E3m2 => 4,
            MxFormat::E2m1Padded => 5,
            MxFormat::E2m1 => 1,
        };
        let packed = |format| format == MxFormat::E2m1;
        require(
            packed(self.a) == packed(self.b),
            "format of B",
            format!("{:?}", self.b),
            "both operands packed e2m1, or neither, needed",
        )?;
        require(self.sfa_id < 4, "scale id of A", self.sfa_id, "0 to 3 possible")?;
        require(self.sfb_id < 4, "scale id of B", self.sfb_id, "0 to 3 possible")?;
        Ok(self.sfb_id << 4
            | code(self.a) << 7
            | code(self.b) << 10
            | (self.n >> 3) << 17
            | ((self.scale == ScaleFormat::Ue8m0) as u32) << 23
            | (self.m >> 4) << 24
            | self.sfa_id << 29)
    }
}

fn shape(m: u32, n: u32, rows: &[u32]) -> Result<(), LayoutError> {
    require(rows.contains(&m), "MMA rows of A", m, "64 (without block scaling), 128 or 256 possible")?;
    require(
        (8..=256).contains(&n) && n.is_multiple_of(8),
        "MMA rows of B",
        n,
        "8 to 256 in steps of 8 possible",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_equal_the_constants_of_nvidias_compilers_exact() {
        assert_eq!(BlockScaledDesc::nvfp4(128, 128).encode(), Ok(0x0820_0480));
        assert_eq!(BlockScaledDesc::nvfp4(128, 256).encode(), Ok(0x0840_0480));
        assert_eq!(BlockScaledDesc::nvfp4(256, 256).encode(), Ok(0x1040_0480));
        assert_eq!(BlockScaledDesc::mxfp4(128, 128, 0).encode(), Ok(0x08A0_0480));
        assert_eq!(BlockScaledDesc::mxfp4(128, 128, 2).encode(), Ok(0x48A0_04A0));
        assert_eq!(InstrDesc::new(128, 128, OperandFormat::F16).encode(), Ok(0x0820_0010));
        assert_eq!(InstrDesc::new(128, 128, OperandFormat::Bf16).encode(), Ok(0x0820_0490));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let error = BlockScaledDesc::nvfp4(64, 128).encode().unwrap_err().to_string();
        assert_eq!(error, "MMA rows of A: 64 found, 64 (without block scaling), 128 or 256 possible");
        assert!(BlockScaledDesc::nvfp4(128, 12).encode().is_err());
        let mixed = InstrDesc { b: OperandFormat::E4m3, ..InstrDesc::new(64, 8, OperandFormat::F16) };
        assert_eq!(mixed.encode().unwrap_err().to_string(), "kind of B: f8f6f4 found, the kind of A needed");
    }
}
