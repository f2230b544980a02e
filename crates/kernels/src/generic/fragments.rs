//! One word of the weight pack as the four fragment registers of an A operand, from sm_80 on: what
//! [`sm90a::decode`](crate::sm90a::decode) says, in fewer operations.

use dualgemm_ptx::builder::*;

use crate::sm90a::decode::{
    BF16_MAGNITUDE_MASK, BF16_SCALE_BASE, BF16_SCALE_MASK, FIELD_MASK, SCALE_MASK, SIGN_MASK,
};

/// `(a & b) | c` as a truth table of `lop3`.
const AND_OR: u8 = 0xEA;
/// -0 in both halves: adding it changes nothing.
pub(super) const NEGATIVE_ZEROS: u32 = 0x8000_8000;

/// Decodes a code word; `scales` is the word of two k16 blocks, `block` (0 or 1) which of them this is. Registers 0 and
/// 2 are the gate row, 1 and 3 the up row.
pub(crate) fn decode_step(
    k: &mut Kernel,
    format: HalfFormat,
    word: Reg<B32>,
    scales: Reg<B32>,
    block: usize,
) -> [Reg<B32>; 4] {
    let (fields, scale) = match format {
        HalfFormat::F16 => {
            let rotated = if block == 0 { scales } else { k.funnel_left(scales, scales, 8u32) };
            (fields_f16(k, word), k.eval(rotated & SCALE_MASK))
        }
        HalfFormat::Bf16 => {
            let placed = match block {
                0 => k.eval(scales.cast::<U32>() >> 3).cast(),
                _ => k.funnel_left(scales, scales, 5u32),
            };
            let base = k.mov::<B32>(BF16_SCALE_BASE);
            (fields_bf16(k, word), k.lop3(placed, BF16_SCALE_MASK, base, AND_OR))
        }
    };
    let (gate, up) = k.unpack_32(scale);
    let scales = [k.pack_32(gate, gate), k.pack_32(up, up)];
    let none = k.mov::<B32>(NEGATIVE_ZEROS);
    std::array::from_fn(|i| {
        let scale = scales[i % 2];
        match format {
            HalfFormat::F16 => k.mul(fields[i].cast::<F16x2>(), scale.cast::<F16x2>()).cast(),
            // sm_80 multiplies bf16 pairs only as part of a sum.
            HalfFormat::Bf16 => {
                k.fma(fields[i].cast::<Bf16x2>(), scale.cast::<Bf16x2>(), none.cast::<Bf16x2>()).cast()
            }
        }
    })
}

/// [`decode_word`](crate::sm90a::decode::decode_word). A sign and a magnitude that lie too far apart are both moved by one
/// multiplication: nine operations, three of them off the units for bits, which are the scarce ones.
fn fields_f16(k: &mut Kernel, word: Reg<B32>) -> [Reg<B32>; 4] {
    let mut moved = |field: u32, factor: u32| {
        let field = k.eval(word & field).cast::<U32>();
        let product = k.mul(field, factor).cast::<B32>();
        k.eval(product & FIELD_MASK)
    };
    // Signs at bits 14 and 13, magnitudes at 3 and 0: to 15 and 9. What comes beside them carries into neither.
    let (third, fourth) = (moved(0x4038_4038, 1 << 1 | 1 << 6), moved(0x2007_2007, 1 << 2 | 1 << 9));
    let first = k.eval(word & FIELD_MASK);
    let second = k.eval((word << 3) & FIELD_MASK);
    [first, second, third, fourth]
}

/// As [`decode_word_bf16`](crate::sm90a::decode::decode_word_bf16), with the last field moved by one multiplication: what comes
/// beside it carries no further than bit 5.
fn fields_bf16(k: &mut Kernel, word: Reg<B32>) -> [Reg<B32>; 4] {
    let above = k.eval(word.cast::<U32>() >> 3).cast();
    let below = k.eval(word << 3);
    let signs = [word, below, k.eval(word << 1)].map(|moved| k.eval(moved & SIGN_MASK));
    let [first, second, third] =
        std::array::from_fn(|i| k.lop3([above, word, below][i], BF16_MAGNITUDE_MASK, signs[i], AND_OR));
    let field = k.eval(word & 0x2007_2007u32).cast::<U32>();
    let product = k.mul(field, 1u32 << 2 | 1 << 6).cast::<B32>();
    [first, second, third, k.eval(product & (SIGN_MASK | BF16_MAGNITUDE_MASK))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sm90a::decode::{decode_word, decode_word_bf16};

    #[test]
    fn two_fields_move_by_one_multiplication_each() {
        // Every pair of lanes that differ in the fields, whatever else they hold.
        for low in 0..=u16::MAX {
            for high in [0, u16::MAX, low, !low, low.rotate_left(5)] {
                let word = u32::from(low) | u32::from(high) << 16;
                let moved = |field: u32, factor: u32| (word & field).wrapping_mul(factor) & FIELD_MASK;
                let [_, _, third, fourth] = decode_word(word);
                assert_eq!(moved(0x4038_4038, 66), third, "{word:#010x}");
                assert_eq!(moved(0x2007_2007, 516), fourth, "{word:#010x}");
                let [.., fourth] = decode_word_bf16(word);
                let moved = (word & 0x2007_2007).wrapping_mul(68) & (SIGN_MASK | BF16_MAGNITUDE_MASK);
                assert_eq!(moved, fourth, "{word:#010x}");
            }
        }
    }
}
