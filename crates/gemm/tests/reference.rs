//! The reference itself, against numbers worked out by hand.

use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AOperand, Activation, Epilogue, GateUp, reference};

/// One row: ones and twos against a gate of ones (times ½) and an up of minus twos, worked out by hand.
#[test]
fn a_case_worked_out_by_hand() {
    let weight = |name: &'static str, byte: u8, scale: u8, global| {
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
