//! What tensor cores compute: D = A·B + C, to the bit as far as it is publicly known.
//!
//! Flow: `exec/{mma,wgmma,tcgen05}` decodes A and B once per instruction into slices of f32 (exact for every
//! type, see [`Element::decode`]), negates them if the instruction says so, and asks a [`Product`], or [`multiply_f64`].
//! Layouts: `a[row * k + kk]`, `b[col * k + kk]` (both K-contiguous), `c[row * n + col]`; zeros in C when the
//! instruction does not accumulate.
//!
//! # What is assumed
//! The ISA promises only exact products and "at least single precision" accumulation in an unspecified order
//! (PTX ISA 9.7.14.5.14, 9.7.15.5.2, 9.7.16.10). Studies of the hardware agree on more: Fasi, Higham,
//! Mikaitis and Pranesh (PeerJ CS 7:e330, 2021: V100 to A100), Khattak and Mikaitis (arXiv 2512.07004: to
//! B200), and Xie et al. (arXiv 2511.10909, "MMA-Sim": Volta to Blackwell, equal to the hardware on a million
//! random cases each):
//!
//! 1. An instruction's K products and the addend form one fused sum (two in sequence on Ampere and Ada).
//! 2. Each term has the exponent of its operands added, not normalised: a product's significand is in [0, 4).
//!    An operand's exponent is at least that of its format's smallest normal number, an f32 addend's at least
//!    -126.
//! 3. Every term is aligned to the largest exponent and *truncated* to `fraction_bits` places below it: 24 on
//!    Ampere and Ada, 25 on Hopper and Blackwell, 13 for e4m3 and e5m2 in Ada `mma` and Hopper `wgmma` (the
//!    "14-bit accumulation").
//! 4. The truncated terms add exactly; the sum is truncated to f32 (13 mantissa bits in the FP8 cases above),
//!    infinity beyond it, or rounded to nearest f16. A zero sum is +0.
//! 5. NaN results are 0x7fffffff or f16 0x7fff; an infinite product or addend gives infinity.
//! 6. Block-scaled e2m1: each 16 products add exactly, times the exact product of the two scales; these terms
//!    (four for K = 64) align by the sum of the scales' exponents, with 35 fraction bits.
//! 7. Hopper `mma` of e4m3 and e5m2 into f32 is two f16 operations: from zero, the products with `k % 4 < 2`
//!    form one sum, the others the next; then C is added in f32, to nearest.
//!
//! Checked bit for bit on an H200, 262144 random and special sums each: `wgmma` f16, bf16, tf32, e4m3, e5m2
//! into f32, f16 and e4m3 into f16, with operands in every swizzle (K-major f16 and e4m3, MN-major f16 and
//! bf16); 65536 each: `mma` f16 k8 and k16, bf16 k16, tf32 k4 and k8, e4m3 and e5m2 k32 into f32, f16 k16 into
//! f16. Ampere, Ada and Blackwell, and rule 6, rest on the papers.
//!
//! Products of a zero operand are left out of the alignment, so C passes through a sum of zeros, rounded to
//! the result's format but not aligned.

mod fused;
mod integer;
mod product;
mod scaled;

pub use integer::multiply_f64;
pub use product::Product;
pub use scaled::BlockScales;

use fused::multiply;
use integer::multiply_i32;
use scaled::multiply_scaled;

use super::element::Element;
use super::float::{F16, F32, Format, Round, Specials};
use super::instr_desc::Accumulator;

/// Whose tensor cores are modelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Generation {
    /// sm_80 to sm_87.
    #[default]
    Ampere,
    /// sm_89.
    Ada,
    /// sm_90.
    Hopper,
    /// sm_100 and later.
    Blackwell,
}

/// The instruction family a product is computed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// `mma.sync`.
    Mma,
    /// `wgmma.mma_async`.
    Wgmma,
    /// `tcgen05.mma`.
    Tcgen05,
}

/// Extents of one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows of A and D.
    pub m: usize,
    /// Columns of B and D.
    pub n: usize,
    /// Elements of K.
    pub k: usize,
}

