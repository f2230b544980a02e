//! The fused Hopper kernel in the simulator, all checkers on, against the f64 reference.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Args, Device, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatMatrix, FloatType, GlobalScale};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::decode::WEIGHT_FACTOR;
use dualgemm_kernels::sm90a::fused;
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_ptx::layout::{TensorDataType, TensorMap, TensorSwizzle};
use dualgemm_sim::Gpu;
use half::f16;

/// Runs the kernel on a device and returns C.
fn run(
    device: &dyn Device,
    config: &Config,
    activation: Activation,
    a: &FloatMatrix<'_>,
    weights: &GateUp<'_>,
) -> Vec<f16> {
    let (m, n, k) = (a.rows(), weights.n(), weights.k());
    let FloatMatrix::F16(rows) = a else { panic!("A is f16") };
    let bytes: Vec<u8> = (0..m).flat_map(|r| rows.row(r)).flat_map(|x| x.to_le_bytes()).collect();
    let upload = |bytes: &[u8]| {
        let ptr = device.alloc(bytes.len()).unwrap();
        device.copy_to(ptr, bytes).unwrap();
        ptr
    };
    let (tokens, pack) = (upload(&bytes), upload(Pack::new(weights).unwrap().bytes()));
    let out = device.alloc(m * n * 2).unwrap();
    let map = TensorMap::matrix(
        TensorDataType::F16,
        tokens.0,
        (m as u64, k as u64),
        k as u64 * 2,
        (config.tokens, 64),
        TensorSwizzle::B128,
    );
    let ptx = fused::generate(config, &activation.program(), n.is_multiple_of(8)).unwrap().to_string();
    let module = device.load(&ptx).unwrap();
    let function = device.function(module, fused::ENTRY).unwrap();
    let alpha = |half: &dualgemm_formats::QuantizedMatrix<'_>| half.global_scale().value() * WEIGHT_FACTOR;
    let args = Args::new()
        .tensor_map(device.tensor_map(&map).unwrap())
        .ptr(pack)
        .ptr(out)
        .u32(m as u32)
        .u32(n as u32)
        .u32(k.div_ceil(64) as u32)
        .f32(alpha(&weights.gate))
        .f32(alpha(&weights.up));
    let spec = LaunchSpec::new(function, [config.grid(m, n), 1, 1], [config.threads(), 1, 1])
        .dynamic_shared(config.layout().unwrap().smem.bytes())
        .args(args);
    device.launch(&spec).unwrap();
    device.synchronize().unwrap_or_else(|e| panic!("{e}"));
    let mut c = vec![0; m * n * 2];
    device.copy_from(&mut c, out).unwrap();
    c.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect()
}

fn check(config: Config, activation: Activation, (m, n, k): (usize, usize, usize)) {
    let mut inputs = Inputs::seeded(7);
    let mut half = |name, scale| {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, GlobalScale::multiplier(scale)).unwrap()
    };
    let weights = GateUp::new(half("gate", 0.011), half("up", 0.023));
    let a = inputs.floats("a", FloatType::F16, m, k).unwrap();
    let got = run(&Gpu::new(dualgemm_sim::Config::default()), &config, activation, &a, &weights);
    let epilogue = Epilogue { activation, ..Epilogue::default() };
    let want = reference(&epilogue, &AOperand::Float(a), 0..m, &weights);
    let comparison = Comparison::new(&got, &want, n).unwrap();
    // Rounding to f16 alone is 2.1e-4.
    assert!(comparison.rel_l2 < 3e-4, "{} {m}x{n}x{k}: {comparison:?}", config.name());
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
