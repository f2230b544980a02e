//! A mixture of experts in one call: rows sorted by expert, each run of rows with weights of its own.
//!
//! `cargo run --release -p dualgemm --example experts`

use dualgemm::formats::{FloatMatrix, Matrix, Producer, Search, quantize};
use dualgemm::gemm::{AFormat, AOperand, DualGemmDesc, GateUp, OutputMut};
use dualgemm::{DualGemm, PackedWeights, Rows, Target};

fn main() -> Result<(), dualgemm::Error> {
    let (n, k) = (128, 64);
    let rows_of_expert = [3, 0, 5];
    let m = rows_of_expert.iter().sum();
    let wave = |len: usize, step: f32| (0..len).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();

    let a = AOperand::Float(FloatMatrix::F32(Matrix::new("a", m, k, wave(m * k, 0.3))?));
    let desc = DualGemmDesc::new(m, n, k, AFormat::F32, dualgemm::formats::BlockFormat::Nvfp4);
    let plan = DualGemm::plan(&desc, &Target::default())?;
    println!("{plan}");

    let expert = |e: usize| -> Result<PackedWeights, dualgemm::Error> {
        let half = |name: &str, step: f32| {
            let x = FloatMatrix::F32(Matrix::new(name, n, k, wave(n * k, step + e as f32))?);
            quantize(name, &x, Producer::ModelOpt, Search::Plain)
        };
        plan.prepack(&GateUp::new(half("gate", 0.7)?, half("up", 1.3)?))
    };
    let experts = (0..rows_of_expert.len()).map(expert).collect::<Result<Vec<_>, _>>()?;

    let mut first = 0;
    let mut groups = Vec::new();
    for (weights, count) in experts.iter().zip(rows_of_expert) {
        groups.push(Rows { first, count, weights });
        first += count;
    }
    let mut c = vec![0f32; m * n];
    plan.runner(groups.len())?.run_grouped(&a, &groups, OutputMut::F32(&mut c))?;
    for (row, c) in c.chunks(n).enumerate() {
        println!("row {row}: {:8.4?} …", &c[..4]);
    }
    Ok(())
}
