//! Arithmetic on f32, f64, f16 and bf16, correctly rounded in every mode.
//!
//! Flow: `exec/float` calls one function per lane with register bits. PTX ISA 9.7.3 (f32, f64), 9.7.4 (f16, bf16),
//! 9.7.5 (mixed precision: widen the narrow operand with [`widen`], then use the f32 function).
//!
//! Method: f64 has [functions of its own](f64_ops). Other operands are exact in `f64`, and so are products of two of them (at most 48 significant bits). A sum
//! or quotient is computed in `f64` *rounded to odd*: truncated, with the last bit set if anything was lost,
//! which an exact error term (two-sum, or the remainder from a fused multiply-add) tells. 53 bits rounded to
//! odd round to 24 or fewer bits, in any direction, as the exact value would (Boldo and Melquiond, 2008):
//! there is no double rounding.

use super::{BF16, Clamp, F32, F64, Format, Round, exp2, f64_ops};
use crate::names::modifiers;

/// The modifiers of an arithmetic instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mode {
    /// `.rn .rz .rm .rp`.
    pub round: Round,
    /// `.ftz`: subnormal operands and results become zeros of the same sign. A result is
    /// subnormal if it still is when rounded without a lower end to exponents, as on sm_90.
    pub ftz: bool,
    /// `.sat`: the result is limited to [0, 1], NaN becomes +0.
    pub sat: bool,
    /// `.relu`: a negative result becomes +0 (f16 and bf16 `fma`).
    pub relu: bool,
}

impl Mode {
    const PLAIN: Mode = Mode { round: Round::NearestEven, ftz: false, sat: false, relu: false };
}

/// `a + b` (PTX ISA 9.7.3.3, 9.7.4.1). Operands and result are register bits of `format`.
#[inline]
pub fn add(format: Format, a: u64, b: u64, mode: Mode) -> u64 {
    if format == F32 && mode == Mode::PLAIN {
        return canonical(single(a) + single(b)).into();
    }
    if format == F64 {
        return f64_ops::add(a, b, mode.round);
    }
    let (a, b) = (operand(format, a, mode), operand(format, b, mode));
    result(format, add_to_odd(a, b, mode.round), mode)
}

/// `a - b` (PTX ISA 9.7.3.4, 9.7.4.2).
#[inline]
pub fn sub(format: Format, a: u64, b: u64, mode: Mode) -> u64 {
    if format == F64 {
        return f64_ops::sub(a, b, mode.round);
    }
    add(format, a, b ^ 1 << (format.width() - 1), mode)
}

/// `a * b` (PTX ISA 9.7.3.5, 9.7.4.3).
#[inline]
pub fn mul(format: Format, a: u64, b: u64, mode: Mode) -> u64 {
    if format == F32 && mode == Mode::PLAIN {
        return canonical(single(a) * single(b)).into();
    }
    if format == F64 {
        return f64_ops::mul(a, b, mode.round);
    }
    result(format, operand(format, a, mode) * operand(format, b, mode), mode)
}

/// `a * b + c` with one rounding (PTX ISA 9.7.3.6, 9.7.4.4).
#[inline]
pub fn fma(format: Format, a: u64, b: u64, c: u64, mode: Mode) -> u64 {
    if format == F32 && mode == Mode::PLAIN {
        return canonical(single(a).mul_add(single(b), single(c))).into();
    }
    if format == F64 {
        return f64_ops::fma(a, b, c, mode.round);
    }
    let product = operand(format, a, mode) * operand(format, b, mode);
    result(format, add_to_odd(product, operand(format, c, mode), mode.round), mode)
}

/// `a / b`, correctly rounded, of f32 or f64 (PTX ISA 9.7.3.8, `div.rnd`).
pub fn div(format: Format, a: u64, b: u64, mode: Mode) -> u64 {
    if format == F64 {
        return f64_ops::div(a, b, mode.round);
    }
    let (a, b) = (operand(F32, a, mode), operand(F32, b, mode));
    let quotient = a / b;
    // The remainder of a rounded quotient is exact.
    let remainder = (-quotient).mul_add(b, a);
    result(F32, to_odd(quotient, remainder * b.signum()), mode)
}

