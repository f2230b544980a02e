//! Conversions between floating point and integers, and rounding to integral values.
//!
//! Flow: `cvt` with an integer side. PTX ISA 9.7.9.21 (Integer Notes), 6.5.2 table 18.

use super::{Clamp, Format, Round};
use crate::names::modifiers;

modifiers! {
    /// An integer rounding modifier (PTX ISA 6.5.2, table 18).
    IntRound {
        /// To nearest, ties to even.
        NearestEven "rni",
        /// Towards zero.
        Zero "rzi",
        /// Towards negative infinity.
        Down "rmi",
        /// Towards positive infinity.
        Up "rpi",
    }
}

/// An integer type of PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntType {
    /// Width: 8, 16, 32 or 64 bits.
    pub bits: u32,
    /// `.s*` rather than `.u*`.
    pub signed: bool,
}

impl IntType {
    /// The least value.
    #[inline]
    pub const fn min(self) -> i128 {
        if self.signed { -(1 << (self.bits - 1)) } else { 0 }
    }

    /// The greatest value.
    #[inline]
    pub const fn max(self) -> i128 {
        (1 << (self.bits - self.signed as u32)) - 1
    }

    /// The value of the low bits of a register.
    #[inline]
    pub const fn value(self, register: u64) -> i128 {
        let unused = 64 - self.bits;
        if self.signed {
            ((register << unused) as i64 >> unused) as i128
        } else {
            (register << unused >> unused) as i128
        }
    }

    /// A number that grows as the value of the low bits of a register does.
    #[inline]
    pub const fn key(self, register: u64) -> u64 {
        let unused = 64 - self.bits;
        if self.signed { register << unused ^ 1 << 63 } else { register << unused }
    }

    /// The two's complement bits of `value`, within the type's width.
    #[inline]
    pub const fn bits_of(self, value: i128) -> u64 {
        value as u64 & (u64::MAX >> (64 - self.bits))
    }
}

/// `x` rounded to an integral value, which keeps the sign of zero (`cvt.rni.f32.f32` and its like). For any
/// format the result is representable in it.
#[inline]
pub fn round_to_integral(x: f64, round: IntRound) -> f64 {
    match round {
        IntRound::NearestEven => x.round_ties_even(),
        IntRound::Zero => x.trunc(),
        IntRound::Down => x.floor(),
        IntRound::Up => x.ceil(),
    }
}

/// Float to integer: rounded, clamped to the type's range, NaN to zero, or to the integer with only the top bit
/// set if the source is f64 or the destination has 64 bits. Returns the type's bits.
#[inline]
pub fn float_to_int(x: f64, from_f64: bool, to: IntType, round: IntRound) -> u64 {
    if x.is_nan() {
        return if from_f64 || to.bits == 64 { 1 << (to.bits - 1) } else { 0 };
    }
    // `as` saturates; every bound of a type is exact in i128.
    to.bits_of((round_to_integral(x, round) as i128).clamp(to.min(), to.max()))
}

/// Integer to float, rounded once. `sat` limits to [0, 1].
#[inline]
pub fn int_to_float(value: i128, to: Format, round: Round, sat: bool) -> u64 {
    let clamp = Clamp { sat, ..Clamp::default() };
    let value = if sat { value.clamp(0, 1) } else { value };
    to.round_parts(value < 0, value.unsigned_abs() as u64, 0, round, clamp)
}

/// Integer to integer (`cvt` sext, zext, chop; with `sat`, limited to the destination's range). Returns the
/// destination's bits.
#[inline]
pub fn int_to_int(register: u64, from: IntType, to: IntType, sat: bool) -> u64 {
    let value = from.value(register);
    to.bits_of(if sat { value.clamp(to.min(), to.max()) } else { value })
}

#[cfg(test)]
mod tests {
    use super::super::{BF16, F16, F32, F64};
    use super::*;
    use proptest::prelude::*;

    const S64: IntType = IntType { bits: 64, signed: true };
    const U64: IntType = IntType { bits: 64, signed: false };

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn integers_round_to_floats_like_the_language_exact(bits in any::<u64>(), shift in 0u32..64) {
            let bits = bits >> shift;
            let signed = bits as i64;
            let rn = |value, to| int_to_float(value, to, Round::NearestEven, false);
            prop_assert_eq!(rn(bits as i128, F32), (bits as f32).to_bits() as u64);
            prop_assert_eq!(rn(signed as i128, F32), (signed as f32).to_bits() as u64);
            prop_assert_eq!(rn(bits as i128, F64), (bits as f64).to_bits());
            prop_assert_eq!(rn(-(signed as i128), F64), (-(signed as i128) as f64).to_bits());
            let small = bits as u16;
            prop_assert_eq!(rn(small as i128, F16), half::f16::from_f64_const(small as f64).to_bits() as u64);
            prop_assert_eq!(rn(small as i128, BF16), half::bf16::from_f32(small as f32).to_bits() as u64);
            prop_assert_eq!(float_to_int(bits as f64, true, U64, IntRound::Zero), bits as f64 as u64);
            prop_assert_eq!(float_to_int(signed as f64, true, S64, IntRound::Zero), signed as f64 as i64 as u64);
            prop_assert_eq!(int_to_float(signed as i128, F32, Round::NearestEven, true),
                (signed.clamp(0, 1) as f32).to_bits() as u64);
        }
    }
}
