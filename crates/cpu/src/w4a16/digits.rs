//! One row: floats as integers of 24 bits, multiplied by the integer kernels of W4A4.
//!
//! ```text
//! 16 floats = 2^e · integers + rest                    exact; e is such that the largest integer has 22 bits
//! sum += (Σ_k integer[k] · code[k]) · (2^e · scale)
//! ```
//!
//! The inner sum is an exact integer. It is rounded to f32, multiplied and added, so that 16 products cost three
//! roundings. Where there is a rest, it is treated in the same way, until there is none. The order is: chunks of 16 k
//! ascending, in each the largest part first.
//!
//! Activations in bf16 and f16 have at most 11 bits and rarely leave a rest. Those in f32 mostly do, and then this is
//! slower than decoding weights to f32.

use dualgemm_formats::FloatMatrix;

use super::widen;
use crate::Isa;
use crate::pack::CHUNK_K;
use crate::vmath::{self, Vectorized};
use crate::w4a4::{self, DigitBlock};

/// Bits of the largest integer of a block.
const BITS: i32 = 22;

/// Exponents for which no product with a scale leaves the normal numbers of f32.
const EXPONENTS: std::ops::RangeInclusive<i32> = -90..=40;

/// Elements that are converted at a time.
const SPAN: usize = 16 * CHUNK_K;

/// f32 words in a block.
pub(super) const BLOCK_WORDS: usize = size_of::<DigitBlock>() / size_of::<f32>();

/// Writes a row into `out` and returns how many blocks it took. Does not if
/// - `out` is too small, or there are more than 5/4 blocks per chunk, from where on they take longer than
///   [`kernel`](super::kernel) does (by their counts of operations);
/// - a number is infinite or NaN, extremely small or large.
///
/// `unit` is what a sum of the kernel of 1 stands for.
///
/// # Safety
/// The machine has `isa`.
pub(super) unsafe fn write(
    isa: Isa,
    kernel: w4a4::Kernel,
    unit: f32,
    a: &FloatMatrix<'_>,
    row: usize,
    out: &mut [f32],
) -> Option<usize> {
    // SAFETY: the caller's promise.
    unsafe { vmath::dispatch(isa, Write { kernel, unit, a, row, out }) }
}

/// The work of [`write`] as something to compile per instruction set.
struct Write<'a> {
    kernel: w4a4::Kernel,
    unit: f32,
    a: &'a FloatMatrix<'a>,
    row: usize,
    out: &'a mut [f32],
}

impl Vectorized for Write<'_> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run(self) -> Option<usize> {
        let Self { kernel, unit, a, row, out } = self;
        let (k, room) = (a.cols(), out.len() / BLOCK_WORDS);
        let blocks: &mut [DigitBlock] = bytemuck::cast_slice_mut(&mut out[..room * BLOCK_WORDS]);
        let most = room.min(k / CHUNK_K * 5 / 4);
        let (mut count, mut wide) = (0, [0.0; SPAN]);
        for first in (0..k).step_by(SPAN) {
            let span = widen(a, row, first, &mut wide[..SPAN.min(k - first)]);
            for (i, chunk) in span.as_chunks::<CHUNK_K>().0.iter().enumerate() {
                let mut rest = *chunk;
                while rest != [0.0; CHUNK_K] {
                    let (exponent, integers) = take_integers(&mut rest)?;
                    let chunk = (first / CHUNK_K + i) as u32;
                    let block = kernel.digit_block(integers, unit * power_of_two(exponent), chunk);
                    *blocks[..most].get_mut(count)? = block;
                    count += 1;
                }
            }
        }
        Some(count)
    }
}

/// The first `count` blocks that [`write`] wrote.
pub(super) fn read(count: usize, from: &[f32]) -> &[DigitBlock] {
    bytemuck::cast_slice(&from[..count * BLOCK_WORDS])
}

/// Takes from each float its part that is a multiple of 2^exponent, which it returns with the multiples. The largest of
/// them has [`BITS`] bits.
#[inline(always)]
fn take_integers(rest: &mut [f32; CHUNK_K]) -> Option<(i32, [i32; CHUNK_K])> {
    let most = rest.iter().fold(0, |most, x| most.max(x.to_bits() & 0x7F80_0000)) >> 23;
    // Below 2^(most - 126), if finite.
    let exponent = most as i32 - 126 - BITS;
    if !EXPONENTS.contains(&exponent) {
        return None;
    }
    let (unit, inverse) = (power_of_two(exponent), power_of_two(-exponent));
    let integers = rest.map(|x| (x * inverse) as i32);
    for (rest, &integer) in rest.iter_mut().zip(&integers) {
        *rest -= integer as f32 * unit;
    }
    Some((exponent, integers))
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

    /// All parts of 16 floats.
    fn parts(mut rest: [f32; CHUNK_K]) -> Option<Vec<(i32, [i32; CHUNK_K])>> {
        let mut parts = vec![];
        while rest != [0.0; CHUNK_K] {
            parts.push(take_integers(&mut rest)?);
        }
        Some(parts)
    }

    #[test]
    fn zeros_have_no_parts_and_powers_of_two_have_one() {
        assert_eq!(parts([0.0; CHUNK_K]), Some(vec![]));
        assert_eq!(parts([-0.0; CHUNK_K]), Some(vec![]));
        let mut x = [0.0; CHUNK_K];
        (x[3], x[7]) = (-0.25, 4.0);
        let mut integers = [0; CHUNK_K];
        (integers[3], integers[7]) = (-1 << 17, 1 << 21);
        assert_eq!(parts(x), Some(vec![(-19, integers)]));
    }

    #[test]
    fn what_has_no_digits_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, f32::from_bits(1), 1e30] {
            let mut x = [1.0; CHUNK_K];
            x[5] = bad;
            assert_eq!(parts(x), None, "{bad}");
            assert_eq!(parts([bad; CHUNK_K]), None, "{bad}");
        }
    }

    #[test]
    fn small_floats_of_similar_size_leave_no_rest() {
        let x: [f32; CHUNK_K] = std::array::from_fn(|i| (i as f32 - 7.3) / 3.0);
        let count = |x: [f32; CHUNK_K]| parts(x).unwrap().len();
        assert_eq!(count(x.map(|x| bf16::from_f32(x).to_f32())), 1);
        assert_eq!(count(x.map(|x| f16::from_f32(x).to_f32())), 1);
        assert_eq!(count(x), 2);
    }

    proptest! {
        #[test]
        fn parts_are_exact(significands in prop::array::uniform16(-1.0f32..1.0), spread in 0i32..40, at in -10i32..40) {
            let x: [f32; CHUNK_K] =
                std::array::from_fn(|k| significands[k] * power_of_two(at - (k as i32 * 7 % 40).min(spread)));
            if let Some(parts) = parts(x) {
                for (k, &x) in x.iter().enumerate() {
                    let terms = parts.iter().map(|(e, integers)| f64::from(integers[k]) * 2f64.powi(*e));
                    prop_assert_eq!(terms.sum::<f64>(), f64::from(x));
                }
                let most = |integers: &[i32; CHUNK_K]| integers.iter().map(|i| i.abs()).max().unwrap();
                for (_, integers) in &parts {
                    prop_assert!((1 << 21..1 << 22).contains(&most(integers)));
                }
            }
        }

        #[test]
        fn floats_of_usual_size_are_integers(x in prop::array::uniform16(prop_oneof![0.5f32..1e6, -1e6f32..-0.5])) {
            prop_assert!(parts(x).is_some());
        }
    }
}
