//! Floats as integers times a power of two, for the integer kernels of one row and of many.
//!
//! ```text
//! 16 floats = 2^e · integers + rests                   e makes the largest integer BITS bits long
//! ```
//!
//! Floats are rounded to the nearest integer, ties to even; rests are exact.

use crate::lanes::{map, reduce};
use crate::pack::CHUNK_K;

/// Bits of short integers, which fit an i16 and two digits. The largest has a little less, see [`HEADROOM`].
pub(super) const SHORT_BITS: i32 = 15;

/// Bits of long integers, which fit three digits.
pub(super) const LONG_BITS: i32 = 22;

/// The largest integer times this has at most the bits of its kind. Two digits reach from -127 · 257 to 127 · 257 =
/// 0.996 · 2¹⁵, and three from -127.5 · 2¹⁵ to 127.5 · 2¹⁵ = 0.996 · 2²².
const HEADROOM: f32 = 1.005;

/// Exponents for which a dot product of integers and codes is a normal f32, with a scale of nvfp4 and without.
pub(super) const EXPONENTS: std::ops::RangeInclusive<i32> = -90..=40;

/// The largest magnitude of 16 floats; NaN if any of them is NaN.
#[inline(always)]
pub(super) fn largest(floats: &[f32; CHUNK_K]) -> f32 {
    f32::from_bits(reduce(&map(floats, |x| x.to_bits() & (u32::MAX >> 1)), Ord::max))
}

/// Subtracts from each float its nearest multiple of 2^exponent. Returns the exponent and the multiples; the largest one has
/// about `BITS` bits. `largest` is the [`largest`](largest()) of the floats, which callers know. Subtracts nothing and returns
/// `None` if all floats are zero, or if one is infinite, NaN, too small or too large.
#[inline(always)]
pub(super) fn take_integers<const BITS: i32>(
    rest: &mut [f32; CHUNK_K],
    largest: f32,
) -> Option<(i32, [i32; CHUNK_K])> {
    // Adding 1.5 · 2²³ rounds to the nearest integer and leaves it in the low bits of the significand.
    const ROUND: f32 = 12_582_912.0;
    let most = (largest * HEADROOM).to_bits() >> 23;
    // `largest · HEADROOM` is below 2^(most - 126), if finite.
    let exponent = most as i32 - 126 - BITS;
    if !EXPONENTS.contains(&exponent) {
        return None;
    }
    let (unit, inverse) = (power_of_two(exponent), power_of_two(-exponent));
    let rounded = map(rest, |x| x * inverse + ROUND);
    for (rest, rounded) in rest.iter_mut().zip(&rounded) {
        *rest -= (rounded - ROUND) * unit;
    }
    Some((exponent, map(&rounded, |x| x.to_bits().wrapping_sub(ROUND.to_bits()) as i32)))
}

/// 2^exponent, a normal number.
#[inline(always)]
pub(super) fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn powers_of_two_are_whole() {
        let mut x = [0.0; CHUNK_K];
        (x[3], x[7]) = (-0.25, 4.0);
        let mut integers = [0; CHUNK_K];
        (integers[3], integers[7]) = (-1 << 17, 1 << 21);
        assert_eq!(take_integers::<LONG_BITS>(&mut x.clone(), 4.0), Some((-19, integers)));
        (integers[3], integers[7]) = (-1 << 10, 1 << 14);
        assert_eq!(take_integers::<SHORT_BITS>(&mut x, 4.0), Some((-12, integers)));
        assert_eq!(x, [0.0; CHUNK_K]);
    }

    #[test]
    fn what_has_no_integers_is_left() {
        for bad in [f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, f32::from_bits(1), 1e30, 0.0] {
            let x = [bad; CHUNK_K];
            let mut rest = x;
            assert_eq!(take_integers::<SHORT_BITS>(&mut rest, largest(&x)), None, "{bad}");
            assert_eq!(rest.map(f32::to_bits), x.map(f32::to_bits));
        }
    }

    fn check<const BITS: i32>(x: [f32; CHUNK_K], capacity: i32) {
        let mut rest = x;
        let Some((exponent, integers)) = take_integers::<BITS>(&mut rest, largest(&x)) else { return };
        let unit = 2f64.powi(exponent);
        for ((x, rest), integer) in x.iter().zip(rest).zip(integers) {
            assert_eq!(f64::from(integer) * unit + f64::from(rest), f64::from(*x));
            assert!(f64::from(rest).abs() <= unit / 2.0);
        }
        let most = integers.iter().map(|i| i.abs()).max().unwrap();
        assert!(most <= capacity && most >= capacity / 2 - capacity / 64, "{most}");
    }

    proptest! {
        #[test]
        fn integers_and_rests_are_the_floats_exact(
            significands in prop::array::uniform16(-1.0f32..1.0),
            spread in 0i32..40,
            at in -10i32..40,
        ) {
            let x: [f32; CHUNK_K] =
                std::array::from_fn(|k| significands[k] * power_of_two(at - (k as i32 * 7 % 40).min(spread)));
            check::<SHORT_BITS>(x, 32_639);
            check::<LONG_BITS>(x, 1 << 22);
        }
    }
}
