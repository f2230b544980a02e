//! Against the definition in f64: with tiles in software, and with those that this processor has.

use super::*;
use crate::fixtures::Random;

/// Heads of queries and of keys, rows, features.
const SHAPES: [[usize; 4]; 7] = [
    [9, 3, 160, 64],
    [4, 2, 37, 32],
    [2, 2, 33, 128],
    [6, 2, 1, 64],
    [3, 1, 129, 256],
    [2, 1, 300, 96],
    [1, 1, 600, 32],
];

/// Elements between rows that belong to no head.
const GAP: usize = 8;

/// Tiles in software, with this processor's vectors, and what a caller gets.
fn sets() -> impl Iterator<Item = Available> {
    let emulated = Isa::best().checked().unwrap().emulating_tiles();
    let own = Isa::ALL.into_iter().filter(|isa| isa.tiles() != Tiles::No && isa.available());
    own.map(|isa| isa.checked().unwrap()).chain([emulated])
}

/// Rows of heads side by side.
fn heads(elements: &[bf16], heads: usize, rows: usize, dim: usize) -> Heads<'_> {
    assert_eq!(elements.len(), rows * (heads * dim + GAP));
    Heads { elements, heads, head_stride: dim, row_stride: heads * dim + GAP }
}

/// Numbers from -1 to 1.
fn random(seed: usize) -> impl FnMut() -> f32 {
    let mut random = Random(seed as u64);
    move || random.float()
}

#[test]
fn a_prompt_attends_to_itself_and_before_close() {
    for [q_heads, kv_heads, rows, dim] in SHAPES {
        let mut random = random(rows);
        let mut elements = |heads: usize, factor: f32| -> Vec<bf16> {
            (0..rows * (heads * dim + GAP)).map(|_| bf16::from_f32(factor * random())).collect()
        };
        // Scores of some ten, so that a few keys have most of the weight.
        let (q, k, v) = (elements(q_heads, 4.0), elements(kv_heads, 4.0), elements(kv_heads, 1.0));
        let of = |elements, count| heads(elements, count, rows, dim);
        let (q, k, v) = (of(&q, q_heads), of(&k, kv_heads), of(&v, kv_heads));
        let causal = Causal { q, k, v, rows, dim, scale: (dim as f32).powf(-0.5) };
        let (want, mut of_tiles) = (exact(&causal), Vec::new());
        for isa in sets() {
            let run = |threads| {
                let mut out = vec![bf16::NAN; rows * q_heads * dim];
                causal.run_on(isa, &mut out, threads, &mut Prepared::default()).unwrap();
                out
            };
            let out = run(1);
            assert_eq!(out, run(3));
            for (i, (got, want)) in out.iter().zip(&want).enumerate() {
                // Weights are off by up to 2⁻⁸, and the result by 2⁻⁹; values are below 1.
                let off = (f64::from(*got) - want).abs();
                assert!(
                    off < 3.0 * 2f64.powi(-9),
                    "{i} of {rows} x {q_heads} x {dim}, {isa:?}: {got}, {want}"
                );
            }
            if isa.tiles.are_real() {
                of_tiles.push(out);
            }
        }
        assert!(of_tiles.iter().all(|out| *out == of_tiles[0]), "tiles in software have other bits");
    }
}

fn exact(causal: &Causal<'_>) -> Vec<f64> {
    let Causal { q, k, v, rows, dim, scale } = *causal;
    fn at(of: Heads<'_>, head: usize, row: usize, dim: usize) -> impl Iterator<Item = f64> {
        of.row(head, row, dim).iter().map(|&x| f64::from(x))
    }
    let mut out = Vec::new();
    for (row, head) in (0..rows).flat_map(|row| (0..q.heads).map(move |head| (row, head))) {
        let of = head / (q.heads / k.heads);
        let score = |key| {
            f64::from(scale) * at(q, head, row, dim).zip(at(k, of, key, dim)).map(|(q, k)| q * k).sum::<f64>()
        };
        let scores: Vec<_> = (0..=row).map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<_> = scores.iter().map(|score| (score - largest).exp()).collect();
        let (total, mut sums) = (weights.iter().sum::<f64>(), vec![0.0; dim]);
        for (key, weight) in weights.iter().enumerate() {
            sums.iter_mut().zip(at(v, of, key, dim)).for_each(|(sum, value)| *sum += weight * value / total);
        }
        out.extend(sums);
    }
    out
}

/// NaN and infinities reach the rows that see them and no others, but values of the same 32 tokens: 0 · NaN.
#[test]
fn what_is_not_finite_stays_in_the_rows_that_see_it() {
    let (rows, dim) = (200, 32);
    for (at, bad) in
        [(0, bf16::NAN), (1, bf16::NAN), (1, bf16::INFINITY), (2, bf16::NAN), (2, bf16::NEG_INFINITY)]
    {
        let elements = || vec![bf16::ONE; rows * (dim + GAP)];
        let mut all = [elements(), elements(), elements()];
        all[at][160 * (dim + GAP)] = bad;
        let [q, k, v] = all.each_ref().map(|of| heads(of, 1, rows, dim));
        for isa in sets() {
            // What an earlier call left behind must not be seen.
            let mut out = vec![bf16::NAN; rows * dim];
            let mut prepared = Prepared(Aligned::zeroed(2 * KEYS * dim));
            prepared.0.fill(u32::MAX);
            Causal { q, k, v, rows, dim, scale: 1.0 }.run_on(isa, &mut out, 1, &mut prepared).unwrap();
            for (row, out) in out.chunks_exact(dim).enumerate() {
                let seen = if at == 0 { row == 160 } else { row >= 160 };
                assert_eq!(!out[0].is_finite(), seen, "row {row}, {bad} in operand {at}, {isa:?}");
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let elements = vec![bf16::ONE; 4 * (2 * 64 + GAP)];
    let (two, mut out) = (heads(&elements, 2, 4, 64), vec![bf16::ZERO; 4 * 2 * 64]);
    let isa = Isa::best().checked().unwrap().emulating_tiles();
    let mut fault = |[q, k, v]: [Heads<'_>; 3], rows, dim, left_out| {
        let causal = Causal { q, k, v, rows, dim, scale: 1.0 };
        causal.run_on(isa, &mut out[left_out..], 1, &mut Prepared::default()).unwrap_err().to_string()
    };
    assert!(fault([two; 3], 4, 48, 0).contains("head_dim is 48"));
    assert!(fault([two; 3], 5, 64, 0).contains("q is 2 heads in 544 elements"));
    assert!(fault([two; 3], 4, 64, 1).contains("out is 511 elements"));
    let three = Heads { heads: 3, head_stride: 32, ..two };
    assert!(fault([two, three, three], 4, 64, 0).contains("the number of heads is 2, 3 and 3"));
    assert!(fault([two, two, Heads { heads: 0, ..two }], 4, 64, 0).contains("v is 0 heads"));
}
