//! NVFP4 and MXFP4 as bytes: the only crate that interprets bits.
//!
//! Pure and without I/O. In reading order:
//!
//! | module | what |
//! |---|---|
//! | [`scalar`] | e2m1 codes, e4m3 and ue8m0 scale bytes |
//! | [`block`] | which elements share a scale: [`BlockFormat`] |
//! | [`scale_layout`] | where the scale of row `r`, block `c` lies: [`ScaleLayout`] |
//! | [`tensor`] | [`QuantizedMatrix`] |
//! | `global_scale` | [`GlobalScale`] |
//! | [`floats`] | [`Matrix`], [`FloatMatrix`] |
//! | [`mod@quantize`] | floats to nvfp4 and mxfp4, bit for bit as each producer does it |
//! | `shard` | parts of a matrix: [`QuantizedMatrix::shard_rows`], [`QuantizedMatrix::shard_k`] |
//! | [`gguf`] | GGUF's `block_nvfp4`, which orders codes its own way |
//! | [`gpumode`] | the six-dimensional scale view of the GPU MODE challenge |
//!
//! Vocabulary: a *code* is one 4-bit e2m1 number, a *block* the elements that share one scale (16 in
//! nvfp4, 32 in mxfp4), the *global scale* the f32 multiplier of a whole tensor.

pub mod block;
pub mod error;
pub mod floats;
pub mod gguf;
mod global_scale;
pub mod gpumode;
#[macro_use]
mod named;
pub mod quantize;
pub mod scalar;
pub mod scale_layout;
mod shard;
pub mod tensor;

pub use block::BlockFormat;
pub use error::Error;
pub use floats::{Float, FloatMatrix, FloatType, Matrix};
pub use global_scale::{GlobalScale, GlobalScaleSource};
pub use quantize::{Producer, Quantizer, Search, quantize};
pub use scale_layout::ScaleLayout;
pub use tensor::QuantizedMatrix;
