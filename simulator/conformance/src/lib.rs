//! What tests of several crates share: the PTX conformance cases, which certify the simulator on silicon.
//!
//! [`generate`] makes a module for each row of the instruction table (`dualgemm_ptx::isa`), with the inputs of its
//! launches in its head; `cases.tsv` keeps what each gives and which card agreed ([`conformance::record`]);
//! [`conformance`] reads cases and runs them on any [`Device`](dualgemm_device::Device).

pub mod conformance;
pub mod generate;
