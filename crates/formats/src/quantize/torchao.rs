//! torchao: scales no smaller than 2⁻⁶, elements multiplied by a reciprocal, the sign of zero kept.
//!
//! Source: `torchao/prototype/mx_formats/nvfp4_tensor.py` of <https://github.com/pytorch/ao>, checked against
//! version 0.18.0.

use super::rule::{Block, Rule};
use crate::scalar::{e2m1, e4m3};
use crate::{FloatType, GlobalScale};

/// 2⁻⁶, the smallest normal e4m3 number: torchao writes no subnormal scale.
const MIN_SCALE: f32 = 1.0 / 64.0;

#[derive(Debug, Clone, Copy)]
pub(super) struct Torchao {
    global: f32,
}

impl Rule for Torchao {
    /// `amax / 2688`, or 1 where that is no positive finite number; torchao would go on to write NaN scales.
    fn global_scale(amax: f32, scale_max: f32, _: FloatType) -> GlobalScale {
        let global = amax / (e2m1::MAX * scale_max);
        GlobalScale::multiplier(if global.is_finite() && global > 0.0 { global } else { 1.0 })
    }

    fn new(global: GlobalScale, _: FloatType) -> Self {
        Self { global: global.value() }
    }

    fn scale(&self, amax: f32) -> u8 {
        e4m3::encode(((amax / e2m1::MAX) / self.global).clamp(MIN_SCALE, e4m3::MAX))
    }

    fn codes(&self, x: &Block, scale: u8) -> [u8; 16] {
        let factor = (1.0 / self.global) / e4m3::decode(scale);
        // Under a global scale whose reciprocal is infinite zeros stay zero; torchao makes NaN of them and codes by chance.
        x.map(|x| e2m1::encode(if x == 0.0 { x } else { x * factor }))
    }
}
