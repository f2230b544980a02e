//! Floating-point formats of PTX and the one place where a real number is rounded into one of them.
//!
//! Flow: `cvt` and every arithmetic instruction compute an exact (or odd-rounded, see [`arith`]) `f64`, then
//! [`Format::encode`] rounds it once. PTX ISA 5.2.3 (formats), 6.5.2 (rounding modifiers), 9.7.9.21 (`cvt`).

pub mod arith;
pub mod f64_ops;
pub mod int;

/// A floating-point rounding modifier (PTX ISA 6.5.2, table 17). `.rs` needs random bits and is not one of
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Round {
    /// `.rn`: to nearest, ties to even.
    #[default]
    NearestEven,
    /// `.rna`: to nearest, ties away from zero (`cvt.rna.tf32.f32`).
    NearestAway,
    /// `.rz`: towards zero.
    Zero,
    /// `.rm`: towards negative infinity.
    Down,
    /// `.rp`: towards positive infinity.
    Up,
}

impl Round {
    /// Whether a magnitude truncated to an even or odd last place moves up to the next one, given the first
    /// discarded bit and whether anything follows it.
    #[inline]
    fn goes_up(self, neg: bool, odd: bool, guard: bool, sticky: bool) -> bool {
        match self {
            Round::NearestEven => guard && (sticky || odd),
            Round::NearestAway => guard,
            Round::Zero => false,
            Round::Down => neg && (guard || sticky),
            Round::Up => !neg && (guard || sticky),
        }
    }
}

/// What happens to a result after rounding (PTX ISA 9.7.9.21 `.sat`, `.satfinite`, `.relu`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Clamp {
    /// `.sat`: limit to [0, 1]; NaN becomes +0, as does -0.
    pub sat: bool,
    /// `.satfinite`: magnitudes beyond the largest finite value, infinity included, become that value.
    pub satfinite: bool,
    /// `.relu`: negative results, -0 included, become +0; NaN stays the canonical NaN.
    pub relu: bool,
}

/// Which codes of a format are not finite numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// The largest exponent holds infinities and NaNs, as in IEEE 754.
    Ieee,
    /// Only exponent and mantissa all ones is special, and it is NaN (e4m3).
    NanOnly,
    /// Every code is a finite number (e2m1, e2m3, e3m2).
    None,
}

/// A binary floating-point format with a sign bit (PTX ISA 5.2.2, 5.2.3). `ue8m0` is not one:
/// see [`decode_ue8m0`]. `ue4m3` is the non-negative half of [`E4M3`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// Width of the exponent field.
    pub exp_bits: u32,
    /// Width of the mantissa field, without the hidden bit.
    pub man_bits: u32,
    /// Zero bits below the mantissa in a register (tf32 keeps the place of an f32 and drops 13 bits).
    pub pad_bits: u32,
    /// The codes that are not finite numbers.
    pub specials: Specials,
    /// The code that a NaN result takes. For a format without NaN it is the largest finite value,
    /// which is what `cvt` makes of NaN there.
    pub nan: u64,
}

/// IEEE binary16. Canonical NaN 0x7fff.
pub const F16: Format = Format::new(5, 10, 0, Specials::Ieee, 0x7fff);
/// bfloat16. Canonical NaN 0x7fff.
pub const BF16: Format = Format::new(8, 7, 0, Specials::Ieee, 0x7fff);
/// TF32: an f32 whose low 13 mantissa bits are ignored and written as zero (the ISA leaves the internal
/// layout open; this is what chips do). Canonical NaN 0x7fffe000.
pub const TF32: Format = Format::new(8, 10, 13, Specials::Ieee, 0x7fff_e000);
/// IEEE binary32. Canonical NaN 0x7fffffff (the ISA says "an unspecified NaN"; this is the one chips make).
pub const F32: Format = Format::new(8, 23, 0, Specials::Ieee, 0x7fff_ffff);
/// IEEE binary64. NaN made by an operation: 0xfff8000000000000.
pub const F64: Format = Format::new(11, 52, 0, Specials::Ieee, 0xfff8_0000_0000_0000);
/// OCP FP8 E4M3: no infinity, NaN 0x7f and 0xff, largest 448.
pub const E4M3: Format = Format::new(4, 3, 0, Specials::NanOnly, 0x7f);
/// OCP FP8 E5M2: IEEE-like, largest 57344; NaN written as 0x7f.
pub const E5M2: Format = Format::new(5, 2, 0, Specials::Ieee, 0x7f);
/// OCP FP4 E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
pub const E2M1: Format = Format::new(2, 1, 0, Specials::None, 0x7);
/// OCP FP6 E2M3: largest 7.5.
pub const E2M3: Format = Format::new(2, 3, 0, Specials::None, 0x1f);
/// OCP FP6 E3M2: largest 28.
pub const E3M2: Format = Format::new(3, 2, 0, Specials::None, 0x1f);

