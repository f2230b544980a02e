//! Many rows of bf16 or f16: integers of 15 bits times a power of two, multiplied two at a time.
//!
//! ```text
//! 16 floats = 2^e · integers + rests                   see [`split`](super::split)
//! sum += (Σ_k integer[k] · code[k]) · 2^e · scale       fused; the inner sum is an exact integer below 2²³
//! sum += rest[k] · (code[k] · scale)                    fused; for each rest that is not 0
//! ```
//!
//! The order is: blocks of BLOCK_K of k ascending; in each block its chunks of 16 ascending, then its rests by k ascending.
//! So bf16 and f16 are exact. 16 products cost one rounding, and each rest costs one more.
//!
//! `vpmaddwd` does 16 products where a fused multiply-add does 8, on as many ports. If floats are normally distributed, one in
//! 150 leaves a rest in bf16, and one in 20 in f16. [`blocks`](super::blocks) decides where there are too many.

use dualgemm_formats::BlockFormat;

use super::blocks::{PAIR_WORDS, Place, Rest};
use super::kernel::groups;
use super::many_rows::{Block, Decoded, for_rows};
use super::split::EXPONENTS;
use super::vector::Vector;
use crate::pack::{CHUNK, CHUNK_K, SCALES};
use crate::tile::TILE_COLS;

/// Scale bytes of mxfp4 for which a scale, times its factor of 2⁻³ and any power of two of A, is a normal f32. Models have
/// other scales only for blocks of zeros.
const USUAL_SCALES: std::ops::RangeInclusive<u8> =
    (127 + 3 - 126 - *EXPONENTS.start()) as u8..=(127 + 3 + 127 - *EXPONENTS.end()) as u8;

const PAIRS: usize = CHUNK_K / 2;

/// The operations on pairs of 16-bit integers, of `Floats::LANES` features: each instruction set implements them once.
///
/// Methods are `unsafe` for the reasons of [`Vector`].
pub(crate) trait Pairs {
    /// The sums.
    type Floats: Vector;
    /// Most rows of which two vectors of integers and of sums fit the registers.
    const ROWS: usize;
    /// A pair of weights per feature, in at most 8 bytes.
    type Pairs: Copy;
    /// One pair of a row's integers, for all features.
    type Pair: Copy;
    /// An integer below 2²³ per feature.
    type Sums: Copy;

    /// Twice the codes of k = 4·quad + 0 and 2, and of 4·quad + 1 and 3. `column` is as in [`Vector`].
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [Self::Pairs; 2];

    /// The pair at `pair` for every feature.
    unsafe fn splat(pair: *const [i16; 2]) -> Self::Pair;

    /// The sum of the two products of each feature.
    unsafe fn dot(weights: Self::Pairs, a: Self::Pair) -> Self::Sums;

    /// The same for two vectors of features, added to `sums`. Implementations keep the compiler from computing one row after
    /// another.
    unsafe fn add_dots(sums: [Self::Sums; 2], weights: [Self::Pairs; 2], a: Self::Pair) -> [Self::Sums; 2];

    /// `scales · unit`, where `unit` is a power of two, and both factors and the product are normal numbers.
    unsafe fn scaled(scales: Self::Floats, unit: Self::Floats) -> Self::Floats;

    /// As f32, exact.
    unsafe fn floats(sums: Self::Sums) -> Self::Floats;

    /// [`pass`], not inlined.
    unsafe fn pass(pass: &Pass);
}

/// Decoded weights of two vectors of features: first the scales, `[chunk][2 · LANES]`, then the pairs,
/// `[chunk][pair][2]`.
#[derive(Debug, Clone, Copy)]
struct Weights {
    scales: *mut f32,
    pairs: *mut u8,
}

