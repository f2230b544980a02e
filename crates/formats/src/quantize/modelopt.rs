//! NVIDIA ModelOpt: every step a true f32 division; an all-zero block gets the scale 1.
//!
//! Source: `modelopt/torch/quantization/qtensor/nvfp4_tensor.py` of
//! <https://github.com/NVIDIA/Model-Optimizer>, checked against version 0.47.0.

use super::rule::{Block, Rule, encode_by_comparison};
use crate::scalar::{e2m1, e4m3};
use crate::{FloatType, GlobalScale};

#[derive(Debug, Clone, Copy)]
pub(super) struct ModelOpt {
    global: f32,
}

impl Rule for ModelOpt {
    /// `amax / 2688`. ModelOpt replaces an activation amax of 0 or NaN by 6; here that also stands for weights,
    /// for infinity and for quotients that underflow, where ModelOpt would divide by zero.
    fn global_scale(amax: f32, scale_max: f32, _: FloatType) -> GlobalScale {
        let range = e2m1::MAX * scale_max;
        let global = amax / range;
        let usable = global.is_finite() && global > 0.0;
        GlobalScale::multiplier(if usable { global } else { e2m1::MAX / range })
    }

    fn new(global: GlobalScale, _: FloatType) -> Self {
        Self { global: global.value() }
    }

    fn scale(&self, amax: f32) -> u8 {
        let scale = amax / (e2m1::MAX * self.global);
        e4m3::encode(if scale == 0.0 { 1.0 } else { scale.clamp(e4m3::MIN_POSITIVE, e4m3::MAX) })
    }

    fn codes(&self, x: &Block, scale: u8) -> [u8; 16] {
        let divisor = e4m3::decode(scale) * self.global;
        x.map(|x| encode_by_comparison(x / divisor))
    }
}
