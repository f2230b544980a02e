//! What tests of several crates share: the PTX conformance cases, which certify the simulator on silicon.
//!
//! `ptx/<family>/<row>.ptx` holds a kernel for a row of the instruction table (`dualgemm_ptx::isa`), with inputs
//! and expected results in the file's head. [`conformance`] reads and runs them on any
//! [`Device`](dualgemm_device::Device).

pub mod conformance;
