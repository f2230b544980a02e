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

use dualgemm_formats::{FloatMatrix, QuantizedMatrix};
use half::bf16;

use crate::bound::Bounded;
use crate::compare::Element;
use crate::operands::WeightRef;
use crate::{AOperand, Epilogue, GateUp};

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
        WeightRef::Linear(layer) => {
            return quantized(a, &layer.weight, epilogue.alpha_gate, |n| bias(&layer.bias, n));
        }
        WeightRef::GateUp(pair) => (
            quantized(a, &pair.gate, epilogue.alpha_gate, |n| bias(&pair.gate_bias, n)),
            quantized(a, &pair.up, epilogue.alpha_up, |n| bias(&pair.up_bias, n)),
        ),
    };
    let program = epilogue.activation.program();
    let rounded = |x: Bounded| match epilogue.round_gate_up_to_bf16 {
        true => x.rounded_by(|x| <bf16 as Element>::from_f64(x).to_f64()),
        false => x,
    };
    gate.into_iter().zip(up).map(|(gate, up)| program.eval(rounded(gate), rounded(up))).collect()
}

/// C of a linear layer whose weights `[n, k]` are floats, each value with what a right result in f32 may be off by.
///
/// # Panics
/// If K of A and of the weights differs, or the bias has fewer than N values.
pub fn float_linear_reference(
    a: &FloatMatrix<'_>,
    weights: &FloatMatrix<'_>,
    bias: Option<&[f32]>,
) -> Vec<Bounded> {
    let exact = |m| (0..a.cols()).map(|k| Bounded::exact(a.value(m, k).into())).collect();
    let a: Vec<_> = (0..a.rows()).map(exact).collect();
    let b = |n, k| f64::from(weights.value(n, k));
    products(&a, [weights.rows(), weights.cols()], b, 1.0, |n| bias.map_or(0.0, |bias| bias[n].into()))
}

/// `alpha · A·Bᵀ + bias`, row-major.
fn quantized(
    a: &[Vec<Bounded>],
    b: &QuantizedMatrix<'_>,
    alpha: f32,
    bias: impl Fn(usize) -> f64,
) -> Vec<Bounded> {
    products(a, [b.rows(), b.k()], |n, k| b.value(n, k), alpha, bias)
}

/// The same for any matrix `[n, k]`, by its values.
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
