//! Plan, prepack, run through the facade: the real checkpoint, mixtures of experts, and misuse.

mod allocation;
#[cfg(feature = "sim")]
mod blackwell;
#[cfg(feature = "sim")]
mod card;
#[cfg(feature = "sim")]
mod experts;
#[cfg(feature = "sim")]
mod gpu;
mod mlp;
#[cfg(feature = "sim")]
mod on_device;
#[cfg(feature = "sim")]
mod products;

use std::path::{Path, PathBuf};

use dualgemm::check::{Reference, RowSample};
use dualgemm::checkpoint::{Checkpoint, OpenOptions, TensorFiles, Which, activations};
use dualgemm::formats::{
    BlockFormat, FloatMatrix, FloatType, Matrix, Producer, QuantizedMatrix, Search, quantize,
};
use dualgemm::gemm::compare::Element;
use dualgemm::gemm::{AFormat, AOperand, Comparison, DualGemmDesc, Epilogue, GateUp, OutFormat, OutputMut};
use dualgemm::{DualGemm, PackedWeights, Plan, Rows, Target};

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/smollm2-135m-layer14").join(name)
}

fn floats(rows: usize, k: usize, step: f32) -> FloatMatrix<'static> {
    let values: Vec<f32> = (0..rows * k).map(|i| (i as f32 * step).sin()).collect();
    FloatMatrix::F32(Matrix::new("x", rows, k, values).unwrap())
}

fn quantized(name: &str, rows: usize, k: usize, step: f32) -> QuantizedMatrix<'static> {
    quantize(name, &floats(rows, k, step), Producer::ModelOpt, Search::Plain).unwrap()
}

fn a_of(format: AFormat, rows: usize, k: usize, step: f32) -> AOperand<'static> {
    let Some(to) = format.float_type() else { return AOperand::Quantized(quantized("a", rows, k, step)) };
    let x = floats(rows, k, step);
    AOperand::Float(FloatMatrix::rounded("x", to, rows, k, x.values()).unwrap())
}

fn expert(n: usize, k: usize, e: usize) -> GateUp<'static> {
    let step = e as f32;
    GateUp::new(quantized("gate", n, k, 0.7 + step), quantized("up", n, k, 1.3 + step))
}

/// Relative L2 error of all rows of C.
fn rel_l2<T: Element>(c: &[T], epilogue: &Epilogue, a: &AOperand<'_>, weights: &GateUp<'_>) -> f64 {
    let want = Reference::new(a, &RowSample::all(a.rows())).values(epilogue, weights).unwrap();
    Comparison::new(c, &want, weights.n()).unwrap().rel_l2
}

fn plan(m: usize, n: usize, k: usize) -> Plan {
    DualGemm::plan(&DualGemmDesc::new(m, n, k, AFormat::F32, BlockFormat::Nvfp4), &Target::default()).unwrap()
}

