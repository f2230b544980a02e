//! One call on device memory: addresses only, so that making one costs nothing.

use dualgemm_device::DevicePtr;
use dualgemm_formats::BlockFormat;

/// A in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DeviceA {
    /// `[m, k]` of the plan's float type.
    Float {
        /// The first element, at a multiple of 16 bytes.
        values: DevicePtr,
        /// Bytes from row to row, a multiple of 16.
        pitch: usize,
    },
    /// Quantized.
    Blocks {
        /// To what.
        format: BlockFormat,
        /// Dense codes, `[m, k / 2]`, at a multiple of 16 bytes.
        codes: DevicePtr,
        /// Block scales in the plan's order, whose padding may be anything.
        scales: DevicePtr,
        /// The tensor scale, a multiplier; 1 of what producers write in mxfp4.
        global_scale: f32,
    },
}

impl DeviceA {
    /// What messages call it.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Float { .. } => "floats",
            Self::Blocks { format, .. } => format.name(),
        }
    }
}

/// C in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DeviceC {
    /// `[m, n]` of the plan's float type, dense, at a multiple of 16 bytes.
    Float(DevicePtr),
    /// Re-quantized.
    Nvfp4 {
        /// Dense codes, `[m, n / 2]`, at a multiple of 16 bytes.
        codes: DevicePtr,
        /// Block scales in the plan's order, padding included, which the caller zeroes once.
        scales: DevicePtr,
        /// Where a dynamic tensor scale (a multiplier) is written, one f32; not used with a static one.
        global_scale: DevicePtr,
    },
}

/// The activations and the result of one call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceCall {
    /// Rows, up to the plan's M.
    pub m: usize,
    /// A.
    pub a: DeviceA,
    /// C.
    pub c: DeviceC,
}

/// A call on rows in groups, each with weights of its own: the experts of a mixture, rows sorted by expert, or the entries
/// of a batch. How many rows each has is known on the device only.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedCall {
    /// All of A and C: rows of every group, and any that belong to none, such as padding. Those are read, if A is
    /// quantized or expanded on the way in, but count in nothing and are never written. Block scales of a quantized A or C
    /// are those of one matrix, not of one for each group.
    pub call: DeviceCall,
    /// One u32 more than there are experts, ascending, at a multiple of 4 bytes: expert e has rows
    /// `rows[e] .. rows[e + 1]`, none if both are equal; none is beyond the call's M. Read on the device when the work that
    /// the stream was given before has ended, so that a router may write it there.
    pub rows: DevicePtr,
    /// Promises that work of this library with the same `rows`, given to the stream after what wrote them, comes before this:
    /// a mixture's down projection, after its gate and up. Kernels may then read `rows` while the work just before goes on.
    pub settled: bool,
    /// Where rows are not sorted, of how many a row of A serves: `rows` are then the experts that tokens chose, one i32 for each row
    /// of C; those that there are not have no row. For plans that [take](crate::Prepared::takes_choices) them.
    pub choices: Option<usize>,
}

impl GroupedCall {
    /// What tells calls apart whose launches differ, one weights' calls among each other.
    pub(crate) fn key(&self) -> [u64; 9] {
        let [a, b, c, d, e, f, g, h, _] = self.call.key();
        // Rows are at a multiple of 4, and addresses have 57 bits. More than 32 choices are refused: 63 stands for all of those.
        let per_row = (self.choices.unwrap_or(0).min(63) as u64) << 58;
        [a, b, c, d, e, f, g, h, self.rows.0 | u64::from(self.settled) | per_row]
    }
}

impl DeviceCall {
    /// What tells calls apart whose launches differ, one weights' calls among each other.
    pub(crate) fn key(&self) -> [u64; 9] {
        let [a, b, c] = match self.a {
            DeviceA::Float { values, pitch } => [values.0, pitch as u64, 0],
            DeviceA::Blocks { format, codes, scales, global_scale } => {
                [codes.0, scales.0, (1 + format as u64) << 32 | u64::from(global_scale.to_bits())]
            }
        };
        let [d, e, f, g] = match self.c {
            DeviceC::Float(values) => [values.0, 0, 0, 0],
            DeviceC::Nvfp4 { codes, scales, global_scale } => [codes.0, scales.0, global_scale.0, 1],
        };
        [self.m as u64, a, b, c, d, e, f, g, 0]
    }
}
