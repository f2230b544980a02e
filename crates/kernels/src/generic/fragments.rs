//! One word of the weight pack as the four fragment registers of an A operand: the operations of
//! [`sm90a::decode`](crate::sm90a::decode), for any target.

use dualgemm_ptx::builder::*;

use crate::sm90a::decode::{FIELD_MASK, MAGNITUDE_MASK, SCALE_MASK, SIGN_MASK};

/// `(a & b) | c` as a truth table of `lop3`.
const AND_OR: u8 = 0xEA;

/// Decodes a code word; `scales` is the word of two k16 blocks, `block` (0 or 1) which of them this is. Registers 0 and
/// 2 are the gate row, 1 and 3 the up row.
pub(crate) fn decode_step(
    k: &mut Kernel,
    format: HalfFormat,
    word: Reg<B32>,
    scales: Reg<B32>,
    block: usize,
) -> [Reg<B32>; 4] {
    let rotated = if block == 0 { scales } else { k.funnel_left(scales, scales, 8u32) };
    let scale = k.and(rotated, SCALE_MASK);
    let (gate, up) = k.unpack_32(scale);
    let scales = [k.pack_32(gate, gate), k.pack_32(up, up)];
    let fields = fields(k, word);
    let products: [Reg<B32>; 4] =
        std::array::from_fn(|i| k.mul(fields[i].cast::<F16x2>(), scales[i % 2].cast::<F16x2>()).cast());
    match format {
        HalfFormat::F16 => products,
        HalfFormat::Bf16 => products.map(|pair| to_bf16(k, pair)),
    }
}

/// Sign and magnitude of the four codes of each half, where f16 has them.
fn fields(k: &mut Kernel, word: Reg<B32>) -> [Reg<B32>; 4] {
    let first = k.and(word, FIELD_MASK);
    let second = k.shl(word, 3u32);
    let second = k.and(second, FIELD_MASK);
    let split = [(6u32, 1u32), (9, 2)].map(|(magnitude, sign)| {
        let sign = k.shl(word, sign);
        let sign = k.and(sign, SIGN_MASK);
        let magnitude = k.shl(word, magnitude);
        k.lop3(magnitude, MAGNITUDE_MASK, sign, AND_OR)
    });
    [first, second, split[0], split[1]]
}

/// Two f16 of at most six significant bits as bf16, exactly.
fn to_bf16(k: &mut Kernel, pair: Reg<B32>) -> Reg<B32> {
    let (low, high) = k.unpack_32(pair);
    let [low, high] = [low, high].map(|half| k.f16_to_f32(half.cast()));
    k.f32_to_bf16x2(low, high).cast()
}
