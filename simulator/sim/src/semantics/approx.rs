//! The approximate functions: `ex2 lg2 rcp rsqrt sqrt sin cos tanh div.approx div.full`.
//!
//! Flow: `exec/arith` for the `.approx` and `.full` forms. PTX ISA 9.7.3.8, .13, .15, .16, .18 to .22 and
//! 9.7.4.9, .10.
//!
//! The ISA gives corner cases and error bounds, not values, and chips differ. Each function here is the
//! mathematical one, rounded to nearest (sine and cosine: within 2^-40 before rounding), so it lies within
//! every bound stated; results are the same on every host, since only additions, multiplications, divisions
//! and square roots are used, never the host's math library.
//!
//! | function | bound of the ISA |
//! |---|---|
//! | `ex2.f32` | 2 ulp; `.f16` relative 2^-9.9, `.bf16` 2^-7 |
//! | `lg2.f32` | absolute 2^-22 in (0.5, 2), else relative 2^-22 |
//! | `rcp.f32` | 1 ulp |
//! | `sqrt.f32`, `rsqrt.f32` | relative 2^-23, 2^-22.9 |
//! | `sin.f32`, `cos.f32` | absolute 2^-20.5 in ±2π, 2^-14.7 in ±100π, none beyond |
//! | `tanh.f32` | relative 2^-11; `.f16` absolute 2^-10.987, `.bf16` 2^-8 |
//! | `div.approx.f32`, `div.full.f32` | 2 ulp |

use super::float::{Clamp, F32, Format, Round, exp2};

/// A function of one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Function {
    /// `ex2`: 2^a.
    Ex2,
    /// `lg2`: log2(a).
    Lg2,
    /// `rcp`: 1/a.
    Rcp,
    /// `rsqrt`: 1/sqrt(a).
    Rsqrt,
    Sqrt,
    Sin,
    Cos,
    Tanh,
}

/// `function.approx{.ftz}` of register bits in `format` (f32; f16 and bf16 for `ex2` and `tanh`). With `ftz`,
/// subnormal operands and results become zeros of the same sign.
pub fn approx(function: Function, format: Format, a: u32, ftz: bool) -> u32 {
    let flush = |bits: u64| if ftz { format.flush(bits) } else { bits };
    let x = format.decode(flush(a as u64));
    let y = match function {
        Function::Ex2 => power_of_two(x),
        Function::Lg2 => log2(x),
        Function::Rcp => 1.0 / x,
        Function::Rsqrt => 1.0 / x.sqrt(),
        Function::Sqrt => x.sqrt(),
        Function::Sin => sine_cosine(x).0,
        Function::Cos => sine_cosine(x).1,
        Function::Tanh => tanh(x),
    };
    flush(format.encode(y, Round::NearestEven, Clamp::default())) as u32
}

/// `div.approx{.ftz}.f32` and, with `full`, `div.full{.ftz}.f32` (PTX ISA 9.7.3.8). The first multiplies by a
/// reciprocal that underflows for divisors beyond 2^126: the quotient is then a zero, NaN for an infinite
/// dividend.
pub fn div(a: u32, b: u32, full: bool, ftz: bool) -> u32 {
    let flush = |bits: u64| if ftz { F32.flush(bits) } else { bits };
    let (x, y) = (F32.decode(flush(a as u64)), F32.decode(flush(b as u64)));
    let reciprocal_underflows = !full && y.abs() > exp2(126) && y.is_finite();
    let quotient = if reciprocal_underflows { x * 0f64.copysign(y) } else { x / y };
    flush(F32.encode(quotient, Round::NearestEven, Clamp::default())) as u32
}

/// 2^x to about 2^-52, relative.
fn power_of_two(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    // Beyond these bounds every format here overflows or underflows, whatever the rest.
    let x = x.clamp(-1000.0, 1000.0);
    let whole = x.round_ties_even();
    (1.0 + exp_minus_one((x - whole) * std::f64::consts::LN_2)) * exp2(whole as i32)
}

/// e^t - 1 for |t| <= 0.35, to about 2^-51, relative: a Taylor series whose first term left out is below 2^-58.
fn exp_minus_one(t: f64) -> f64 {
    let mut sum = 1.0;
    for n in (2..=14).rev() {
        sum = 1.0 + sum * t / n as f64;
    }
    sum * t
}

/// log2(x) to about 2^-51, relative.
fn log2(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x.is_infinite() {
        return x;
    }
    // Operands are f32: normal in f64. A mantissa in [0.7, 1.4] keeps the result's error relative to it near 1.
    let bits = x.to_bits();
    let (mut exponent, mut m) =
        ((bits >> 52) as i32 - 1023, f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        (exponent, m) = (exponent + 1, m / 2.0);
    }
    // ln m = 2 artanh s; s <= 0.172, so the first term left out is below 2^-56 of the sum.
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    for n in (0..11).rev() {
        sum = sum * square + 1.0 / (2 * n + 1) as f64;
    }
    exponent as f64 + 2.0 * s * sum * std::f64::consts::LOG2_E
}

