//! One row of integers of 15 or 22 bits and a sign, times packed panels: what one row of floats becomes in W4A16.
//!
//! ```text
//! integer = Σ DIGITS[i] · digit[i]                       two or three bytes, by block
//! for each block, of 16 integers:
//!     decode 16 × 16 weights into registers             as for one row of W4A4
//!     dot = Σ DIGITS[i] · (Σ_k digit[i][k] · code[k])    exact; rounded to f32 once
//!     sum += dot · scale_a · scale_b                     fused: one rounding; scale_a is a power of two
//! ```
//!
//! On every instruction set, f32 sums start at 0 and add the blocks in their order.

use bytemuck::{Pod, Zeroable};
use dualgemm_formats::BlockFormat;

use super::kernel::{STREAMS, add_scaled};
use super::vector::{BIAS, Vector};
use crate::fetch::Ahead;
use crate::isa::{InstructionSet, Work};
use crate::lanes::{map, reduce};
use crate::pack::{CHUNK, CHUNK_K};
use crate::tile::TILE_COLS;

/// The value that a 1 in each digit stands for. All are 16-bit integers, which `vpmaddwd` needs; 256² would not be.
#[cfg(any(test, target_arch = "x86_64"))]
pub(super) const DIGITS: [i16; 3] = [1, 1 << 8, -1 << 15];

/// 16 integers of one row: a cache line.
#[derive(Debug, Clone, Copy, PartialEq, Zeroable, Pod)]
#[repr(C)]
pub(crate) struct DigitBlock {
    /// The digits of each k, low digits first.
    pub(super) digits: [[i8; CHUNK_K]; 3],
    /// Subtracts the bias of the weights from the dot product.
    pub(super) bias: i32,
    /// The value that an integer of 1 stands for, a power of two.
    pub(super) scale: f32,
    /// The chunk of weights that they are multiplied with.
    pub(crate) chunk: u32,
    /// Number of digits, 2 or 3. The third is zero if there are two.
    pub(super) count: u32,
}

impl DigitBlock {
    /// Splits integers into `count` digits. Their magnitudes are at most 127 · 257 for two digits and 127 · 2¹⁵ + 2¹⁴ for three,
    /// so that a weighted sum of 16 fits an i32.
    #[inline(always)]
    pub(crate) fn new(count: u32, integers: [i32; CHUNK_K], scale: f32, chunk: u32) -> Self {
        let bias = -i32::from(BIAS) * reduce(&integers, i32::wrapping_add);
        // Rounded to the nearest, so that two lower digits can hold the rest.
        let high = map(&integers, |integer| if count == 3 { -((integer + (1 << 14)) >> 15) } else { 0 });
        let mut rest = integers;
        for (rest, high) in rest.iter_mut().zip(high) {
            *rest += high << 15;
        }
        let middle = map(&rest, |rest| ((rest + (1 << 7)) >> 8) as i8);
        let digits = [map(&rest, |rest| rest as i8), middle, map(&high, |high| high as i8)];
        Self { digits, bias, scale, chunk, count }
    }
}

/// Some panels, to be multiplied with one row of integers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DigitTask {
    /// Block format of the weights.
    pub(super) format: BlockFormat,
    /// The first panel.
    pub(super) panel: *const u8,
    /// Bytes from panel to panel.
    pub(super) panel_stride: usize,
    /// Number of panels.
    pub(super) panels: usize,
    /// Panels from the first one on that the same thread reads.
    pub(super) left: usize,
    /// Sums, `[panels][32]`, which the products overwrite.
    pub(super) sums: *mut f32,
}

/// Multiplies the blocks of one row.
pub(super) struct Multiply<'a> {
    task: DigitTask,
    blocks: &'a [DigitBlock],
}

impl<'a> Multiply<'a> {
    /// A product for [`Work::run`].
    ///
    /// # Safety
    /// While it runs, the pointers of the task are valid for as many panels and sums as it says, and each panel has the chunk
    /// of every block.
    pub(super) unsafe fn new(task: DigitTask, blocks: &'a [DigitBlock]) -> Self {
        Self { task, blocks }
    }
}

impl Work for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let Self { task, blocks } = self;
        let mut panel = 0;
        while panel < task.panels {
            let panels = match task.panels - panel {
                STREAMS.. => STREAMS,
                2 => 2,
                _ => 1,
            };
            // SAFETY: the machine has the instruction set, since `run` got its token. Whoever called `new` vouched for the
            // pointers, and these are panels and sums from among them.
            unsafe {
                let part = DigitTask {
                    panel: task.panel.add(panel * task.panel_stride),
                    panels,
                    left: task.panels - panel,
                    sums: task.sums.add(panel * TILE_COLS),
                    ..task
                };
                S::multiply_blocks(&part, blocks);
            }
            panel += panels;
        }
    }
}

