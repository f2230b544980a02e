//! The fused Blackwell kernels in the simulator, all checkers on, against the f64 reference.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Device, LaunchSpec};
use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::parts::operand::{FusedArgs, Operand};
use dualgemm_kernels::parts::rows::Out;
use dualgemm_kernels::sm100a::config::Side;
use dualgemm_kernels::{Error, sm100a, sm120a};
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

/// A configuration of either kernel.
#[derive(Clone, Copy)]
enum Config {
    Sm100(sm100a::config::Config),
    Sm120(sm120a::config::Config),
}

impl Config {
    fn name(self) -> String {
        match self {
            Self::Sm100(config) => config.name(),
            Self::Sm120(config) => config.name(),
        }
    }

    fn card(self) -> Card {
        match self {
            Self::Sm100(_) => Card::B200,
            Self::Sm120(_) => Card::RtxPro6000,
        }
    }

    fn spec(self, gpu: &Gpu, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (program, n) = (Activation::Silu.program(), args.gate.rows);
        match self {
            Self::Sm100(config) => sm100a::host::Fused::new(gpu, config, &program, Out::F32, n)?.spec(args),
            Self::Sm120(config) => sm120a::host::Fused::new(gpu, config, &program, Out::F32, n)?.spec(args),
        }
    }
}

fn run(gpu: &Gpu, config: Config, a: &QuantizedMatrix<'_>, weights: &GateUp<'_>) -> Vec<f32> {
    let [x, gate, up] = [a, &weights.gate, &weights.up].map(|m| Operand::upload(gpu, m).unwrap());
    let (m, n) = (a.rows(), weights.n());
    let c = gpu.alloc(m * n * 4).unwrap();
    let scale = |w: &QuantizedMatrix<'_>| a.global_scale().value() * w.global_scale().value();
    let alpha = [scale(&weights.gate), scale(&weights.up)];
    let spec = config.spec(gpu, &FusedArgs { a: x, gate, up, c, alpha }).unwrap();
    gpu.launch(&spec).unwrap_or_else(|e| panic!("{}: {e}", config.name()));
    gpu.synchronize().unwrap();
    let mut bytes = vec![0; m * n * 4];
    gpu.copy_from(&mut bytes, c).unwrap();
    [x, gate, up].into_iter().for_each(|operand| operand.free(gpu).unwrap());
    gpu.free(c).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn check(config: Config, (m, n, k): (usize, usize, usize)) {
    let (a, weights) = matrices((m, n, k));
    let gpu = Gpu::new(dualgemm_sim::Config::default().card(config.card()));
    let got = run(&gpu, config, &a, &weights);
    let want = reference(&Epilogue::default(), &AOperand::Quantized(a), 0..m, &weights);
    let comparison = Comparison::new(&got, &want, n).unwrap();
    assert!(comparison.rel_l2 < 1e-6, "{} {m}x{n}x{k}: {comparison:?}", config.name());
}

const TOKENS: sm100a::config::Config = sm100a::config::Config {
    side: Side::Tokens,
    n: 64,
    cta_group: 1,
    split_k: 1,
    stages: 2,
    accumulators: 2,
};
const FEATURES: sm100a::config::Config =
    sm100a::config::Config { side: Side::Features, n: 8, accumulators: 1, ..TOKENS };

#[test]
fn sm100_one_tile_close() {
    check(Config::Sm100(TOKENS), (128, 64, 256));
    check(Config::Sm100(FEATURES), (8, 128, 256));
}

#[test]
fn sm100_tails_in_every_dimension_close() {
    check(Config::Sm100(TOKENS), (130, 72, 336));
    check(Config::Sm100(TOKENS), (3, 37, 80));
    check(Config::Sm100(FEATURES), (3, 37, 80));
    check(Config::Sm100(FEATURES), (7, 130, 592));
}

#[test]
fn sm100_pairs_of_ctas_close() {
    for n in [32, 64, 96, 128] {
        let config = Config::Sm100(sm100a::config::Config { cta_group: 2, n, accumulators: 1, ..TOKENS });
        check(config, (256, 2 * n as usize, 256));
        check(config, (131, n as usize + 40, 336));
    }
}

#[test]
fn sm100_tiles_across_scale_atoms_close() {
    let config = sm100a::config::Config { n: 96, accumulators: 1, ..TOKENS };
    check(Config::Sm100(config), (128, 4 * 96, 256));
}

#[test]
fn sm100_split_k_close() {
    for split_k in [2, 4] {
        let features = sm100a::config::Config { split_k, ..FEATURES };
        check(Config::Sm100(features), (5, 130, 1040));
        check(Config::Sm100(sm100a::config::Config { n: 32, ..features }), (64, 128, 1280));
        let tokens = sm100a::config::Config { split_k, accumulators: 1, ..TOKENS };
        check(Config::Sm100(tokens), (130, 100, 1040));
    }
}

/// More tiles than CTAs: the ring and both pairs of accumulators wrap around several times.
#[test]
fn sm100_persistent_ctas_close() {
    let config = sm100a::config::Config { n: 32, ..TOKENS };
    check(Config::Sm100(config), (1, 32 * 160, 64));
    check(Config::Sm100(sm100a::config::Config { cta_group: 2, ..config }), (129, 32 * 80, 320));
}

#[test]
fn sm100_every_configuration_of_the_menu_close() {
    for config in sm100a::config::Config::MENU {
        let tokens = if config.side == Side::Features { config.n as usize - 1 } else { 140 };
        check(Config::Sm100(config), (tokens, 200, 1072));
    }
}

#[test]
fn sm120_every_configuration_of_the_menu_close() {
    for config in sm120a::config::Config::MENU {
        let (tokens, features) = (config.tokens as usize, config.features as usize);
        check(Config::Sm120(config), (tokens, features, 256));
        check(Config::Sm120(config), (tokens + 3, features + 13, 592));
        check(Config::Sm120(config), (1, 8, 80));
        check(Config::Sm120(config), (2, 4 * features, 1344));
    }
}
