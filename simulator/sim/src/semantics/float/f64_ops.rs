//! f64 arithmetic in every rounding mode, on 128-bit integers; nearest is the CPU's own.
//!
//! Flow: `exec/arith` for `.f64`. PTX ISA 9.7.3. NaN: the ISA supports payloads without saying which operand's;
//! as observed on sm_90, the result is the NaN operand that comes first in the order b, c, a (for a quotient
//! a, b), made quiet, and an invalid operation makes 0xfff8000000000000.

use super::{Clamp, F64, Round};

/// `a + b` (PTX ISA 9.7.3.3).
pub fn add(a: u64, b: u64, round: Round) -> u64 {
    // Multiplying by one is exact; `b` comes first among NaNs as addend as it does as factor.
    fma(a, 1f64.to_bits(), b, round)
}

/// `a - b` (PTX ISA 9.7.3.4).
pub fn sub(a: u64, b: u64, round: Round) -> u64 {
    let flipped = if f64::from_bits(b).is_nan() { b } else { b ^ 1 << 63 };
    add(a, flipped, round)
}

/// `a * b` (PTX ISA 9.7.3.5).
pub fn mul(a: u64, b: u64, round: Round) -> u64 {
    let (x, y) = (f64::from_bits(a), f64::from_bits(b));
    let native = x * y;
    if round == Round::NearestEven || !(native.is_finite() || x.is_finite() && y.is_finite()) {
        return with_nan(native, &[b, a]);
    }
    WideFloat::product(x, y).round(round)
}

/// `a * b + c` with one rounding (PTX ISA 9.7.3.6).
pub fn fma(a: u64, b: u64, c: u64, round: Round) -> u64 {
    let (x, y, z) = (f64::from_bits(a), f64::from_bits(b), f64::from_bits(c));
    if round == Round::NearestEven || !(x.is_finite() && y.is_finite() && z.is_finite()) {
        return with_nan(x.mul_add(y, z), &[b, c, a]);
    }
    let (product, addend) = (WideFloat::product(x, y), WideFloat::product(z, 1.0));
    product.add(addend, round).round(round)
}

/// `a / b` (PTX ISA 9.7.3.8).
pub fn div(a: u64, b: u64, round: Round) -> u64 {
    let (x, y) = (f64::from_bits(a), f64::from_bits(b));
    if round == Round::NearestEven || !x.is_finite() || !y.is_finite() || x == 0.0 || y == 0.0 {
        return with_nan(x / y, &[a, b]);
    }
    let (n, d) = (WideFloat::product(x, 1.0).normalized(53), WideFloat::product(y, 1.0).normalized(53));
    let (dividend, divisor) = (n.sig << 66, d.sig);
    let sig = (dividend / divisor) | (dividend % divisor != 0) as u128;
    WideFloat { neg: n.neg != d.neg, sig, exp: n.exp - 66 - d.exp }.round(round)
}

/// The square root of `a` (PTX ISA 9.7.3.15).
pub fn sqrt(a: u64, round: Round) -> u64 {
    let x = f64::from_bits(a);
    if round == Round::NearestEven || !x.is_finite() || x <= 0.0 {
        return with_nan(x.sqrt(), &[a]);
    }
    let x = WideFloat::product(x, 1.0).normalized(124);
    // An even exponent halves exactly; one more bit still fits.
    let (square, exp) = if x.exp % 2 == 0 { (x.sig, x.exp) } else { (x.sig << 1, x.exp - 1) };
    let root = square.isqrt();
    WideFloat { neg: false, sig: root | (root * root != square) as u128, exp: exp / 2 }.round(round)
}

fn with_nan(result: f64, operands: &[u64]) -> u64 {
    if !result.is_nan() {
        return result.to_bits();
    }
    match operands.iter().find(|&&bits| f64::from_bits(bits).is_nan()) {
        Some(bits) => bits | 1 << 51,
        None => F64.nan,
    }
}

/// `(-1)^neg * sig * 2^exp`, whose last bit may stand for anything nonzero below ("jam").
#[derive(Clone, Copy)]
struct WideFloat {
    neg: bool,
    sig: u128,
    exp: i32,
}

impl WideFloat {
    /// The exact product of two finite numbers.
    fn product(x: f64, y: f64) -> WideFloat {
        let parts = |v: f64| {
            let (field, man) = ((v.to_bits() >> 52 & 0x7ff) as i32, v.to_bits() & ((1 << 52) - 1));
            if field == 0 { (man as u128, -1074) } else { ((man | 1 << 52) as u128, field - 1075) }
        };
        let ((m, e), (n, f)) = (parts(x), parts(y));
        WideFloat { neg: x.is_sign_negative() != y.is_sign_negative(), sig: m * n, exp: e + f }
    }

    /// The same nonzero number with exactly `bits` significant bits; the ones below must be zero or jam.
    fn normalized(self, bits: u32) -> WideFloat {
        let by = (128 - self.sig.leading_zeros()) as i32 - bits as i32;
        WideFloat { sig: shift_right(self.sig, by), exp: self.exp + by, ..self }
    }

