//! One word of the weight pack as the four fragment registers of an A operand, for targets that the Hopper kernel's
//! multiplication of bf16 pairs does not exist on: the operations of [`sm90a::decode`](crate::sm90a::decode).

use dualgemm_ptx::builder::*;

use crate::sm90a::consumers::{fields_bf16, fields_f16};
use crate::sm90a::decode::{BF16_SCALE_BASE, BF16_SCALE_MASK, SCALE_MASK};

/// `(a & b) | c` as a truth table of `lop3`.
const AND_OR: u8 = 0xEA;
/// -0 in both halves: adding it changes nothing.
const NEGATIVE_ZEROS: u32 = 0x8000_8000;

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