/// `1 / a`, correctly rounded, of f32 or f64 (PTX ISA 9.7.3.13, `rcp.rnd`).
pub fn rcp(format: Format, a: u64, mode: Mode) -> u64 {
    let one = format.encode(1.0, Round::NearestEven, Clamp::default());
    div(format, one, a, mode)
}

/// The square root of `a`, correctly rounded, of f32 or f64 (PTX ISA 9.7.3.15, `sqrt.rnd`).
pub fn sqrt(format: Format, a: u64, mode: Mode) -> u64 {
    if format == F64 {
        return f64_ops::sqrt(a, mode.round);
    }
    let a = operand(F32, a, mode);
    let root = a.sqrt();
    result(F32, to_odd(root, (-root).mul_add(root, a)), mode)
}

/// Modifiers of `min` and `max` (PTX ISA 9.7.3.11, 9.7.3.12, 9.7.4.7, 9.7.4.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MinMax {
    /// `max` rather than `min`.
    pub max: bool,
    /// `.NaN`: a NaN operand makes the result NaN; else the other operand is the result.
    pub nan: bool,
    /// `.abs`: compare and return magnitudes.
    pub abs: bool,
    /// `.xorsign` (with `.abs`): the result takes the XOR of the operands' signs.
    pub xorsign: bool,
    pub ftz: bool,
}

/// The minimum or maximum of two operands, -0 below +0; a NaN result is the canonical one. Any format, f64
/// included. Three operands: apply twice (`.xorsign` is not allowed there).
#[inline]
pub fn min_max(format: Format, a: u64, b: u64, m: MinMax) -> u64 {
    let sign = 1u64 << (format.width() - 1);
    let prepare = |bits: u64| {
        let bits = if m.ftz { format.flush(bits) } else { bits };
        if m.abs { bits & !sign } else { bits }
    };
    let (x, y) = (prepare(a), prepare(b));
    let (fx, fy) = (format.decode(x), format.decode(y));
    let d = match (fx.is_nan(), fy.is_nan()) {
        // f64 keeps a payload, as arithmetic does.
        (true, true) if format == F64 => return b | 1 << 51,
        (true, true) => return format.nan,
        (true, false) | (false, true) if m.nan => return format.nan,
        (true, false) => y,
        (false, true) => x,
        // Equal values differ at most in the sign of zero.
        _ if fx == fy => {
            if m.max {
                x & y
            } else {
                x | y
            }
        }
        _ if (fx > fy) == m.max => x,
        _ => y,
    };
    if m.xorsign { d & !sign | (a ^ b) & sign } else { d }
}

/// `|a|` (PTX ISA 9.7.3.9, 9.7.4.6), on bits; `ftz` flushes first.
#[inline]
pub fn abs(format: Format, a: u64, ftz: bool) -> u64 {
    let a = if ftz { format.flush(a) } else { a };
    nan_of_unary(format, a).unwrap_or(a & !(1 << (format.width() - 1)))
}

/// `-a` (PTX ISA 9.7.3.10, 9.7.4.5), on bits; `ftz` flushes first.
#[inline]
pub fn neg(format: Format, a: u64, ftz: bool) -> u64 {
    let a = if ftz { format.flush(a) } else { a };
    nan_of_unary(format, a).unwrap_or(a ^ 1 << (format.width() - 1))
}

/// What `abs` and `neg` make of NaN: an H100 gives the canonical one, in binary64 the operand made quiet.
#[inline]
fn nan_of_unary(format: Format, a: u64) -> Option<u64> {
    match format.decode(a).is_nan() {
        true if format == F64 => Some(a | 1 << 51),
        true => Some(format.nan),
        false => None,
    }
}

/// The f32 with the value of `bits` (PTX ISA 9.7.5: "convert(a)"; `cvt.f32.f16`). NaN becomes the canonical
/// one, except from bf16, which chips widen by a shift.
#[inline]
pub fn widen(format: Format, bits: u32) -> u32 {
    if format == BF16 {
        return bits << 16;
    }
    canonical(format.decode(bits as u64) as f32)
}

