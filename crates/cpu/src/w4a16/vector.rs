//! The operations from which the kernels with floats are built; each instruction set implements them once.

use dualgemm_formats::BlockFormat;
use dualgemm_formats::scalar::e2m1;
use half::{bf16, f16};

use super::many_rows::Pass;
use super::sum_unit;
use crate::pack::{CHUNK_K, PANEL};

/// Twice the values of the codes, which makes them integers: some instruction sets decode them as integers.
pub(super) const DOUBLED: [f32; 16] = {
    let (mut values, mut code) = ([0.0; 16], 0);
    while code < 16 {
        values[code] = 2.0 * e2m1::VALUES[code];
        code += 1;
    }
    values
};

/// The factor in [`Vector::scales`]: codes are doubled, and sums count in [`sum_unit`].
pub(super) const fn scale_factor(format: BlockFormat) -> f32 {
    0.5 / sum_unit(format)
}

/// `LANES` values, each made of one of another type.
#[inline(always)]
unsafe fn load_as<V: Vector, T: Copy>(from: *const T, convert: impl Fn(T) -> f32) -> V {
    let mut lanes = [0.0; 16];
    for (i, lane) in lanes.iter_mut().enumerate().take(V::LANES) {
        // SAFETY: the caller has `from` point to `LANES` values.
        *lane = convert(unsafe { from.add(i).read() });
    }
    // SAFETY: a vector has at most 16 lanes.
    unsafe { V::load(lanes.as_ptr()) }
}

/// A vector of f32.
///
/// Every method is `unsafe` with the same two conditions: the machine has the instruction set, and pointers are valid for what
/// the method says it reads or writes (they need no alignment). `chunk` points to [`CHUNK`](crate::pack::CHUNK) bytes.
/// `column` counts the 16 gate features, then the 16 up features of a panel; it is a multiple of [`LANES`](Self::LANES) below 32.
pub(crate) trait Vector: Copy {
    /// Elements; divides 16.
    const LANES: usize;
    /// Most rows whose sums, for two vectors of features, fit the registers.
    const ROWS: usize;
    /// How many bytes ahead of their use weights are fetched: [`AHEAD`](crate::fetch::AHEAD) or its like.
    const AHEAD: usize;

    /// Twice the values of the codes of four consecutive k, `4·quad ..`, for `LANES` features: one vector per k.
    unsafe fn weights(chunk: *const u8, column: usize, quad: usize) -> [Self; 4];

    /// The scales of the same features times [`scale_factor`].
    unsafe fn scales(chunk: *const u8, column: usize, format: BlockFormat) -> Self;

    /// The same weights in whatever order is cheapest to decode: the vectors `[x][y]` together hold, for chain
    /// x′ = 0 and 1 of every feature, the weight of k = 4·quad + 2·x′ + y. Lanes may mix features and chains, but
    /// in the same way for both y, and as [`chain_scales`](Self::chain_scales) does.
    ///
    /// By default this and the next three methods have the order of [`weights`](Self::weights): one chain per vector,
    /// no lanes mixed.
    #[inline(always)]
    unsafe fn chain_weights(chunk: *const u8, column: usize, quad: usize) -> [[Self; 2]; 2] {
        // SAFETY: both methods read the same of the chunk.
        let [k0, k1, k2, k3] = unsafe { Self::weights(chunk, column, quad) };
        [[k0, k1], [k2, k3]]
    }

    /// The scale that belongs to each lane of [`chain_weights`](Self::chain_weights).
    #[inline(always)]
    unsafe fn chain_scales(chunk: *const u8, column: usize, format: BlockFormat) -> [Self; 2] {
        // SAFETY: both methods read the same of the chunk.
        [unsafe { Self::scales(chunk, column, format) }; 2]
    }

    /// The activation that belongs to each lane of `chain_weights()[x][y]`. `a` points to the four activations of
    /// the quad, k in the order 0, 2, 1, 3.
    #[inline(always)]
    unsafe fn chain_activations(a: *const f32, x: usize, y: usize) -> Self {
        // SAFETY: `a` points to four values, and 2y + x is below 4.
        unsafe { Self::splat(a.add(2 * y + x)) }
    }

    /// Writes chain 0 + chain 1 of every feature, `LANES` values by feature.
    #[inline(always)]
    unsafe fn join_chains(chains: [Self; 2], to: *mut f32) {
        // SAFETY: `to` points to room for `LANES` values, as `store` needs.
        unsafe { Self::store(to, Self::add(chains[0], chains[1])) };
    }

    /// 0 in every lane.
    unsafe fn zero() -> Self;

    /// The f32 at `value` in every lane.
    unsafe fn splat(value: *const f32) -> Self;

    /// Reads `LANES` values.
    unsafe fn load(from: *const f32) -> Self;

    /// Reads `LANES` values of bf16.
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: a vector has at most 16 lanes, and `from` points to `LANES` values.
        unsafe { load_as(from, |x| f32::from_bits(u32::from(x.to_bits()) << 16)) }
    }

    /// Reads `LANES` values of f16.
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: as above.
        unsafe { load_as(from, f16::to_f32) }
    }

    /// The sum of the lanes of each vector.
    #[inline(always)]
    unsafe fn sums(vectors: [Self; 4]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        for (sum, vector) in sums.iter_mut().zip(vectors) {
            let mut lanes = [0.0; 16];
            // SAFETY: a vector has at most 16 lanes.
            unsafe { Self::store(lanes.as_mut_ptr(), vector) };
            *sum = lanes.iter().sum();
        }
        sums
    }

    /// Writes `LANES` values.
    unsafe fn store(to: *mut f32, value: Self);

    /// Writes `LANES` pairs of bf16, each a value of `low` and then one of `high`. These have no more bits than bf16 have.
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u32, low: Self, high: Self) {
        let [mut lows, mut highs] = [[0u32; 16]; 2];
        // SAFETY: a vector has at most 16 lanes, and `to` points to room for `LANES` words.
        unsafe {
            Self::store(lows.as_mut_ptr().cast(), low);
            Self::store(highs.as_mut_ptr().cast(), high);
            for (i, (low, high)) in lows.into_iter().zip(highs).enumerate().take(Self::LANES) {
                to.add(i).write(low >> 16 | high & 0xFFFF_0000);
            }
        }
    }

    /// Writes the weights of `LANES` features of a chunk of nvfp4, which are bf16, scale included: `[pair of k][16][2]`.
    #[inline(always)]
    unsafe fn widen(chunk: *const u8, column: usize, to: *mut u32) {
        // SAFETY: the caller has room for eight times 16 words, and for `LANES` of the last.
        unsafe {
            let scales = Self::scales(chunk, column, BlockFormat::Nvfp4);
            for quad in 0..CHUNK_K / 4 {
                let [k0, k1, k2, k3] = Self::weights(chunk, column, quad).map(|w| Self::mul(w, scales));
                Self::store_bf16(to.add(2 * quad * PANEL), k0, k1);
                Self::store_bf16(to.add((2 * quad + 1) * PANEL), k2, k3);
            }
        }
    }

    /// Sum.
    unsafe fn add(a: Self, b: Self) -> Self;

    /// The larger; `b` if one is NaN.
    unsafe fn max(a: Self, b: Self) -> Self;

    /// Product.
    unsafe fn mul(a: Self, b: Self) -> Self;

    /// `a · b + c`, rounded once where the machine can.
    unsafe fn mul_add(a: Self, b: Self, c: Self) -> Self;

    /// [`many_rows::pass`](super::many_rows::pass), not inlined.
    unsafe fn pass(pass: &Pass);
}
