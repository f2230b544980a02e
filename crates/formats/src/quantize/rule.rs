//! What a producer decides, and the few lines of arithmetic that several of them share.

use crate::scalar::e2m1;
use crate::{FloatType, GlobalScale, GlobalScaleSource};

pub(super) type Block = [f32; 16];

/// The rule by which one producer quantizes. Everything else is common to all.
pub(super) trait Rule: Copy {
    /// The global scale of tensors of type `ty` whose largest magnitude is `amax`, so that it becomes
    /// `6 · scale_max`. `scale_max` is 448 in every producer's plain path. Always positive and finite, whatever
    /// `amax` is.
    fn global_scale(amax: f32, scale_max: f32, ty: FloatType) -> GlobalScale;

    /// The rule for a tensor of type `ty` with this global scale.
    fn new(global: GlobalScale, ty: FloatType) -> Self;

    /// The scale byte, at most 0x7E, of a block whose largest magnitude is `amax` (never NaN).
    fn scale(&self, amax: f32) -> u8;

    /// The codes of a block under a scale byte.
    fn codes(&self, x: &Block, scale: u8) -> [u8; 16];
}

/// The reciprocal of the multiplier: the number itself where it was held as a divisor.
#[inline(always)]
pub(super) fn divisor_of(global: GlobalScale) -> f32 {
    match global.source() {
        GlobalScaleSource::Divisor(d) => d,
        GlobalScaleSource::Multiplier | GlobalScaleSource::Absent => 1.0 / global.value(),
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
