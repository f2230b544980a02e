//! Where data lies, as values that the kernel, the host and the simulator share: tiles in shared memory,
//! the descriptors that name them to the tensor cores, tensor maps. Nothing here emits instructions.

mod im2col;
mod instr_desc;
mod smem;
mod tensor_map;
mod tile;

pub use im2col::Im2col;
pub use instr_desc::{BlockScaledDesc, InstrDesc, MxFormat, OperandFormat, ResultFormat, ScaleFormat};
pub use smem::{SmemLayout, SmemRegion};
pub use tensor_map::{
    Interleave, L2Promotion, OutOfBounds, Swizzle, TENSOR_MAP_BYTES, TensorDataType, TensorMap,
};
pub use tile::{SmemTile, tcgen05_smem_desc, wgmma_smem_desc};

/// A layout that cannot exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {value} found, {rule}")]
pub struct LayoutError {
    /// The quantity that breaks the rule.
    pub what: String,
    /// Its value.
    pub value: String,
    /// What would be valid.
    pub rule: &'static str,
}

/// Refuses `value` for `what` unless `valid`.
fn require(
    valid: bool,
    what: impl Into<String>,
    value: impl ToString,
    rule: &'static str,
) -> Result<(), LayoutError> {
    if valid { Ok(()) } else { Err(LayoutError { what: what.into(), value: value.to_string(), rule }) }
}