/// Multiplies all rows of a tile with two vectors of features of a block of K. Its activations are
/// `[group of rows][chunk]`: first the integers, `[pair][row of group]`, then the powers of two, `[row of group]`.
///
/// # Safety
/// The machine has the instruction set of `P`. The pointers of the block are valid for its chunks, rows and sums, and
/// [`blocks::Write`](super::blocks::Write) wrote its activations and `rests` rests.
#[inline(always)]
pub(super) unsafe fn multiply<P: Pairs>(block: &Block, rests: usize, decoded: &mut Decoded) {
    let Block { rows, chunks, .. } = *block;
    let weights =
        Weights { scales: decoded.scales.as_mut_ptr().cast(), pairs: decoded.weights.as_mut_ptr().cast() };
    // SAFETY: groups lie inside `rows`; `Write` put the rests right behind the integers, with rows and k of this tile and block;
    // `decoded` has room for a block of weights; two of them take at most 8 bytes.
    unsafe {
        let usual_scales = decode::<P>(block, weights);
        for group in groups(rows, P::ROWS) {
            let a = block.a.add(group.start * chunks * PAIR_WORDS);
            let sums = block.sums.add(group.start * TILE_COLS);
            P::pass(&Pass { rows: group.len(), weights, usual_scales, chunks, a, sums, add: block.add });
        }
        let rest = block.a.add(rows * chunks * PAIR_WORDS).cast::<Rest>();
        for i in 0..rests {
            add_rest::<P>(weights, *rest.add(i), block.sums);
        }
    }
}

/// Decodes two vectors of features of a block. Returns whether all scales are usual.
#[inline(always)]
unsafe fn decode<P: Pairs>(block: &Block, to: Weights) -> bool {
    let mut usual = true;
    let (mut scales, mut pairs) = (to.scales, to.pairs.cast::<P::Pairs>());
    for c in 0..block.chunks {
        // SAFETY: `multiply` passes a block of whole chunks, a column two vectors before their end, and room for the weights.
        unsafe {
            let chunk = block.packed.add(c * CHUNK);
            block.fetch_next(chunk);
            if block.format == BlockFormat::Mxfp4 {
                let bytes = chunk.add(SCALES + block.column);
                let bytes = std::slice::from_raw_parts(bytes, 2 * P::Floats::LANES);
                usual &= bytes.iter().fold(true, |usual, byte| usual & USUAL_SCALES.contains(byte));
            }
            for v in 0..2 {
                let column = block.column + v * P::Floats::LANES;
                P::Floats::store(scales, P::Floats::scales(chunk, column, block.format));
                scales = scales.add(P::Floats::LANES);
                for quad in 0..CHUNK_K / 4 {
                    for (i, weights) in P::weights(chunk, column, quad).into_iter().enumerate() {
                        pairs.add(2 * (2 * quad + i) + v).write(weights);
                    }
                }
            }
            pairs = pairs.add(2 * PAIRS);
        }
    }
    usual
}

/// One group of rows and a decoded block of K.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pass {
    /// Rows, at most [`Pairs::ROWS`].
    rows: usize,
    weights: Weights,
    /// Whether the product of any scale and any power of two of A is a normal f32.
    usual_scales: bool,
    /// Chunks of K.
    chunks: usize,
    /// `[chunk]`: integers, then powers of two.
    a: *const f32,
    /// Two vectors of the first row, 32 values before those of the next one.
    sums: *mut f32,
    /// Whether to add to the sums or to overwrite them.
    add: bool,
}

/// Multiplies one group of rows. Compiled as a separate function for the reason that
/// [`many_rows::pass`](super::many_rows::pass) gives.
///
/// # Safety
/// The machine has the instruction set of `P`, and the pointers of the pass are valid for what their fields say.
#[inline(always)]
pub(super) unsafe fn pass<P: Pairs>(pass: &Pass) {
    // SAFETY: `for_rows` picks the `ROWS` that is `pass.rows`, and the rest of the contract is this function's.
    unsafe {
        if pass.usual_scales {
            for_rows!(pass.rows, P::ROWS, |ROWS| pass_rows::<P, ROWS, true>(pass));
        } else {
            for_rows!(pass.rows, P::ROWS, |ROWS| pass_rows::<P, ROWS, false>(pass));
        }
    }
}

