//! compressed-tensors and llm-compressor, CPU path: the global scale is a divisor, it and `amax / 6` are rounded
//! to the tensor's own type, and a scale that rounds to zero becomes 1/8.
//!
//! Source: `src/compressed_tensors/quantization/{utils/helpers,quant_args}.py` of
//! <https://github.com/vllm-project/compressed-tensors>, checked against version 0.20.0.

use super::rule::{Block, Rule, divisor_of, encode_by_comparison};
use crate::scalar::{e2m1, e4m3};
use crate::{FloatType, GlobalScale};

/// 1/8, the "eps" that stands for a zero scale.
const ZERO_SCALE: u8 = 0x20;

#[derive(Debug, Clone, Copy)]
pub(super) struct CompressedTensors {
    divisor: f32,
    ty: FloatType,
}

impl Rule for CompressedTensors {
    /// `2688 / amax` in the tensor's type. torch computes number / tensor as reciprocal · number, so two roundings
    /// fall here: the bf16 divisor 608 of a real checkpoint is no rounded `2688 / amax` of any bf16 `amax`.
    /// NaN and infinity become 1 (the producer's rule), and so does the 0 that an infinite amax gives.
    fn global_scale(amax: f32, scale_max: f32, ty: FloatType) -> GlobalScale {
        let divisor = ty.round(ty.round(1.0 / amax) * (e2m1::MAX * scale_max));
        GlobalScale::divisor(if divisor.is_finite() && divisor > 0.0 { divisor } else { 1.0 })
    }

    fn new(global: GlobalScale, ty: FloatType) -> Self {
        Self { divisor: divisor_of(global), ty }
    }

    fn scale(&self, amax: f32) -> u8 {
        match e4m3::encode(self.divisor * self.ty.round(amax / e2m1::MAX)) {
            0 => ZERO_SCALE,
            scale => scale,
        }
    }

    fn codes(&self, x: &Block, scale: u8) -> [u8; 16] {
        let divisor = e4m3::decode(scale) / self.divisor;
        x.map(|x| encode_by_comparison(x / divisor))
    }
}
