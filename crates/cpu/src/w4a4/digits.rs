//! One row of integers of 15 or 22 bits and a sign against packed panels, for one row of floats in W4A16.
//!
//! ```text
//! integer = Σ 256^i · digit[i]                          two or three bytes, by block
//! for each block, of 16 integers:
//!     decode 16 × 16 weights into registers             as for one row of W4A4
//!     dot = Σ 256^i · (Σ_k digit[i][k] · code[k])       exact; rounded to f32 once
//!     sum += dot · scale_a · scale_b                     fused: one rounding; scale_a is a power of two
//! ```
//!
//! The order of the f32 sums is that of the blocks, from 0, on every instruction set.

use bytemuck::{Pod, Zeroable};
use dualgemm_formats::BlockFormat;

use super::kernel::{PREFETCH, STREAMS, add_scaled, fetch_ahead};
use super::vector::{BIAS, Vector};
use crate::pack::{CHUNK, CHUNK_K};
use crate::tile::TILE_COLS;

/// 16 integers of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub(crate) struct DigitBlock {
    /// By k, the low digits first.
    digits: [[i8; CHUNK_K]; 3],
    /// What takes the bias of the weights off the sum of each digit.
    biases: [i32; 3],
    /// The same for the whole: `Σ 256^i · biases[i]`.
    bias: i32,
    /// What an integer of 1 stands for, a power of two.
    scale: f32,
    /// The chunk that they are multiplied with.
    chunk: u32,
    /// How many digits there are, 2 or 3. Others are zero.
    count: u32,
}

// SAFETY: 48 bytes, four i32, an f32 and two u32 without padding, all of which may be zero.
unsafe impl Zeroable for DigitBlock {}
// SAFETY: as above, every bit pattern is valid; it is `Copy`, `repr(C)`, and holds no pointer.
unsafe impl Pod for DigitBlock {}

impl DigitBlock {
    /// Integers of a magnitude of at most 127 · 257 in two digits, and below 2²³ − 2¹⁵ in three, so that a weighted sum of
    /// 16 fits an i32.
    #[inline(always)]
    pub(crate) fn new(count: u32, mut integers: [i32; CHUNK_K], scale: f32, chunk: u32) -> Self {
        let (mut digits, mut biases) = ([[0; CHUNK_K]; 3], [0; 3]);
        for (digits, bias) in digits.iter_mut().zip(&mut biases) {
            // Of the integers, not of the digits, which are bytes by now.
            *bias = -i32::from(BIAS) * integers.iter().sum::<i32>();
            *digits = integers.map(|integer| integer as i8);
            integers = integers.map(|integer| (integer - i32::from(integer as i8)) >> 8);
        }
        let bias = biases[0];
        biases = [biases[0] - 256 * biases[1], biases[1] - 256 * biases[2], biases[2]];
        Self { digits, biases, bias, scale, chunk, count }
    }
}

/// Some panels that one row of integers is multiplied with.
#[derive(Debug, Clone, Copy)]
pub(super) struct DigitTask {
    /// Block format of the weights.
    pub(super) format: BlockFormat,
    /// The first panel.
    pub(super) panel: *const u8,
    /// Bytes from panel to panel.
    pub(super) panel_stride: usize,
    /// Panels.
    pub(super) panels: usize,
    /// What the products overwrite, `[panels][32]`.
    pub(super) sums: *mut f32,
}

/// Multiplies the blocks of one row.
///
/// # Safety
/// The machine has the instruction set of `V`, the pointers of the task point to as much as it says, and the panels
/// have the chunks of the blocks.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector>(task: &DigitTask, blocks: &[DigitBlock]) {
    // Loops are compiled for each format, so that they do not ask for it with every vector of scales.
    let of_format = |format| DigitTask { format, ..*task };
    // SAFETY: the caller's promises.
    unsafe {
        match task.format {
            BlockFormat::Nvfp4 => multiply_format::<V>(&of_format(BlockFormat::Nvfp4), blocks),
            BlockFormat::Mxfp4 => multiply_format::<V>(&of_format(BlockFormat::Mxfp4), blocks),
        }
    }
}

/// [`multiply`], where the compiler knows the format.
#[inline(always)]
unsafe fn multiply_format<V: Vector>(task: &DigitTask, blocks: &[DigitBlock]) {
    let mut panel = 0;
    while panel < task.panels {
        // SAFETY: the caller's promises, for panel after panel.
        panel += unsafe {
            match task.panels - panel {
                STREAMS.. => streams::<V, STREAMS>(task, blocks, panel),
                _ => streams::<V, 1>(task, blocks, panel),
            }
        };
    }
}

