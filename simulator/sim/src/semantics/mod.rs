//! What PTX instructions compute, as pure functions of values: no state, no dispatch, no timing.
//!
//! Flow: `exec/*` decodes operands, calls one function here, writes the result back. Every function names the
//! section of the PTX ISA (9.1, <https://docs.nvidia.com/cuda/parallel-thread-execution/>) it implements; what
//! that text leaves open is said where it is decided.

pub mod approx;
pub mod dot;
pub mod element;
pub mod float;
pub mod fragment;
pub mod instr_desc;
pub mod mbarrier;
pub mod misuse;
pub mod narrow;
pub mod reduce;
pub mod smem_desc;
pub mod tcgen05;
pub mod tma;
