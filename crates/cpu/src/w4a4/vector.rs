//! The operations from which the W4A4 kernel is built; each instruction set implements them once.
//!
//! Codes are doubled into integers of at most 12, so that the dot product of a 16-element block is an integer of at
//! most 16 · 144 = 2304, exact in i16 however it is grouped. Where the hardware multiplies unsigned by signed bytes,
//! weights carry a bias of +12, and prepared activations hold a word that subtracts it again ([`Vector::bias_word`]).

use dualgemm_formats::BlockFormat;
#[cfg(target_arch = "x86_64")]
use dualgemm_formats::scalar::e2m1::DOUBLED;

use super::activations::Block;
use super::digits::{DigitBlock, DigitTask};
use super::kernel::Pass;
use crate::pack::{CHUNK_K, SCALE_EXPONENT};

/// Added to doubled weights where the hardware wants an unsigned operand.
pub(super) const BIAS: i8 = 12;

/// Doubled weights plus [`BIAS`] by code, a byte-shuffle table.
#[cfg(target_arch = "x86_64")]
pub(super) const BIASED: [u8; 16] = {
    let mut table = [0; 16];
    let mut code = 0;
    while code < 16 {
        table[code] = (DOUBLED[code] + BIAS) as u8;
        code += 1;
    }
    table
};

/// Vectors of `LANES` f32 sums, one per feature, and the integers that lead to them.
///
/// Every `unsafe` method has the same two conditions: the machine has the instruction set, and pointers are valid for what the
/// method says it reads or writes (they need no alignment). `chunk` points to [`CHUNK`](crate::pack::CHUNK) bytes.
pub(crate) trait Vector: Copy {
    /// Features per vector; divides 16.
    const LANES: usize;
    /// How many bytes ahead of their use weights are fetched: [`AHEAD`](crate::fetch::AHEAD) or its like.
    const AHEAD: usize;
    /// Most rows of which two vectors of integers and of sums fit the registers, where it is faster to keep sums there; else 0.
    const ROWS: usize = 0;
    /// Four consecutive weights for each feature.
    type Quads: Copy;
    /// One activation quad, for all features.
    type Quad: Copy;
    /// Partial dot products.
    type Sums: Copy;
    /// f32 by feature.
    type Floats: Copy;

    /// The word by which [`start`](Self::start) subtracts the bias of the weights; `sum` is the sum of the block's 16
    /// doubled codes.
    fn bias_word(sum: i32) -> i32;

    /// The doubled values of 16 codes, and their sum.
    unsafe fn doubled(codes: [u8; CHUNK_K]) -> ([i8; CHUNK_K], i32);

    /// The four weight quads of a chunk for the features `column ..`. `column` counts the 16 gate features, then the 16 up
    /// features, and is a multiple of [`LANES`](Self::LANES) below 32. Reads the chunk's codes.
    unsafe fn weights(chunk: *const u8, column: usize) -> [Self::Quads; 4];

    /// The scales of the same features, times [`scale_unit`]. Reads the chunk's scales. A scale of zero may give any number,
    /// since its codes are zero.
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self::Floats;

    /// The same times [`raw_scale_unit`] instead, which takes one instruction less. The other factor of a product needs room
    /// for the power of two.
    unsafe fn raw_scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self::Floats;

    /// The four doubled codes at `quad`.
    unsafe fn quad(quad: *const i8) -> Self::Quad;

    /// Sums to start from. `word` points to a [`bias_word`](Self::bias_word).
    unsafe fn start(word: *const i32) -> Self::Sums;

    /// `sums` plus the dot products of `quad` with the weights of two vectors of features. Implementations keep the compiler
    /// from computing one vector after the other.
    unsafe fn dots(sums: [Self::Sums; 2], weights: [Self::Quads; 2], quad: Self::Quad) -> [Self::Sums; 2];

