//! How eight codes in a 32-bit word become four f16x2 registers, in integer and f16 operations only.
//!
//! An e2m1 code is a sign, two exponent bits and a mantissa bit. Placed at bits 15 and 11..9 of a half, it *is* the
//! half `code · 2⁻¹⁴`: the exponent biases are 1 and 15, and code 1 (½, e2m1's subnormal) lands on a half
//! subnormal of the right value. One word holds four such fields per 16-bit lane, placed so that each needs a shift
//! and a mask, and two of the four a second pair for the sign:
//!
//! ```text
//! lane bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
//! holds      s0 s2 s3 s1 [a0 em] [a1 em] [a2 em] [a3 em]
//! ```
//!
//! The scale byte is the e4m3 scale times 2⁷ as an unsigned half without its lowest seven bits (bits 14..7), which
//! every non-negative e4m3 value fits. Both factors are exact, and so is their product: `code · scale · 2⁻⁷` has at
//! most six significant bits. [`WEIGHT_FACTOR`] goes into the epilogue's alpha.
//!
//! For bf16 the same word serves: a field goes to bits 15 and 8..6, where it is `code · 2⁻¹²⁶`, and the scale byte to
//! bits 11..4 below a constant exponent, where it is the scale times 2¹¹⁹. The product is `code · scale · 2⁻⁷` again. Only
//! a scale of zero has no such form; the packer gives its block zero codes.
//!
//! The functions here are the specification: the packer writes what they read, the kernel generator emits the same
//! operations, and the tests walk all 16 × 127 pairs.

use dualgemm_formats::scalar::e4m3;
use half::f16;

/// What a decoded weight must be multiplied by to be `code · scale`.
pub const WEIGHT_FACTOR: f32 = 128.0;

/// Sign and magnitude of one field, in both 16-bit lanes.
pub const FIELD_MASK: u32 = 0x8E00_8E00;
/// Magnitude alone.
pub const MAGNITUDE_MASK: u32 = 0x0E00_0E00;
/// Sign alone.
pub const SIGN_MASK: u32 = 0x8000_8000;
/// Two scales as halves.
pub const SCALE_MASK: u32 = 0x7F80_7F80;

/// Magnitude of a field where bf16 has it, in both 16-bit lanes.
pub const BF16_MAGNITUDE_MASK: u32 = 0x01C0_01C0;
/// The scale byte where bf16 has it.
pub const BF16_SCALE_MASK: u32 = 0x0FF0_0FF0;
/// The upper three exponent bits of every scale in bf16.
pub const BF16_SCALE_BASE: u32 = 0x7000_7000;

/// Position of the lowest magnitude bit and of the sign bit of field 0..=3 in a 16-bit lane.
const FIELDS: [(u32, u32); 4] = [(9, 15), (6, 12), (3, 14), (0, 13)];

/// One 16-bit lane from four codes.
pub fn encode_lane(codes: [u8; 4]) -> u16 {
    FIELDS.iter().zip(codes).fold(0, |lane, (&(magnitude, sign), code)| {
        lane | u16::from(code & 7) << magnitude | u16::from(code >> 3 & 1) << sign
    })
}

/// The four registers of a word, each two halves `code · 2⁻¹⁴`: what the kernel computes with six `lop3` and five
/// shifts.
pub fn decode_word(word: u32) -> [u32; 4] {
    [
        word & FIELD_MASK,
        word << 3 & FIELD_MASK,
        (word << 6 & MAGNITUDE_MASK) | (word << 1 & SIGN_MASK),
        (word << 9 & MAGNITUDE_MASK) | (word << 2 & SIGN_MASK),
    ]
}

/// As [`decode_word`], each register two bf16 `code · 2⁻¹²⁶`.
pub fn decode_word_bf16(word: u32) -> [u32; 4] {
    [
        (word >> 3 & BF16_MAGNITUDE_MASK) | (word & SIGN_MASK),
        (word & BF16_MAGNITUDE_MASK) | (word << 3 & SIGN_MASK),
        (word << 3 & BF16_MAGNITUDE_MASK) | (word << 1 & SIGN_MASK),
        (word << 6 & BF16_MAGNITUDE_MASK) | (word << 2 & SIGN_MASK),
    ]
}

/// The scale byte of an e4m3 byte: bits 14..7 of the half `scale · 2⁷`. None for NaN and negative scales.
///
/// Converted by value: adding a constant to the byte is wrong for e4m3's subnormals.
pub fn encode_scale(byte: u8) -> Option<u8> {
    let bits = (f16::from_f32(e4m3::decode(byte) * WEIGHT_FACTOR)).to_bits();
    (byte < e4m3::NAN).then_some((bits >> 7) as u8)
}