/// A published crate is its own folder: what it includes from beside that would not be there.
#[test]
fn the_crate_includes_nothing_from_outside_its_folder() {
    let includes = include_str!("../../src/lib.rs").lines().filter(|line| line.contains("include_str!"));
    assert_eq!(includes.collect::<Vec<_>>(), ["#![doc = include_str!(\"../README.md\")]"]);
    assert!(include_str!("../../README.md").starts_with("# dualgemm"));
    assert!(
        !std::fs::symlink_metadata(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap().is_symlink()
    );
}

/// The README's ten lines, against the reference.
#[test]
fn the_readme_example_is_right() {
    let checkpoint = Checkpoint::open(&testdata("modelopt-nvfp4"), &OpenOptions::default()).unwrap();
    let weights = checkpoint.gate_up(0).unwrap();
    let files = TensorFiles::open(&testdata("hidden-states-f32.safetensors")).unwrap();
    let a = activations::read(&files, None).unwrap();

    let desc = DualGemmDesc::new(a.rows(), weights.n(), weights.k(), AFormat::of(&a), weights.gate.format());
    let plan = DualGemm::plan(&desc, &Target::default()).unwrap();
    let packed = plan.prepack(&weights).unwrap();
    let c = plan.run_to_vec(&a, &packed).unwrap();

    let found = rel_l2(&c, &desc.epilogue, &a, &weights);
    assert!(c.len() == 64 * desc.n && found < 1e-6, "{found:e}");
    assert!(plan.to_string().contains("C[64,1536] f32 = silu"), "{plan}");
}

#[test]
fn plans_survive_json_and_run_the_same_afterwards_exact() {
    let (plan, weights) = (plan(5, 48, 64), expert(48, 64, 0));
    let again: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    assert_eq!(again, plan);
    let (a, packed) = (AOperand::Float(floats(5, 64, 0.3)), plan.prepack(&weights).unwrap());
    assert_eq!(again.run_to_vec(&a, &packed).unwrap(), plan.run_to_vec(&a, &packed).unwrap());
}

#[test]
fn runs_of_features_pack_to_the_same_weights_exact() {
    let (plan, weights) = (plan(1, 48, 64), expert(48, 64, 1));
    let run = |rows| Ok(weights.features(rows)?);
    let packed = plan.prepack(&weights).unwrap();
    assert_eq!(plan.prepack_runs([run(0..16), run(16..48)]).unwrap(), packed);
    assert!(plan.prepack_runs([run(0..16)]).is_err(), "features are missing");
}

/// Each expert's rows are what that expert alone gives, bit for bit where A is nvfp4 (sums over float A take an order
/// that depends on how many rows there are); rows of no expert stay as they were. Out of order they are refused.
fn grouped_rows_equal_single_products(target: &Target, refusal: &str) {
    let (m, n, k) = (9, 40, 64);
    let desc = DualGemmDesc::new(m, n, k, AFormat::Nvfp4, BlockFormat::Nvfp4);
    let plan = DualGemm::plan(&desc, target).unwrap();
    let experts: Vec<PackedWeights> = (0..3).map(|e| plan.prepack(&expert(n, k, e)).unwrap()).collect();
    let a = AOperand::Quantized(quantized("a", m, k, 0.3));
    // Rows 0..3 of expert 0, none of expert 1, 4..8 of expert 2; 3 and 8 belong to nobody.
    let ranges = [(0, 3), (3, 0), (4, 4)];
    let groups: Vec<Rows<'_>> =
        experts.iter().zip(ranges).map(|(weights, (first, count))| Rows { first, count, weights }).collect();
    let mut c = vec![-1f32; m * n];
    let mut runner = plan.runner(3).unwrap();
    for _ in 0..2 {
        runner.run_grouped(&a, &groups, OutputMut::F32(&mut c)).unwrap();
    }
    let alone: Vec<Vec<f32>> = experts.iter().map(|w| plan.run_to_vec(&a, w).unwrap()).collect();
    for (row, c) in c.chunks(n).enumerate() {
        let of = ranges.iter().position(|&(first, count)| (first..first + count).contains(&row));
        match of {
            Some(expert) => assert_eq!(c, &alone[expert][row * n..(row + 1) * n], "row {row}"),
            None => assert!(c.iter().all(|&x| x == -1.0), "row {row} belongs to nobody"),
        }
    }
    let out_of_order = [groups[2], groups[0]];
    let message = runner.run_grouped(&a, &out_of_order, OutputMut::F32(&mut c)).unwrap_err();
    assert!(message.to_string().contains(refusal), "{message}");
}

#[test]
fn grouped_rows_equal_single_products_exact() {
    grouped_rows_equal_single_products(&Target::default(), "group 1: rows 0..3 do not fit");
}

#[test]
fn misuse_is_refused_with_a_reason() {
    let plan = plan(4, 48, 64);
    let packed = plan.prepack(&expert(48, 64, 0)).unwrap();
    let message = |r: Result<Vec<f32>, dualgemm::Error>| r.unwrap_err().to_string();
    let a = |rows, k| AOperand::Float(floats(rows, k, 0.3));
    assert!(message(plan.run_to_vec(&a(5, 64), &packed)).contains("[5, 64]"));
    assert!(message(plan.run_to_vec(&a(4, 80), &packed)).contains("[4, 80]"));
    let quantized = AOperand::Quantized(quantized("a", 4, 64, 0.3));
    assert!(message(plan.run_to_vec(&quantized, &packed)).contains("nvfp4"));
    assert_eq!(
        plan.prepack(&expert(32, 64, 0)).unwrap_err().to_string(),
        "gate is nvfp4 [32, 64]; the problem asks for nvfp4 [48, 64]"
    );
    let mut short = vec![0f32; 4 * 48 - 1];
    assert!(plan.run(&a(4, 64), &packed, OutputMut::F32(&mut short)).is_err());
    let half = DualGemmDesc { out: OutFormat::F16, ..*plan.desc() };
    let half = DualGemm::plan(&half, &Target::default()).unwrap();
    assert!(half.run_to_vec(&a(4, 64), &packed).is_err(), "f16 does not fit f32");
    let odd = DualGemmDesc::new(1, 1, 24, AFormat::F32, BlockFormat::Nvfp4);
    assert!(DualGemm::plan(&odd, &Target::default()).is_err());
    assert!(dualgemm::quantize_a(&quantized, dualgemm::gemm::QuantizeA::Dynamic).is_err());
}

/// Fewer rows than planned are fine: decoding varies M under one plan.
#[test]
fn one_plan_serves_fewer_rows_exact() {
    let (many, weights) = (plan(9, 48, 64), expert(48, 64, 2));
    let packed = many.prepack(&weights).unwrap();
    let a = AOperand::Float(floats(2, 64, 0.3));
    let c = many.run_to_vec(&a, &packed).unwrap();
    assert_eq!(c.len(), 2 * 48);
    assert!(rel_l2(&c, &Epilogue::default(), &a, &weights) < 1e-6);
}
