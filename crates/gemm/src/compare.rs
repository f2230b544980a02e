//! How far a result is from the f64 reference.
//!
//! Where the reference says what each element may be off by ([`Bounded`]), each is held to that and half a step of the
//! format: it has to be what some number within the bound rounds to. One tolerance for all elements would hide wrong ones
//! behind large ones (a product with shuffled scales can pass `atol = 1`).
//!
//! Against another result, which comes without a bound, there are relative L2 and cosine over all elements, and, since a few
//! wrong ones among many hardly move these, the largest error beside what is usual in its row.

use half::{bf16, f16};

use crate::Error;
use crate::bound::Bounded;

/// A type that C can be stored in, as far as comparing goes.
pub trait Element: Copy {
    /// The value, exactly.
    fn to_f64(self) -> f64;
    /// The nearest value of this type, ties to even.
    fn from_f64(x: f64) -> Self;
    /// Bits in value order: neighbours differ by 1, and zero of either sign is 0.
    fn ordered_bits(self) -> i64;
    /// The value with these [`ordered_bits`](Self::ordered_bits).
    fn from_ordered_bits(bits: i64) -> Self;
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
            fn from_ordered_bits(bits: i64) -> Self {
                let magnitude = Self::from_bits(bits.unsigned_abs() as $bits);
                if bits < 0 { -magnitude } else { magnitude }
            }
            fn bits(self) -> u32 {
                self.to_bits().into()
            }
        }
    )*};
}
element!(
    f32, u32, |x| x as f32;
    f16, u16, |x| f16::from_f32(to_odd(x));
    bf16, u16, |x| bf16::from_f32(to_odd(x))
);

/// Rounded to odd: of the two f32 around a number that is not an f32, the one with the odd significand. That rounds to 16 bits
/// as the number itself does, where the nearest f32 may be a tie that the number is not. (`f16::from_f64` rounds twice.)
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    match f64::from(nearest) {
        back if back == x || x.is_nan() || nearest.to_bits() & 1 == 1 => nearest,
        back if back < x => nearest.next_up(),
        _ => nearest.next_down(),
    }
}

/// Half the way from a finite value to its neighbour in the direction of another: what rounding to it may have lost.
fn half_step<T: Element>(value: T, toward: f64) -> f64 {
    let step = |by: i64| (T::from_ordered_bits(value.ordered_bits() + by).to_f64() - value.to_f64()).abs();
    let by = if toward > value.to_f64() { 1 } else { -1 };
    // Beyond the largest there is infinity, a step away as far as rounding goes.
    let step = if step(by).is_finite() { step(by) } else { step(-by) };
    step / 2.0
}

/// How far an element is from the reference, over how far it may be.
fn of_bound<T: Element>(got: T, want: Bounded) -> f64 {
    let (value, error) = (got.to_f64(), want.error);
    if !value.is_finite() || !want.value.is_finite() {
        let near = [want.value - error, want.value, want.value + error];
        let same = |x: f64| T::from_f64(x).to_f64() == value || x.is_nan() && value.is_nan();
        return if same(near[1]) || error.is_finite() && near.into_iter().any(same) {
            0.0
        } else {
            f64::INFINITY
        };
    }
    let ratio = (value - want.value).abs() / (error + half_step(got, want.value));
    if ratio.is_nan() { f64::INFINITY } else { ratio }
}

/// The element whose error is the largest part of its bound; where bounds are not known, the largest error.
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
    /// How far a right result may be from the reference, half a step of the format included; None where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
}

impl Worst {
    /// How far the value is from the reference.
    pub fn error(&self) -> f64 {
        (self.got - self.want).abs()
    }
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
    /// Largest part of its bound that an element's error is: at most 1 if all are right; 0 where no bounds are known.
    pub max_of_bound: f64,
    /// Elements beyond their bound.
    pub over_bound: usize,
    /// Largest absolute difference.
    pub max_abs: f64,
    /// Largest difference over the sum of the reference's magnitude and the root mean square of its row, of elements more
    /// than one unit in the last place off; 0 if there are none, and where rows have one element.
    pub max_rel: f64,
    /// Largest distance of a block scale of an nvfp4 result from those that values within the bounds have under the same
    /// tensor scale, in bytes; None for floats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_scale_steps: Option<u64>,
    /// Relative L2 error of the reference itself in nvfp4 under that tensor scale: how little it fits; None for floats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nearest_rel_l2: Option<f64>,
    /// Elements compared.
    pub elements: usize,
    /// Elements that are not finite and equal on both sides: they count as right, and in nothing else.
    pub not_finite: usize,
    /// Elements that a number beyond f32 led to, so that nothing is known of them: they count as right, and in nothing else.
    pub overflowed: usize,
    /// Where the result is worst.
    pub worst: Worst,
}