impl Format {
    const fn new(exp_bits: u32, man_bits: u32, pad_bits: u32, specials: Specials, nan: u64) -> Format {
        Format { exp_bits, man_bits, pad_bits, specials, nan }
    }

    /// Width of a value in a register, in bits.
    #[inline]
    pub const fn width(self) -> u32 {
        1 + self.exp_bits + self.man_bits + self.pad_bits
    }

    /// The exponent of the smallest normal number, `1 - bias`.
    #[inline]
    pub const fn min_exponent(self) -> i32 {
        2 - (1 << (self.exp_bits - 1))
    }

    /// The code of the largest finite number, without padding.
    #[inline]
    const fn max_finite_code(self) -> u64 {
        let ones = (1u64 << (self.exp_bits + self.man_bits)) - 1;
        match self.specials {
            Specials::Ieee => (((1u64 << self.exp_bits) - 1) << self.man_bits) - 1,
            Specials::NanOnly => ones - 1,
            Specials::None => ones,
        }
    }

    /// Whether `bits` is a nonzero number below the smallest normal one (what `.ftz` flushes).
    #[inline]
    pub const fn is_subnormal(self, bits: u64) -> bool {
        let magnitude = (bits >> self.pad_bits) & ((1 << (self.exp_bits + self.man_bits)) - 1);
        magnitude != 0 && magnitude >> self.man_bits == 0
    }

    /// `.ftz`: `bits`, or the zero of the same sign if it is subnormal.
    #[inline]
    pub const fn flush(self, bits: u64) -> u64 {
        if self.is_subnormal(bits) { bits & (1 << (self.width() - 1)) } else { bits }
    }

    /// The value of a code, exact for every format; any NaN gives the quiet `f64` NaN. Bits above
    /// [`width`](Self::width) and in the padding are ignored.
    #[inline]
    pub fn decode(self, bits: u64) -> f64 {
        if self.man_bits == 52 {
            return f64::from_bits(bits);
        }
        let bits = bits >> self.pad_bits;
        let man = bits & ((1 << self.man_bits) - 1);
        let exp = (bits >> self.man_bits) & ((1 << self.exp_bits) - 1);
        let neg = (bits >> (self.exp_bits + self.man_bits)) & 1;
        let all_ones = exp == (1 << self.exp_bits) - 1;
        let magnitude = match self.specials {
            Specials::Ieee if all_ones => return special(neg, man != 0),
            Specials::NanOnly if all_ones && man == (1 << self.man_bits) - 1 => return f64::NAN,
            _ if exp == 0 => man as f64 * exp2(self.min_exponent() - self.man_bits as i32),
            _ => {
                let biased = (exp as i64 - 1 + self.min_exponent() as i64 + 1023) as u64;
                f64::from_bits(biased << 52 | man << (52 - self.man_bits))
            }
        };
        f64::from_bits(magnitude.to_bits() | neg << 63)
    }

    /// `x` rounded into this format (PTX ISA 9.7.9.21). Exact results are exact; otherwise one rounding in
    /// direction `round`; beyond the largest finite value infinity or that value as IEEE 754 7.4 says, or as
    /// `clamp` says; a format without infinity takes its NaN, or its largest value if it has none.
    #[inline]
    pub fn encode(self, x: f64, round: Round, clamp: Clamp) -> u64 {
        let bits = x.to_bits();
        let neg = bits >> 63 != 0;
        let exp_field = ((bits >> 52) & 0x7ff) as i32;
        let man = bits & ((1 << 52) - 1);
        if x.is_nan() {
            return if clamp.sat { 0 } else { self.nan };
        }
        if (clamp.relu || clamp.sat) && neg {
            return 0;
        }
        if clamp.sat && x >= 1.0 {
            return self.round_parts(false, 1, 0, Round::Zero, clamp);
        }
        if exp_field == 0x7ff {
            return self.infinity(neg, clamp);
        }
        match exp_field {
            0 => self.round_parts(neg, man, -1074, round, clamp),
            e => self.round_parts(neg, man | 1 << 52, e - 1075, round, clamp),
        }
    }

    /// The number `sig * 2^exp` with sign `neg`, rounded. A caller that had to drop nonzero bits below `sig`
    /// sets its last bit ("jamming"), which rounds right as long as two bits below the result's last place
    /// remain.
    pub(crate) fn round_parts(self, neg: bool, sig: u64, exp: i32, round: Round, clamp: Clamp) -> u64 {
        let sign = (neg as u64) << (self.exp_bits + self.man_bits);
        if sig == 0 {
            return sign << self.pad_bits;
        }
        let top = 63 - sig.leading_zeros() as i32;
        // Exponent of the binade the result lies in; subnormals share the one of the smallest normal number.
        let binade = (exp + top).max(self.min_exponent());
        let drop = binade - self.man_bits as i32 - exp;
        let (kept, guard, sticky) = match drop {
            ..=0 => (sig << -drop, false, false),
            1..=63 => (sig >> drop, sig >> (drop - 1) & 1 != 0, sig & ((1 << (drop - 1)) - 1) != 0),
            64 => (0, sig >> 63 != 0, sig << 1 != 0),
            _ => (0, false, true),
        };
        let kept = kept + round.goes_up(neg, kept & 1 != 0, guard, sticky) as u64;
        // The hidden bit of `kept` adds the last one to the exponent field, and so does a carry out of
        // rounding.
        let code = (((binade - self.min_exponent()) as u64) << self.man_bits) + kept;
        if code > self.max_finite_code() {
            let to_infinity = match round {
                Round::NearestEven | Round::NearestAway => true,
                Round::Zero => false,
                Round::Down => neg,
                Round::Up => !neg,
            };
            return if to_infinity {
                self.infinity(neg, clamp)
            } else {
                (sign | self.max_finite_code()) << self.pad_bits
            };
        }
        (sign | code) << self.pad_bits
    }

