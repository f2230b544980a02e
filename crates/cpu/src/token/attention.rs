//! Attention of one token to all tokens of a cache, in f32.
//!
//! ```text
//! for each block of 128 tokens      scores = scale · q·k, each a fused sum by lanes
//!                                   the largest score so far, and by how much older sums shrink
//!                                   sums  += e^(score - largest) · v, fused, tokens ascending
//! result = sums / Σ e^(score - largest), rounded once
//! ```
//!
//! A sink is the first score, with no value.
//!
//! Queries of heads that share keys go together, four at a time, so that keys and values are widened once for four. Results do not
//! depend on the number of threads.

use super::{Float, LayerDesc};
use crate::float_linear::{Fused, multiply};
use crate::isa::{Available, InstructionSet, Work};
use crate::threads;
use crate::vmath::{EXP_LIMIT, exp_neg};
use crate::w4a16::{Pairs, Vector, for_rows};

/// Tokens whose scores are computed before their values are added.
const BLOCK: usize = 128;

const QUERIES: usize = 4;

/// Products that a thread does in less time than others take to wake.
const SMALL: usize = 1 << 18;

/// Sums of some queries.
type Sums<const COUNT: usize> = [[f32; LayerDesc::MAX_HEAD_DIM]; COUNT];

/// The keys and values of all heads, `[heads, room, head_dim]`; tokens from `first` to `len` count.
#[derive(Debug)]
pub(super) struct Cached<'a, T> {
    pub(super) keys: &'a [T],
    pub(super) values: &'a [T],
    pub(super) room: usize,
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) head_dim: usize,
}

impl<T: Float> Cached<'_, T> {
    /// Writes what the queries, `[heads of queries, head_dim]`, attend to.
    pub(super) fn attend(
        &self,
        isa: Available,
        threads: usize,
        queries: &[T],
        sinks: Option<&[T]>,
        scale: f32,
        out: &mut [T],
    ) {
        let len = self.len - self.first;
        let of_head = self.room * self.head_dim;
        let heads = self.keys.len() / of_head;
        let of_queries = queries.len() / heads;
        let threads = if 2 * len * queries.len() <= SMALL { 1 } else { threads };
        threads::for_each_part(threads, out, of_queries, |head, out| {
            let range = head * of_head + self.first * self.head_dim..(head + 1) * of_head;
            let (keys, values) = (&self.keys[range.clone()], &self.values[range]);
            let queries = &queries[head * of_queries..][..of_queries];
            let sinks = sinks.map(|sinks| &sinks[head * of_queries / self.head_dim..]);
            let cached = &Cached { keys, values, first: 0, len, ..*self };
            isa.dispatch(Head { cached, queries, sinks, scale, out });
        });
    }

    #[inline(always)]
    fn token<'t>(&self, of: &'t [T], token: usize) -> &'t [T] {
        &of[token * self.head_dim..][..self.head_dim]
    }
}

/// One head of keys and its queries.
struct Head<'a, T> {
    cached: &'a Cached<'a, T>,
    queries: &'a [T],
    sinks: Option<&'a [T]>,
    scale: f32,
    out: &'a mut [T],
}

impl<T: Float> Work for Head<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: InstructionSet>(self, _: S) {
        let (dim, some) = (self.cached.head_dim, QUERIES * self.cached.head_dim);
        for (i, (queries, out)) in self.queries.chunks(some).zip(self.out.chunks_mut(some)).enumerate() {
            let sinks = self.sinks.map(|sinks| &sinks[i * QUERIES..]);
            for_rows!(queries.len() / dim, QUERIES, |COUNT| {
                // SAFETY: the machine has the instruction set, since `run` got its token.
                unsafe {
                    self.cached.attend_some::<<S as Pairs>::Floats, COUNT>(queries, sinks, self.scale, out);
                };
            });
        }
    }
}

