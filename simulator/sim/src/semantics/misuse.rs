//! What a program can get wrong in the operands these functions decode.
//!
//! Flow: a function here returns a [`Misuse`]; `exec/*` turns it into a trap that adds kernel, line, CTA, warp
//! and lane.

/// A rule of the PTX ISA that a value broke.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misuse {
    /// A field of a descriptor, tensor map or address has a value that its rule excludes.
    #[error("{what}: {field} is {found:#x}, but {rule}")]
    Field {
        /// The thing decoded, as the ISA calls it.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What would be valid.
        rule: &'static str,
    },
    /// A valid combination that this simulator does not model.
    #[error("{what}: {field} {found:#x} is legal PTX that the simulator does not model: {rule}")]
    NotModelled {
        /// The thing decoded.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What is modelled.
        rule: &'static str,
    },
    /// An mbarrier operation with a count out of range.
    #[error("mbarrier.{operation}: count {count} is outside {min}..={max}")]
    BarrierCount {
        /// The operation, as in its opcode.
        operation: &'static str,
        /// The count given.
        count: u64,
        /// The least valid count.
        min: u64,
        /// The greatest valid count.
        max: u64,
    },
    /// More arrivals than the current phase has left.
    #[error(
        "mbarrier.{operation}: {count} arrivals, but phase {phase} has {pending} pending of {expected} expected: \
         an arrival too many, or the barrier was initialised with too small a count"
    )]
    BarrierOverrun {
        /// The operation, as in its opcode.
        operation: &'static str,
        /// The arrivals made.
        count: u32,
        /// The phase they fall in, counted from initialisation.
        phase: u64,
        /// Arrivals that phase still expects.
        pending: u32,
        /// Arrivals each phase expects.
        expected: u32,
    },
    /// The pending transaction bytes left the range a barrier can count.
    #[error("mbarrier.{operation}: tx-count becomes {tx_count} in phase {phase}, outside -1048575..=1048575")]
    BarrierTxRange {
        /// The operation, as in its opcode.
        operation: &'static str,
        /// The tx-count that would result.
        tx_count: i64,
        /// The phase, counted from initialisation.
        phase: u64,
    },
    /// A barrier whose bits no sequence of operations makes.
    #[error("mbarrier object {bits:#018x} is not an initialised barrier")]
    BarrierInvalid {
        /// The 64 bits found in shared memory.
        bits: u64,
    },
}

/// `Err(Misuse::Field)` unless `holds`.
#[inline]
pub(crate) fn require(
    holds: bool,
    what: &'static str,
    field: &'static str,
    found: u64,
    rule: &'static str,
) -> Result<(), Misuse> {
    if holds { Ok(()) } else { Err(Misuse::Field { what, field, found, rule }) }
}
