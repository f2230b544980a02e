//! What a machine allows: measured arithmetic and memory rates, and the time no kernel can beat.

use dualgemm_gemm::DualGemmDesc;

/// Which limit is the higher floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Arithmetic.
    Compute,
    /// Bytes to and from memory.
    Memory,
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Compute => "compute",
            Self::Memory => "memory",
        })
    }
}

/// What has to be done at least.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Arithmetic operations.
    pub flops: f64,
    /// Bytes to and from memory.
    pub bytes: f64,
}

impl From<&DualGemmDesc> for Work {
    /// Every operand read once, C written once.
    fn from(desc: &DualGemmDesc) -> Self {
        Self { flops: desc.flops(), bytes: desc.bytes() }
    }
}

/// The two rates of one machine for one kind of arithmetic, both measured, not looked up.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Roofline {
    /// Arithmetic operations per second (a multiplication and an addition count as two).
    pub flops_per_s: f64,
    /// Bytes read from memory per second.
    pub bytes_per_s: f64,
}

impl Roofline {
    /// `max(FLOP / rate, bytes / bandwidth)` in µs.
    pub fn floor_us(&self, work: impl Into<Work>) -> f64 {
        let (compute, memory) = self.floors_us(work.into());
        compute.max(memory)
    }

    /// Which of the two floors is higher.
    pub fn bound(&self, work: impl Into<Work>) -> Bound {
        let (compute, memory) = self.floors_us(work.into());
        if compute >= memory { Bound::Compute } else { Bound::Memory }
    }

    fn floors_us(&self, work: Work) -> (f64, f64) {
        (work.flops / self.flops_per_s * 1e6, work.bytes / self.bytes_per_s * 1e6)
    }

    /// FLOP per byte at which both limits meet.
    pub fn ridge(&self) -> f64 {
        self.flops_per_s / self.bytes_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_formats::BlockFormat;
    use dualgemm_gemm::AFormat;

    #[test]
    fn the_higher_floor_binds() {
        let roofline = Roofline { flops_per_s: 300e9, bytes_per_s: 36e9 };
        let desc = |m| DualGemmDesc::new(m, 4096, 7168, AFormat::Nvfp4, BlockFormat::Nvfp4);
        assert_eq!(roofline.bound(&desc(1)), Bound::Memory);
        assert!((roofline.floor_us(&desc(1)) - desc(1).bytes() / 36e3).abs() < 1e-9);
        assert_eq!(roofline.bound(&desc(256)), Bound::Compute);
        assert!((roofline.floor_us(&desc(256)) - desc(256).flops() / 300e3).abs() < 1e-6);
    }
}
