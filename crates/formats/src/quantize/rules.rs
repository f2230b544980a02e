//! What producers decide, step by step beside each other; everything else is common to all.
//!
//! | producer | what is its own | source |
//! |---|---|---|
//! | ModelOpt | every step a true f32 division; an all-zero block gets the scale 1 | `modelopt/torch/quantization/qtensor/nvfp4_tensor.py` of <https://github.com/NVIDIA/Model-Optimizer>, 0.47.0 |
//! | compressed-tensors, llm-compressor, CPU path | the global scale is a divisor, it and `amax / 6` are rounded to the tensor's own type, and a scale that rounds to zero becomes 1/8 | `src/compressed_tensors/quantization/{utils/helpers,quant_args}.py` of <https://github.com/vllm-project/compressed-tensors>, 0.20.0 |
//! | torchao | scales no smaller than 2⁻⁶, elements multiplied by a reciprocal, the sign of zero kept | `torchao/prototype/mx_formats/nvfp4_tensor.py` of <https://github.com/pytorch/ao>, 0.18.0 |
//! | Transformer Engine, FlashInfer with fast math off | the global scale is a divisor, a scale may round to zero, the sign of zero is kept | `transformer_engine/common/cast/nvfp4/core_nvfp4.cuh` of <https://github.com/NVIDIA/TransformerEngine> |
//! | ggml's CPU reference | no global scale; the rest is in [`ggml`] | there |

use super::{Producer, ggml};
use crate::scalar::{e2m1, e4m3};
use crate::{FloatType, GlobalScale, GlobalScaleSource};

pub(super) type Block = [f32; 16];

/// 1/8, the "eps" that compressed-tensors has for a zero scale.
const ZERO_SCALE: u8 = 0x20;

/// 2⁻⁶, the smallest normal e4m3 number: torchao writes no subnormal scale.
const MIN_SCALE: f32 = 1.0 / 64.0;

/// The rule by which one producer quantizes tensors of a type with a global scale.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    producer: Producer,
    /// The global scale as the producer holds it: a divisor or a multiplier.
    held: f32,
    ty: FloatType,
}

impl Rule {
    /// The global scale of tensors of type `ty` whose largest magnitude is `amax`, so that it becomes
    /// `6 · scale_max`. `scale_max` is 448 in every producer's plain path. Always positive and finite, whatever
    /// `amax` is.
    pub(super) fn global_scale(producer: Producer, amax: f32, scale_max: f32, ty: FloatType) -> GlobalScale {
        let range = e2m1::MAX * scale_max;
        let usable = |scale: f32, otherwise| {
            if scale.is_finite() && scale > 0.0 { scale } else { otherwise }
        };
        match producer {
            // ModelOpt replaces an activation amax of 0 or NaN by 6; here that also stands for weights, for infinity and for
            // quotients that underflow, where ModelOpt would divide by zero.
            Producer::ModelOpt => GlobalScale::multiplier(usable(amax / range, e2m1::MAX / range)),
            // torch computes number / tensor as reciprocal · number, so two roundings fall here: the bf16 divisor 608 of a
            // real checkpoint is no rounded `2688 / amax` of any bf16 `amax`. NaN and infinity become 1 (the producer's
            // rule), and so does the 0 that an infinite amax gives.
            Producer::CompressedTensors => {
                GlobalScale::divisor(usable(ty.round(ty.round(1.0 / amax) * range), 1.0))
            }
            // Where that is no positive finite number, torchao would go on to write NaN scales.
            Producer::Torchao => GlobalScale::multiplier(usable(amax / range, 1.0)),
            // At most the largest f32; 1 if amax is 0 or infinite.
            Producer::Te => {
                let divisor = (range / amax).min(f32::MAX);
                GlobalScale::divisor(if amax == 0.0 || divisor == 0.0 { 1.0 } else { divisor })
            }
            Producer::Ggml => GlobalScale::ONE,
        }
    }