    /// `sums` plus the dot products of all 16 codes at `codes` with these weights.
    #[inline(always)]
    unsafe fn block_dots(
        mut sums: [Self::Sums; 2],
        weights: &[[Self::Quads; 4]; 2],
        codes: *const i8,
    ) -> [Self::Sums; 2] {
        for (q, (&left, &right)) in weights[0].iter().zip(&weights[1]).enumerate() {
            // SAFETY: `codes` points to 16 codes, and q is below 4.
            sums = unsafe { Self::dots(sums, [left, right], Self::quad(codes.add(4 * q))) };
        }
        sums
    }

    /// Multiplies the first rows with the weights of a pass, where the instruction set has a faster way for many rows, or for two at once:
    /// `rows` blocks and their sums at the first column of the pass start at the pointers. Returns how many rows it has done.
    /// Sums are as [`swap_pairs`](Self::swap_pairs) leaves them.
    #[inline(always)]
    unsafe fn first_rows(_pass: &Pass<Self>, _rows: usize, _blocks: *const Block, _sums: *mut f32) -> usize {
        0
    }

    /// Puts `[rows][32]` sums in the order of [`first_rows`](Self::first_rows), and back.
    #[inline(always)]
    unsafe fn swap_pairs(_rows: usize, _sums: *mut f32) {}

    /// The finished dot products as f32, exact.
    unsafe fn floats(sums: Self::Sums) -> Self::Floats;

    /// Whether [`scaled_floats`](Self::scaled_floats) takes fewer instructions than multiplying floats.
    const SCALES_INTEGERS: bool;

    /// The finished dot products times an integer below 2¹⁵, as f32. `scale` holds the integer in both halves. Exact,
    /// since the integer is a block scale, which has at most four bits between its first and last one.
    unsafe fn scaled_floats(sums: Self::Sums, scale: *const i32) -> Self::Floats;

    /// The sums of several digits, joined from the highest digit on.
    type Joined: Copy;

    /// Joined sums to start from: the number at `bias` if the bias of the weights is subtracted here, or else 0.
    unsafe fn joined(bias: *const i32) -> Self::Joined;

    /// Sums of one digit to start from: the number at `bias` if the bias of the weights is subtracted in digit 0 and this is
    /// digit 0, or else 0.
    unsafe fn start_digit(bias: *const i32, digit: usize) -> Self::Sums;

    /// Joins the sums of one digit to those of all higher digits. Exact, or rounded to f32 at digit 0.
    unsafe fn join(joined: Self::Joined, sums: Self::Sums, digit: usize) -> Self::Joined;

    /// `Σ DIGITS[digit] · sums[digit]`, rounded once.
    unsafe fn joined_floats(joined: Self::Joined) -> Self::Floats;

    /// [`digits::Multiply`](super::digits::Multiply) of `STREAMS` panels or of one. The pointers of the task are valid for its
    /// panels and sums, and each panel has the chunk of every block.
    unsafe fn multiply_blocks(task: &DigitTask, blocks: &[DigitBlock]);

    /// The f32 at `value`, for every feature.
    unsafe fn splat(value: *const f32) -> Self::Floats;

    /// Product.
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// `a · b + c`, rounded once where the machine can. It makes no difference in W4A4, where `a · b` is exact.
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Reads `LANES` values.
    unsafe fn load(from: *const f32) -> Self::Floats;

    /// Writes `LANES` values.
    unsafe fn store(to: *mut f32, value: Self::Floats);
}

/// The factor in [`Vector::scales`]: it undoes the doubling of codes for nvfp4.
pub(crate) const fn scale_unit(format: BlockFormat) -> f32 {
    match format {
        BlockFormat::Nvfp4 => 0.5,
        BlockFormat::Mxfp4 => 1.0,
    }
}

/// The factor in [`Vector::raw_scales`].
pub(crate) const fn raw_scale_unit(format: BlockFormat) -> f32 {
    match format {
        BlockFormat::Nvfp4 => f32::from_bits((127 - SCALE_EXPONENT) << 23),
        BlockFormat::Mxfp4 => 1.0,
    }
}