/// [`Vector::multiply_blocks`] in the order that compilers choose.
///
/// # Safety
/// That of [`Vector::multiply_blocks`], on which the functions below rely, too.
#[inline(always)]
pub(super) unsafe fn multiply_blocks<V: Vector>(task: &DigitTask, blocks: &[DigitBlock]) {
    // The loops are compiled for each format, so that they do not branch on it for every vector of scales.
    // SAFETY: the caller's word is passed on.
    unsafe {
        match task.format {
            format @ BlockFormat::Nvfp4 => some_streams::<V>(&DigitTask { format, ..*task }, blocks),
            format @ BlockFormat::Mxfp4 => some_streams::<V>(&DigitTask { format, ..*task }, blocks),
        }
    }
}

/// As many panels as [`Multiply`] cuts off.
#[inline(always)]
unsafe fn some_streams<V: Vector>(task: &DigitTask, blocks: &[DigitBlock]) {
    // SAFETY: the task has as many panels as are multiplied.
    unsafe {
        match task.panels {
            STREAMS => streams::<V, STREAMS>(task, blocks),
            2 => streams::<V, 2>(task, blocks),
            1 => streams::<V, 1>(task, blocks),
            panels => unreachable!("{panels} panels at once"),
        }
    }
}

/// Several panels at once, as one row of W4A4 does.
#[inline(always)]
unsafe fn streams<V: Vector, const PANELS: usize>(task: &DigitTask, blocks: &[DigitBlock]) {
    let vectors = TILE_COLS / V::LANES;
    // SAFETY: the task has `PANELS` panels and their sums, and every panel has the chunk of each block; column < 32.
    unsafe {
        let mut accumulators = [[V::splat(&0.0); 4]; PANELS];
        let ahead = Ahead::new(V::AHEAD / STREAMS, task.panel_stride, PANELS, task.left);
        for block in blocks {
            for (p, accumulators) in accumulators.iter_mut().enumerate() {
                let at = block.chunk as usize * CHUNK;
                let chunk = task.panel.add(p * task.panel_stride + at);
                ahead.fetch(chunk, at);
                for (i, pair) in accumulators[..vectors].chunks_exact_mut(2).enumerate() {
                    let column = 2 * i * V::LANES;
                    // Branching once per block, outside of both loops, makes three digits a third slower on AVX-512/VNNI.
                    if block.count == 2 {
                        add_pair::<V, 2>(task.format, chunk, column, block, pair);
                    } else {
                        add_pair::<V, 3>(task.format, chunk, column, block, pair);
                    }
                }
            }
        }
        for (p, accumulators) in accumulators.iter().enumerate() {
            for (v, &accumulator) in accumulators.iter().enumerate().take(vectors) {
                V::store(task.sums.add(p * TILE_COLS + v * V::LANES), accumulator);
            }
        }
    }
}

/// Adds the products of two vectors of features of one panel, from `column` on.
#[inline(always)]
unsafe fn add_pair<V: Vector, const D: usize>(
    format: BlockFormat,
    chunk: *const u8,
    column: usize,
    block: &DigitBlock,
    sums: &mut [V::Floats],
) {
    // SAFETY: `streams` passes a whole chunk, and a column at least two vectors before its end; q is below 4, and a digit has
    // four quads.
    unsafe {
        let weights = [V::weights(chunk, column), V::weights(chunk, column + V::LANES)];
        // Quads are the outer loop: their weights stay in registers for all digits, and no digit waits for another.
        let mut sums_of_digits: [[V::Sums; 2]; D] =
            std::array::from_fn(|digit| [V::start_digit(&block.bias, digit); 2]);
        for (q, (left, right)) in weights[0].into_iter().zip(weights[1]).enumerate() {
            for (digit, sums) in sums_of_digits.iter_mut().enumerate() {
                *sums = V::dots(*sums, [left, right], V::quad(block.digits[digit].as_ptr().add(4 * q)));
            }
        }
        finish_pair::<V>(format, chunk, column, block, &sums_of_digits, sums);
    }
}

