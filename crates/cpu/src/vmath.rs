//! Elementwise functions of the epilogue, in a form that compilers vectorize and every ISA rounds alike.
//!
//! They use only operations that IEEE 754 defines exactly (add, subtract, multiply, divide, compare, bit
//! patterns). Rust never contracts or reorders these, so a function has the same
//! bits with 1, 8 or 16 lanes, with or without FMA. The [`Isa`](crate::Isa) only decides how many lanes the compiler may use.
//!
//! Accuracy against f64, over every f32: [`sigmoid`] within 2.5 ulp and [`tanh`] within 1.5 ulp where the result is
//! normal, one step of 2⁻¹⁴⁹ where it is subnormal.

/// `e^-y` rounds to 0 in f32 for larger y (2⁻¹⁵⁰ = e^-103.97).
pub(crate) const EXP_LIMIT: f32 = 104.0;

/// Adding 1.5 · 2²³ rounds to the nearest integer and leaves it in the low bits of the significand.
const ROUND: f32 = 12_582_912.0;

/// ln 2 in two parts; the first has nine bits, so that its product with n is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// (e^r - 1 - r) / r² on |r| ≤ ln(2)/2, least largest error, weighted by r².
const EXP: [f32; 6] = [0.5, 0.166_666_66, 0.041_666_295, 0.008_333_498, 0.001_394_475_8, 0.000_197_902_44];

/// `e^-y` for `0 ≤ y ≤ 104`, within 1 ulp (half a step where subnormal). NaN gives NaN.
#[inline(always)]
pub(crate) fn exp_neg(y: f32) -> f32 {
    let rounded = y * -std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (-y - n * LN2_HIGH) - n * LN2_LOW;
    let p = ((((EXP[5] * r + EXP[4]) * r + EXP[3]) * r + EXP[2]) * r + EXP[1]) * r + EXP[0];
    let significand = p * (r * r) + r + 1.0;
    // 2^n in two factors, because n reaches -150: the first product is exact, the second rounds once.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let power = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    significand * power(n >> 1) * power(n - (n >> 1))
}

/// `2^x` for x up to 127, off by at most 2⁻¹⁸ of it, and 0 below 2⁻¹²⁶. NaN gives NaN. Fused, and so not for every ISA.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    // With the bias of exponents in the low bits.
    const ROUND: f32 = self::ROUND + 127.0;
    // (2^f - 1) / f on |f| ≤ 1/2, least largest error, weighted by f / 2^f.
    const P: [f32; 4] = [0.693_113_6, 0.240_207_1, 0.055_976_883, 0.009_782_912];
    let rounded = x + ROUND;
    let f = x - (rounded - ROUND);
    let p = P[3].mul_add(f, P[2]).mul_add(f, P[1]).mul_add(f, P[0]).mul_add(f, 1.0);
    if x < -126.0 { 0.0 } else { p * f32::from_bits(rounded.to_bits() << 23) }
}

/// `x / (1 + e^-x)`, within 2.5 ulp; -0 where a sigmoid is below 2⁻¹²⁶, also of -∞. NaN gives NaN. Fused, and so not for every ISA.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    const LIMIT: f32 = 87.0;
    // NaN fails both comparisons.
    let y = if x > LIMIT { LIMIT } else { x };
    let y = if y < -LIMIT { -LIMIT } else { y };
    let rounded = y.mul_add(-std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, -y));
    let p =
        EXP[5].mul_add(r, EXP[4]).mul_add(r, EXP[3]).mul_add(r, EXP[2]).mul_add(r, EXP[1]).mul_add(r, EXP[0]);
    let significand = p.mul_add(r * r, r) + 1.0;
    let power = f32::from_bits(significand.to_bits().wrapping_add(rounded.to_bits() << 23));
    let quotient = x / (1.0 + power);
    if x < -LIMIT { -0.0 } else { quotient }
}

/// `1 / (1 + e^-x)`. Subnormal and then 0 below -87.3; NaN gives NaN.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    let magnitude = x.abs();
    // NaN fails the comparison and so passes through.
    let t = exp_neg(if magnitude > EXP_LIMIT { EXP_LIMIT } else { magnitude });
    let numerator = if x < 0.0 { t } else { 1.0 };
    numerator / (1.0 + t)
}

/// Hyperbolic tangent. The sign of zero is kept; NaN gives NaN.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    // (tanh(x) / x - 1) / x² in x², for |x| ≤ 5/8, least largest error.
    const P: [f32; 6] =
        [-0.333_333_3, 0.133_332_1, -0.053_947_203, 0.021_702_97, -0.008_182_677, 0.002_147_54];
    let magnitude = x.abs();
    let z = x * x;
    let p = ((((P[5] * z + P[4]) * z + P[3]) * z + P[2]) * z + P[1]) * z + P[0];
    let near = x + x * (z * p);
    let twice = magnitude + magnitude;
    let t = exp_neg(if twice > EXP_LIMIT { EXP_LIMIT } else { twice });
    let far = 1.0 - (t + t) / (1.0 + t);
    (if magnitude < 0.625 { near } else { far }).copysign(x)
}

/// The smaller of two, NaN if either is.
#[inline(always)]
pub(crate) fn min(l: f32, r: f32) -> f32 {
    let smaller = if l < r { l } else { r };
    if l.is_nan() { l } else { smaller }
}

/// The larger of two, NaN if either is.
#[inline(always)]
pub(crate) fn max(l: f32, r: f32) -> f32 {
    let larger = if l > r { l } else { r };
    if l.is_nan() { l } else { larger }
}

