//! Rules of the PTX ISA that operands can break, as faults; the dispatch loop adds kernel, line, CTA, warp and lane.

use crate::trap::{Check, Fault, fault};

/// A field of a descriptor, tensor map or address has a value that `rule`, which says what is valid, excludes.
pub(crate) fn invalid(what: &str, field: &str, found: u64, rule: &str) -> Fault {
    fault!(Check::Illegal, "{what}: {field} is {found:#x}, but {rule}")
}

/// A valid combination that this simulator does not model; `rule` says what it does.
pub(crate) fn not_modelled(what: &str, field: &str, found: u64, rule: &str) -> Fault {
    let text = format!("{what}: {field} {found:#x} is legal PTX that the simulator does not model: {rule}");
    Fault::new(Check::Illegal, text)
}

/// `Err` of [`invalid`] unless `holds`.
#[inline]
pub(crate) fn require(holds: bool, what: &str, field: &str, found: u64, rule: &str) -> Result<(), Fault> {
    if holds { Ok(()) } else { Err(invalid(what, field, found, rule)) }
}
