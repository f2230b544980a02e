//! One row: floats become integers of 15 or 22 bits, which the integer kernels of W4A4 multiply.
//!
//! ```text
//! 16 floats = 2^e · integers + rests                   see [`split`](super::split)
//! sum += (Σ_k integer[k] · code[k]) · 2^e · scale
//! ```
//!
//! The inner sum is an exact integer. Rounding it to f32 and a fused multiply-add make two roundings for 16 products. A rest that
//! matters is split again in the same way, until none is left. The order is: chunks of 16 k ascending, in each chunk the largest
//! part first.
//!
//! Every rest of bf16 and f16 matters, so that these are exact. A rest of f32 is dropped if it is at most K · 2⁻²⁵ of its float,
//! and at most 2⁻¹², which is less than the last bit of an f16. So a result is within K · 2⁻²⁴ · Σ |a · w| of the exact one, the
//! bound of K additions in f32. It is usually closer than those additions would be: most floats lose nothing, and 16 products
//! take two roundings instead of 16.
//!
//! Integers of 15 bits take two digits, which are faster to multiply. bf16 and f16 try them first; if a rest matters, and always
//! for f32, integers have 22 bits, in three digits.

use std::ops::Range;

use dualgemm_formats::FloatMatrix;

use super::split::{LONG_BITS, SHORT_BITS, largest, power_of_two, take_integers};
use super::widen;
use crate::isa::{InstructionSet, Work};
use crate::pack::CHUNK_K;
use crate::w4a4::DigitBlock;

/// Elements that are converted at a time.
const SPAN: usize = 16 * CHUNK_K;

/// Four-byte words in a block.
const BLOCK_WORDS: usize = size_of::<DigitBlock>() / size_of::<f32>();

/// Four-byte words that hold a row of `k` floats in one block per chunk.
pub(super) const fn words(k: usize) -> usize {
    k / CHUNK_K * BLOCK_WORDS
}

/// Four-byte words that hold as many blocks as can be worthwhile.
pub(super) const fn useful_words(k: usize) -> usize {
    most_blocks(k) * BLOCK_WORDS
}

/// The number of blocks above which [`few_rows`](super::few_rows) is faster, by counts of operations.
const fn most_blocks(k: usize) -> usize {
    k / CHUNK_K * 7 / 4
}

/// Writes elements of a row into `out` as digit blocks and returns their number. The result is `None` if
/// - `out` is too small, or multiplying floats is faster than multiplying so many blocks;
/// - a number is infinite, NaN, extremely small or extremely large.
///
/// The [`chunk`](DigitBlock::chunk) of each block is below the row's number of chunks.
pub(super) struct Write<'a> {
    /// The value that a sum of 1 of the kernel stands for.
    pub(super) unit: f32,
    /// A.
    pub(super) a: &'a FloatMatrix<'a>,
    /// The row of A.
    pub(super) row: usize,
    /// The elements, whole chunks.
    pub(super) range: Range<usize>,
    /// Where the blocks go.
    pub(super) out: &'a mut [f32],
}

impl Work for Write<'_> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) -> Option<usize> {
        let Self { unit, a, row, range, out } = self;
        let (k, short) = (a.cols(), may_be_short(a));
        let room = out.len() / BLOCK_WORDS;
        let blocks: &mut [DigitBlock] = bytemuck::cast_slice_mut(&mut out[..room * BLOCK_WORDS]);
        let most = room.min(most_blocks(range.len()));
        let (mut count, mut widened) = (0, [0.0; SPAN]);
        for first in range.clone().step_by(SPAN) {
            let span = widen(a, row, first, &mut widened[..SPAN.min(range.end - first)]);
            for (i, floats) in span.as_chunks::<CHUNK_K>().0.iter().enumerate() {
                let (mut rest, mut left) = (*floats, largest(floats));
                while left != 0.0 {
                    let (part, more) = take_part(&mut rest, left, floats, k, short)?;
                    left = if more { largest(&rest) } else { 0.0 };
                    let (chunk, scale) = ((first / CHUNK_K + i) as u32, unit * power_of_two(part.exponent));
                    if scale.is_infinite() {
                        return None;
                    }
                    *blocks[..most].get_mut(count)? =
                        DigitBlock::new(part.digits, part.integers, scale, chunk);
                    count += 1;
                }
            }
        }
        Some(count)
    }
}

/// The first `count` blocks that [`Write`] wrote.
pub(super) fn read(count: usize, from: &[f32]) -> &[DigitBlock] {
    bytemuck::cast_slice(&from[..count * BLOCK_WORDS])
}

/// Whether integers of 15 bits are worth trying: for f32 they always leave a rest that matters.
#[inline(always)]
fn may_be_short(a: &FloatMatrix<'_>) -> bool {
    !matches!(a, FloatMatrix::F32(_))
}

/// 16 multiples of 2^exponent.
#[derive(Debug, PartialEq)]
struct Part {
    exponent: i32,
    digits: u32,
    integers: [i32; CHUNK_K],
}