/// The scale word of two consecutive 16-blocks, from the scale bytes `[gate, up]` of each.
///
/// The first block's pair lies where [`SCALE_MASK`] finds it, the second's where it is after a rotation by 8.
pub fn encode_scales(first: [u8; 2], second: [u8; 2]) -> u32 {
    let pair = |[gate, up]: [u8; 2]| u32::from(gate) << 7 | u32::from(up) << 23;
    pair(first) | pair(second).rotate_right(8)
}

/// The scales of both blocks of a word as half pairs: gate in the low half, up in the high one.
pub fn decode_scales(word: u32) -> [u32; 2] {
    [word & SCALE_MASK, word.rotate_left(8) & SCALE_MASK]
}

/// As [`decode_scales`], as bf16 `scale · 2¹¹⁹`; a zero is 2⁹⁷.
pub fn decode_scales_bf16(word: u32) -> [u32; 2] {
    [word >> 3, word.rotate_left(5)].map(|word| (word & BF16_SCALE_MASK) | BF16_SCALE_BASE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dualgemm_formats::scalar::e2m1;
    use half::bf16;

    fn halves(register: u32) -> [f16; 2] {
        [f16::from_bits(register as u16), f16::from_bits((register >> 16) as u16)]
    }

    #[test]
    fn every_field_decodes_every_code_whatever_its_neighbours_hold() {
        for field in 0..4 {
            for code in 0..16u8 {
                for filler in 0..16u8 {
                    let mut low = [filler; 4];
                    low[field] = code;
                    let high = [filler ^ 15; 4];
                    let word = u32::from(encode_lane(low)) | u32::from(encode_lane(high)) << 16;
                    let [got, other] = halves(decode_word(word)[field]);
                    let want = |code: u8| e2m1::decode(code) * 2f32.powi(-14);
                    assert_eq!(got.to_f32().to_bits(), want(code).to_bits());
                    assert_eq!(other.to_f32().to_bits(), want(filler ^ 15).to_bits());
                }
            }
        }
    }

    #[test]
    fn fields_do_not_overlap_and_use_all_bits() {
        let all: u32 = (0..4)
            .map(|field| {
                let mut codes = [0; 4];
                codes[field] = 15;
                u32::from(encode_lane(codes))
            })
            .sum();
        assert_eq!(all, 0xFFFF);
    }

    #[test]
    fn code_times_scale_is_exact_for_all_pairs() {
        for byte in 0..e4m3::NAN {
            let scale = f16::from_bits(u16::from(encode_scale(byte).unwrap()) << 7);
            assert_eq!(scale.to_f32(), e4m3::decode(byte) * WEIGHT_FACTOR, "scale {byte:#04x}");
            for code in 0..16u8 {
                let raw = halves(decode_word(encode_lane([code, 0, 0, 0]).into())[0])[0];
                // The rounded half product, as the hardware multiplies.
                let product = f16::from_f64(raw.to_f64() * scale.to_f64());
                let exact = f64::from(e2m1::decode(code)) * f64::from(e4m3::decode(byte));
                assert_eq!(
                    product.to_f64() * f64::from(WEIGHT_FACTOR),
                    exact,
                    "code {code}, scale {byte:#04x}"
                );
            }
        }
    }

    #[test]
    fn code_times_scale_is_exact_in_bf16_for_all_pairs_and_places() {
        for byte in 1..e4m3::NAN {
            let encoded = encode_scale(byte).unwrap();
            let words =
                [encode_scales([encoded, 0xA5], [0x5A, 0xFF]), encode_scales([0xFF, 0], [encoded, 0x77])];
            for (place, word) in words.into_iter().enumerate() {
                let scale = bf16::from_bits(decode_scales_bf16(word)[place] as u16);
                for (field, code) in (0..4).flat_map(|field| (0..16u8).map(move |code| (field, code))) {
                    let mut codes = [!code; 4];
                    codes[field] = code;
                    let word = u32::from(encode_lane(codes)) | u32::from(encode_lane([code ^ 5; 4])) << 16;
                    let raw = bf16::from_bits(decode_word_bf16(word)[field] as u16);
                    let product = bf16::from_f64(raw.to_f64() * scale.to_f64());
                    let exact = f64::from(e2m1::decode(code)) * f64::from(e4m3::decode(byte));
                    assert_eq!(
                        product.to_f64() * f64::from(WEIGHT_FACTOR),
                        exact,
                        "{code} {byte:#04x} {field}"
                    );
                }
            }
        }
    }

    #[test]
    fn nan_and_negative_scales_have_no_encoding() {
        assert!((e4m3::NAN..=255).all(|byte| encode_scale(byte).is_none()));
    }

    #[test]
    fn scale_words_hold_two_blocks() {
        for byte in 0..=255u8 {
            let (first, second) = ([byte, byte ^ 0x55], [!byte, byte.wrapping_mul(7)]);
            let pair = |[gate, up]: [u8; 2]| u32::from(gate) << 7 | u32::from(up) << 23;
            assert_eq!(decode_scales(encode_scales(first, second)), [pair(first), pair(second)]);
        }
    }
}