/// How sums are formed and rounded: points 1 to 4 of the [module](self) text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// Products in one fused sum.
    pub group: usize,
    /// Places kept below the largest exponent in alignment.
    pub fraction_bits: u32,
    /// The smallest exponent of a nonzero operand of A or B, that of the type's smallest normal number.
    pub min_exponent: i32,
    /// Format and rounding of a sum.
    pub result: Sum,
    /// Rule 7: pairs of K in two sums from zero, C added last. Otherwise C is a term of the first sum.
    pub paired: bool,
}

/// Format and rounding of one fused sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sum {
    /// f32, truncated.
    F32,
    /// f32 with 13 mantissa bits, truncated.
    F32Short,
    /// f16, to nearest.
    F16,
}

/// f32 with 13 mantissa bits, in the place of an f32.
const F32_SHORT: Format =
    Format { exp_bits: 8, man_bits: 13, pad_bits: 10, specials: Specials::Ieee, nan: 0x7fff_ffff };

impl Model {
    /// The model of an instruction that multiplies `element`s over `k` (its own K) into an f16 or f32
    /// accumulator.
    pub fn new(
        generation: Generation,
        family: Family,
        element: Element,
        accumulator: Accumulator,
        k: usize,
    ) -> Model {
        let fp8 = matches!(element, Element::E4m3 | Element::E5m2);
        let short = fp8
            && matches!(
                (generation, family),
                (Generation::Ada, Family::Mma) | (Generation::Hopper, Family::Wgmma)
            );
        let early = matches!(generation, Generation::Ampere | Generation::Ada);
        // A 16-bit k16, tf32 k8 or fp8 k32 `mma` is two passes of half the length there.
        let split = early && k as u32 * element.bits() == 256;
        let paired =
            fp8 && (generation, family, accumulator) == (Generation::Hopper, Family::Mma, Accumulator::F32);
        Model {
            group: if split || paired { k / 2 } else { k },
            fraction_bits: match (short, early) {
                (true, _) => 13,
                (false, true) => 24,
                (false, false) => 25,
            },
            min_exponent: element.format().map_or(0, Format::min_exponent),
            result: match (accumulator, short) {
                (Accumulator::F16, _) => Sum::F16,
                (_, true) => Sum::F32Short,
                (_, false) => Sum::F32,
            },
            paired,
        }
    }
}

/// `2^n`, zero or infinity outside the range of f64's normal numbers.
#[inline]
fn power(n: i32) -> f64 {
    f64::from_bits(((n + 1023).clamp(0, 2047) as u64) << 52)
}

/// The exponent rule 2 gives a nonzero finite `x`.
#[inline]
fn exponent(x: f32, min_exponent: i32) -> i32 {
    ((x.to_bits() >> 23 & 0xff) as i32 - 127).max(min_exponent)
}

/// Rounds the exact value of a fused sum (rule 4).
#[inline]
fn finish(x: f64, result: Sum) -> f32 {
    let keep = |bits: u32| {
        let cut = f64::from_bits(x.to_bits() & !((1 << (52 - bits)) - 1));
        // Beyond f32 the conversion makes infinity; below its normal numbers it would not truncate.
        if cut.abs() < f32::MIN_POSITIVE as f64 && cut != 0.0 {
            let format = if bits == 23 { F32 } else { F32_SHORT };
            return f32::from_bits(format.encode(x, Round::Zero, Default::default()) as u32);
        }
        cut as f32
    };
    match result {
        Sum::F32 => keep(23),
        Sum::F32Short => keep(13),
        Sum::F16 => F16.decode(F16.encode(x, Round::NearestEven, Default::default())) as f32,
    }
}

/// Rule 5: the result of a sum with a term that is not finite. `sum` is that of the terms in f64.
#[inline]
fn not_finite(sum: f64) -> f32 {
    if sum.is_nan() { f32::from_bits(0x7fff_ffff) } else { sum as f32 }
}

#[cfg(test)]
mod tests;
