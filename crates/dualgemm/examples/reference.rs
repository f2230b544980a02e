//! The operation in its plainest form: four rows against a small pair of weights, all in f64.
//!
//! `cargo run -p dualgemm --example reference`

use dualgemm::formats::{FloatMatrix, Matrix, Producer, Search, quantize};
use dualgemm::gemm::{AOperand, Epilogue, GateUp, reference};

fn main() -> Result<(), dualgemm::Error> {
    let (m, n, k) = (4, 8, 32);
    let wave = |len: usize, step: f32| (0..len).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
    let matrix = |name: &str, rows, step| Matrix::new(name, rows, k, wave(rows * k, step));

    let gate = FloatMatrix::F32(matrix("gate", n, 0.7)?);
    let up = FloatMatrix::F32(matrix("up", n, 1.3)?);
    let weights = GateUp::new(
        quantize("gate", &gate, Producer::ModelOpt, Search::Plain)?,
        quantize("up", &up, Producer::ModelOpt, Search::Plain)?,
    );
    let a = AOperand::Float(FloatMatrix::F32(matrix("a", m, 0.3)?));

    let c = reference(&Epilogue::default(), &a, 0..m, &weights);
    for row in c.chunks(n) {
        println!("{row:8.4?}");
    }
    Ok(())
}
