//! Many rows of bf16 or f16: integers of 15 bits times a power of two, multiplied two at a time.
//!
//! ```text
//! 16 floats = 2^e · integers + rests                   see [`split`](super::split)
//! sum += (Σ_k integer[k] · code[k]) · 2^e · scale       fused; the inner sum is an exact integer below 2²³
//! sum += rest[k] · (code[k] · scale)                    fused; for each rest that is not 0
//! ```
//!
//! The order is: blocks of BLOCK_K of k ascending, in each the chunks of 16 ascending, and then its rests by k ascending.
//! So bf16 and f16 are exact, and 16 products cost one rounding, and one more for each rest.
//!
//! `vpmaddwd` does 16 products where a fused multiply-add does 8, on as many ports. Where it is bf16, one float in 150
//! leaves a rest (of normally distributed ones), f16 one in 20. See `write` in [`blocks`](super::blocks) for where floats
//! are better left alone.

use dualgemm_formats::BlockFormat;

use super::blocks::{PAIR_WORDS, Rest};
use super::kernel::groups;
use super::split::EXPONENTS;
use super::vector::Vector;
use super::wide::{Block, Decoded, for_rows};
use crate::pack::{CHUNK, CHUNK_K, SCALES};
use crate::tile::TILE_COLS;

/// Scale bytes of mxfp4 for which a scale, times its factor of 2⁻³ and any power of two of A, is a normal f32. No model has
/// others, but for blocks of zeros.
const USUAL_SCALES: std::ops::RangeInclusive<u8> =
    (127 + 3 - 126 - *EXPONENTS.start()) as u8..=(127 + 3 + 127 - *EXPONENTS.end()) as u8;

/// Pairs of a chunk.
const PAIRS: usize = CHUNK_K / 2;

/// The operations on pairs of 16-bit integers, of `Floats::LANES` features: each instruction set implements them once.
///
/// Methods are `unsafe` for the reasons of [`Vector`].
pub(super) trait Pairs {
    /// The sums.
    type Floats: Vector;
    /// Most rows whose sums of two vectors fit the registers.
    const ROWS: usize = Self::Floats::ROWS;
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

    /// Of each feature, the sum of the two products.
    unsafe fn dot(weights: Self::Pairs, a: Self::Pair) -> Self::Sums;

    /// The same of two vectors of features, added to `sums`. Compilers must not compute one row after another.
    unsafe fn add_dots(sums: [Self::Sums; 2], weights: [Self::Pairs; 2], a: Self::Pair) -> [Self::Sums; 2];

    /// `scales · unit`, where units are powers of two, and all three are normal numbers.
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
/// `[group of rows][chunk]`, of each first the integers, `[pair][row of group]`, and then `[row of group]` powers of two.
///
/// # Safety
/// The machine has the instruction set of `P`, and the pointers of the block point to as much as it says.
#[inline(always)]
pub(super) unsafe fn multiply<P: Pairs>(block: &Block, rests: usize, decoded: &mut Decoded) {
    let Block { rows, chunks, .. } = *block;
    let weights =
        Weights { scales: decoded.scales.as_mut_ptr().cast(), pairs: decoded.weights.as_mut_ptr().cast() };
    // SAFETY: all offsets stay inside what the caller promises; `decoded` has room for two weights in 8 bytes.
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

/// Two vectors of features of some chunks. Returns whether all scales are usual.
#[inline(always)]
unsafe fn decode<P: Pairs>(block: &Block, to: Weights) -> bool {
    let mut usual = true;
    let (mut scales, mut pairs) = (to.scales, to.pairs.cast::<P::Pairs>());
    for c in 0..block.chunks {
        // SAFETY: the caller passes a block, and room for the weights.
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

/// One group of rows over a decoded block of K.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    /// Rows, at most [`Pairs::ROWS`].
    rows: usize,
    weights: Weights,
    /// Whether all scales may be multiplied with all powers of two.
    usual_scales: bool,
    /// Chunks of K.
    chunks: usize,
    /// `[chunk]` integers and powers of two.
    a: *const f32,
    /// Two vectors of the first row, 32 values before those of the next one.
    sums: *mut f32,
    /// Whether to add to the sums or to overwrite them.
    add: bool,
}

/// Multiplies one group of rows. Compiled as a function of its own, as the one of floats is.
///
/// # Safety
/// The machine has the instruction set of `P`, and the pointers point to as much as they say.
#[inline(always)]
pub(super) unsafe fn pass<P: Pairs>(pass: &Pass) {
    // SAFETY: the caller's promises.
    unsafe {
        if pass.usual_scales {
            for_rows!(pass.rows, P::ROWS, |ROWS| pass_rows::<P, ROWS, true>(pass));
        } else {
            for_rows!(pass.rows, P::ROWS, |ROWS| pass_rows::<P, ROWS, false>(pass));
        }
    }
}

/// `ROWS` rows × two vectors of features: the integers stay in registers over a chunk, sums in the first-level cache.
#[inline(always)]
unsafe fn pass_rows<P: Pairs, const ROWS: usize, const USUAL: bool>(pass: &Pass) {
    let (mut pairs, mut scales, mut a) = (pass.weights.pairs.cast::<P::Pairs>(), pass.weights.scales, pass.a);
    // SAFETY: the pass has `chunks` chunks of weights, scales and activations, and `ROWS` rows of sums.
    unsafe {
        for chunk in 0..pass.chunks {
            let splat = |pair: usize, row: usize| P::splat(a.add(pair * ROWS + row).cast());
            let two = |pair: usize| [pairs.add(2 * pair).read(), pairs.add(2 * pair + 1).read()];
            let weights = two(0);
            let mut sums: [[P::Sums; 2]; ROWS] =
                std::array::from_fn(|row| weights.map(|weights| P::dot(weights, splat(0, row))));
            for pair in 1..PAIRS {
                let weights = two(pair);
                for (row, sums) in sums.iter_mut().enumerate() {
                    *sums = P::add_dots(*sums, weights, splat(pair, row));
                }
            }
            for (row, sums) in sums.into_iter().enumerate() {
                let unit = P::Floats::splat(a.add(PAIRS * ROWS + row));
                for (v, sums) in sums.into_iter().enumerate() {
                    let to = pass.sums.add(row * TILE_COLS + v * P::Floats::LANES);
                    let scales = P::Floats::load(scales.add(v * P::Floats::LANES));
                    let sum = if pass.add || chunk > 0 { P::Floats::load(to) } else { P::Floats::zero() };
                    let dots = P::floats(sums);
                    // All but the sum is exact. The second way is 3 % slower: both scales and sums cannot be memory
                    // operands. In the first one, extreme powers of two would leave f32, also where dots are zero.
                    let sum = if USUAL {
                        P::Floats::mul_add(dots, P::scaled(scales, unit), sum)
                    } else {
                        P::Floats::mul_add(P::Floats::mul(dots, unit), scales, sum)
                    };
                    P::Floats::store(to, sum);
                }
            }
            (pairs, scales, a) =
                (pairs.add(2 * PAIRS), scales.add(2 * P::Floats::LANES), a.add(ROWS * PAIR_WORDS));
        }
    }
}

/// Adds the products of one rest and two vectors of features.
#[inline(always)]
unsafe fn add_rest<P: Pairs>(weights: Weights, rest: Rest, sums: *mut f32) {
    const ONE: [[i16; 2]; 2] = [[1, 0], [0, 1]];
    let (chunk, pair, of_pair) = rest.place();
    // SAFETY: the caller passes weights of the rest's chunk and the sums of its row.
    unsafe {
        let one = P::splat(&ONE[of_pair]);
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
