//! The fused Blackwell kernel in the simulator, all checkers on, against the f64 reference.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::Device;
use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::sm100a::config::{Config, Rows};
use dualgemm_kernels::sm100a::fused::Out;
use dualgemm_kernels::sm100a::host::{Fused, FusedArgs, Operand};
use dualgemm_sim::{Card, Gpu};

fn matrices((m, n, k): (usize, usize, usize)) -> (QuantizedMatrix<'static>, GateUp<'static>) {
    let mut inputs = Inputs::seeded(7);
    let mut matrix = |name, rows, scale| {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        inputs.quantized(name, BlockFormat::Nvfp4, (rows, k), sets, GlobalScale::multiplier(scale)).unwrap()
    };
    let a = matrix("A", m, 0.5);
    (a, GateUp::new(matrix("gate", n, 0.011), matrix("up", n, 0.023)))
}

fn run(gpu: &Gpu, config: Config, a: &QuantizedMatrix<'_>, weights: &GateUp<'_>) -> Vec<f32> {
    let [x, gate, up] = [a, &weights.gate, &weights.up].map(|m| Operand::upload(gpu, m).unwrap());
    let (m, n) = (a.rows(), weights.n());
    let c = gpu.alloc(m * n * 4).unwrap();
    let scale = |w: &QuantizedMatrix<'_>| a.global_scale().value() * w.global_scale().value();
    let alpha = [scale(&weights.gate), scale(&weights.up)];
    let kernel = Fused::new(gpu, config, &Activation::Silu.program(), Out::F32, n).unwrap();
    kernel
        .launch(&FusedArgs { a: x, gate, up, c, alpha })
        .unwrap_or_else(|e| panic!("{}: {e}", config.name()));
    gpu.synchronize().unwrap();
    let mut bytes = vec![0; m * n * 4];
    gpu.copy_from(&mut bytes, c).unwrap();
    [x, gate, up].into_iter().for_each(|operand| operand.free(gpu).unwrap());
    gpu.free(c).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn check(config: Config, (m, n, k): (usize, usize, usize)) {
    let (a, weights) = matrices((m, n, k));
    let gpu = Gpu::new(dualgemm_sim::Config::default().card(Card::B200));
    let got = run(&gpu, config, &a, &weights);
    let want = reference(&Epilogue::default(), &AOperand::Quantized(a), 0..m, &weights);
    let comparison = Comparison::new(&got, &want, n).unwrap();
    assert!(comparison.rel_l2 < 1e-6, "{} {m}x{n}x{k}: {comparison:?}", config.name());
}

const TOKENS: Config =
    Config { rows: Rows::Tokens, n: 64, cta_group: 1, split_k: 1, stages: 2, accumulators: 2 };
const FEATURES: Config =
    Config { rows: Rows::Features, n: 8, cta_group: 1, split_k: 1, stages: 2, accumulators: 1 };

#[test]
fn one_tile_close() {
    check(TOKENS, (128, 64, 256));
    check(FEATURES, (8, 128, 256));
}

#[test]
fn tails_in_every_dimension_close() {
    check(TOKENS, (130, 72, 336));
    check(TOKENS, (3, 37, 80));
    check(FEATURES, (3, 37, 80));
    check(FEATURES, (7, 130, 592));
}

#[test]
fn pairs_of_ctas_close() {
    for n in [32, 64, 96, 128] {
        let config = Config { cta_group: 2, n, accumulators: 1, ..TOKENS };
        check(config, (256, 2 * n as usize, 256));
        check(config, (131, n as usize + 40, 336));
    }
}

#[test]
fn tiles_across_scale_atoms_close() {
    check(Config { n: 96, accumulators: 1, ..TOKENS }, (128, 4 * 96, 256));
}

#[test]
fn split_k_close() {
    for split_k in [2, 4] {
        check(Config { split_k, ..FEATURES }, (5, 130, 1040));
        check(Config { split_k, n: 32, ..FEATURES }, (64, 128, 1280));
        check(Config { split_k, accumulators: 1, ..TOKENS }, (130, 100, 1040));
    }
}

/// More tiles than CTAs: the ring and both pairs of accumulators wrap around several times.
#[test]
fn persistent_ctas_close() {
    check(Config { n: 32, ..TOKENS }, (20, 32 * 300, 64));
    check(Config { cta_group: 2, n: 32, ..TOKENS }, (130, 32 * 150, 320));
}

#[test]
fn every_configuration_of_the_menu_close() {
    for config in Config::MENU {
        let tokens = if config.rows == Rows::Features { config.n as usize - 1 } else { 140 };
        check(config, (tokens, 200, 1072));
    }
}