    /// The sum. With 126 significant bits in each operand, either the exponents differ by two or more and at
    /// most one leading bit cancels, or nothing is lost in alignment: a jammed bit never reaches the result.
    fn add(self, other: WideFloat, round: Round) -> WideFloat {
        match (self.sig, other.sig) {
            (0, 0) if self.neg == other.neg => return self,
            (0, 0) => return WideFloat { neg: round == Round::Down, ..self },
            (0, _) => return other,
            (_, 0) => return self,
            _ => {}
        }
        let (a, b) = (self.normalized(126), other.normalized(126));
        let (big, small) = if (a.exp, a.sig) >= (b.exp, b.sig) { (a, b) } else { (b, a) };
        let aligned = shift_right(small.sig, big.exp - small.exp);
        if big.neg == small.neg {
            return WideFloat { sig: big.sig + aligned, ..big };
        }
        match big.sig - aligned {
            0 => WideFloat { neg: round == Round::Down, sig: 0, exp: 0 },
            sig => WideFloat { sig, ..big },
        }
    }

    fn round(self, round: Round) -> u64 {
        self.round_to(F64, round)
    }

    fn round_to(self, format: super::Format, round: Round) -> u64 {
        let wide = if self.sig >> 62 == 0 { self } else { self.normalized(62) };
        format.round_parts(wide.neg, wide.sig as u64, wide.exp, round, Clamp::default())
    }
}

/// `sig >> by` with jam; a negative `by` shifts left.
fn shift_right(sig: u128, by: i32) -> u128 {
    match by {
        ..0 => sig << -by,
        0 => sig,
        1..128 => sig >> by | (sig & ((1 << by) - 1) != 0) as u128,
        _ => (sig != 0) as u128,
    }
}

/// The sum of at most two products of finite numbers, rounded to `format`: an independent reference for
/// [`super::arith`].
#[cfg(test)]
pub(super) fn exact_sum(format: super::Format, terms: &[(f64, f64)], round: Round) -> u64 {
    let first = WideFloat::product(terms[0].0, terms[0].1);
    let sum = match terms.get(1) {
        Some(&(x, y)) => first.add(WideFloat::product(x, y), round),
        None => first,
    };
    sum.round_to(format, round)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROUNDS: [Round; 3] = [Round::Zero, Round::Down, Round::Up];

    #[test]
    fn nan_payloads_and_the_default_nan_exact() {
        let (payload, inf) = (0x7ff0_0000_0000_1234, f64::INFINITY.to_bits());
        for round in [Round::NearestEven, Round::Up] {
            assert_eq!(add(payload, 0, round), 0x7ff8_0000_0000_1234);
            assert_eq!(sub(0, payload, round), 0x7ff8_0000_0000_1234);
            assert_eq!(fma(payload, 1, payload + 1, round), 0x7ff8_0000_0000_1235);
            assert_eq!(mul(payload, payload + 1, round), 0x7ff8_0000_0000_1235);
            assert_eq!(fma(payload, payload + 1, payload + 2, round), 0x7ff8_0000_0000_1235);
            assert_eq!(sub(inf, inf, round), F64.nan);
            assert_eq!(mul(inf, 0, round), F64.nan);
            assert_eq!(sqrt((-1f64).to_bits(), round), F64.nan);
            assert_eq!(div(1f64.to_bits(), 0, round), inf);
            assert_eq!(mul(inf, 1f64.to_bits(), round), inf);
        }
        assert_eq!(add(1f64.to_bits(), (-1f64).to_bits(), Round::Down), (-0f64).to_bits());
        assert_eq!(mul(f64::MAX.to_bits(), f64::MAX.to_bits(), Round::Zero), f64::MAX.to_bits());
    }

    fn near() -> impl Strategy<Value = f64> {
        prop_oneof![
            any::<f64>(),
            (any::<u64>(), 960u64..1090)
                .prop_map(|(m, e)| f64::from_bits(m & 0x800f_ffff_ffff_ffff | e << 52)),
            (any::<u64>(), 0u64..3).prop_map(|(m, e)| f64::from_bits(m & 0x800f_ffff_ffff_ffff | e << 52)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn integer_arithmetic_to_nearest_is_the_cpus_exact(x in near(), y in near(), z in near()) {
            prop_assume!(x.is_finite() && y.is_finite() && z.is_finite());
            let rn = Round::NearestEven;
            let product = WideFloat::product(x, y);
            prop_assert_eq!(product.round(rn), (x * y).to_bits());
            let fused = product.add(WideFloat::product(z, 1.0), rn).round(rn);
            prop_assert_eq!(fused, x.mul_add(y, z).to_bits());
        }

        #[test]
        fn directions_bracket_the_nearest_exact(x in near(), y in near(), z in near()) {
            let bits = [x.to_bits(), y.to_bits(), z.to_bits()];
            let ops: [fn([u64; 3], Round) -> u64; 5] = [
                |v, r| add(v[0], v[1], r),
                |v, r| mul(v[0], v[1], r),
                |v, r| fma(v[0], v[1], v[2], r),
                |v, r| div(v[0], v[1], r),
                |v, r| sqrt(v[0] & (u64::MAX >> 1), r),
            ];
            for op in ops {
                let nearest = f64::from_bits(op(bits, Round::NearestEven));
                let [zero, down, up] = ROUNDS.map(|round| f64::from_bits(op(bits, round)));
                prop_assume!(!nearest.is_nan());
                prop_assert!(down <= nearest && nearest <= up, "{} {} {}", down, nearest, up);
                prop_assert!(down == up || down.next_up() == up, "{} {}", down, up);
                prop_assert_eq!(zero, if nearest.is_sign_negative() { up } else { down });
            }
        }
    }
}
