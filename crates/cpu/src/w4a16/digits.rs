//! One row: floats as integers of 15 or 22 bits, multiplied by the integer kernels of W4A4.
//!
//! ```text
//! 16 floats = 2^e · integers + rest                    e is such that the largest integer has BITS bits
//! sum += (Σ_k integer[k] · code[k]) · (2^e · scale)
//! ```
//!
//! Floats are rounded to the nearest integer, ties to even. The inner sum is an exact integer. It is rounded to f32,
//! multiplied and added, so that 16 products cost three roundings. A rest that matters is treated in the same way, until
//! there is none. The order is: chunks of 16 k ascending, in each the largest part first.
//!
//! What matters is every rest in bf16 and f16: these are exact. Of f32, a rest of at most K · 2⁻²⁵ of its float does
//! not (and none of more than 2⁻¹², which is less than the last bit of an f16): so a result is within
//! K · 2⁻²⁴ · Σ |a · w| of the exact one, which is the bound of K additions in f32. It is usually nearer than these: most
//! floats lose nothing, and 16 products take three roundings instead of 16.
//!
//! Two digits, which are faster, suit bf16: its 8 bits rarely leave a rest. Other types get three.

use dualgemm_formats::FloatMatrix;

use super::widen;
use crate::Isa;
use crate::pack::CHUNK_K;
use crate::vmath::{self, Vectorized};
use crate::w4a4::{DigitBlock, Digits};

/// Bits of the largest integer of a block of two or three digits. Two could hold a little less than 15 bits and a sign,
/// see [`HEADROOM`]; what three could hold beyond 22 would not round by an addition.
const fn bits(digits: usize) -> i32 {
    if digits == 2 { 15 } else { 22 }
}

/// The largest float of a block times this is less than 2^[`bits`] integers, since two digits reach from -127 · 257 to
/// 127 · 257 = 0.996 · 2¹⁵.
const HEADROOM: f32 = 1.005;

/// Exponents for which no product with a scale leaves the normal numbers of f32.
const EXPONENTS: std::ops::RangeInclusive<i32> = -90..=40;

/// Elements that are converted at a time.
const SPAN: usize = 16 * CHUNK_K;

/// f32 words in a block.
const fn block_words(digits: usize) -> usize {
    if digits == 2 { size_of::<DigitBlock<2>>() / 4 } else { size_of::<DigitBlock<3>>() / 4 }
}

/// f32 words that hold as many blocks for a row of `k` floats as are of use.
pub(super) const fn useful_words(k: usize) -> usize {
    let chunks = k / CHUNK_K;
    let (two, three) = (most_blocks(2, chunks) * block_words(2), most_blocks(3, chunks) * block_words(3));
    if two > three { two } else { three }
}

/// Blocks from where on another way is faster, by their counts of operations: of three digits instead of two, of floats
/// instead of three.
const fn most_blocks(digits: usize, chunks: usize) -> usize {
    if digits == 2 { chunks * 5 / 4 } else { chunks * 7 / 4 }
}

/// Writes a row into `out` and returns in how many digits and how many blocks. Does not if
/// - `out` is too small, or [`kernel`](super::kernel) is faster than so many blocks;
/// - a number is infinite or NaN, extremely small or large.
///
/// `unit` is what a sum of the kernel of 1 stands for.
///
/// # Safety
/// The machine has `isa`.
pub(super) unsafe fn write(
    isa: Isa,
    unit: f32,
    a: &FloatMatrix<'_>,
    row: usize,
    out: &mut [f32],
) -> Option<(usize, usize)> {
    let mut write = |digits| {
        let count = match digits {
            // SAFETY: the caller's promise.
            2 => unsafe { vmath::dispatch(isa, Write::<2> { unit, a, row, out: &mut *out }) },
            // SAFETY: as above.
            _ => unsafe { vmath::dispatch(isa, Write::<3> { unit, a, row, out: &mut *out }) },
        };
        count.map(|count| (digits, count))
    };
    let two = if matches!(a, FloatMatrix::Bf16(_)) { write(2) } else { None };
    two.or_else(|| write(3))
}

/// The first blocks that [`write()`] wrote.
pub(super) fn read(digits: usize, count: usize, from: &[f32]) -> Digits<'_> {
    let words = &from[..count * block_words(digits)];
    match digits {
        2 => Digits::Two(bytemuck::cast_slice(words)),
        _ => Digits::Three(bytemuck::cast_slice(words)),
    }
}

/// The work of [`write()`] as something to compile per instruction set.
struct Write<'a, const D: usize> {
    unit: f32,
    a: &'a FloatMatrix<'a>,
    row: usize,
    out: &'a mut [f32],
}

impl<const D: usize> Vectorized for Write<'_, D> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run(self) -> Option<usize> {
        let Self { unit, a, row, out } = self;
        let (k, room) = (a.cols(), out.len() / block_words(D));
        let blocks: &mut [DigitBlock<D>] = bytemuck::cast_slice_mut(&mut out[..room * block_words(D)]);
        let most = room.min(most_blocks(D, k / CHUNK_K));
        let (mut count, mut wide) = (0, [0.0; SPAN]);
        for first in (0..k).step_by(SPAN) {
            let span = widen(a, row, first, &mut wide[..SPAN.min(k - first)]);
            for (i, floats) in span.as_chunks::<CHUNK_K>().0.iter().enumerate() {
                let mut rest = *floats;
                let mut left = floats.iter().fold(0, |bits, x| bits | x.to_bits() << 1) != 0;
                while left {
                    let (exponent, integers) = take_integers::<D>(&mut rest)?;
                    let chunk = (first / CHUNK_K + i) as u32;
                    *blocks[..most].get_mut(count)? =
                        DigitBlock::new(integers, unit * power_of_two(exponent), chunk);
                    count += 1;
                    left = matters(&rest, floats, k);
                }
            }
        }
        Some(count)
    }
}

