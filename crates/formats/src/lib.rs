//! NVFP4 and MXFP4 as bytes: the only crate that interprets bits.
//!
//! Pure and without I/O. In reading order:
//!
//! | module | what |
//! |---|---|
//! | [`scalar`] | e2m1 codes, e4m3 and ue8m0 scale bytes |
//! | [`block`] | which elements share a scale: [`BlockFormat`] |
//! | [`scale_layout`] | where the scale of row `r`, block `c` lies: [`ScaleLayout`] |
//! | [`tensor`] | [`QuantizedMatrix`], [`GlobalScale`], [`Matrix`] |
//!
//! Vocabulary: a *code* is one 4-bit e2m1 number, a *block* the elements that share one scale (16 in
//! nvfp4, 32 in mxfp4), the *global scale* the f32 multiplier of a whole tensor.

pub mod block;
pub mod error;
pub mod scalar;
pub mod scale_layout;
pub mod tensor;

pub use block::BlockFormat;
pub use error::Error;
pub use scale_layout::ScaleLayout;
pub use tensor::{FloatMatrix, GlobalScale, GlobalScaleSource, Matrix, QuantizedMatrix};
