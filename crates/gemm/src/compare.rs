//! How far a result is from the f64 reference.
//!
//! Elementwise tolerances hide wrong results behind large ones (a product with shuffled scales can pass
//! `atol = 1`), so the verdict rests on relative L2 and cosine over all elements, and the worst element is named
//! with its bits.

use half::{bf16, f16};

use crate::Error;

/// A type that C can be stored in, as far as comparing goes.
pub trait Element: Copy {
    /// The value, exactly.
    fn to_f64(self) -> f64;
    /// The nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// Bits in value order: neighbours differ by 1, and zero of either sign is 0.
    fn ordered_bits(self) -> i64;
    /// Bits as stored.
    fn bits(self) -> u32;
}

macro_rules! element {
    ($($t:ty, $bits:ty, $from:expr);*) => {$(
        impl Element for $t {
            fn to_f64(self) -> f64 {
                self.into()
            }
            fn from_f64(x: f64) -> Self {
                $from(x)
            }
            fn ordered_bits(self) -> i64 {
                let magnitude = i64::from(self.to_bits() & (<$bits>::MAX >> 1));
                if self.is_sign_negative() { -magnitude } else { magnitude }
            }
            fn bits(self) -> u32 {
                self.to_bits().into()
            }
        }
    )*};
}
element!(f32, u32, |x| x as f32; f16, u16, f16::from_f64; bf16, u16, bf16::from_f64);

/// The element whose error is largest, relative to the root mean square of the reference.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Worst {
    /// Row of C.
    pub row: usize,
    /// Column of C.
    pub col: usize,
    /// Value found.
    pub got: f64,
    /// Reference value in f64.
    pub want: f64,
    /// Bits found.
    pub got_bits: u32,
    /// Bits of the reference rounded to the result's type.
    pub want_bits: u32,
}

/// Distance of a result from the reference.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// `‖got − want‖ / ‖want‖`; 0 where both are zero, infinite where anything is not finite that should be.
    pub rel_l2: f64,
    /// Cosine of the angle between both as vectors.
    pub cosine: f64,
    /// Largest distance from the rounded reference, in units in the last place of the result's type.
    pub max_ulp: u64,
    /// Elements more than one unit in the last place off.
    pub over_1_ulp: usize,
    /// Largest absolute difference.
    pub max_abs: f64,
    /// Elements compared.
    pub elements: usize,
    /// Where the difference is largest.
    pub worst: Worst,
}

impl Comparison {
    /// Compares a row-major result of `cols` columns with the reference.
    ///
    /// # Errors
    /// If the sizes differ, or there is nothing to compare.
    pub fn new<T: Element>(got: &[T], want: &[f64], cols: usize) -> Result<Self, Error> {
        if got.len() != want.len() || got.is_empty() || cols == 0 {
            return Err(Error::CompareLen { found: got.len(), expected: want.len() });
        }
        let (mut error2, mut got2, mut want2, mut dot) = (0.0, 0.0, 0.0, 0.0);
        let (mut max_ulp, mut over_1_ulp, mut max_abs, mut worst_index) = (0, 0, -1.0, 0);
        for (index, (&g, &w)) in got.iter().zip(want).enumerate() {
            let rounded = T::from_f64(w);
            let value = g.to_f64();
            // Both infinite or both NaN counts as equal; one alone is infinitely wrong.
            let same = value == rounded.to_f64() && !value.is_finite() || value.is_nan() && w.is_nan();
            let difference = match (same, (value - w).abs()) {
                (true, _) => 0.0,
                (false, d) if d.is_nan() => f64::INFINITY,
                (false, d) => d,
            };
            let ulp = match (same, value.is_nan() || w.is_nan()) {
                (true, _) => 0,
                (false, true) => u64::MAX,
                (false, false) => g.ordered_bits().abs_diff(rounded.ordered_bits()),
            };
            max_ulp = max_ulp.max(ulp);
            over_1_ulp += usize::from(ulp > 1);
            if difference > max_abs {
                (max_abs, worst_index) = (difference, index);
            }
            error2 += difference * difference;
            if !same {
                got2 += value * value;
                want2 += w * w;
                dot += value * w;
            }
        }
        let ratio = |over: f64, under: f64| if over == 0.0 { 0.0 } else { over / under };
        let (g, w) = (got[worst_index], want[worst_index]);
        Ok(Self {
            rel_l2: ratio(error2.sqrt(), want2.sqrt()),
            cosine: if got2 == 0.0 && want2 == 0.0 { 1.0 } else { ratio(dot, got2.sqrt() * want2.sqrt()) },
            max_ulp,
            over_1_ulp,
            max_abs,
            elements: got.len(),
            worst: Worst {
                row: worst_index / cols,
                col: worst_index % cols,
                got: g.to_f64(),
                want: w,
                got_bits: g.bits(),
                want_bits: T::from_f64(w).bits(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_results_have_no_distance() {
        let want = [1.0, -2.0, 0.0, 1e-9];
        let got = want.map(|x| x as f32);
        let c = Comparison::new(&got, &want, 2).unwrap();
        assert!(c.rel_l2 < 1e-7 && c.cosine > 1.0 - 1e-12);
        assert_eq!((c.max_ulp, c.over_1_ulp), (0, 0));
    }

    #[test]
    fn counts_units_in_the_last_place_across_zero() {
        let tiny = f32::from_bits(1);
        let c = Comparison::new(&[tiny], &[f64::from(-tiny)], 1).unwrap();
        assert_eq!(c.max_ulp, 2);
        let c = Comparison::new(&[f16::from_bits(0x3C02)], &[1.0], 1).unwrap();
        assert_eq!((c.max_ulp, c.over_1_ulp), (2, 1));
        assert_eq!((c.worst.got_bits, c.worst.want_bits), (0x3C02, 0x3C00));
    }

    #[test]
    fn the_worst_element_is_named_by_row_and_column() {
        let want = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        let got = [1.0f32, 1.0, 1.0, 1.0, 1.5, 1.0];
        let c = Comparison::new(&got, &want, 3).unwrap();
        assert_eq!((c.worst.row, c.worst.col, c.worst.got), (1, 1, 1.5));
    }

    #[test]
    fn nan_and_infinity_never_pass() {
        for bad in [f32::NAN, f32::INFINITY] {
            let c = Comparison::new(&[bad, 1.0], &[1.0, 1.0], 2).unwrap();
            assert!(c.rel_l2.is_infinite() || c.rel_l2.is_nan(), "{c:?}");
            assert!(c.max_ulp > 1 << 20);
        }
        let c = Comparison::new(&[0.0f32, 1.0], &[f64::NAN, 1.0], 2).unwrap();
        assert!(c.rel_l2.is_infinite() || c.rel_l2.is_nan(), "{c:?}");
    }

    #[test]
    fn overflow_to_infinity_is_right_where_the_rounded_reference_is_infinite() {
        let c = Comparison::new(&[f16::INFINITY, f16::ONE], &[1e6, 1.0], 2).unwrap();
        assert_eq!((c.max_ulp, c.rel_l2), (0, 0.0));
    }
}
