//! The operations that the W4A4 kernel is written in; each instruction set implements them once.
//!
//! Codes are doubled into integers of at most 12, so that the dot product of a 16-element block is an integer of at
//! most 16 · 144 = 2304, exact in i16 however it is grouped. Where the hardware multiplies unsigned by signed bytes,
//! weights carry a bias of +12; the prepared activations bring what takes it off again ([`Vector::bias_word`]).

use dualgemm_formats::BlockFormat;
use dualgemm_formats::scalar::e2m1::DOUBLED;

use super::digits::{DigitBlock, DigitTask};
use crate::pack::{CHUNK_K, SCALE_EXPONENT};

/// Added to doubled weights where the hardware wants an unsigned operand.
pub(super) const BIAS: i8 = 12;

/// Doubled weights plus [`BIAS`] by code, a byte-shuffle table.
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
/// Every method is `unsafe` for the same two reasons: the machine must have the instruction set, and pointers must
/// be valid for what the method says it reads or writes (no alignment is asked for).
pub(super) trait Vector: Copy {
    /// Features per vector; divides 16.
    const LANES: usize;
    /// How far ahead of use weights are fetched, all panels that are read at once together: see [`fetch`](crate::fetch).
    const AHEAD: usize;
    /// Four consecutive weights for each feature.
    type Quads: Copy;
    /// One activation quad, for all features.
    type Quad: Copy;
    /// Partial dot products.
    type Sums: Copy;
    /// f32 by feature.
    type Floats: Copy;

    /// What the activations of a block store so that [`start`](Self::start) takes the bias off again; `sum` is
    /// the sum of the block's 16 doubled codes.
    fn bias_word(sum: i32) -> i32;

    /// The doubled values of 16 codes, and their sum.
    unsafe fn doubled(codes: [u8; CHUNK_K]) -> ([i8; CHUNK_K], i32);

    /// The four weight quads of a chunk for the features `column ..`, `column` counting 16 gate features, then
    /// 16 up features. Reads the chunk's codes.
    unsafe fn weights(chunk: *const u8, column: usize) -> [Self::Quads; 4];

    /// The scales of the same features, times [`scale_unit`]. Reads the chunk's scales. What those of zero are read as is
    /// no matter, since their codes are zero.
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self::Floats;

    /// The same times [`raw_scale_unit`]: an instruction less, for products with what has room for that.
    unsafe fn raw_scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self::Floats;

    /// The four doubled codes at `quad`.
    unsafe fn quad(quad: *const i8) -> Self::Quad;

    /// Sums to start from: [`bias_word`](Self::bias_word), the one that lies at `word`.
    unsafe fn start(word: *const i32) -> Self::Sums;

    /// `sums` plus the dot products of `quad` with the weights of two vectors of features, whose products the compiler may
    /// not compute one after the other.
    unsafe fn dots(sums: [Self::Sums; 2], weights: [Self::Quads; 2], quad: Self::Quad) -> [Self::Sums; 2];

    /// The finished dot products as f32, exact.
    unsafe fn floats(sums: Self::Sums) -> Self::Floats;

    /// Whether [`scaled_floats`](Self::scaled_floats) takes fewer instructions than multiplying floats.
    const SCALES_INTEGERS: bool;

    /// The finished dot products times an integer below 2¹⁵, as f32. `scale` holds the integer in both halves. Exact,
    /// since the integer is a block scale, which has at most four bits between its first and last one.
    unsafe fn scaled_floats(sums: Self::Sums, scale: *const i32) -> Self::Floats;

    /// What the sums of the digits of an integer are joined to, the highest one first.
    type Joined: Copy;

    /// Joined sums to start from: 0, or the number at `bias` if it takes the bias of the weights off the whole.
    unsafe fn joined(bias: *const i32) -> Self::Joined;

    /// Sums to start one digit from: 0, or of digit 0 the number at `bias` if that takes the bias off it.
    unsafe fn start_digit(bias: *const i32, digit: usize) -> Self::Sums;

    /// `joined` and the sums of one digit; those above have been joined already. Exact, or rounded to f32 at digit 0.
    unsafe fn join(joined: Self::Joined, sums: Self::Sums, digit: usize) -> Self::Joined;

    /// `Σ DIGITS[digit] · sums[digit]`, rounded once.
    unsafe fn joined_floats(joined: Self::Joined) -> Self::Floats;

    /// [`digits::multiply`](super::digits::multiply) of `STREAMS` panels or of one.
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

/// What [`Vector::scales`] multiplies scales with: nvfp4's are of doubled codes.
pub(crate) const fn scale_unit(format: BlockFormat) -> f32 {
    match format {
        BlockFormat::Nvfp4 => 0.5,
        BlockFormat::Mxfp4 => 1.0,
    }
}

/// What [`Vector::raw_scales`] multiplies scales with.
pub(crate) const fn raw_scale_unit(format: BlockFormat) -> f32 {
    match format {
        BlockFormat::Nvfp4 => f32::from_bits((127 - SCALE_EXPONENT) << 23),
        BlockFormat::Mxfp4 => 1.0,
    }
}
