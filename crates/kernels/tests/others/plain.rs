//! The kernel on a checkpoint's own layout against the f64 reference.

use dualgemm_bench::inputs::Inputs;
use dualgemm_formats::{FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::{AOperand, Activation, Epilogue, GateUp, reference};
use dualgemm_kernels::generic::quantize::{Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::parts::rows::{self, Output, Variant};
use dualgemm_kernels::plain::config::Config;
use dualgemm_kernels::plain::host::{Fused, FusedArgs};
use dualgemm_kernels::plain::order::SPAN;
use dualgemm_kernels::sm90a::decode::WEIGHT_FACTOR;

use crate::common::*;
use crate::sm80::{bound, error_of, weights};

fn check(config: Config, out: FloatType, activation: Activation, (m, n, k): (usize, usize, usize)) {
    let gpu = gpu();
    let a = Inputs::seeded(5).floats("a", FloatType::F16, m, k).unwrap();
    let GateUp { gate, up, .. } = weights((n, k));
    let layout = config.scale_layout;
    let weights = GateUp::new(gate.with_scale_layout(layout), up.with_scale_layout(layout));
    let size = size(out);

    let permute = Quantize::new(gpu, FloatType::F16, Sink::Permuted(FloatType::F16), false).unwrap();
    let a_pitch = 2 * k.next_multiple_of(SPAN);
    let permuted = poisoned(gpu, m * a_pitch);
    let to = Out::Image { values: permuted, pitch: a_pitch };
    run(gpu, &permute.spec(&upload_floats(gpu, &a), &to, &Scale::Static(GlobalScale::ONE)).unwrap());

    let variant =
        Variant { out: rows::Out::float(out), ..Variant::new(activation.program()) }.for_features(n);
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let c = poisoned(gpu, m * n * size);
    let alpha = [&weights.gate, &weights.up].map(|half| half.global_scale().value() * WEIGHT_FACTOR);
    let args = FusedArgs {
        size: (m, n, k),
        a: permuted,
        a_pitch,
        weights: [&weights.gate, &weights.up].map(|half| upload_codes(gpu, half)),
        output: Output::new(c, alpha),
    };
    run(gpu, &kernel.spec(&args).unwrap());
    let epilogue = Epilogue { activation, ..Epilogue::default() };
    let want = reference(&epilogue, &AOperand::Float(a), 0..m, &weights);
    let error = error_of(&read(gpu, c, m * n * size), out, &want, n);
    assert!(error < bound(out), "{} {out:?} {m}x{n}x{k}: {error}", config.name());
}

#[test]
fn every_tile_of_the_plain_kernel_close() {
    for config in Config::MENU {
        check(config, FloatType::F16, Activation::Silu, (config.tokens as usize, 64, 256));
    }
}

#[test]
fn tails_and_scale_layouts_of_the_plain_kernel_close() {
    let [few, .., many] = Config::MENU;
    check(few, FloatType::F32, Activation::GeluTanh, (3, 37, 96));
    check(few, FloatType::F16, Activation::Silu, (17, 40, 1184));
    let swizzled = Config { scale_layout: ScaleLayout::Sf128x4, tokens: 128, stages: 4, ..many };
    check(swizzled, FloatType::Bf16, Activation::Silu, (131, 72, 1120));
}

#[test]
fn k_that_the_tma_unit_cannot_take_is_refused() {
    let gpu = gpu();
    let kernel = Fused::new(gpu, Config::MENU[0], &Variant::new(Activation::Silu.program())).unwrap();
    let weights = weights((32, 80));
    let halves = [&weights.gate, &weights.up].map(|half| upload_codes(gpu, half));
    let (a, output) = (halves[0].codes, Output::new(halves[0].codes, [1.0; 2]));
    let args = FusedArgs { size: (1, 32, 80), a, a_pitch: 256, weights: halves, output };
    let message = kernel.spec(&args).unwrap_err().to_string();
    assert!(message.contains("K a multiple of 32"), "{message}");
}