/// Whether the rest of any float is more than a sum of `k` products may lose anyway.
#[inline(always)]
fn matters(rest: &[f32; CHUNK_K], floats: &[f32; CHUNK_K], k: usize) -> bool {
    let share = (k as f32 * 2f32.powi(-25)).min(2f32.powi(-12));
    rest.iter().zip(floats).fold(false, |any, (rest, x)| any | (rest.abs() > x.abs() * share))
}

/// Takes from each float the nearest multiple of 2^exponent, which it returns with the multiples. The largest of them has
/// about [`bits`] bits.
#[inline(always)]
fn take_integers<const D: usize>(rest: &mut [f32; CHUNK_K]) -> Option<(i32, [i32; CHUNK_K])> {
    // Adding 1.5 · 2²³ rounds to the nearest integer and leaves it in the low bits of the significand.
    const ROUND: f32 = 12_582_912.0;
    let most = rest.iter().fold(0, |most, x| most.max((x.abs() * HEADROOM).to_bits())) >> 23;
    // Below 2^(most - 126), if finite.
    let exponent = most as i32 - 126 - bits(D);
    if !EXPONENTS.contains(&exponent) {
        return None;
    }
    let (unit, inverse) = (power_of_two(exponent), power_of_two(-exponent));
    let rounded = rest.map(|x| x * inverse + ROUND);
    for (rest, rounded) in rest.iter_mut().zip(&rounded) {
        *rest -= (rounded - ROUND) * unit;
    }
    Some((exponent, rounded.map(|x| x.to_bits().wrapping_sub(ROUND.to_bits()) as i32)))
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// All parts of 16 floats that matter in a sum of `k` products.
    fn parts<const D: usize>(x: [f32; CHUNK_K], k: usize) -> Option<Vec<(i32, [i32; CHUNK_K])>> {
        let (mut rest, mut parts) = (x, vec![]);
        let mut left = x != [0.0; CHUNK_K];
        while left {
            parts.push(take_integers::<D>(&mut rest)?);
            left = matters(&rest, &x, k);
        }
        Some(parts)
    }

    /// What the parts add up to.
    fn sum(parts: &[(i32, [i32; CHUNK_K])], k: usize) -> f64 {
        parts.iter().map(|(e, integers)| f64::from(integers[k]) * 2f64.powi(*e)).sum()
    }

    #[test]
    fn zeros_have_no_parts_and_powers_of_two_have_one() {
        assert_eq!(parts::<3>([0.0; CHUNK_K], 16), Some(vec![]));
        assert_eq!(parts::<3>([-0.0; CHUNK_K], 16), Some(vec![]));
        let mut x = [0.0; CHUNK_K];
        (x[3], x[7]) = (-0.25, 4.0);
        let mut integers = [0; CHUNK_K];
        (integers[3], integers[7]) = (-1 << 17, 1 << 21);
        assert_eq!(parts::<3>(x, 16), Some(vec![(-19, integers)]));
        (integers[3], integers[7]) = (-1 << 10, 1 << 14);
        assert_eq!(parts::<2>(x, 16), Some(vec![(-12, integers)]));
    }

    #[test]
    fn what_has_no_digits_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, f32::from_bits(1), 1e30] {
            let mut x = [1.0; CHUNK_K];
            x[5] = bad;
            assert_eq!(parts::<3>(x, 16), None, "{bad}");
            assert_eq!(parts::<3>([bad; CHUNK_K], 16), None, "{bad}");
        }
    }

    #[test]
    fn floats_of_similar_size_leave_no_rest() {
        let x: [f32; CHUNK_K] = std::array::from_fn(|i| (i as f32 - 7.3) / 3.0);
        let bf16s = x.map(|x| bf16::from_f32(x).to_f32());
        assert_eq!(parts::<2>(bf16s, 16).unwrap().len(), 1);
        assert_eq!(parts::<3>(x.map(|x| f16::from_f32(x).to_f32()), 16).unwrap().len(), 1);
        assert_eq!([16, 4096].map(|k| parts::<3>(x, k).unwrap().len()), [2, 1]);
    }

    fn check<const D: usize>(x: [f32; CHUNK_K], k: usize, share: f64) {
        let Some(parts) = parts::<D>(x, k) else { return };
        for (k, &x) in x.iter().enumerate() {
            let x = f64::from(x);
            assert!((sum(&parts, k) - x).abs() <= x.abs() * share, "{x} in {D} digits");
        }
        let capacity = if D == 2 { 32_639 } else { 1 << 22 };
        for (_, integers) in &parts {
            let most = integers.iter().map(|i| i.abs()).max().unwrap();
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
                let share = (k as f64 * 2f64.powi(-25)).min(2f64.powi(-12));
                check::<2>(x, k, share);
                check::<3>(x, k, share);
                for half in [x.map(|x| bf16::from_f32(x).to_f32()), x.map(|x| f16::from_f32(x * 1e-9).to_f32())] {
                    check::<2>(half, k, 0.0);
                    check::<3>(half, k, 0.0);
                }
            }
        }

        #[test]
        fn floats_of_usual_size_are_integers(x in prop::array::uniform16(prop_oneof![0.5f32..1e6, -1e6f32..-0.5])) {
            prop_assert!(parts::<3>(x, 16).is_some());
        }
    }
}
