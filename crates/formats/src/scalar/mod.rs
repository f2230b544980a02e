//! Scalars: one file per bit format, each with `decode`, `encode` and its constants.

pub mod e2m1;
pub mod e4m3;
pub mod ue8m0;
