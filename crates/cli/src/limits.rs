//! The rates of this machine that a run is held against.

use std::fmt;

use dualgemm_bench::Roofline;
use serde::Serialize;

/// Measured rates, for the arithmetic and the size of one computation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// Multiplications and additions per second, of the kinds that it does.
    pub flops_per_s: f64,
    /// Bytes per second, from where operands of this size live when they are used again.
    pub bytes_per_s: f64,
}

impl Limits {
    pub fn roofline(self) -> Roofline {
        Roofline { flops_per_s: self.flops_per_s, bytes_per_s: self.bytes_per_s }
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} GFLOP/s, {:.1} GB/s measured", self.flops_per_s * 1e-9, self.bytes_per_s * 1e-9)
    }
}
