//! Blocks of nvfp4 by Transformer Engine's rule, bit for bit as `dualgemm_formats::Producer::Te`: in integer and f32
//! operations, which every GPU has.

use dualgemm_formats::scalar::e2m1;
use dualgemm_ptx::builder::*;

/// The scale byte of a block whose largest magnitude is `amax`, and the number that its elements are multiplied by before
/// they are encoded. `sixth` and `inverse` are `divisor / 6` and `1 / divisor` of the tensor scale's divisor.
pub(crate) fn scale(k: &mut Kernel, amax: Reg<F32>, [sixth, inverse]: [Reg<F32>; 2]) -> (Reg<U32>, Reg<F32>) {
    let scaled = k.mul(amax, sixth);
    let byte = encode_e4m3(k, scaled);
    let decoded = decode_e4m3(k, byte);
    let divisor = k.mul(decoded, inverse);
    let factor = k.rcp(divisor);
    (byte, k.min(factor, f32::MAX))
}

/// A block in one thread, its elements 0 to 7 and 8 to 15: the words of its codes, and its scale byte. `factors` as for
/// [`scale`].
pub(crate) fn encode_block(
    k: &mut Kernel,
    halves: [[Reg<F32>; 8]; 2],
    factors: [Reg<F32>; 2],
) -> ([Reg<B32>; 2], Reg<U32>) {
    let [first, second] = [0, 1].map(|half| amax(k, &halves[half]));
    let amax = k.max(first, second);
    let (byte, factor) = scale(k, amax, factors);
    let words = halves.map(|values| {
        let scaled = values.map(|value| k.mul(value, factor));
        encode_e2m1(k, &scaled)
    });
    (words, byte)
}

/// The largest magnitude of eight values and 0, NaN not counted.
pub(crate) fn amax(k: &mut Kernel, values: &[Reg<F32>; 8]) -> Reg<F32> {
    let mut amax = k.mov(0.0f32);
    for &value in values {
        let magnitude = k.abs(value);
        amax = k.max(amax, magnitude);
    }
    amax
}

/// [`e4m3::encode`](dualgemm_formats::scalar::e4m3::encode) of a number that is not negative.
pub(crate) fn encode_e4m3(k: &mut Kernel, x: Reg<F32>) -> Reg<U32> {
    // Subnormal: whole steps of 2⁻⁹, which is the unit in the last place of 2¹⁴.
    const STEPS: f32 = 16384.0;
    let steps = k.add(x, STEPS);
    let steps = k.to_bits(steps).cast::<U32>();
    let steps = k.eval(steps - STEPS.to_bits());
    // Normal: the significand rounded to three bits; exponents count from 2⁻⁷ instead of 2⁻¹²⁷.
    let rounded = round_significand(k, x, 3, 120);
    let small = k.compare(Cmp::Lt, x, 1.0f32 / 64.0);
    let byte = k.select::<U32>(small, steps, rounded);
    k.eval(byte.min(0x7E))
}

/// Exponent and the upper `bits` bits of the significand of a number that is not negative, rounded to nearest even; the
/// exponent less `bias`.
fn round_significand(k: &mut Kernel, x: Reg<F32>, bits: u32, bias: u32) -> Reg<U32> {
    let dropped = 23 - bits;
    let x = k.to_bits(x).cast::<U32>();
    let odd = k.eval(x.bit_field(dropped, 1));
    let rounded = (x + ((1 << (dropped - 1)) - 1) + odd) >> dropped;
    k.eval(rounded - (bias << bits))
}

/// The number of an e4m3 byte that is not negative.
fn decode_e4m3(k: &mut Kernel, byte: Reg<U32>) -> Reg<F32> {
    let placed = k.eval(byte << 7);
    let (half, _) = k.unpack_32(placed);
    let number = k.f16_to_f32(half.cast());
    k.mul(number, 256.0f32)
}

/// [`e2m1::encode`] of eight numbers, even elements in low nibbles.
pub(crate) fn encode_e2m1(k: &mut Kernel, values: &[Reg<F32>; 8]) -> Reg<B32> {
    // Steps of ½ are the unit in the last place of 2²².
    const STEPS: f32 = 4_194_304.0;
    let mut word = k.mov::<U32>(0u32);
    for (i, &value) in values.iter().enumerate() {
        let bits = k.to_bits(value).cast::<U32>();
        let magnitude = k.eval(bits & 0x7FFF_FFFF);
        // As integers, NaN and infinity are larger than 6 too.
        let bounded = k.eval(magnitude.min(e2m1::MAX.to_bits()));
        let bounded = k.from_bits(bounded);
        let steps = k.add(bounded, STEPS);
        let steps = k.to_bits(steps).cast::<U32>();
        let steps = k.eval(steps - STEPS.to_bits());
        let rounded = round_significand(k, bounded, 1, 126);
        let small = k.compare(Cmp::Lt, bounded, 1.0f32);
        let code = k.select::<U32>(small, steps, rounded);
        let number = k.compare(Cmp::Le, magnitude, f32::INFINITY.to_bits());
        let sign = k.eval((bits >> 28) & 8);
        let signed = k.eval(code | sign);
        let code = k.select::<U32>(number, signed, code);
        word = match i {
            0 => k.eval(word | code),
            _ => k.eval(word | (code << (4 * i as u32))),
        };
    }
    word.cast()
}
