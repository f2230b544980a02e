//! Transformer Engine, and FlashInfer with fast math off: the global scale is a divisor, a scale may round to
//! zero, the sign of zero is kept.
//!
//! Source: `transformer_engine/common/cast/nvfp4/core_nvfp4.cuh` of
//! <https://github.com/NVIDIA/TransformerEngine>.

use super::rule::{Block, Rule, divisor_of};
use crate::scalar::{e2m1, e4m3};
use crate::{FloatType, GlobalScale};

#[derive(Debug, Clone, Copy)]
pub(super) struct Te {
    divisor: f32,
}

impl Rule for Te {
    /// `2688 / amax`, at most the largest f32; 1 if amax is 0 or infinite.
    fn global_scale(amax: f32, scale_max: f32, _: FloatType) -> GlobalScale {
        let divisor = (e2m1::MAX * scale_max / amax).min(f32::MAX);
        GlobalScale::divisor(if amax == 0.0 || divisor == 0.0 { 1.0 } else { divisor })
    }

    #[inline(always)]
    fn new(global: GlobalScale, _: FloatType) -> Self {
        Self { divisor: divisor_of(global) }
    }

    #[inline(always)]
    fn scale(&self, amax: f32) -> u8 {
        e4m3::encode(amax * (self.divisor * (1.0 / e2m1::MAX)))
    }

    #[inline(always)]
    fn codes(&self, x: &Block, scale: u8) -> [u8; 16] {
        let factor = (1.0 / (e4m3::decode(scale) * (1.0 / self.divisor))).min(f32::MAX);
        let mut codes = [0; 16];
        for (code, x) in codes.iter_mut().zip(x) {
            *code = e2m1::encode(x * factor);
        }
        codes
    }
}