impl<T: Float> Cached<'_, T> {
    #[inline(always)]
    unsafe fn attend_some<V: Vector, const COUNT: usize>(
        &self,
        queries: &[T],
        sinks: Option<&[T]>,
        scale: f32,
        out: &mut [T],
    ) {
        let dim = self.head_dim;
        let (mut rows, mut sums): (Sums<COUNT>, Sums<COUNT>) = ([[0.0; _]; COUNT], [[0.0; _]; COUNT]);
        for (row, query) in rows.iter_mut().zip(queries.chunks_exact(dim)) {
            row.iter_mut().zip(query).for_each(|(to, from)| *to = from.widen());
        }
        let rows: [&[f32]; COUNT] = std::array::from_fn(|i| &rows[i][..dim]);
        // e^(sink - largest) is 1 while no other score is known.
        let (mut largest, mut total) = match sinks {
            Some(sinks) => (std::array::from_fn(|i| sinks[i].widen()), [1.0; COUNT]),
            None => ([f32::NEG_INFINITY; COUNT], [0.0; COUNT]),
        };
        for first in (0..self.len).step_by(BLOCK) {
            let count = BLOCK.min(self.len - first);
            let mut scores = [[0.0; BLOCK]; COUNT];
            for token in (0..count).step_by(4) {
                let keys = std::array::from_fn(|i| self.token(self.keys, first + (token + i).min(count - 1)));
                // SAFETY: the caller's machine has the instruction set.
                let products = unsafe { multiply::<Fused<V, T>, 4, COUNT, false>(keys, rows) };
                for (scores, products) in scores.iter_mut().zip(products) {
                    scores[token..token + 4].copy_from_slice(&products);
                }
            }
            for (i, scores) in scores.iter_mut().enumerate() {
                let shrink = weigh(scores, count, scale, &mut largest[i], &mut total[i]);
                sums[i][..dim].iter_mut().for_each(|sum| *sum *= shrink);
            }
            // As many vectors as leave registers for those of four queries.
            let (many, wide) = (if V::LANES == 16 { 4 } else { 2 }, V::LANES);
            let whole = dim / (many * wide) * many * wide;
            // SAFETY: as above.
            unsafe {
                for column in (0..whole).step_by(many * wide) {
                    if many == 4 {
                        self.add::<V, COUNT, 4>(first, count, &scores, &mut sums, column);
                    } else {
                        self.add::<V, COUNT, 2>(first, count, &scores, &mut sums, column);
                    }
                }
                for column in (whole..dim).step_by(wide) {
                    self.add::<V, COUNT, 1>(first, count, &scores, &mut sums, column);
                }
            }
        }
        for ((out, sums), total) in out.chunks_exact_mut(dim).zip(&sums).zip(total) {
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::narrow(sum / total));
        }
    }

    /// Adds the values of some tokens, `WIDTH` vectors of their features from `column` on, times the weights of `COUNT` queries.
    #[inline(always)]
    unsafe fn add<V: Vector, const COUNT: usize, const WIDTH: usize>(
        &self,
        first: usize,
        count: usize,
        weights: &[[f32; BLOCK]; COUNT],
        sums: &mut Sums<COUNT>,
        column: usize,
    ) {
        let columns = column..column + WIDTH * V::LANES;
        // SAFETY: the caller's machine has the instruction set, and the slices have `WIDTH` vectors.
        unsafe {
            let mut chains = [[V::zero(); WIDTH]; COUNT];
            for (chains, sums) in chains.iter_mut().zip(&*sums) {
                let sums = &sums[columns.clone()];
                for (i, chain) in chains.iter_mut().enumerate() {
                    *chain = V::load(sums.as_ptr().add(i * V::LANES));
                }
            }
            for token in 0..count {
                let value = &self.token(self.values, first + token)[columns.clone()];
                let mut vectors = [V::zero(); WIDTH];
                for (i, vector) in vectors.iter_mut().enumerate() {
                    *vector = T::load(value.as_ptr().add(i * V::LANES));
                }
                for (chains, weights) in chains.iter_mut().zip(weights) {
                    let weight = V::splat(&raw const weights[token]);
                    for (chain, vector) in chains.iter_mut().zip(vectors) {
                        *chain = V::mul_add(vector, weight, *chain);
                    }
                }
            }
            for (chains, sums) in chains.into_iter().zip(sums) {
                let sums = &mut sums[columns.clone()];
                for (i, chain) in chains.into_iter().enumerate() {
                    V::store(sums.as_mut_ptr().add(i * V::LANES), chain);
                }
            }
        }
    }
}

/// Turns a block's products into weights, adds these to the total, and returns by how much older ones shrink.
#[inline(always)]
fn weigh(scores: &mut [f32; BLOCK], count: usize, scale: f32, largest: &mut f32, total: &mut f32) -> f32 {
    let mut most = [*largest; 16];
    scores.iter_mut().for_each(|score| *score *= scale);
    scores[count..].fill(f32::NEG_INFINITY);
    for scores in scores.as_chunks::<16>().0 {
        for (score, most) in scores.iter().zip(&mut most) {
            *most = if *score > *most { *score } else { *most };
        }
    }
    let most = most.into_iter().fold(*largest, f32::max);
    // NaN fails the comparison and so passes through.
    let exp = |below: f32| exp_neg(if below > EXP_LIMIT { EXP_LIMIT } else { below });
    let shrink = exp(most - *largest);
    let mut sums = [0.0; 16];
    for scores in scores.as_chunks_mut::<16>().0 {
        for (score, sum) in scores.iter_mut().zip(&mut sums) {
            *score = exp(most - *score);
            *sum += *score;
        }
    }
    *total = *total * shrink + sums.iter().sum::<f32>();
    *largest = most;
    shrink
}
