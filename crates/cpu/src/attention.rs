//! Causal attention of many rows of bf16, where a processor multiplies bf16 in vectors: a prompt's.
//!
//! ```text
//! for each head and 32 rows, 128 keys at a time up to the last row's own
//!     scores = q·kᵀ              as linear layers are: see `float_linear::dots`
//!     weights = e^(scale · scores - largest so far)
//!     sums = sums · e^(largest before - largest) + bf16(weights) · v
//! result = sums / Σ weights
//! ```
//!
//! Everything but the weights' rounding to bf16, which torch does, too, is f32. Results do not depend on the number of threads.

use std::cell::RefCell;

use half::bf16;

use crate::amx::{TILE_K, TILE_ROWS};
use crate::float_linear::BLOCK_ROWS;
use crate::float_linear::dots::{Block, multiply, transpose};
use crate::isa::compiled_for;
use crate::threads::{self, SharedSlice};
use crate::tile::TILE_COLS;
use crate::vmath::{EXP_LIMIT, bf16_bits, exp_neg};
use crate::{Error, Isa};

/// Most features of a head.
const MAX_DIM: usize = 256;

/// Keys at a time, in panels of 32.
const PANELS: usize = 4;

/// Sums of 32 rows and 32 keys or features, `[feature][row]`.
type Sums = [f32; BLOCK_ROWS * TILE_COLS];

/// A step of K of 32 rows of A, as `FloatLinear` writes it: `[half of the rows][pair of k][row]`.
type Step = [u32; BLOCK_ROWS * TILE_K / 2];

/// Vectors of heads, somewhere in memory.
#[derive(Debug, Clone, Copy)]
pub struct Heads<'a> {
    /// From the first element to the last one.
    pub elements: &'a [bf16],
    /// Number of heads.
    pub heads: usize,
    /// Elements from head to head.
    pub head_stride: usize,
    /// Elements from row to row.
    pub row_stride: usize,
}

impl<'a> Heads<'a> {
    fn row(&self, head: usize, row: usize, dim: usize) -> &'a [bf16] {
        &self.elements[head * self.head_stride + row * self.row_stride..][..dim]
    }

    fn check(&self, what: &'static str, rows: usize, dim: usize) -> Result<(), Error> {
        let last = |count: usize, stride: usize| count.checked_sub(1)?.checked_mul(stride);
        let end = last(self.heads, self.head_stride).zip(last(rows, self.row_stride));
        let end = end.and_then(|(head, row)| head.checked_add(row)?.checked_add(dim));
        if end.is_some_and(|end| end <= self.elements.len()) {
            return Ok(());
        }
        let found = format!("{} heads in {} elements", self.heads, self.elements.len());
        Err(Error::NotPlanned {
            what,
            found,
            expected: format!("at least one of {rows} rows of {dim} elements"),
        })
    }
}

/// Whether this machine computes it for heads of so many features.
pub fn is_available(dim: usize) -> bool {
    // Processors with tiles have these vectors, too.
    let has_vectors = matches!(Isa::detect(), Ok(Isa::Avx512Bf16 | Isa::AmxBf16));
    has_vectors && dim.is_multiple_of(TILE_K) && (1..=MAX_DIM).contains(&dim)
}

