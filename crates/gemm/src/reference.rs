//! The operations, in f64 and in the plainest loops: what every kernel is compared with.
//!
//! ```text
//! gate[m,n] = alpha_gate · Σ_k A[m,k] · B1[n,k] + bias_gate[n]
//! up[m,n]   = alpha_up   · Σ_k A[m,k] · B2[n,k] + bias_up[n]
//! C[m,n]    = act(gate[m,n], up[m,n])                          silu: gate · sigmoid(gate) · up
//!
//! linear    C[m,n] = alpha_gate · Σ_k A[m,k] · B[n,k] + bias[n]
//! MLP       Y = linear(H) where H is C above, stored in the format between the products
//! mixture   Y[t] = Σ_j w[t,j] · MLP of expert id[t,j] (A[t]), in the order of j; or of w[t,j] · A[t]
//! ```
//!
//! A value of A or B is `code · block_scale · tensor_scale`, or a float as it is. Products of codes and scales are
//! exact in f64; only the sums round, at 2⁻⁵³.

use std::ops::Range;

use dualgemm_formats::QuantizedMatrix;
use half::bf16;

use crate::bound::Bounded;
use crate::compare::Element;
use crate::operands::WeightRef;
use crate::{AOperand, Epilogue, GateUp, Linear};

/// C for `rows` of A against one pair of weights: `rows.len() · n` values, row-major.
///
/// # Panics
/// If K of the operands differs, a bias is too short, or `rows` exceeds A.
pub fn reference(
    epilogue: &Epilogue,
    a: &AOperand<'_>,
    rows: Range<usize>,
    weights: &GateUp<'_>,
) -> Vec<f64> {
    bounded_reference(epilogue, a, rows, weights).into_iter().map(|c| c.value).collect()
}

/// C of either operation, each value with what a right result in f32 may be off by; see [`crate::bound`].
///
/// # Panics
/// As [`reference()`].
pub fn bounded_reference<'w>(
    epilogue: &Epilogue,
    a: &AOperand<'_>,
    rows: Range<usize>,
    weights: impl Into<WeightRef<'w>>,
) -> Vec<Bounded> {
    let exact = |m| (0..a.k()).map(|k| Bounded::exact(a.value(m, k))).collect();
    reference_of(epilogue, &rows.map(exact).collect::<Vec<_>>(), weights.into())
}

/// As [`bounded_reference`], for rows of A that may be off themselves.
///
/// # Panics
/// As [`reference()`].
pub fn reference_of(epilogue: &Epilogue, a: &[Vec<Bounded>], weights: WeightRef<'_>) -> Vec<Bounded> {
    let bias = |bias: &Option<std::borrow::Cow<'_, [f32]>>, n: usize| {
        bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]))
    };
    let (gate, up) = match weights {
        WeightRef::Linear(Linear { weight: w, bias: b }) => {
            let value = |n, k| w.value(n, k);
            return products(a, [w.rows(), w.k()], value, epilogue.alpha_gate, |n| bias(b, n));
        }
        WeightRef::GateUp(pair) => {
            let of = |w: &QuantizedMatrix<'_>, alpha, b| {
                products(a, [w.rows(), w.k()], |n, k| w.value(n, k), alpha, |n| bias(b, n))
            };
            (
                of(&pair.gate, epilogue.alpha_gate, &pair.gate_bias),
                of(&pair.up, epilogue.alpha_up, &pair.up_bias),
            )
        }
    };
    let program = epilogue.activation.program();
    let rounded = |x: Bounded| match epilogue.round_gate_up_to_bf16 {
        true => x.rounded_by(|x| <bf16 as Element>::from_f64(x).to_f64()),
        false => x,
    };
    gate.into_iter().zip(up).map(|(gate, up)| program.eval(rounded(gate), rounded(up))).collect()
}

/// `alpha · A·Bᵀ + bias`, row-major, of B `[n, k]` by its values.
fn products(
    a: &[Vec<Bounded>],
    [n, k]: [usize; 2],
    b: impl Fn(usize, usize) -> f64,
    alpha: f32,
    bias: impl Fn(usize) -> f64,
) -> Vec<Bounded> {
    // Sums of a token side by side: each in order of K, without waiting for the one before.
    let columns: Vec<Vec<f64>> = (0..k).map(|k| (0..n).map(|n| b(n, k)).collect()).collect();
    let mut c = Vec::with_capacity(a.len() * n);
    for a_row in a {
        assert_eq!(a_row.len(), k, "K of A and of B");
        let mut sums = vec![[0.0; 3]; n];
        for (x, column) in a_row.iter().zip(&columns) {
            for ([dot, magnitudes, squares], y) in sums.iter_mut().zip(column) {
                let (product, off) = (x.value * y, x.error * y);
                *dot += product;
                *magnitudes += product.abs();
                *squares += off * off;
            }
        }
        for (n, [dot, magnitudes, squares]) in sums.into_iter().enumerate() {
            let sum = Bounded::product(k, [dot, magnitudes], alpha.into(), bias(n));
            c.push(sum.off_by(f64::from(alpha).abs() * Bounded::together(squares)));
        }
    }
    c
}