/// Several panels at once, as one row of W4A4 does. Returns how many.
#[inline(always)]
unsafe fn streams<V: Vector, const PANELS: usize>(
    task: &DigitTask,
    blocks: &[DigitBlock],
    panel: usize,
) -> usize {
    // SAFETY: the caller promises `PANELS` panels and their sums, and that they have the chunk of each block.
    unsafe {
        let (first, sums) = (task.panel.add(panel * task.panel_stride), task.sums.add(panel * TILE_COLS));
        let mut accumulators = [[V::splat(&0.0); 4]; PANELS];
        for block in blocks {
            if block.count == 2 {
                add_block::<V, 2>(task, block, first, &mut accumulators);
            } else {
                add_block::<V, 3>(task, block, first, &mut accumulators);
            }
        }
        for (p, accumulators) in accumulators.iter().enumerate() {
            for (v, &accumulator) in accumulators.iter().enumerate().take(TILE_COLS / V::LANES) {
                V::store(sums.add(p * TILE_COLS + v * V::LANES), accumulator);
            }
        }
    }
    PANELS
}

/// Adds the products of one block of `D` digits and several panels.
#[inline(always)]
unsafe fn add_block<V: Vector, const D: usize>(
    task: &DigitTask,
    block: &DigitBlock,
    first: *const u8,
    accumulators: &mut [[V::Floats; 4]],
) {
    for (p, accumulators) in accumulators.iter_mut().enumerate() {
        let vectors = TILE_COLS / V::LANES;
        // SAFETY: the caller passes the first of as many panels as accumulators, which have the chunk of the block;
        // column < 32.
        unsafe {
            let chunk = first.add(p * task.panel_stride + block.chunk as usize * CHUNK);
            fetch_ahead::<V>(chunk, PREFETCH / STREAMS);
            for (i, pair) in accumulators[..vectors].chunks_exact_mut(2).enumerate() {
                add_pair::<V, D>(task.format, chunk, 2 * i * V::LANES, block, pair);
            }
        }
    }
}

/// The same for two vectors of features of one panel, from `column` on.
#[inline(always)]
unsafe fn add_pair<V: Vector, const D: usize>(
    format: BlockFormat,
    chunk: *const u8,
    column: usize,
    block: &DigitBlock,
    sums: &mut [V::Floats],
) {
    // SAFETY: the machine has the instructions; the caller passes a chunk, and a column at least two vectors before its end;
    // digits have quads 0 to 3.
    unsafe {
        let weights = [V::weights(chunk, column), V::weights(chunk, column + V::LANES)];
        // Quads first: their weights stay in registers for all digits, of which none waits for another.
        let mut sums_of_digits: [[V::Sums; 2]; D] =
            std::array::from_fn(|digit| [V::start_digit(&block.biases[digit]); 2]);
        for (q, (left, right)) in weights[0].into_iter().zip(weights[1]).enumerate() {
            for (digit, sums) in sums_of_digits.iter_mut().enumerate() {
                *sums = V::dots(*sums, [left, right], V::quad(block.digits[digit].as_ptr().add(4 * q)));
            }
        }
        let mut joined = [V::joined(&block.bias); 2];
        for (digit, sums) in sums_of_digits.into_iter().enumerate().rev() {
            joined = [V::join(joined[0], sums[0], digit), V::join(joined[1], sums[1], digit)];
        }
        let scale = V::splat(&block.scale);
        for (v, (sum, joined)) in sums.iter_mut().zip(joined).enumerate() {
            let scales = V::raw_scales(chunk, column + v * V::LANES, format);
            *sum = add_scaled::<V>(format, V::joined_floats(joined), scale, scales, *sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn digits_are_those_of_the_integers_exact(
            short in prop::array::uniform16(-32_639i32..=32_639),
            long in prop::array::uniform16(-8_355_711i32..=8_355_711),
        ) {
            for (count, integers) in [(2, short), (3, short), (3, long)] {
                let block = DigitBlock::new(count, integers, 1.0, 0);
                for (k, &integer) in integers.iter().enumerate() {
                    let digits = block.digits[..count as usize].iter().rev();
                    assert_eq!(digits.fold(0, |sum, digits| 256 * sum + i32::from(digits[k])), integer);
                }
                let sum = |digits: &[i8; CHUNK_K]| digits.iter().map(|&digit| i32::from(digit)).sum::<i32>();
                assert_eq!(block.biases, block.digits.each_ref().map(|digits| -12 * sum(digits)));
                assert_eq!(block.bias, -12 * integers.iter().sum::<i32>());
            }
        }
    }
}
