//! A prompt's causal attention against the definition in f64, where a processor has the instructions.

use dualgemm_cpu::attention::{Heads, causal, is_available};

use super::*;

/// Heads of queries and of keys, rows, features.
const SHAPES: [[usize; 4]; 6] =
    [[9, 3, 160, 64], [4, 2, 37, 32], [2, 2, 33, 128], [6, 2, 1, 64], [3, 1, 129, 256], [2, 1, 300, 96]];

/// Rows of heads side by side, with some elements between rows, and their elements.
fn heads(elements: &[bf16], heads: usize, rows: usize, dim: usize) -> Heads<'_> {
    assert_eq!(elements.len(), rows * (heads * dim + 8));
    Heads { elements, heads, head_stride: dim, row_stride: heads * dim + 8 }
}

#[test]
fn a_prompt_attends_to_itself_and_before_close() {
    for [q_heads, kv_heads, rows, dim] in SHAPES {
        if !is_available(dim) {
            eprintln!("skipped: this processor has no kernels of avx512bf16");
            return;
        }
        let mut random = Random(rows as u64);
        let mut elements = |heads: usize, factor: f32| -> Vec<bf16> {
            let len = rows * (heads * dim + 8);
            (0..len).map(|_| bf16::from_f32(factor * random.float())).collect()
        };
        // Scores of some ten, so that a few keys have most of the weight.
        let (q, k, v) = (elements(q_heads, 4.0), elements(kv_heads, 4.0), elements(kv_heads, 1.0));
        let all =
            [heads(&q, q_heads, rows, dim), heads(&k, kv_heads, rows, dim), heads(&v, kv_heads, rows, dim)];
        let scale = (dim as f32).powf(-0.5);
        let run = |threads| {
            let mut out = vec![bf16::NAN; rows * q_heads * dim];
            causal(all, rows, dim, scale, &mut out, threads).unwrap();
            out
        };
        let out = run(1);
        assert_eq!(out, run(3));
        let at = |of: &Heads<'_>, head: usize, row: usize, i: usize| {
            f64::from(of.elements[head * of.head_stride + row * of.row_stride + i])
        };
        for (row, head) in (0..rows).flat_map(|row| (0..q_heads).map(move |head| (row, head))) {
            let of = head / (q_heads / kv_heads);
            let dot =
                |key| (0..dim).map(|i| at(&all[0], head, row, i) * at(&all[1], of, key, i)).sum::<f64>();
            let scores: Vec<_> = (0..=row).map(|key| f64::from(scale) * dot(key)).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<_> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            for i in 0..dim {
                let want =
                    weights.iter().enumerate().map(|(key, w)| w * at(&all[2], of, key, i)).sum::<f64>()
                        / total;
                let got = f64::from(out[(row * q_heads + head) * dim + i]);
                // Weights and the result are rounded to bf16, half of 2⁻⁸ each; values are below 1.
                assert!(
                    (got - want).abs() < 2f64.powi(-8),
                    "{row} {head} {i} of {rows} x {dim}: {got}, {want}"
                );
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let elements = vec![bf16::ONE; 4 * (2 * 64 + 8)];
    let (two, mut out) = (heads(&elements, 2, 4, 64), vec![bf16::ZERO; 4 * 2 * 64]);
    let fault =
        |all, rows, dim, out: &mut [bf16]| causal(all, rows, dim, 1.0, out, 1).unwrap_err().to_string();
    assert!(fault([two; 3], 4, 48, &mut out).contains("head_dim is 48"));
    if is_available(64) {
        assert!(fault([two; 3], 5, 64, &mut out).contains("q is 2 heads in 544 elements"));
        assert!(fault([two; 3], 4, 64, &mut out[1..]).contains("out is 511 elements"));
        let three = Heads { heads: 3, head_stride: 32, ..two };
        assert!(fault([two, three, three], 4, 64, &mut out).contains("the number of heads is 2, 3 and 3"));
        assert!(fault([two, two, Heads { heads: 0, ..two }], 4, 64, &mut out).contains("v is 0 heads"));
    }
}
