//! Eight values in registers: from memory, to memory, from e2m1 codes, to e2m1 codes. Integer, f16 and f32 operations
//! only, so that they exist on every GPU; each is exact or rounds as the scalar functions of `dualgemm-formats` do.

use dualgemm_formats::FloatType;
use dualgemm_ptx::builder::*;

use super::fragments::NEGATIVE_ZEROS;
use crate::parts::nvfp4::encode_e4m3;
pub(super) use crate::parts::nvfp4::{amax, encode_e2m1, scale};

/// `(a & b) | c` as a truth table of `lop3`.
const AND_OR: u8 = 0xEA;
/// 2¹⁴, twice: an e2m1 code placed in a half is `code · 2⁻¹⁴`.
const CODE_FACTOR: u32 = 0x7400_7400;
/// 2⁸ as a half: an e4m3 byte placed in a half is `scale · 2⁻⁸`.
const SCALE_FACTOR: u32 = 0x5C00_5C00;

pub(super) fn bytes(ty: FloatType) -> u32 {
    ty.bytes() as u32
}

/// Both elements of a word of 16-bit floats.
pub(super) fn widen(k: &mut Kernel, ty: FloatType, word: Reg<B32>) -> [Reg<F32>; 2] {
    if ty == FloatType::Bf16 {
        let (low, high) = (k.eval(word << 16), k.eval(word & 0xFFFF_0000));
        return [k.from_bits(low), k.from_bits(high)];
    }
    let (low, high) = k.unpack_32(word);
    [k.f16_to_f32(low.cast()), k.f16_to_f32(high.cast())]
}

/// Eight neighbouring elements at an address that is a multiple of 16.
pub(super) fn load(k: &mut Kernel, ty: FloatType, from: Addr<Global>) -> [Reg<F32>; 8] {
    let values: Vec<Reg<F32>> = match ty {
        FloatType::F32 => {
            let halves: [[Reg<F32>; 4]; 2] = [k.ld_vector(from), k.ld_vector(from.at(16))];
            halves.concat()
        }
        _ => {
            let words: [Reg<B32>; 4] = k.ld_vector(from);
            words.into_iter().flat_map(|word| widen(k, ty, word)).collect()
        }
    };
    std::array::from_fn(|i| values[i])
}

/// Two elements as a word of 16-bit floats.
pub(super) fn narrow(k: &mut Kernel, ty: FloatType, low: Reg<F32>, high: Reg<F32>) -> Reg<B32> {
    match ty {
        FloatType::Bf16 => k.f32_to_bf16x2(low, high).cast(),
        _ => k.f32_to_f16x2(low, high).cast(),
    }
}

/// Eight elements of bf16, times the power of two that is in both halves of `factor`, in f16.
pub(crate) fn bf16_to_f16(k: &mut Kernel, words: [Reg<B32>; 4], factor: Reg<B32>) -> [Reg<B32>; 4] {
    let none = k.mov::<B32>(NEGATIVE_ZEROS);
    words.map(|word| {
        let scaled = k.fma(word.cast::<Bf16x2>(), factor.cast::<Bf16x2>(), none.cast::<Bf16x2>());
        let [low, high] = widen(k, FloatType::Bf16, scaled.cast());
        narrow(k, FloatType::F16, low, high)
    })
}

/// Stores eight neighbouring elements at an address that is a multiple of 16, rounded to nearest.
pub(super) fn store(k: &mut Kernel, ty: FloatType, to: Addr<Global>, values: &[Reg<F32>; 8]) {
    if ty == FloatType::F32 {
        k.st_vector(to, &values[..4]);
        k.st_vector(to.at(16), &values[4..]);
        return;
    }
    let words: Vec<Reg<B32>> = values.chunks_exact(2).map(|pair| narrow(k, ty, pair[0], pair[1])).collect();
    k.st_vector(to, &words);
}

/// `code · scale` of eight codes, even elements in low nibbles, as four pairs of f16: exact, since a product has at
/// most six significant bits and is a multiple of 2⁻¹⁰.
pub(crate) fn decode(k: &mut Kernel, codes: Reg<B32>, scale: Reg<U32>) -> [Reg<F16x2>; 4] {
    let shifted = k.eval(scale << 7).cast::<B32>();
    let doubled = k.permute(shifted, shifted, 0x1010u32);
    let scale = k.mov::<B32>(SCALE_FACTOR);
    let scale = k.mul(doubled.cast::<F16x2>(), scale.cast::<F16x2>());
    let factor = k.mov::<B32>(CODE_FACTOR).cast::<F16x2>();
    let even = k.eval(codes << 4);
    std::array::from_fn(|pair| {
        // Even element in bits 15..12, odd one in bits 31..28; the masks drop what lies below them.
        let p = pair as u32;
        let both = k.permute(even, codes, p | p << 4 | (4 + p) << 8 | (4 + p) << 12);
        let magnitude = k.eval((both >> 3) & 0x0E00_0E00);
        let half = k.lop3(both, 0x8000_8000u32, magnitude, AND_OR);
        let code = k.mul(half.cast::<F16x2>(), factor);
        k.mul(code, scale)
    })
}

/// Pairs of f16 as f32.
pub(super) fn widen_pairs(k: &mut Kernel, pairs: [Reg<F16x2>; 4]) -> [Reg<F32>; 8] {
    let values: Vec<Reg<F32>> =
        pairs.into_iter().flat_map(|pair| widen(k, FloatType::F16, pair.cast())).collect();
    std::array::from_fn(|i| values[i])
}

/// Four numbers as e4m3, lowest first; beyond 448, and NaN, saturated.
pub(super) fn encode_e4m3_word(k: &mut Kernel, values: &[Reg<F32>]) -> Reg<B32> {
    let mut word = k.mov::<U32>(0u32);
    for (i, &value) in values.iter().enumerate() {
        let bits = k.to_bits(value).cast::<U32>();
        let sign = k.eval((bits >> 24) & 0x80);
        let magnitude = k.abs(value);
        let byte = encode_e4m3(k, magnitude);
        let byte = byte | sign;
        word = match i {
            0 => k.eval(word | byte),
            _ => k.eval(word | (byte << (8 * i as u32))),
        };
    }
    word.cast()
}