/// Joins the sums of the digits of two vectors of features and adds them, scaled.
///
/// # Safety
/// The machine has the instruction set of `V`; `chunk` points to a chunk, and `column` is at least two vectors before its end.
#[inline(always)]
pub(super) unsafe fn finish_pair<V: Vector>(
    format: BlockFormat,
    chunk: *const u8,
    column: usize,
    block: &DigitBlock,
    sums_of_digits: &[[V::Sums; 2]],
    sums: &mut [V::Floats],
) {
    // SAFETY: reads the scales of these columns, and numbers behind references.
    unsafe {
        let mut joined = [V::joined(&block.bias); 2];
        for (digit, sums) in sums_of_digits.iter().enumerate().rev() {
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
    use super::super::Kernel;
    use super::super::vector::raw_scale_unit;
    use super::*;
    use crate::fixtures::{isas, weights};
    use crate::isa::FUSED;
    use crate::pack::{PANEL, SCALES, UP_CODES, unpack_scale};
    use crate::{Isa, PackedGateUp};
    use dualgemm_formats::scalar::e2m1::DOUBLED;
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;

    /// Blocks of two and three digits, some with the largest integers, for chunks in any order.
    fn blocks(chunks: usize) -> impl Strategy<Value = Vec<([i32; CHUNK_K], DigitBlock)>> {
        let integers = prop::array::uniform16(prop_oneof![-1i32..=1, Just(4_177_920), Just(-4_177_920)]);
        let block = (integers, any::<[i32; CHUNK_K]>(), 2..=3u32, -20i32..20, 0..chunks as u32).prop_map(
            |(edges, random, count, exponent, chunk)| {
                let most = if count == 2 { 32_639 } else { 4_177_920 };
                let integers = std::array::from_fn(|k| match edges[k] {
                    0 => random[k] % (most + 1),
                    edge => edge.clamp(-most, most),
                });
                (integers, DigitBlock::new(count, integers, 2f32.powi(exponent), chunk))
            },
        );
        prop::collection::vec(block, 0..12)
    }

    /// The sums of [`Multiply`] by their definition, with multiply-adds fused or not.
    fn model(
        weights: &PackedGateUp,
        panel: usize,
        blocks: &[([i32; CHUNK_K], DigitBlock)],
        fused: bool,
    ) -> [f32; TILE_COLS] {
        std::array::from_fn(|feature| {
            blocks.iter().fold(0f32, |sum, (integers, block)| {
                let chunk = &weights.panel(panel)[block.chunk as usize * CHUNK..][..CHUNK];
                let code = |k: usize| {
                    let byte = feature / PANEL * UP_CODES + k / 8 * 64 + feature % PANEL * 4 + k % 4;
                    usize::from(chunk[byte] >> (k / 4 % 2 * 4) & 15)
                };
                let terms = integers.iter().enumerate().map(|(k, i)| i * i32::from(DOUBLED[code(k)]));
                let format = weights.format();
                let scale = unpack_scale(format, chunk[SCALES + feature]) * raw_scale_unit(format);
                let dot = terms.sum::<i32>() as f32 * block.scale;
                if fused { dot.mul_add(scale, sum) } else { dot * scale + sum }
            })
        })
    }

    #[test]
    fn blocks_of_any_digits_and_panels_exact() {
        for format in [BlockFormat::Nvfp4, BlockFormat::Mxfp4] {
            for n in [16, 64, 100] {
                let weights = PackedGateUp::pack(&weights(format, n, 128, 1)).unwrap();
                let panels = weights.panels();
                let check = |blocks: Vec<([i32; CHUNK_K], DigitBlock)>| {
                    let only: Vec<_> = blocks.iter().map(|(_, block)| *block).collect();
                    for isa in isas() {
                        let fused = FUSED || isa != Isa::Portable;
                        let want: Vec<f32> =
                            (0..panels).flat_map(|panel| model(&weights, panel, &blocks, fused)).collect();
                        let (kernel, mut sums) =
                            (Kernel::new(isa.checked().unwrap()), vec![f32::NAN; want.len()]);
                        // SAFETY: `blocks` draws chunks below those of the weights.
                        unsafe { kernel.multiply_digits(&weights, 0..panels, &only, &mut sums) };
                        assert_eq!(sums, want, "{isa} {format} {n}");
                    }
                    Ok(())
                };
                let config =
                    ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() };
                // One runner for all would stop at the number of cases, in the first shape.
                TestRunner::new(config).run(&blocks(weights.chunks()), check).unwrap();
            }
        }
    }

    proptest! {
        #[test]
        fn digits_are_those_of_the_integers_exact(
            short in prop::array::uniform16(-32_639i32..=32_639),
            long in prop::array::uniform16(-4_177_920i32..=4_177_920),
        ) {
            for (count, integers) in [(2, short), (3, short), (3, long)] {
                let block = DigitBlock::new(count, integers, 1.0, 0);
                for (k, &integer) in integers.iter().enumerate() {
                    let digits = block.digits.iter().zip(DIGITS);
                    assert_eq!(digits.map(|(digits, unit)| i32::from(digits[k]) * i32::from(unit)).sum::<i32>(), integer);
                }
                assert!(count == 3 || block.digits[2] == [0; CHUNK_K]);
                assert_eq!(block.bias, -12 * integers.iter().sum::<i32>());
            }
        }
    }
}