/// (sin x, cos x), absolute error below 2^-40 for |x| up to 2^20, falling off beyond.
fn sine_cosine(x: f64) -> (f64, f64) {
    if !x.is_finite() {
        return (f64::NAN, f64::NAN);
    }
    if x == 0.0 {
        return (x, 1.0);
    }
    // Pi / 2 in two parts, the first with zeros enough that its product with a quadrant number is exact.
    const HIGH: f64 = f64::from_bits(0x3ff9_21fb_5400_0000);
    const LOW: f64 = std::f64::consts::FRAC_PI_2 - HIGH;
    let reduced = x % (2.0 * std::f64::consts::PI * exp2(20));
    let quadrant = (reduced * std::f64::consts::FRAC_2_PI).round_ties_even();
    let r = (reduced - quadrant * HIGH) - quadrant * LOW;
    // Taylor series for |r| <= 0.79: the first terms left out are below 2^-60.
    let square = r * r;
    let (mut sine, mut cosine) = (1.0, 1.0);
    for n in (1..=9).rev() {
        sine = 1.0 - sine * square / (2 * n * (2 * n + 1)) as f64;
        cosine = 1.0 - cosine * square / ((2 * n - 1) * 2 * n) as f64;
    }
    let sine = sine * r;
    match quadrant as i64 & 3 {
        0 => (sine, cosine),
        1 => (cosine, -sine),
        2 => (-sine, -cosine),
        _ => (-cosine, sine),
    }
}

/// tanh(x) to about 2^-50, relative.
fn tanh(x: f64) -> f64 {
    let t = -2.0 * x.abs();
    let e = if t > -0.35 { exp_minus_one(t) } else { power_of_two(t * std::f64::consts::LOG2_E) - 1.0 };
    (-e / (2.0 + e)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::super::float::{BF16, F16};
    use super::*;
    use Function::*;

    fn f32_of(function: Function, x: f32, ftz: bool) -> f32 {
        f32::from_bits(approx(function, F32, x.to_bits(), ftz))
    }

    /// Every 64k-th f32, and neighbourhoods of 1 and of the limits.
    fn operands() -> impl Iterator<Item = f32> {
        let spread = (0..u32::MAX / 9973).map(|i| i * 9973);
        let near = [1f32, 0.5, 2.0, 126.0, 127.99, 149.0, 1e-20, f32::MIN_POSITIVE];
        let close = near.into_iter().flat_map(|x| (x.to_bits() - 50)..(x.to_bits() + 50));
        spread.chain(close).map(f32::from_bits).filter(|x| x.is_finite())
    }

    /// One ulp of f32 at `x`.
    fn ulp(x: f64) -> f64 {
        let x = (x.abs() as f32).max(f32::MIN_POSITIVE);
        x as f64 - x.next_down() as f64
    }

    #[test]
    fn results_lie_within_the_bounds_of_the_isa_close() {
        for x in operands() {
            let wide = x as f64;
            let check = |function: Function, exact: f64, bound: f64| {
                let y = f32_of(function, x, false) as f64;
                // Where f32 overflows so does the function.
                let close = (y - exact).abs() <= bound || y.is_infinite() && exact.abs() > f32::MAX as f64;
                assert!(close, "{function:?} {x:e}: {y:e} for {exact:e}");
            };
            let exact = wide.exp2();
            check(Ex2, exact, 2.0 * ulp(exact));
            check(Tanh, wide.tanh(), wide.tanh().abs() * 2f64.powi(-11) + f64::from(f32::from_bits(1)));
            if x != 0.0 {
                check(Rcp, 1.0 / wide, ulp(1.0 / wide));
            }
            if x > 0.0 {
                let log = wide.log2();
                let relative = if (0.5..2.0).contains(&x) { 1.0 } else { log.abs() };
                check(Lg2, log, relative * 2f64.powi(-22));
                check(Sqrt, wide.sqrt(), wide.sqrt() * 2f64.powi(-23));
                check(Rsqrt, 1.0 / wide.sqrt(), 2f64.powf(-22.9) / wide.sqrt());
            }
            if x.abs() < 314.0 {
                let bound = if x.abs() < std::f32::consts::TAU { 2f64.powf(-20.5) } else { 2f64.powf(-14.7) };
                check(Sin, wide.sin(), bound);
                check(Cos, wide.cos(), bound);
            }
        }
    }

    #[test]
    fn the_functions_are_nearly_exact_close() {
        let close = |got: f64, exact: f64, what: &str, x: f64| {
            assert!(
                (got - exact).abs() <= exact.abs() * 2f64.powi(-48) + 1e-300,
                "{what} {x}: {got} {exact}"
            );
        };
        for i in -2000..2000 {
            let x = i as f64 * 0.0713 + 1e-3;
            close(power_of_two(x), x.exp2(), "2^x", x);
            close(tanh(x), x.tanh(), "tanh", x);
            let (sine, cosine) = sine_cosine(x);
            assert!(
                (sine - x.sin()).abs() < 2f64.powi(-45) && (cosine - x.cos()).abs() < 2f64.powi(-45),
                "{x}"
            );
            close(log2(x.abs()), x.abs().log2(), "log2", x);
        }
        let (sine, cosine) = sine_cosine(3e38);
        assert!((sine * sine + cosine * cosine - 1.0).abs() < 1e-12);
    }

    #[test]
    fn sixteen_bit_forms_are_rounded_results_close() {
        for bits in 0..=u16::MAX as u32 {
            for (format, ex2_bound, tanh_bound) in [(F16, -9.9, -10.987), (BF16, -7.0, -8.0)] {
                let x = format.decode(bits as u64);
                let value = |function| format.decode(approx(function, format, bits, false) as u64);
                if x.is_nan() {
                    assert!(value(Ex2).is_nan() && value(Tanh).is_nan());
                    continue;
                }
                assert!((value(Tanh) - x.tanh()).abs() <= 2f64.powf(tanh_bound), "{x}");
                let exact = x.exp2();
                let smallest = format.decode(1);
                if exact < format.decode(format.nan).abs() || exact < 60000.0 {
                    assert!((value(Ex2) - exact).abs() <= exact * 2f64.powf(ex2_bound) + smallest, "{x}");
                }
            }
        }
        assert_eq!(approx(Ex2, BF16, 0x8001, true), 0x3f80);
        assert_eq!(approx(Ex2, F16, 0x4c00, false), 0x7c00);
    }
}