impl Comparison {
    /// Compares a row-major result of `cols` columns, at least one, with the reference.
    ///
    /// # Errors
    /// If the sizes differ, or there is nothing to compare.
    pub fn new<T: Element, W: Copy + Into<Bounded>>(
        got: &[T],
        want: &[W],
        cols: usize,
    ) -> Result<Self, Error> {
        let mut comparer = Comparer::new(cols);
        comparer.add(got, want)?;
        comparer.finish()
    }
}

/// A [`Comparison`] made piece by piece, so that neither side has to be in memory as a whole. In order, pieces give
/// the same bits as the whole.
#[derive(Debug, Clone)]
pub struct Comparer {
    cols: usize,
    error2: f64,
    got2: f64,
    want2: f64,
    dot: f64,
    /// What [`Worst`] is chosen by.
    worst_by: f64,
    /// All but the relative error and the cosine.
    found: Comparison,
}

impl Comparer {
    /// For a row-major result of `cols` columns, at least one.
    pub fn new(cols: usize) -> Self {
        let worst = Worst { row: 0, col: 0, got: 0.0, want: 0.0, got_bits: 0, want_bits: 0, bound: None };
        let found = Comparison {
            rel_l2: 0.0,
            cosine: 1.0,
            max_ulp: 0,
            over_1_ulp: 0,
            max_of_bound: 0.0,
            over_bound: 0,
            max_abs: 0.0,
            max_rel: 0.0,
            max_scale_steps: None,
            nearest_rel_l2: None,
            elements: 0,
            not_finite: 0,
            overflowed: 0,
            worst,
        };
        Self { cols, error2: 0.0, got2: 0.0, want2: 0.0, dot: 0.0, worst_by: -1.0, found }
    }

    /// The next rows, in row-major order; `want` is the reference.
    ///
    /// # Errors
    /// If there are not as many of both.
    pub fn add<T: Element, W: Copy + Into<Bounded>>(&mut self, got: &[T], want: &[W]) -> Result<(), Error> {
        if got.len() != want.len() {
            return Err(Error::CompareLen { found: got.len(), expected: want.len() });
        }
        for (got, want) in got.chunks(self.cols).zip(want.chunks(self.cols)) {
            self.add_row(got, want);
        }
        Ok(())
    }

    fn add_row<T: Element, W: Copy + Into<Bounded>>(&mut self, got: &[T], want: &[W]) {
        let finite = want.iter().map(|&w| w.into().value).filter(|w| w.is_finite());
        let usual = (finite.map(|w| w * w).sum::<f64>() / want.len() as f64).sqrt();
        let found = &mut self.found;
        for (&g, &bounded) in got.iter().zip(want) {
            let bounded: Bounded = bounded.into();
            if bounded.error.is_nan() && !bounded.value.is_nan() {
                found.overflowed += 1;
                found.elements += 1;
                continue;
            }
            let w = bounded.value;
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
            found.max_ulp = found.max_ulp.max(ulp);
            if ulp > 1 {
                found.over_1_ulp += 1;
                // An element that is alone in its row has nothing usual beside it, and may be the rest of a cancellation.
                if self.cols > 1 {
                    let rel = difference / (w.abs() + usual);
                    found.max_rel = found.max_rel.max(if rel.is_nan() { f64::INFINITY } else { rel });
                }
            }
            found.max_abs = found.max_abs.max(difference);
            let of_bound = of_bound(g, bounded);
            found.max_of_bound = found.max_of_bound.max(of_bound);
            found.over_bound += usize::from(of_bound > 1.0);
            let known = bounded.error.is_finite();
            let worst_by = if known { of_bound } else { difference };
            if worst_by > self.worst_by {
                self.worst_by = worst_by;
                let bound = bounded.error + if value.is_finite() { half_step(g, w) } else { 0.0 };
                found.worst = Worst {
                    row: found.elements / self.cols,
                    col: found.elements % self.cols,
                    got: value,
                    want: w,
                    got_bits: g.bits(),
                    want_bits: rounded.bits(),
                    bound: known.then_some(bound),
                };
            }
            self.error2 += difference * difference;
            if same {
                found.not_finite += 1;
            } else {
                self.got2 += value * value;
                self.want2 += w * w;
                self.dot += value * w;
            }
            found.elements += 1;
        }
    }