/// Subtracts the largest part from `rest`, which is left of 16 floats and has the largest magnitude `most`. Returns the part and
/// whether the new rest matters.
#[inline(always)]
fn take_part(
    rest: &mut [f32; CHUNK_K],
    most: f32,
    floats: &[f32; CHUNK_K],
    k: usize,
    short: bool,
) -> Option<(Part, bool)> {
    if short {
        let mut after = *rest;
        let (exponent, integers) = take_integers::<SHORT_BITS>(&mut after, most)?;
        if !matters(&after, floats, k) {
            return Some((Part { exponent, digits: 2, integers }, false));
        }
    }
    let (exponent, integers) = take_integers::<LONG_BITS>(rest, most)?;
    Some((Part { exponent, digits: 3, integers }, matters(rest, floats, k)))
}

/// Whether the rest of any float is larger than the error that a sum of `k` products may have anyway.
#[inline(always)]
fn matters(rest: &[f32; CHUNK_K], floats: &[f32; CHUNK_K], k: usize) -> bool {
    let share = (k as f32 * 2f32.powi(-25)).min(2f32.powi(-12));
    rest.iter().zip(floats).fold(false, |any, (rest, x)| any | (rest.abs() > x.abs() * share))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// All parts of 16 floats that matter in a sum of `k` products.
    fn parts(x: [f32; CHUNK_K], k: usize, short: bool) -> Option<Vec<Part>> {
        let (mut rest, mut parts, mut left) = (x, vec![], x != [0.0; CHUNK_K]);
        while left {
            let most = largest(&rest);
            let (part, more) = take_part(&mut rest, most, &x, k, short)?;
            parts.push(part);
            left = more;
        }
        Some(parts)
    }

    #[test]
    fn zeros_have_no_parts_and_powers_of_two_have_one() {
        for short in [true, false] {
            assert_eq!(parts([0.0; CHUNK_K], 16, short), Some(vec![]));
            assert_eq!(parts([-0.0; CHUNK_K], 16, short), Some(vec![]));
        }
        let mut x = [0.0; CHUNK_K];
        (x[3], x[7]) = (-0.25, 4.0);
        let mut integers = [0; CHUNK_K];
        (integers[3], integers[7]) = (-1 << 17, 1 << 21);
        assert_eq!(parts(x, 16, false), Some(vec![Part { exponent: -19, digits: 3, integers }]));
        (integers[3], integers[7]) = (-1 << 10, 1 << 14);
        assert_eq!(parts(x, 16, true), Some(vec![Part { exponent: -12, digits: 2, integers }]));
    }

    #[test]
    fn what_has_no_digits_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, f32::from_bits(1), 1e30] {
            let mut x = [1.0; CHUNK_K];
            x[5] = bad;
            for short in [true, false] {
                assert_eq!(parts(x, 16, short), None, "{bad}");
                assert_eq!(parts([bad; CHUNK_K], 16, short), None, "{bad}");
            }
        }
    }

    /// The digits of each part.
    fn digits(x: [f32; CHUNK_K], k: usize, short: bool) -> Vec<u32> {
        parts(x, k, short).unwrap().iter().map(|part| part.digits).collect()
    }

    #[test]
    fn floats_of_similar_size_leave_no_rest() {
        let x: [f32; CHUNK_K] = std::array::from_fn(|i| (i as f32 - 7.3) / 3.0);
        assert_eq!(digits(x.map(|x| bf16::from_f32(x).to_f32()), 16, true), [2]);
        let mut f16s = x.map(|x| f16::from_f32(x).to_f32());
        f16s[7] /= 16.0;
        assert_eq!(digits(f16s, 16, true), [3]);
        assert_eq!(digits(x, 4096, false), [3]);
        assert_eq!(digits(x, 16, false), [3, 3]);
    }

    fn check(x: [f32; CHUNK_K], k: usize, short: bool, share: f64) {
        let Some(parts) = parts(x, k, short) else { return };
        for (k, &x) in x.iter().enumerate() {
            let terms = parts.iter().map(|part| f64::from(part.integers[k]) * 2f64.powi(part.exponent));
            let x = f64::from(x);
            assert!((terms.sum::<f64>() - x).abs() <= x.abs() * share, "{x}");
        }
        for part in &parts {
            let capacity = if part.digits == 2 { 32_639 } else { 4_177_920 };
            let most = part.integers.iter().map(|i| i.abs()).max().unwrap();
            assert!(most <= capacity && most >= capacity / 2 - capacity / 64, "{most}");
        }
    }

    proptest! {
        #[test]
        fn parts_are_exact_or_close(
            significands in prop::array::uniform16(-1.0f32..1.0),
            spread in 0i32..40,
            at in -10i32..40,
        ) {
            let x: [f32; CHUNK_K] =
                std::array::from_fn(|k| significands[k] * power_of_two(at - (k as i32 * 7 % 40).min(spread)));
            for k in [16, 4096, 1 << 20] {
                check(x, k, false, (k as f64 * 2f64.powi(-25)).min(2f64.powi(-12)));
                for half in [x.map(|x| bf16::from_f32(x).to_f32()), x.map(|x| f16::from_f32(x * 1e-9).to_f32())] {
                    check(half, k, true, 0.0);
                }
            }
        }

        #[test]
        fn floats_of_usual_size_are_integers(x in prop::array::uniform16(prop_oneof![0.5f32..1e6, -1e6f32..-0.5])) {
            prop_assert!(parts(x, 16, false).is_some());
        }
    }
}