modifiers! {
    /// A floating-point comparison operator (PTX ISA 9.3.1.2): ordered, unordered (`*u`), or a NaN test.
    Compare {
        Eq "eq", Ne "ne", Lt "lt" | "lo", Le "le" | "ls", Gt "gt" | "hi", Ge "ge" | "hs",
        Equ "equ", Neu "neu", Ltu "ltu", Leu "leu", Gtu "gtu", Geu "geu", Num "num", Nan "nan",
    }
}

/// Compares two values (PTX ISA 9.3.1.2, tables 23 to 25). Decode, and flush for `.ftz`, before.
#[inline]
pub fn compare(op: Compare, a: f64, b: f64) -> bool {
    let nan = a.is_nan() || b.is_nan();
    match op {
        Compare::Eq => a == b,
        Compare::Ne => !nan && a != b,
        Compare::Lt => a < b,
        Compare::Le => a <= b,
        Compare::Gt => a > b,
        Compare::Ge => a >= b,
        Compare::Equ => nan || a == b,
        Compare::Neu => a != b,
        Compare::Ltu => nan || a < b,
        Compare::Leu => nan || a <= b,
        Compare::Gtu => nan || a > b,
        Compare::Geu => nan || a >= b,
        Compare::Num => !nan,
        Compare::Nan => nan,
    }
}

/// The bits of a result: NaN is the canonical one.
#[inline]
pub fn canonical(x: f32) -> u32 {
    if x.is_nan() { F32.nan as u32 } else { x.to_bits() }
}

