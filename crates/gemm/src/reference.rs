//! The operation, in f64 and in the plainest loops: what every kernel is compared with.
//!
//! ```text
//! gate[m,n] = alpha_gate · Σ_k A[m,k] · B1[n,k] + bias_gate[n]
//! up[m,n]   = alpha_up   · Σ_k A[m,k] · B2[n,k] + bias_up[n]
//! C[m,n]    = act(gate[m,n], up[m,n])                          silu: gate · sigmoid(gate) · up
//! ```
//!
//! A value of A or B is `code · block_scale · tensor_scale`, or a float as it is. Products of codes and scales are
//! exact in f64; only the sums round, at 2⁻⁵³.

use std::ops::Range;

use half::bf16;

use crate::bound::Bounded;
use crate::compare::Element;
use crate::{AOperand, Epilogue, GateUp};

/// C for `rows` of A against one pair of weights: `rows.len() · n` values, row-major.
///
/// # Panics
/// If K of the operands differs, a bias is too short, or `rows` exceeds A;
/// [`DualGemmDesc::check_operands`](crate::DualGemmDesc::check_operands) tells of the operands beforehand.
pub fn reference(
    epilogue: &Epilogue,
    a: &AOperand<'_>,
    rows: Range<usize>,
    weights: &GateUp<'_>,
) -> Vec<f64> {
    bounded_reference(epilogue, a, rows, weights).into_iter().map(|c| c.value).collect()
}

/// The same, each value with what a right result in f32 may be off by; see [`crate::bound`].
///
/// # Panics
/// As [`reference()`].
pub fn bounded_reference(
    epilogue: &Epilogue,
    a: &AOperand<'_>,
    rows: Range<usize>,
    weights: &GateUp<'_>,
) -> Vec<Bounded> {
    let program = epilogue.activation.program();
    let gate_up = [
        (&weights.gate, &weights.gate_bias, epilogue.alpha_gate),
        (&weights.up, &weights.up_bias, epilogue.alpha_up),
    ];
    let mut halves = gate_up.map(|(b, bias, alpha)| {
        assert_eq!(a.k(), b.k(), "K of A and of {}", b.name());
        // Sums of a token side by side: each in order of K, without waiting for the one before.
        let columns: Vec<Vec<f64>> =
            (0..b.k()).map(|k| (0..b.rows()).map(|n| b.value(n, k)).collect()).collect();
        let mut acc = Vec::with_capacity(rows.len() * b.rows());
        for m in rows.clone() {
            let mut sums = vec![[0.0; 2]; b.rows()];
            for (k, column) in columns.iter().enumerate() {
                let x = a.value(m, k);
                for ([dot, magnitudes], y) in sums.iter_mut().zip(column) {
                    *dot += x * y;
                    *magnitudes += (x * y).abs();
                }
            }
            for (n, sums) in sums.into_iter().enumerate() {
                let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]));
                acc.push(Bounded::product(b.k(), sums, alpha.into(), bias));
            }
        }
        acc
    });
    if epilogue.round_gate_up_to_bf16 {
        let round = |x: f64| <bf16 as Element>::from_f64(x).to_f64();
        halves.iter_mut().flatten().for_each(|x| *x = x.rounded_by(round));
    }
    let [gate, up] = halves;
    gate.into_iter().zip(up).map(|(gate, up)| program.eval(gate, up)).collect()
}