    /// The rule for a tensor of type `ty` with this global scale. Producers that hold a divisor take the reciprocal of a
    /// multiplier.
    #[inline(always)]
    pub(super) fn new(producer: Producer, global: GlobalScale, ty: FloatType) -> Self {
        let held = match (producer, global.source()) {
            (Producer::CompressedTensors | Producer::Te, GlobalScaleSource::Divisor(divisor)) => divisor,
            (Producer::CompressedTensors | Producer::Te, _) => 1.0 / global.value(),
            _ => global.value(),
        };
        Self { producer, held, ty }
    }

    /// The scale byte, at most 0x7E, of a block whose largest magnitude is `amax` (never NaN).
    #[inline(always)]
    pub(super) fn scale(&self, amax: f32) -> u8 {
        let &Self { producer, held, ty } = self;
        match producer {
            Producer::ModelOpt => {
                let scale = amax / (e2m1::MAX * held);
                e4m3::encode(if scale == 0.0 { 1.0 } else { scale.clamp(e4m3::MIN_POSITIVE, e4m3::MAX) })
            }
            Producer::CompressedTensors => match e4m3::encode(held * ty.round(amax / e2m1::MAX)) {
                0 => ZERO_SCALE,
                scale => scale,
            },
            Producer::Torchao => e4m3::encode(((amax / e2m1::MAX) / held).clamp(MIN_SCALE, e4m3::MAX)),
            Producer::Te => e4m3::encode(amax * (held * (1.0 / e2m1::MAX))),
            Producer::Ggml => ggml::encode_scale((amax / held) / e2m1::MAX),
        }
    }

    /// The codes of a block under a scale byte.
    #[inline(always)]
    pub(super) fn codes(&self, x: &Block, scale: u8) -> [u8; 16] {
        let (held, scale) = (self.held, e4m3::decode(scale));
        match self.producer {
            Producer::ModelOpt => {
                let divisor = scale * held;
                x.map(|x| encode_by_comparison(x / divisor))
            }
            Producer::CompressedTensors => {
                let divisor = scale / held;
                x.map(|x| encode_by_comparison(x / divisor))
            }
            Producer::Torchao => {
                let factor = (1.0 / held) / scale;
                // Under a global scale whose reciprocal is infinite zeros stay zero; torchao makes NaN of them and codes by
                // chance.
                x.map(|x| e2m1::encode(if x == 0.0 { x } else { x * factor }))
            }
            Producer::Te => {
                let factor = (1.0 / (scale * (1.0 / held))).min(f32::MAX);
                let mut codes = [0; 16];
                for (code, x) in codes.iter_mut().zip(x) {
                    *code = e2m1::encode(x * factor);
                }
                codes
            }
            Producer::Ggml => x.map(|x| ggml::encode(x / held, scale)),
        }
    }
}

/// Nearest code whose sign is that of the comparison `x < 0`: -0 gets code 0. NaN gets 7.
pub(super) fn encode_by_comparison(x: f32) -> u8 {
    e2m1::encode_magnitude(x.abs()) | u8::from(x < 0.0) << 3
}

/// Largest magnitude of a block, NaN not counted. No scale byte may come from a NaN.
#[inline(always)]
pub(super) fn block_amax(x: &Block) -> f32 {
    let amax = f32::from_bits(amax_bits(x));
    if amax.is_nan() { x.iter().fold(0.0, |m, v| v.abs().max(m)) } else { amax }
}

/// Bits of the largest magnitude; NaN if there is one, because its bits are the largest of all.
///
/// Magnitudes are compared as integers: they order as the numbers do, and an integer maximum needs no care for
/// NaN and so vectorizes.
#[inline(always)]
pub(super) fn amax_bits(x: &Block) -> u32 {
    x.iter().fold(0i32, |m, v| m.max((v.to_bits() & 0x7FFF_FFFF) as i32)) as u32
}

/// Two codes per byte, the even element in the low nibble.
#[inline(always)]
pub(super) fn pack(codes: [u8; 16]) -> [u8; 8] {
    std::array::from_fn(|i| e2m1::pack(codes[2 * i], codes[2 * i + 1]))
}
