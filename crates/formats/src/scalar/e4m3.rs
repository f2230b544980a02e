//! e4m3 (the "fn" variant): sign, four exponent bits (bias 7), three mantissa bits, no infinities,
//! 0x7F and 0xFF are NaN. Block scales use its non-negative half, PTX's `.ue4m3`.
//!
//! Source: OCP 8-bit Floating Point Specification (OFP8) 1.0; Micikevicius et al., arXiv:2209.05433.

/// Largest finite value, byte 0x7E.
pub const MAX: f32 = 448.0;
/// Smallest positive value (subnormal), byte 0x01.
pub const MIN_POSITIVE: f32 = 1.0 / 512.0;
/// The positive NaN byte.
pub const NAN: u8 = 0x7F;

/// Value of a byte, NaN for 0x7F and 0xFF.
#[inline]
pub const fn decode(byte: u8) -> f32 {
    DECODED[byte as usize]
}

/// [`decode`] of every byte.
pub const DECODED: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = compute(byte as u8);
        byte += 1;
    }
    table
};

const fn compute(byte: u8) -> f32 {
    let (sign, exponent, mantissa) = ((byte as u32 >> 7) << 31, (byte as u32 >> 3) & 15, byte as u32 & 7);
    match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Subnormal: mantissa · 2⁻⁹, exact in f32.
        (0, m) => {
            let v = m as f32 / 512.0;
            if sign == 0 { v } else { -v }
        }
        (e, m) => f32::from_bits(sign | (e + 120) << 23 | m << 20),
    }
}

/// Nearest byte, ties to even, magnitudes over 448 (infinity too) to 448, NaN to 0x7F with the sign kept.
///
/// This is PTX `cvt.rn.satfinite.e4m3x2.f32`.
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 31) as u8) << 7;
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return sign | NAN;
    }
    if magnitude >= MAX {
        return sign | 0x7E;
    }
    let steps = if magnitude < 1.0 / 64.0 {
        // Subnormal range: whole steps of 2⁻⁹. Eight steps are the first normal number, whose byte is 8.
        (magnitude * 512.0).round_ties_even() as u32
    } else {
        // Round the f32 significand to three bits; a carry into the exponent is the right answer.
        let bits = magnitude.to_bits();
        let rounded = bits + 0x7FFFF + ((bits >> 20) & 1);
        (rounded >> 20) - (120 << 3)
    };
    sign | (steps as u8).min(0x7E)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// flashinfer#3932: subnormal block scales, decoded by hand, came out up to 4.5 times wrong.
    #[test]
    fn decode_agrees_with_float8_on_all_bytes() {
        for byte in 0..=255u8 {
            let theirs = float8::F8E4M3::from_bits(byte).to_f32();
            let ours = decode(byte);
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{byte:#04x}");
        }
    }

    #[test]
    fn every_byte_encodes_to_itself() {
        for byte in 0..=255u8 {
            assert_eq!(encode(decode(byte)) & 0x7F, byte & 0x7F);
            if !decode(byte).is_nan() {
                assert_eq!(encode(decode(byte)), byte);
            }
        }
    }

    #[test]
    fn rounds_to_the_nearest_and_ties_to_even() {
        for byte in 0..0x7Eu8 {
            let (low, high) = (decode(byte), decode(byte + 1));
            let middle = (low + high) / 2.0;
            let below = f32::from_bits(middle.to_bits() - 1);
            let above = f32::from_bits(middle.to_bits() + 1);
            assert_eq!(encode(below), byte);
            assert_eq!(encode(above), byte + 1);
            assert_eq!(encode(middle), if byte % 2 == 0 { byte } else { byte + 1 });
            assert_eq!(encode(-middle), encode(middle) | 0x80);
        }
    }

    #[test]
    fn saturates() {
        assert_eq!([encode(449.0), encode(1e9), encode(f32::INFINITY)], [0x7E; 3]);
        assert_eq!(encode(f32::NAN) & 0x7F, NAN);
    }
}
