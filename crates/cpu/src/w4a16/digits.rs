//! One row: floats as digits in base 256, multiplied by the integer kernels of W4A4.
//!
//! ```text
//! 16 floats = 2^e · Σ 256^i · digit_i                 digits in -128 ..= 127, exact
//! sum += (Σ_k digit_i[k] · code[k]) · (2^e · 256^i · scale)
//! ```
//!
//! The inner sum is an integer and its product with the scales exact, so that each block of digits costs one rounding
//! of the f32 sum: fewer than adding the 16 products one by one. The order is: chunks of 16 k ascending, in each the
//! low digits first; 2^e is the largest power of two of which all 16 are multiples.
//!
//! Activations in bf16 usually take two digits and sometimes three, in f16 more often three, and then this is faster
//! than decoding weights to f32. Those in f32 take four or five, and it is not.

use dualgemm_formats::FloatMatrix;

use super::widen;
use crate::Isa;
use crate::pack::CHUNK_K;
use crate::vmath::{self, Vectorized};
use crate::w4a4::{self, Block};

/// Most digits of 16 numbers.
const MAX_DIGITS: usize = 4;

/// Powers of two of digits for which no product with a scale leaves the normal numbers of f32.
const EXPONENTS: std::ops::RangeInclusive<i32> = -90..=60;

/// Elements that are converted at a time.
const SPAN: usize = 16 * CHUNK_K;

/// f32 words in a block.
const BLOCK_WORDS: usize = size_of::<Block>() / size_of::<f32>();

/// The words of an offset table: where the blocks of each chunk start, and where the last ones end.
fn starts_len(chunks: usize) -> usize {
    chunks + 1
}

/// Writes a row into `out`, offsets first and then blocks, and tells whether that worked. It does not if
/// - `out` is too small, or there are more than 7/2 blocks per chunk, from where on digits take longer than
///   [`kernel`](super::kernel) does (measured on Zen 3);
/// - a number is infinite or NaN, extremely small or large, or 16 are too far apart for [`MAX_DIGITS`].
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
) -> bool {
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
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let Self { kernel, unit, a, row, out } = self;
        let (k, chunks) = (a.cols(), a.cols() / CHUNK_K);
        if out.len() < starts_len(chunks) {
            return false;
        }
        let (starts, out) = out.split_at_mut(starts_len(chunks));
        let starts: &mut [u32] = bytemuck::cast_slice_mut(starts);
        let room = out.len() / BLOCK_WORDS * BLOCK_WORDS;
        let blocks: &mut [Block] = bytemuck::cast_slice_mut(&mut out[..room]);
        let most = blocks.len().min(7 * chunks / 2);
        let (mut count, mut wide) = (0, [0.0; SPAN]);
        for (first, starts) in (0..k).step_by(SPAN).zip(starts.chunks_mut(SPAN / CHUNK_K)) {
            let span = widen(a, row, first, &mut wide[..SPAN.min(k - first)]);
            for (x, start) in span.as_chunks().0.iter().zip(starts) {
                *start = count as u32;
                let Some(digits) = Digits::new(x) else { return false };
                if count + digits.count > most {
                    return false;
                }
                for (i, of_block) in digits.digits[..digits.count].iter().enumerate() {
                    let scale = unit * power_of_two(digits.exponent + 8 * i as i32);
                    blocks[count] = kernel.digit_block(*of_block, scale);
                    count += 1;
                }
            }
        }
        starts[chunks] = count as u32;
        true
    }
}

/// The offsets and blocks of a row that [`write`] wrote.
pub(super) fn read(chunks: usize, from: &[f32]) -> (&[u32], &[Block]) {
    let (starts, blocks) = from.split_at(starts_len(chunks));
    (bytemuck::cast_slice(starts), bytemuck::cast_slice(&blocks[..blocks.len() / BLOCK_WORDS * BLOCK_WORDS]))
}

/// 16 floats as `2^exponent · Σ 256^i · digits[i]`.
#[derive(Debug, PartialEq)]
struct Digits {
    exponent: i32,
    count: usize,
    digits: [[i8; CHUNK_K]; MAX_DIGITS],
}