/// The f32 with these bits.
#[inline]
fn single(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

#[inline]
fn operand(format: Format, bits: u64, mode: Mode) -> f64 {
    format.decode(if mode.ftz { format.flush(bits) } else { bits })
}

#[inline]
fn result(format: Format, x: f64, mode: Mode) -> u64 {
    if mode.ftz && is_tiny(format, x, mode.round) {
        return format.encode(
            if mode.relu || mode.sat { 0.0 } else { x * 0.0 },
            Round::Zero,
            Clamp::default(),
        );
    }
    if format == F32 && mode.round == Round::NearestEven && !mode.sat && !mode.relu {
        return canonical(x as f32).into();
    }
    format.encode(x, mode.round, Clamp { sat: mode.sat, relu: mode.relu, satfinite: false })
}

/// Whether `x`, rounded as if exponents had no lower end, is nonzero and below the smallest normal number.
#[inline]
fn is_tiny(format: Format, x: f64, round: Round) -> bool {
    let smallest = exp2(format.min_exponent());
    if x.abs() >= smallest || x == 0.0 {
        return false;
    }
    // Scaled out of the subnormal range, exactly, and rounded there.
    let scale = 4.0;
    x.abs() < smallest / 2.0
        || format.decode(format.encode(x * scale, round, Clamp::default())).abs() < smallest * scale
}

/// `a + b` rounded to odd. An exact zero of operands of different signs is -0 in direction `.rm`, else +0.
#[inline]
fn add_to_odd(a: f64, b: f64, round: Round) -> f64 {
    let sum = a + b;
    if sum == 0.0 && round == Round::Down && (a.is_sign_negative() || b.is_sign_negative()) {
        return -0.0;
    }
    let from_b = sum - a;
    to_odd(sum, (a - (sum - from_b)) + (b - from_b))
}

/// `nearest + error` rounded to odd, where `nearest` is that value rounded to nearest; only the sign of `error`
/// matters.
#[inline]
fn to_odd(nearest: f64, error: f64) -> f64 {
    let bits = nearest.to_bits();
    if !nearest.is_finite() || error == 0.0 || error.is_nan() || bits & 1 != 0 {
        return nearest;
    }
    let outward = (error > 0.0) == (nearest > 0.0);
    f64::from_bits(if outward { bits + 1 } else { bits - 1 })
}

#[cfg(test)]
mod tests {
    use super::super::F16;
    use super::super::f64_ops::exact_sum;
    use super::*;
    use proptest::prelude::*;

    const ROUNDS: [Round; 4] = [Round::NearestEven, Round::Zero, Round::Down, Round::Up];

    #[test]
    fn nan_is_canonical_but_from_bf16_exact() {
        let widened = (widen(F16, 0xfe01), widen(BF16, 0xffc1), widen(F16, 0x3e00));
        assert_eq!(widened, (0x7fff_ffff, 0xffc1_0000, 0x3fc0_0000));
    }

    /// Operands whose exponents lie close enough for rounding to be interesting, specials now and then.
    fn operand_bits() -> impl Strategy<Value = u32> {
        prop_oneof![
            1 => any::<u32>(),
            6 => (any::<u32>(), 90u32..165).prop_map(|(m, e)| m & 0x807f_ffff | e << 23),
            2 => (any::<u32>(), 100u32..150, 0u32..24).prop_map(|(m, e, z)| (m & 0x807f_ffff | e << 23) >> z << z),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30_000))]

        #[test]
        fn f32_nearest_is_the_languages_arithmetic_exact(a in operand_bits(), b in operand_bits(), c in operand_bits()) {
            let (x, y, z) = (f32::from_bits(a), f32::from_bits(b), f32::from_bits(c));
            let [a, b, c] = [a, b, c].map(u64::from);
            let (plain, canonical) = (Mode::default(), |x| u64::from(canonical(x)));
            prop_assert_eq!(add(F32, a, b, plain), canonical(x + y));
            prop_assert_eq!(sub(F32, a, b, plain), canonical(x - y));
            prop_assert_eq!(mul(F32, a, b, plain), canonical(x * y));
            prop_assert_eq!(fma(F32, a, b, c, plain), canonical(x.mul_add(y, z)));
            prop_assert_eq!(div(F32, a, b, plain), canonical(x / y));
            prop_assert_eq!(sqrt(F32, a, plain), canonical(x.sqrt()));
        }

        #[test]
        fn every_direction_agrees_with_wide_integers_exact(a in operand_bits(), b in operand_bits(), c in operand_bits(),
                                                           round in prop::sample::select(&ROUNDS[..])) {
            let mode = Mode { round, ..Mode::default() };
            for format in [F32, F16, BF16] {
                let narrow = |x: u32| match format.width() {
                    32 => u64::from(x),
                    // The top half keeps an f32's exponent for bf16; f16 takes any 16 bits.
                    _ => u64::from(x >> 16),
                };
                let (a, b, c) = (narrow(a), narrow(b), narrow(c));
                let (x, y, z) = (operand(format, a, mode), operand(format, b, mode), operand(format, c, mode));
                prop_assume!(x.is_finite() && y.is_finite() && z.is_finite());
                let expect = |terms: &[(f64, f64)]| exact_sum(format, terms, round);
                prop_assert_eq!(add(format, a, b, mode), expect(&[(x, 1.0), (y, 1.0)]));
                prop_assert_eq!(mul(format, a, b, mode), expect(&[(x, y)]));
                prop_assert_eq!(fma(format, a, b, c, mode), expect(&[(x, y), (z, 1.0)]));
            }
        }

        #[test]
        fn directed_quotients_and_roots_bracket_the_exact_one(a in operand_bits(), b in operand_bits()) {
            let (x, y) = (f32::from_bits(a), f32::from_bits(b));
            prop_assume!(x.is_finite() && y.is_finite() && y != 0.0 && x != 0.0);
            let value = |bits: u64| single(bits) as f64;
            let mode = |round| Mode { round, ..Mode::default() };
            let quotient = |round| div(F32, a.into(), b.into(), mode(round));
            let (down, up) = (quotient(Round::Down), quotient(Round::Up));
            // down <= x / y <= up, by exact products in f64.
            let (x, y) = (x as f64, y as f64);
            let (x, y) = if y < 0.0 { (-x, -y) } else { (x, y) };
            if value(down).is_finite() && value(up).is_finite() {
                prop_assert!(value(down) * y <= x && x <= value(up) * y);
                prop_assert!(down == up || single(down).next_up() == single(up));
            }
            let zero = quotient(Round::Zero);
            prop_assert_eq!(zero, if x < 0.0 { up } else { down });
            let root = |round| sqrt(F32, (a & 0x7fff_ffff).into(), mode(round));
            let (down, up) = (root(Round::Down), root(Round::Up));
            prop_assert!(value(down) * value(down) <= x.abs() && x.abs() <= value(up) * value(up));
            prop_assert!(up - down <= 1);
        }
    }
}
