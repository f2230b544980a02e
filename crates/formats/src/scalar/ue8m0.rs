//! ue8m0: an unsigned power of two, `2^(byte - 127)`; 0xFF is NaN.
//!
//! Source: OCP Microscaling Formats (MX) v1.0, section 5.4.1.

/// The NaN byte.
pub const NAN: u8 = 0xFF;

/// Value of a byte, NaN for 0xFF. Byte 0 is 2⁻¹²⁷, an f32 subnormal.
#[inline]
pub const fn decode(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        NAN => f32::NAN,
        e => f32::from_bits((e as u32) << 23),
    }
}

/// Byte of the power of two `2^exponent`, clamped to what the format holds.
#[inline]
pub fn from_exponent(exponent: i32) -> u8 {
    exponent.clamp(-127, 127).wrapping_add(127) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_its_power_of_two() {
        for byte in 0..255u8 {
            assert_eq!(f64::from(decode(byte)), 2f64.powi(i32::from(byte) - 127));
            assert_eq!(from_exponent(i32::from(byte) - 127), byte);
        }
        assert!(decode(NAN).is_nan());
        assert_eq!([from_exponent(-500), from_exponent(500)], [0, 254]);
    }
}