/// Writes what each of `rows` tokens attends to, of itself and those before: `[rows, heads of queries, dim]`.
///
/// # Errors
/// If [`is_available`] is false, or the operands do not have these rows, or heads that share keys evenly.
pub fn causal(
    [q, k, v]: [Heads<'_>; 3],
    rows: usize,
    dim: usize,
    scale: f32,
    out: &mut [bf16],
    threads: usize,
) -> Result<(), Error> {
    let fault = |what, found: String, expected: String| Err(Error::NotPlanned { what, found, expected });
    if !is_available(dim) {
        let expected = "multiples of 32 up to 256 on a processor whose kernels are avx512bf16".into();
        return fault("head_dim", dim.to_string(), expected);
    }
    for (what, heads) in [("q", q), ("k", k), ("v", v)] {
        heads.check(what, rows, dim)?;
    }
    if k.heads != v.heads || !q.heads.is_multiple_of(k.heads) {
        let found = format!("{}, {} and {}", q.heads, k.heads, v.heads);
        return fault(
            "the number of heads",
            found,
            "as many keys as values, each for as many queries".into(),
        );
    }
    if out.len() != rows * q.heads * dim {
        let expected = format!("{rows} rows of {} heads of {dim}", q.heads);
        return fault("out", format!("{} elements", out.len()), expected);
    }
    // Values by feature, as a linear layer's weights; zeros behind the last token.
    let padded = rows.next_multiple_of(TILE_K);
    let mut by_feature = vec![bf16::ZERO; k.heads * dim * padded];
    threads::for_each_part(threads, &mut by_feature, TILE_K * padded, |item, to| {
        let (head, first) = (item / (dim / TILE_K), item % (dim / TILE_K) * TILE_K);
        for row in 0..rows {
            for (i, value) in v.row(head, row, dim)[first..first + TILE_K].iter().enumerate() {
                to[i * padded + row] = *value;
            }
        }
    });
    let (out, blocks) = (SharedSlice::new(out), rows.div_ceil(BLOCK_ROWS));
    let work = Causal { q, k, values: &by_feature, padded, rows, dim, scale, out: &out };
    threads::for_each(
        threads,
        q.heads * blocks,
        |_| (),
        // Those with most keys first.
        |(), item| {
            let (head, block) = (item % q.heads, blocks - 1 - item / q.heads);
            // SAFETY: `is_available` found the instructions.
            ROOM.with_borrow_mut(|room| unsafe { block_of(&work, head, block * BLOCK_ROWS, room) });
        },
    );
    Ok(())
}

/// A thread's memory for 32 rows.
struct Room {
    q: [Step; MAX_DIM / TILE_K],
    weights: [Step; PANELS],
    scores: [Sums; PANELS],
    sums: [Sums; MAX_DIM / TILE_COLS],
}

thread_local! {
    static ROOM: RefCell<Box<Room>> = RefCell::new(Box::new(Room {
        q: [[0; _]; _],
        weights: [[0; _]; _],
        scores: [[0.0; _]; _],
        sums: [[0.0; _]; _],
    }));
}

struct Causal<'a> {
    q: Heads<'a>,
    k: Heads<'a>,
    /// `[head of keys][feature][padded rows]`.
    values: &'a [bf16],
    padded: usize,
    rows: usize,
    dim: usize,
    scale: f32,
    out: &'a SharedSlice<'a, bf16>,
}