impl Digits {
    /// The digits, without leading zeros: none if all floats are 0.
    #[inline(always)]
    fn new(x: &[f32; CHUNK_K]) -> Option<Self> {
        // A float is significand · 2^(field - 150), where a subnormal counts as field 1.
        let (mut field, mut significand, mut low) = ([0u32; CHUNK_K], [0u32; CHUNK_K], [0u32; CHUNK_K]);
        let (mut least, mut most) = (u32::MAX, 0);
        for i in 0..CHUNK_K {
            let bits = x[i].to_bits() & 0x7FFF_FFFF;
            let normal = u32::from(bits >= 0x80_0000);
            field[i] = (bits >> 23) + 1 - normal;
            significand[i] = bits & 0x7F_FFFF | normal << 23;
            // The lowest set bit is found by converting it to a float, which vectorizes.
            let lowest = significand[i] & significand[i].wrapping_neg();
            low[i] = field[i] + ((lowest as i32 as f32).to_bits() >> 23);
            // A zero does not count for what is lowest, nor harm what is highest.
            least = least.min(if bits == 0 { u32::MAX } else { low[i] });
            most = most.max(field[i]);
        }
        let mut this = Self { exponent: 0, count: 0, digits: [[0; CHUNK_K]; MAX_DIGITS] };
        if least == u32::MAX {
            return Some(this);
        }
        let least = least - 127;
        // Bits from the lowest to the highest one, and one more since the last digit has a sign.
        let width = most + 24 - least + 1;
        this.exponent = least as i32 - 150;
        if most == 255 || width > 8 * MAX_DIGITS as u32 || !EXPONENTS.contains(&this.exponent) {
            return None;
        }
        let mut rest = [0i32; CHUNK_K];
        let mut any = 0;
        for i in 0..CHUNK_K {
            // Left or right; either way nothing is lost. Zeros are shifted by whatever their field says.
            let (left, right) = (field[i].saturating_sub(least), least.saturating_sub(field[i]));
            let magnitude = (significand[i] << (left & 31) >> (right & 31)) as i32;
            rest[i] = if x[i] < 0.0 { -magnitude } else { magnitude };
            any |= rest[i];
        }
        while any != 0 {
            let digits = this.digits.get_mut(this.count)?;
            any = 0;
            for i in 0..CHUNK_K {
                digits[i] = rest[i] as i8;
                // What is left in the end would be a fifth digit.
                rest[i] = (rest[i] >> 8) + i32::from(digits[i] < 0);
                any |= rest[i];
            }
            this.count += 1;
        }
        Some(this)
    }
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

    fn value(digits: &Digits, k: usize) -> f64 {
        let terms = (0..digits.count).map(|i| f64::from(digits.digits[i][k]) * 256f64.powi(i as i32));
        terms.sum::<f64>() * 2f64.powi(digits.exponent)
    }

    #[test]
    fn zeros_have_no_digits_and_powers_of_two_have_one() {
        assert_eq!(Digits::new(&[0.0; 16]).unwrap().count, 0);
        assert_eq!(Digits::new(&[-0.0; 16]).unwrap().count, 0);
        let mut x = [0.0; 16];
        (x[3], x[7]) = (-0.25, 4.0);
        let digits = Digits::new(&x).unwrap();
        assert_eq!(
            (digits.count, digits.exponent, digits.digits[0][3], digits.digits[0][7]),
            (1, -2, -1, 16)
        );
    }

    #[test]
    fn what_has_no_digits_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, f32::from_bits(1), 1e30] {
            let mut x = [1.0; 16];
            x[5] = bad;
            assert_eq!(Digits::new(&x), None, "{bad}");
            assert_eq!(Digits::new(&[bad; 16]), None, "{bad}");
        }
    }

    #[test]
    fn small_floats_of_similar_size_take_few_digits() {
        let x: [f32; 16] = std::array::from_fn(|i| (i as f32 - 7.3) / 3.0);
        let count = |x: [f32; 16]| Digits::new(&x).unwrap().count;
        assert_eq!(count(x.map(|x| bf16::from_f32(x).to_f32())), 2);
        assert_eq!(count(x.map(|x| f16::from_f32(x).to_f32())), 2);
        assert_eq!(count(x), 4);
    }

    proptest! {
        #[test]
        fn digits_are_exact(significands in prop::array::uniform16(-1.0f32..1.0), spread in 0i32..16, at in -40i32..40) {
            let x: [f32; 16] =
                std::array::from_fn(|k| significands[k] * power_of_two(at - (k as i32 * 7 % 16).min(spread)));
            if let Some(digits) = Digits::new(&x) {
                for (k, &x) in x.iter().enumerate() {
                    prop_assert_eq!(value(&digits, k), f64::from(x));
                }
            }
        }

        #[test]
        fn floats_within_seven_binades_have_digits(significands in prop::array::uniform16(0.5f32..1.0)) {
            let x: [f32; 16] = std::array::from_fn(|k| significands[k] * power_of_two(-(k.min(6) as i32)));
            prop_assert!(Digits::new(&x).is_some());
        }
    }
}