    /// The comparison of all that was added.
    ///
    /// # Errors
    /// If that is nothing.
    pub fn finish(self) -> Result<Comparison, Error> {
        let Self { error2, got2, want2, dot, found, .. } = self;
        if found.elements == 0 {
            return Err(Error::CompareLen { found: 0, expected: 0 });
        }
        let ratio = |over: f64, under: f64| if over == 0.0 { 0.0 } else { over / under };
        Ok(Comparison {
            rel_l2: ratio(error2.sqrt(), want2.sqrt()),
            cosine: if got2 == 0.0 && want2 == 0.0 { 1.0 } else { ratio(dot, got2.sqrt() * want2.sqrt()) },
            ..found
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What overflowed is not held against a kernel; a wrong neighbour still is.
    #[test]
    fn what_exceeds_f32_on_the_way_is_counted_and_not_compared() {
        let of = |gate: f64, up: f64| {
            let bounded = |sum: f64| Bounded::product(16, [sum, sum.abs()], 1.0, 0.0);
            crate::Activation::ClampedSilu { limit: 7.0 }.program().eval(bounded(gate), bounded(up))
        };
        let want = [of(3e39, 1.0), of(1.0, 1.0)];
        let compare = |got: [f32; 2]| Comparison::new(&got, &want, 2).unwrap();
        let right = compare([f32::INFINITY, want[1].value as f32]);
        assert_eq!((right.overflowed, right.over_bound, right.rel_l2 < 1e-6), (1, 0, true));
        assert_eq!(compare([7.0, 2.0]).over_bound, 1);
    }

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

    /// Beside every tie of two neighbours, by less than an f32 or the upper half of an f64 can tell.
    fn rounds_once<T: Element>(step: impl Fn(u16) -> T) {
        for bits in 0..0x7B80 {
            let [low, high] = [bits, bits + 1].map(&step);
            let tie = (low.to_f64() + high.to_f64()) / 2.0;
            let even = if bits % 2 == 0 { low } else { high };
            for (x, nearest) in [(tie.next_down(), low), (tie, even), (tie.next_up(), high)] {
                assert_eq!(T::from_f64(x).bits(), nearest.bits(), "{x:e}");
                assert_eq!(T::from_f64(-x).to_f64(), -nearest.to_f64(), "{x:e}");
            }
        }
        for (x, rounded) in [(0.0, 0.0), (1e-60, 0.0), (1e60, f64::INFINITY), (f64::INFINITY, f64::INFINITY)]
        {
            assert_eq!(T::from_f64(x).to_f64(), rounded);
        }
        assert!(T::from_f64(f64::NAN).to_f64().is_nan());
    }

    #[test]
    fn the_reference_is_rounded_once_not_through_f32() {
        rounds_once(f16::from_bits);
        rounds_once(bf16::from_bits);
    }

    #[test]
    fn the_worst_element_is_named_by_row_and_column() {
        let want = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        let got = [1.0f32, 1.0, 1.0, 1.0, 1.5, 1.0];
        let c = Comparison::new(&got, &want, 3).unwrap();
        assert_eq!((c.worst.row, c.worst.col, c.worst.got), (1, 1, 1.5));
    }

    #[test]
    fn one_wrong_element_shows_beside_what_is_usual_in_its_row() {
        let mut want = vec![1.0; 1000];
        want.extend([1e-3; 1000]);
        let mut got: Vec<f32> = want.iter().map(|&x| x as f32).collect();
        got[1500] = 1.5e-3;
        let c = Comparison::new(&got, &want, 1000).unwrap();
        assert!(c.rel_l2 < 2e-5 && (c.max_rel - 0.25).abs() < 1e-4, "{c:?}");
        let c = Comparison::new(&[1.0f32, 1.1e-6], &[1.0, 1e-6], 1).unwrap();
        assert!(c.rel_l2 < 2e-7 && c.max_rel == 0.0 && c.over_1_ulp == 1, "{c:?}");
        // What rounding alone explains does not count.
        let c = Comparison::new(&[half::f16::from_bits(1)], &[2e-8], 1).unwrap();
        assert_eq!((c.max_ulp, c.max_rel), (1, 0.0));
    }

    #[test]
    fn pieces_give_the_same_as_the_whole_exact() {
        let want: Vec<f64> = (0..60).map(|i| f64::from(i * i % 17) / 7.0 - 1.0).collect();
        let got: Vec<f32> = want.iter().enumerate().map(|(i, x)| *x as f32 + (i % 5) as f32 * 1e-7).collect();
        let whole = Comparison::new(&got, &want, 6).unwrap();
        for rows in [1, 2, 3, 7] {
            let mut comparer = Comparer::new(6);
            for (got, want) in got.chunks(6 * rows).zip(want.chunks(6 * rows)) {
                comparer.add(got, want).unwrap();
            }
            assert_eq!(comparer.finish().unwrap(), whole);
        }
        assert!(Comparer::new(6).finish().is_err() && Comparer::new(6).add(&got, &want[1..]).is_err());
    }

    /// A result is right if a number within the bound rounds to it, whichever side of a border that is.
    #[test]
    fn elements_are_held_to_their_bound_and_half_a_step() {
        fn found<T: Element>(got: T, value: f64, error: f64) -> f64 {
            Comparison::new(&[got], &[Bounded { value, error }], 1).unwrap().max_of_bound
        }
        let step = 2f64.powi(-7);
        let next = bf16::from_f64(1.0 + step);
        // Between 1 and the next, 0.4 of a step from 1: only a bound of a tenth reaches the border.
        let value = 1.0 + 0.4 * step;
        assert!(found(bf16::ONE, value, 0.0) <= 1.0 && found(bf16::ONE, value, 1e-9) <= 1.0);
        assert!(found(next, value, 0.09 * step) > 1.0 && found(next, value, 0.11 * step) <= 1.0);
        // Below a power of two steps are half as long.
        assert!(found(bf16::ONE, 1.0 - 0.3 * step, 0.04 * step) > 1.0);
        assert!(found(bf16::ONE, 1.0 - 0.3 * step, 0.06 * step) <= 1.0);
        assert_eq!(found(1.0f32, 1.0, 0.0), 0.0);
        assert!(found(f16::MAX, 65519.0, 0.0) <= 1.0 && found(f16::INFINITY, 65519.0, 0.0) > 1.0);
        assert!(found(f16::MAX, 65521.0, 0.0) > 1.0 && found(f16::INFINITY, 65519.0, 2.0) == 0.0);
        assert!(found(f32::NAN, 1.0, 1e9) > 1.0 && found(1.0f32, f64::NAN, 0.0) > 1.0);
        assert_eq!([found(f32::NAN, f64::NAN, 0.0), found(f32::NAN, f64::NAN, f64::NAN)], [0.0; 2]);
        let known = |value| Bounded { value, error: 0.1 };
        let c = Comparison::new(&[100.0f32, 1.5], &[known(99.92), known(1.0)], 2).unwrap();
        assert_eq!((c.worst.col, c.over_bound), (1, 1));
        assert!((c.worst.bound.unwrap() - 0.1).abs() < 1e-6 && c.worst.error() == 0.5);
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
        assert_eq!((c.max_ulp, c.rel_l2, c.not_finite), (0, 0.0, 1));
    }

    #[test]
    fn elements_that_are_nan_on_both_sides_are_counted() {
        let c = Comparison::new(&[f32::NAN, 1.0, f32::NAN], &[f64::NAN, 1.0, f64::NAN], 3).unwrap();
        assert_eq!((c.not_finite, c.elements, c.rel_l2), (2, 3, 0.0));
    }
}