/// The nearest bf16, ties to even, as an f32. NaN stays NaN.
#[inline(always)]
pub(crate) fn round_to_bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(bf16_bits(x)) << 16)
}

/// Bits of the nearest bf16, ties to even; every NaN becomes 0x7FC0.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    (if nan { 0x7FC0 } else { rounded }) as u16
}

/// The number itself, or the same NaN for every NaN: IEEE 754 does not say which payload an operation passes on, and
/// instruction sets differ.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { 0x7FC0_0000 } else { bits })
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// Distance from the f64 value, in units of the last place of the nearest f32.
    fn ulps(got: f32, want: f64) -> f64 {
        let nearest = want as f32;
        let ulp = f64::from(f32::from_bits(nearest.abs().to_bits() + 1)) - f64::from(nearest.abs());
        (f64::from(got) - want).abs() / ulp
    }

    /// Every `step`-th f32 between 2⁻⁴⁰ and 200, of both signs.
    fn sweep(step: usize) -> impl Iterator<Item = f32> {
        let bits = (87u32 << 23..200f32.to_bits()).step_by(step).map(f32::from_bits);
        bits.flat_map(|x| [x, -x])
    }

    #[test]
    fn sigmoid_is_close_over_the_whole_range() {
        let worst =
            sweep(499).map(|x| ulps(sigmoid(x), 1.0 / (1.0 + (-f64::from(x)).exp()))).fold(0.0, f64::max);
        assert!(worst <= 2.5, "{worst} ulp");
    }

    #[test]
    fn silu_is_close_over_the_whole_range_and_zero_below() {
        let exact = |x: f32| f64::from(x) / (1.0 + (-f64::from(x)).exp());
        let worst = sweep(499).filter(|x| *x >= -87.0).map(|x| ulps(silu(x), exact(x))).fold(0.0, f64::max);
        assert!(worst <= 2.5, "{worst} ulp");
        for below in [-87.1, -200.0, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(silu(below).to_bits(), (-0.0f32).to_bits());
        }
        assert_eq!([0.0, 87.5, f32::MAX, f32::INFINITY].map(silu), [0.0, 87.5, f32::MAX, f32::INFINITY]);
        assert!(silu(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_close_over_the_whole_range() {
        let worst = sweep(499).map(|x| ulps(tanh(x), f64::from(x).tanh())).fold(0.0, f64::max);
        assert!(worst <= 1.5, "{worst} ulp");
    }

    #[test]
    fn powers_of_two_are_close_over_the_whole_range() {
        let exact = |x: f32| f64::from(x).exp2();
        let off = |x: f32| (f64::from(exp2(x)) / exact(x) - 1.0).abs();
        let worst = sweep(499).filter(|x| (-126.0..=127.0).contains(x)).map(off).fold(0.0, f64::max);
        assert!(worst <= 2f64.powi(-18), "{worst}");
        assert_eq!(
            [0.0, -1.0, -126.0, -126.5, f32::NEG_INFINITY].map(exp2),
            [1.0, 0.5, f32::MIN_POSITIVE, 0.0, 0.0]
        );
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn limits_and_nan() {
        for big in [104.0, 1e3, f32::MAX, f32::INFINITY] {
            assert_eq!((sigmoid(big), sigmoid(-big)), (1.0, 0.0));
            assert_eq!((tanh(big), tanh(-big)), (1.0, -1.0));
        }
        for tiny in [0.0, f32::from_bits(1), f32::MIN_POSITIVE] {
            assert_eq!((sigmoid(tiny), sigmoid(-tiny)), (0.5, 0.5));
            assert_eq!(tanh(tiny).to_bits(), tiny.to_bits());
            assert_eq!(tanh(-tiny).to_bits(), (-tiny).to_bits());
        }
        assert!(sigmoid(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
    }

    #[test]
    fn silu_far_below_zero_is_subnormal_not_nan() {
        for x in [-88.0f32, -100.0, -103.0] {
            let want = f64::from(x) * f64::from(x).exp();
            let got = f64::from(x * sigmoid(x));
            assert!((got - want).abs() <= f64::from(-x) * 2f64.powi(-150), "{x}: {got:e} for {want:e}");
        }
        assert_eq!(-200.0 * sigmoid(-200.0), 0.0);
    }

    #[test]
    fn min_and_max_never_hide_nan() {
        for (l, r) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::NAN, f32::NAN)] {
            assert!(min(l, r).is_nan() && max(l, r).is_nan());
        }
        assert_eq!((min(1.0, -2.0), max(1.0, -2.0)), (-2.0, 1.0));
        assert_eq!((min(-2.0, 1.0), max(-2.0, 1.0)), (-2.0, 1.0));
    }

    #[test]
    fn bf16_rounds_as_half_does() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (ours, theirs) = (bf16::from_bits(bf16_bits(x)), bf16::from_f32(x));
                assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{x:e}");
            }
        }
    }

    #[test]
    fn every_nan_becomes_the_same() {
        for bits in [0x7F80_0001, 0x7FFF_FFFF, 0xFF80_0001, 0xFFC0_0000] {
            assert_eq!(canonical(f32::from_bits(bits)).to_bits(), 0x7FC0_0000);
        }
        for x in [0.0f32, -0.0, f32::INFINITY, -1e-45] {
            assert_eq!(canonical(x).to_bits(), x.to_bits());
        }
    }
}
