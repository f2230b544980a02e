//! ggml's CPU reference: no global scale, scales rounded half up, codes by least distance with ties towards zero.
//!
//! Source: `ggml/src/{ggml-quants.c,ggml-impl.h}` of <https://github.com/ggml-org/llama.cpp>
//! (`quantize_row_nvfp4_ref`, `best_index_mxfp4`, `ggml_fp32_to_ue4m3`). A given global scale is divided out
//! first, because GGUF's `.scale` multiplies the product afterwards.

use crate::scalar::e2m1;

/// e4m3 with halves rounded up. Numbers that round past 240 become 448, and the subnormal range never rounds up
/// into the normal one.
pub(super) fn encode_scale(x: f32) -> u8 {
    match x {
        _ if x.is_nan() || x <= 0.0 => 0,
        _ if x < 1.0 / 64.0 => ((x * 512.0 + 0.5) as u8).min(7),
        _ if x >= 256.0 => 0x7E,
        _ => match ((x.to_bits() + (1 << 19)) >> 20) - (120 << 3) {
            0x78.. => 0x7E,
            byte => byte as u8,
        },
    }
}

/// The first code of least distance, in f32: a distance that rounds to that of a smaller code loses, and
/// infinity and NaN, equally far from all, get code 0.
pub(super) fn encode(x: f32, scale: f32) -> u8 {
    let magnitude = x.abs();
    let (mut best, mut distance) = (0, magnitude);
    for code in 1..8 {
        let d = (e2m1::VALUES[code as usize] * scale - magnitude).abs();
        if d < distance {
            (best, distance) = (code, d);
        }
    }
    best | if best != 0 && x < 0.0 { 8 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scalar::e4m3;

    #[test]
    fn every_scale_byte_below_0x78_encodes_to_itself_and_the_rest_saturates() {
        for byte in 0..0x7Fu8 {
            let expected = if byte < 0x78 { byte } else { 0x7E };
            assert_eq!(encode_scale(e4m3::decode(byte)), expected, "{byte:#04x}");
        }
        assert_eq!([encode_scale(f32::NAN), encode_scale(f32::INFINITY)], [0, 0x7E]);
    }

    #[test]
    fn scales_round_half_up_and_subnormals_stop_at_seven() {
        for byte in 0..0x77u8 {
            let middle = (e4m3::decode(byte) + e4m3::decode(byte + 1)) / 2.0;
            let up = if byte == 7 { 7 } else { byte + 1 };
            assert_eq!(encode_scale(middle), up, "{byte:#04x}");
            if byte >= 8 {
                assert_eq!(encode_scale(middle.next_down()), byte, "{byte:#04x}");
            }
        }
        assert_eq!([encode_scale(247.99998), encode_scale(248.0)], [0x77, 0x7E]);
    }

    #[test]
    fn ties_go_towards_zero_and_zero_has_no_sign() {
        for (tie, code) in [(0.25, 0), (0.75, 1), (1.25, 2), (1.75, 3), (2.5, 4), (3.5, 5), (5.0, 6)] {
            let tie: f32 = tie;
            let negative = |code| if code == 0 { 0 } else { code | 8 };
            assert_eq!([encode(tie, 1.0), encode(-tie, 1.0)], [code, negative(code)]);
            assert_eq!([encode(tie.next_up(), 1.0), encode(-tie.next_up(), 1.0)], [code + 1, (code + 1) | 8]);
            assert_eq!(encode(tie.next_down(), 1.0), code);
        }
        assert_eq!([encode(-0.0, 1.0), encode(-1.0, 0.0), encode(f32::NAN, 1.0)], [0; 3]);
    }
}