/// `ROWS` rows × two vectors of features: integers stay in registers over a chunk, sums over the whole block. (Sums of 512 bits in
/// memory cost a third of the time on an Ice Lake.)
#[inline(always)]
unsafe fn pass_rows<P: Pairs, const ROWS: usize, const USUAL: bool>(pass: &Pass) {
    let (mut pairs, mut scales, mut a) = (pass.weights.pairs.cast::<P::Pairs>(), pass.weights.scales, pass.a);
    // SAFETY: `pass` vouches for `chunks` chunks of weights, scales and activations, and `ROWS` rows of sums.
    unsafe {
        let at = |row: usize, v: usize| pass.sums.add(row * TILE_COLS + v * P::Floats::LANES);
        let mut sums = [[P::Floats::zero(); 2]; ROWS];
        if pass.add {
            for (row, sums) in sums.iter_mut().enumerate() {
                *sums = [P::Floats::load(at(row, 0)), P::Floats::load(at(row, 1))];
            }
        }
        for _ in 0..pass.chunks {
            let splat = |pair: usize, row: usize| P::splat(a.add(pair * ROWS + row).cast());
            let two = |pair: usize| [pairs.add(2 * pair).read(), pairs.add(2 * pair + 1).read()];
            let weights = two(0);
            let mut dots: [[P::Sums; 2]; ROWS] =
                std::array::from_fn(|row| weights.map(|weights| P::dot(weights, splat(0, row))));
            for pair in 1..PAIRS {
                let weights = two(pair);
                for (row, dots) in dots.iter_mut().enumerate() {
                    *dots = P::add_dots(*dots, weights, splat(pair, row));
                }
            }
            for (row, (sums, dots)) in sums.iter_mut().zip(dots).enumerate() {
                let unit = P::Floats::splat(a.add(PAIRS * ROWS + row));
                for (v, (sum, dots)) in sums.iter_mut().zip(dots).enumerate() {
                    let scales = P::Floats::load(scales.add(v * P::Floats::LANES));
                    let dots = P::floats(dots);
                    // Only the addition rounds. The first way multiplies two scales, whose product may overflow if they are
                    // extreme, even where dots are zero.
                    *sum = if USUAL {
                        P::Floats::mul_add(dots, P::scaled(scales, unit), *sum)
                    } else {
                        P::Floats::mul_add(P::Floats::mul(dots, unit), scales, *sum)
                    };
                }
            }
            (pairs, scales, a) =
                (pairs.add(2 * PAIRS), scales.add(2 * P::Floats::LANES), a.add(ROWS * PAIR_WORDS));
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                P::Floats::store(at(row, v), sum);
            }
        }
    }
}

/// Adds the products of one rest and two vectors of features.
#[inline(always)]
unsafe fn add_rest<P: Pairs>(weights: Weights, rest: Rest, sums: *mut f32) {
    const ONE: [[i16; 2]; 2] = [[1, 0], [0, 1]];
    let Place { chunk, pair, element } = rest.place();
    // SAFETY: `multiply` passes all decoded chunks of the block and the sums of all rows: the rest's are among them.
    unsafe {
        let one = P::splat(&ONE[element]);
        let value = P::Floats::splat(&rest.value);
        for v in 0..2 {
            let weights_of_pair = weights.pairs.cast::<P::Pairs>().add(2 * (chunk * PAIRS + pair) + v).read();
            let code = P::floats(P::dot(weights_of_pair, one));
            let scales = P::Floats::load(weights.scales.add((2 * chunk + v) * P::Floats::LANES));
            let to = sums.add(rest.row() * TILE_COLS + v * P::Floats::LANES);
            let product = P::Floats::mul(code, scales);
            P::Floats::store(to, P::Floats::mul_add(value, product, P::Floats::load(to)));
        }
    }
}
