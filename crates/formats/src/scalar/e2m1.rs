//! e2m1: sign, two exponent bits (bias 1), one mantissa bit. No infinities, no NaN.
//!
//! Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3; PTX ISA `.e2m1`.

/// Value of each code. Code 8 is -0.
pub const VALUES: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Twice the value of each code: integers of at most 12, so sums of their products are exact.
pub const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// Value of a code; only the low four bits count.
#[inline]
pub fn decode(code: u8) -> f32 {
    VALUES[(code & 15) as usize]
}

/// Nearest code, ties to even, magnitudes over 6 to 6, the sign of zero kept, NaN to +6.
///
/// This is PTX `cvt.rn.satfinite.e2m1x2.f32`, and so what torchao and Transformer Engine write.
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    encode_magnitude(x.abs()) | if x.is_nan() { 0 } else { (x.to_bits() >> 28 & 8) as u8 }
}

/// Code 0..=7 nearest to a magnitude, ties to the even code. NaN gives 7; negative numbers, which are no magnitudes, 0.
#[inline(always)]
pub fn encode_magnitude(x: f32) -> u8 {
    // Comparisons with the midpoints between neighbours; a tie belongs to the even code, below or above. Counted in as
    // many bits as x has, which is how vectors compare.
    let odd_below = [0.75, 1.75, 3.5].map(|middle| u32::from(x < middle));
    let even_below = [0.25, 1.25, 2.5, 5.0].map(|middle| u32::from(x <= middle));
    (7 - odd_below.iter().chain(&even_below).sum::<u32>()) as u8
}

/// The two codes of a byte: the element with the even index along K is in the low nibble.
#[inline]
pub fn unpack(byte: u8) -> (u8, u8) {
    (byte & 15, byte >> 4)
}

/// A byte from the codes of an even element and its successor.
#[inline(always)]
pub fn pack(even: u8, odd: u8) -> u8 {
    (even & 15) | odd << 4
}

/// Code bytes with the nibbles of each exchanged. Some producers put the even element into the high nibble
/// (`hi-lo` order); nothing in the bytes tells, so it takes the caller's word.
pub fn swap_nibbles(codes: &[u8]) -> Vec<u8> {
    codes.iter().map(|byte| byte.rotate_left(4)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_sign_exponent_mantissa() {
        for code in 0u8..16 {
            let (e, m) = ((code >> 1) & 3, (code & 1) as f32);
            let magnitude = if e == 0 { m * 0.5 } else { (1.0 + m * 0.5) * 2f32.powi(e as i32 - 1) };
            assert_eq!(VALUES[code as usize].abs(), magnitude);
            assert_eq!(VALUES[code as usize].is_sign_negative(), code & 8 != 0);
            assert_eq!(f32::from(DOUBLED[code as usize]), 2.0 * VALUES[code as usize]);
        }
    }

    #[test]
    fn every_code_encodes_to_itself() {
        for code in 0u8..16 {
            assert_eq!(encode(decode(code)), code);
        }
    }

    #[test]
    fn ties_go_to_even_codes_and_their_neighbours_do_not() {
        for (tie, code) in [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)] {
            let tie: f32 = tie;
            let (below, above) = (f32::from_bits(tie.to_bits() - 1), f32::from_bits(tie.to_bits() + 1));
            assert_eq!((encode(tie), encode(-tie)), (code, code | 8));
            assert_eq!(encode(below) + 1, encode(above), "one code apart around {tie}");
            assert!(encode(below) == code || encode(above) == code);
        }
    }

    #[test]
    fn saturates_and_takes_nan_to_six() {
        assert_eq!([encode(1e30), encode(f32::INFINITY), encode(f32::NEG_INFINITY)], [7, 7, 15]);
        assert_eq!([encode(f32::NAN), encode(-f32::NAN)], [7, 7]);
    }

    #[test]
    fn nibbles_round_trip() {
        for byte in 0..=255u8 {
            let (even, odd) = unpack(byte);
            assert_eq!(pack(even, odd), byte);
            assert_eq!(swap_nibbles(&[byte]), [pack(odd, even)]);
        }
    }
}
