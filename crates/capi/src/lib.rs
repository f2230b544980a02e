//! The C interface: plan, prepack, run. `include/dualgemm.h` is made from this crate and checked in.
//!
//! In reading order: [`types`] (what crosses the border by value), [`status`] (failures and their text), [`weights`]
//! (prepack), [`plan`] (plan and run), [`device`] (targets, memory of a GPU). No panic leaves a function, and no number or null pointer from C is trusted;
//! that a pointer which is not null points at what its documentation says is all that callers vouch for.
//!
//! Weights belong to a target: the processor, or a GPU by name. A plan is for the target of the weights it was made for, and
//! the operands of its runs lie in that target's memory.

#![expect(non_camel_case_types, reason = "names are those of the C header")]

pub mod device;
pub mod plan;
pub mod status;
pub mod types;
pub mod weights;