compiled_for!(Avx512Bf16, {
    /// 32 rows of a head.
    unsafe fn block_of(work: &Causal<'_>, head: usize, first: usize, room: &mut Room) {
        let Causal { q, k, values, padded, rows, dim, scale, out } = *work;
        let (count, kv_head) = (BLOCK_ROWS.min(rows - first), head / (q.heads / k.heads));
        let (steps, sums) = (dim / TILE_K, &mut room.sums[..dim / TILE_COLS]);
        sums.as_flattened_mut().fill(0.0);
        for row in 0..count {
            let at = row / TILE_ROWS * TILE_ROWS * TILE_ROWS + row % TILE_ROWS;
            for (pair, values) in q.row(head, first + row, dim).as_chunks::<2>().0.iter().enumerate() {
                let bits = values.map(|x| u32::from(x.to_bits()));
                room.q[pair / TILE_ROWS][at + pair % TILE_ROWS * TILE_ROWS] = bits[0] | bits[1] << 16;
            }
        }
        let (mut largest, mut total) = ([f32::NEG_INFINITY; BLOCK_ROWS], [0.0; BLOCK_ROWS]);
        let end = first + count;
        for key in (0..end).step_by(PANELS * TILE_COLS) {
            let panels = PANELS.min((end - key).div_ceil(TILE_COLS));
            let scores = &mut room.scores[..panels];
            scores.as_flattened_mut().fill(0.0);
            for (panel, scores) in scores.iter_mut().enumerate() {
                let key =
                    |i: usize| k.row(kv_head, (key + panel * TILE_COLS + i).min(rows - 1), dim).as_ptr();
                let a = room.q.as_ptr().cast();
                let block = Block {
                    weights: &std::array::from_fn(key),
                    next: None,
                    a,
                    steps,
                    rows: BLOCK_ROWS,
                    sums: scores,
                };
                // SAFETY: the caller's machine has the instructions, and A and the keys have so many steps.
                unsafe { multiply(block) };
            }
            let before = largest;
            weigh(scores, first, key, scale, &mut largest);
            let mut shrink = before;
            for ((shrink, largest), total) in shrink.iter_mut().zip(&largest).zip(&mut total) {
                *shrink = exp(largest - *shrink);
                *total *= *shrink;
            }
            for (scores, weights) in scores.iter_mut().zip(&mut room.weights) {
                exponents(scores, &largest, &mut total, weights);
            }
            for (panel, sums) in sums.iter_mut().enumerate() {
                for sums in sums.as_chunks_mut::<BLOCK_ROWS>().0 {
                    sums.iter_mut().zip(&shrink).for_each(|(sum, shrink)| *sum *= shrink);
                }
                let feature =
                    |i: usize| values[((kv_head * dim) + panel * TILE_COLS + i) * padded + key..].as_ptr();
                let (a, steps) = (room.weights.as_ptr().cast(), panels);
                let block = Block {
                    weights: &std::array::from_fn(feature),
                    next: None,
                    a,
                    steps,
                    rows: BLOCK_ROWS,
                    sums,
                };
                // SAFETY: as above; values have zeros behind the last one.
                unsafe { multiply(block) };
            }
        }
        for (panel, sums) in sums.iter_mut().enumerate() {
            // SAFETY: as above.
            unsafe { transpose(sums) };
            for (row, (sums, total)) in
                sums.as_chunks::<TILE_COLS>().0.iter().zip(total).enumerate().take(count)
            {
                let at = ((first + row) * q.heads + head) * dim + panel * TILE_COLS;
                // SAFETY: rows of a head belong to one item of work, which one thread takes.
                let out = unsafe { out.part(at, TILE_COLS) };
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = bf16::from_bits(bf16_bits(sum / total));
                }
            }
        }
    }
});

/// Scales scores, hides keys that come after a row, and finds the largest of each row.
#[inline(always)]
fn weigh(scores: &mut [Sums], first_row: usize, key: usize, scale: f32, largest: &mut [f32; BLOCK_ROWS]) {
    for (i, scores) in scores.as_flattened_mut().as_chunks_mut::<BLOCK_ROWS>().0.iter_mut().enumerate() {
        // Rows before this one do not see the key.
        let hidden = (key + i).saturating_sub(first_row).min(BLOCK_ROWS);
        scores.iter_mut().for_each(|score| *score *= scale);
        scores[..hidden].fill(f32::NEG_INFINITY);
        for (score, largest) in scores.iter().zip(&mut *largest) {
            *largest = if *score > *largest { *score } else { *largest };
        }
    }
}

/// `e^-below`. NaN fails the comparison and so passes through.
#[inline(always)]
fn exp(below: f32) -> f32 {
    exp_neg(if below > EXP_LIMIT { EXP_LIMIT } else { below })
}

/// Adds `e^(score - largest)` to the totals and writes it as a step of A.
#[inline(always)]
fn exponents(scores: &Sums, largest: &[f32; BLOCK_ROWS], total: &mut [f32; BLOCK_ROWS], weights: &mut Step) {
    let keys = scores.as_chunks::<TILE_ROWS>().0;
    let (largest, total) = (largest.as_chunks::<TILE_ROWS>().0, total.as_chunks_mut::<TILE_ROWS>().0);
    for (half, weights) in weights.as_chunks_mut::<{ TILE_ROWS * TILE_ROWS }>().0.iter_mut().enumerate() {
        let (largest, total) = (&largest[half], &mut total[half]);
        for (pair, weights) in weights.as_chunks_mut::<TILE_ROWS>().0.iter_mut().enumerate() {
            let (even, odd) = (&keys[4 * pair + half], &keys[4 * pair + 2 + half]);
            for row in 0..TILE_ROWS {
                let (even, odd) = (exp(largest[row] - even[row]), exp(largest[row] - odd[row]));
                total[row] += even + odd;
                weights[row] = u32::from(bf16_bits(even)) | u32::from(bf16_bits(odd)) << 16;
            }
        }
    }
}
