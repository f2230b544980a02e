//! The rates of this machine that a run is held against.

use std::fmt;

use dualgemm::Plan;
use dualgemm_bench::Roofline;
use serde::Serialize;

/// Measured rates, for the arithmetic and the size of one plan.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// Multiplications and additions per second, of the kind that the plan does.
    flops_per_s: f64,
    /// Bytes per second, from where operands of this size live when they are used again.
    bytes_per_s: f64,
}

impl Limits {
    /// Measures, for about half a second.
    pub fn measure(plan: &Plan) -> Result<Self, dualgemm::Error> {
        let (flops_per_s, bytes_per_s) = plan.measure_limits()?;
        Ok(Self { flops_per_s, bytes_per_s })
    }

    /// The same as a roofline.
    pub fn roofline(self) -> Roofline {
        Roofline { flops_per_s: self.flops_per_s, bytes_per_s: self.bytes_per_s }
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} GFLOP/s, {:.1} GB/s measured", self.flops_per_s * 1e-9, self.bytes_per_s * 1e-9)
    }
}