    /// What infinity, or a number that rounds beyond the largest finite one, becomes.
    fn infinity(self, neg: bool, clamp: Clamp) -> u64 {
        let sign = (neg as u64) << (self.exp_bits + self.man_bits);
        let code = match self.specials {
            Specials::Ieee if !clamp.satfinite => ((1u64 << self.exp_bits) - 1) << self.man_bits,
            Specials::NanOnly if !clamp.satfinite => return self.nan,
            _ => self.max_finite_code(),
        };
        (sign | code) << self.pad_bits
    }
}

/// `2^n` for `n` in the normal range of f64.
#[inline]
pub(crate) fn exp2(n: i32) -> f64 {
    debug_assert!((-1022..=1023).contains(&n));
    f64::from_bits(((n + 1023) as u64) << 52)
}

fn special(neg: u64, nan: bool) -> f64 {
    match (nan, neg) {
        (true, _) => f64::NAN,
        (false, 0) => f64::INFINITY,
        _ => f64::NEG_INFINITY,
    }
}

/// The value of a `ue8m0` code, `2^(code - 127)`; 0xff is NaN (PTX ISA 5.2.3).
#[inline]
pub fn decode_ue8m0(code: u8) -> f64 {
    if code == 0xff { f64::NAN } else { exp2(code as i32 - 127) }
}

/// `x` as `ue8m0`, rounded down (`.rz`) or up (`.rp`) to a power of two (PTX ISA 9.7.9.21,
/// `cvt.frnd3.ue8m0x2`).
///
/// The format has no sign: the magnitude is converted. Below 2^-127, zero included, the result is code 0. Above
/// 2^127 it is 0xfe with `satfinite`, else NaN. Rounding modes other than `.rz` and `.rp` do not exist for this
/// instruction; they are read as `.rz`, except `.rp`.
pub fn encode_ue8m0(x: f64, round: Round, satfinite: bool) -> u8 {
    if x.is_nan() {
        return 0xff;
    }
    let bits = x.to_bits() & (u64::MAX >> 1);
    let exponent = (bits >> 52) as i32 - 1023;
    let inexact = bits & ((1 << 52) - 1) != 0;
    let rounded = exponent + (round == Round::Up && inexact) as i32;
    match rounded {
        ..-127 => 0,
        -127..=127 => (rounded + 127) as u8,
        _ if satfinite => 0xfe,
        _ => 0xff,
    }
}

/// The result of `cvt.rs` from f32 to a format of 16 bits or less: the discarded mantissa bits plus random bits,
/// and the carry rounds the magnitude up (PTX ISA 9.7.9.21, `.rs`, figures 38 to 41).
///
/// `rbits` holds 13 (f16) or 16 (others) random bits, the upper ones ignored. Random bits are aligned with the
/// top of the discarded bits; where more bits are discarded than there are random ones (formats of 8 bits and less,
/// subnormal results) the lower ones cannot carry.
pub fn encode_stochastic(format: Format, x: f32, rbits: u32, clamp: Clamp) -> u64 {
    let bits = x.to_bits();
    let (field, man) = ((bits >> 23 & 0xff) as i32, bits & 0x7f_ffff);
    if field == 0xff || bits << 1 == 0 {
        return format.encode(x as f64, Round::Zero, clamp);
    }
    let (sig, exp) = if field == 0 { (man as u64, -149) } else { (man as u64 | 1 << 23, field - 150) };
    let top = 63 - sig.leading_zeros() as i32;
    let drop = (exp + top).max(format.min_exponent()) - format.man_bits as i32 - exp;
    let width = (23 - format.man_bits as i32).min(16);
    let random = rbits as u64 & ((1 << width) - 1);
    let sum = match drop - width {
        0.. if drop < 40 => sig + (random << (drop - width)),
        0.. => sig,
        short => sig + (random >> -short),
    };
    let neg = bits >> 31 != 0;
    if clamp.relu && neg {
        return 0;
    }
    // The carry may have moved the sum one binade up, where `.rz` drops one more bit, which is then zero or
    // below the last place the carry reached: the truncation is the same.
    format.round_parts(neg, sum, exp, Round::Zero, clamp)
}

#[cfg(test)]
mod tests;
