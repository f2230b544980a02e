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
    let program = epilogue.activation.program();
    let gate_up = [
        (&weights.gate, &weights.gate_bias, epilogue.alpha_gate),
        (&weights.up, &weights.up_bias, epilogue.alpha_up),
    ];
    let mut halves = gate_up.map(|(b, bias, alpha)| {
        let weight_rows: Vec<Vec<f64>> =
            (0..b.rows()).map(|n| (0..b.k()).map(|k| b.value(n, k)).collect()).collect();
        let mut acc = Vec::with_capacity(rows.len() * b.rows());
        for m in rows.clone() {
            let a_row: Vec<f64> = (0..a.k()).map(|k| a.value(m, k)).collect();
            for (n, b_row) in weight_rows.iter().enumerate() {
                assert_eq!(a_row.len(), b_row.len(), "K of A and of {}", b.name());
                let dot: f64 = a_row.iter().zip(b_row).map(|(x, y)| x * y).sum();
                acc.push(f64::from(alpha) * dot + bias.as_ref().map_or(0.0, |bias| f64::from(bias[n])));
            }
        }
        acc
    });
    if epilogue.round_gate_up_to_bf16 {
        halves.iter_mut().flatten().for_each(|x| *x = bf16::from_f64(*x).to_f64());
    }
    let [gate, up] = halves;
    gate.into_iter().zip(up).map(|(gate, up)| program.eval_f64(gate, up)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Activation;
    use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};

    /// One row: ones and twos against a gate of ones (times ½) and an up of minus twos, worked out by hand.
    #[test]
    fn a_case_worked_out_by_hand() {
        let weight = |name: &str, byte: u8, scale: u8, global| {
            let global = GlobalScale::multiplier(global);
            QuantizedMatrix::new(
                name,
                BlockFormat::Nvfp4,
                1,
                16,
                vec![byte; 8],
                vec![scale],
                ScaleLayout::Linear,
                global,
            )
            .unwrap()
        };
        // Code 2 is 1, code 12 is -2; scale byte 0x38 is 1, 0x40 is 2.
        let weights = GateUp::new(weight("gate", 0x22, 0x38, 0.5), weight("up", 0xCC, 0x40, 0.25));
        let a: Vec<f32> = (0..16).map(|k| if k < 8 { 1.0 } else { 2.0 }).collect();
        let a = AOperand::Float(FloatMatrix::F32(Matrix::new("a", 1, 16, a).unwrap()));
        // Σ a = 24: gate = 24 · 1 · 1 · ½ = 12, up = 24 · -2 · 2 · ¼ = -24.
        let epilogue = Epilogue { activation: Activation::Identity, ..Epilogue::default() };
        assert_eq!(reference(&epilogue, &a, 0..1, &weights), [12.0 * -24.0]);
        let silu = 12.0 / (1.0 + (-12f64).exp()) * -24.0;
        assert_eq!(reference(&Epilogue::default(), &a, 0..1, &weights), [silu]);
    }
}
