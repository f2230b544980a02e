//! The fused Hopper kernel in the simulator, all checkers on, against the f64 reference.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::Device;
use dualgemm_formats::{BlockFormat, FloatMatrix, FloatType, GlobalScale, Matrix};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::host::{Fused, Operands};
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_sim::Gpu;
use half::f16;

fn operands(n: usize, (m, k): (usize, usize)) -> (FloatMatrix<'static>, GateUp<'static>) {
    let mut inputs = Inputs::seeded(7);
    let mut half = |name, scale| {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, GlobalScale::multiplier(scale)).unwrap()
    };
    let weights = GateUp::new(half("gate", 0.011), half("up", 0.023));
    (inputs.floats("a", FloatType::F16, m, k).unwrap(), weights)
}

fn f16s<'m>(a: &'m FloatMatrix<'static>) -> &'m Matrix<'static, f16> {
    let FloatMatrix::F16(a) = a else { panic!("A is f16") };
    a
}

fn check(config: Config, activation: Activation, (m, n, k): (usize, usize, usize)) {
    let (a, weights) = operands(n, (m, k));
    let gpu = Gpu::new(dualgemm_sim::Config::default());
    let kernel = Fused::new(&gpu, config, &activation.program(), n).unwrap();
    let on_device = Operands::upload(&gpu, f16s(&a), &Pack::new(&weights).unwrap()).unwrap();
    kernel.launch(&on_device).unwrap_or_else(|e| panic!("{e}"));
    gpu.synchronize().unwrap();
    let got = on_device.read_c(&gpu).unwrap();
    let epilogue = Epilogue { activation, ..Epilogue::default() };
    let want = reference(&epilogue, &AOperand::Float(a), 0..m, &weights);
    let comparison = Comparison::new(&got, &want, n).unwrap();
    // Rounding to f16 alone is 2.1e-4.
    assert!(comparison.rel_l2 < 3e-4, "{} {m}x{n}x{k}: {comparison:?}", config.name());
    on_device.free(&gpu).unwrap();
}

const P: Config = Config { row_groups: 2, tokens: 64, blocks_per_stage: 2, stages: 3, k_groups: 1 };
const D: Config = Config { row_groups: 1, tokens: 8, blocks_per_stage: 4, stages: 3, k_groups: 4 };

#[test]
fn one_tile_close() {
    check(P, Activation::Silu, (64, 64, 256));
}

#[test]
fn tails_in_every_dimension_close() {
    check(P, Activation::Silu, (65, 72, 336));
    check(P, Activation::Silu, (3, 37, 80));
}

#[test]
fn k_groups_close() {
    check(D, Activation::Silu, (1, 64, 512));
    check(D, Activation::Silu, (9, 40, 336));
}

#[test]
fn every_activation_close() {
    for activation in Activation::EXAMPLES {
        check(D, activation, (2, 32, 128));
    }
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let gpu = Gpu::new(dualgemm_sim::Config::default());
    let (a, weights) = operands(32, (2, 64));
    let (wide, _) = operands(32, (2, 80));
    let pack = Pack::new(&weights).unwrap();
    let message = Operands::upload(&gpu, f16s(&wide), &pack).unwrap_err().to_string();
    assert_eq!(message, "A is [2, 80]; the problem asks for [M, 64], as the weights are");
    let kernel = Fused::new(&gpu, D, &Activation::Silu.program(), 40).unwrap();
    let on_device = Operands::upload(&gpu, f16s(&a), &pack).unwrap();
    let message = kernel.launch(&on_device).unwrap_err().to_string();
    assert_eq!(message, "gate is [32, 64]; the problem asks for [40, K]: the kernel is for that N");
    let biased = GateUp { up_bias: Some(vec![0.0; 32].into()), ..weights };
    assert_eq!(Pack::new(&biased).unwrap_err().to_string(), "up has a bias; the sm_90a pack holds none");
}
