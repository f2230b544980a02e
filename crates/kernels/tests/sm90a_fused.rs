//! The fused Hopper kernel in the simulator, all checkers on, against the f64 reference.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::Device;
use dualgemm_formats::{BlockFormat, FloatMatrix, FloatType, GlobalScale};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::host::Fused;
use dualgemm_kernels::sm90a::operands::Operands;
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_kernels::sm90a::variant::{Compute, Out, Scheduler, Variant};
use dualgemm_sim::Gpu;

type Shape = (usize, usize, usize);

fn operands(variant: &Variant, (m, n, k): Shape) -> (FloatMatrix<'static>, GateUp<'static>) {
    let mut inputs = Inputs::seeded(7);
    let mut half = |name, scale| {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, GlobalScale::multiplier(scale)).unwrap()
    };
    let mut weights = GateUp::new(half("gate", 0.011), half("up", 0.023));
    if variant.bias {
        weights.gate_bias = Some((0..n).map(|i| i as f32 / 64.0 - 0.5).collect());
        weights.up_bias = Some((0..n).map(|i| 0.5 - i as f32 / 32.0).collect());
    }
    let ty = match variant.compute {
        Compute::F16 => FloatType::F16,
        Compute::Bf16 => FloatType::Bf16,
    };
    (inputs.floats("a", ty, m, k).unwrap(), weights)
}

fn silu() -> Variant {
    Variant::new(Activation::Silu.program())
}

/// Half a unit in the last place of C, as relative error; f32 has what sums and the activation leave.
fn bound(out: Out) -> f64 {
    match out {
        Out::F16 => 3e-4,
        Out::Bf16 => 2.4e-3,
        Out::F32 | Out::Nvfp4 { .. } => 2e-6,
    }
}

fn check_with(config: Config, variant: Variant, activation: Activation, shape: Shape) {
    let (m, n, k) = shape;
    let variant = variant.for_weights(n, k);
    let (a, weights) = operands(&variant, shape);
    let gpu = Gpu::new(dualgemm_sim::Config::default());
    let kernel = Fused::new(&gpu, config, &variant).unwrap();
    let on_device = Operands::upload(&gpu, &kernel, &a, &Pack::new(&weights).unwrap()).unwrap();
    let epilogue =
        Epilogue { activation, round_gate_up_to_bf16: variant.round_gate_up_to_bf16, ..Epilogue::default() };
    let want = reference(&epilogue, &AOperand::Float(a), 0..m, &weights);
    // Twice: what a launch leaves behind must not disturb the next one.
    for _ in 0..if variant.scheduler == Scheduler::StreamK { 2 } else { 1 } {
        kernel.launch(on_device.args()).unwrap_or_else(|e| panic!("{e}"));
        gpu.synchronize().unwrap();
        let got = on_device.read_values(&gpu).unwrap();
        let comparison = Comparison::new(&got, &want, n).unwrap();
        assert!(comparison.rel_l2 < bound(variant.out), "{kernel:?} {m}x{n}x{k}: {comparison:?}");
        assert!(on_device.guard_is_whole(&gpu).unwrap(), "{kernel:?} {m}x{n}x{k} wrote behind C");
    }
    on_device.free(&gpu).unwrap();
}

fn check(config: Config, variant: Variant, shape: Shape) {
    check_with(config, variant, Activation::Silu, shape);
}

const P: Config = Config::new(2, 64, 2, 3, 1);
const D: Config = Config::new(1, 8, 4, 3, 4);

#[test]
fn one_tile_close() {
    check(P, silu(), (64, 64, 256));
}

#[test]
fn tails_in_every_dimension_close() {
    check(P, silu(), (65, 72, 336));
    check(P, silu(), (3, 37, 80));
}

#[test]
fn k_groups_close() {
    check(D, silu(), (1, 64, 512));
    check(D, silu(), (9, 40, 336));
    check(D, silu(), (2, 32, 64));
}

#[test]
fn every_activation_close() {
    for activation in Activation::EXAMPLES {
        check_with(D, Variant::new(activation.program()), activation, (2, 32, 128));
    }
}

#[test]
fn bf16_in_and_every_float_out_close() {
    for (config, shape) in [(Config::new(2, 16, 2, 2, 1), (9, 68, 128)), (D, (5, 36, 256))] {
        for out in [Out::F16, Out::Bf16, Out::F32] {
            check(config, Variant { compute: Compute::Bf16, out, ..silu() }, shape);
        }
        check(config, Variant { out: Out::F32, ..silu() }, (3, 35, 80));
    }
}

#[test]
fn bias_and_rounded_products_close() {
    for (config, shape) in [(Config::new(2, 16, 2, 2, 1), (9, 68, 128)), (D, (5, 36, 256))] {
        check(config, Variant { bias: true, out: Out::F32, ..silu() }, shape);
        check(config, Variant { bias: true, out: Out::F32, round_gate_up_to_bf16: true, ..silu() }, shape);
    }
}

#[test]
fn persistent_close() {
    let persistent = || Variant { scheduler: Scheduler::Persistent, ..silu() };
    // More tiles than the card has multiprocessors; the last stage holds one block of two.
    check(Config::new(2, 8, 2, 2, 1), persistent(), (9, 4400, 192));
    check(Config::new(1, 8, 2, 2, 2), persistent(), (9, 2200, 192));
}

#[test]
fn stream_k_close_and_repeatable() {
    let stream = || Variant { scheduler: Scheduler::StreamK, ..silu() };
    check(Config::new(2, 16, 2, 2, 1), stream(), (40, 136, 720));
    check(D, stream(), (9, 72, 2048));
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let gpu = Gpu::new(dualgemm_sim::Config::default());
    let (a, weights) = operands(&silu(), (2, 32, 64));
    let (wide, _) = operands(&silu(), (2, 32, 80));
    let pack = Pack::new(&weights).unwrap();
    let kernel = Fused::new(&gpu, D, &silu().for_weights(40, 64)).unwrap();
    let message = Operands::upload(&gpu, &kernel, &wide, &pack).unwrap_err().to_string();
    assert_eq!(message, "A is [2, 80]; the problem asks for [M, 64], as the weights are");
    let on_device = Operands::upload(&gpu, &kernel, &a, &pack).unwrap();
    let args = *on_device.args();
    let refusal = |args| kernel.launch(&args).unwrap_err().to_string();
    let message = refusal(dualgemm_kernels::sm90a::host::FusedArgs { n: 36, ..args });
    assert_eq!(message, "N is 36; the problem asks for a multiple of 8, which the kernel was made for");
}
