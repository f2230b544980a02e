//! Operands other than nvfp4: mxfp4, and A in 16 bits beside nvfp4 weights.

use dualgemm_device::DevicePtr;
use dualgemm_formats::{BlockFormat, FloatType};
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::operand::{FusedArgs, Operand};
use dualgemm_kernels::parts::rows::Output;
use dualgemm_kernels::sm100a::config::{Config as Sm100, Side};
use dualgemm_kernels::sm120a::config::Config as Sm120;
use dualgemm_ptx::builder::HalfFormat;

use crate::common::{Config, FEATURES, TOKENS, WIDE, check, f32_out, gpu, matrices, operands};

const HALVES: [HalfFormat; 2] = [HalfFormat::F16, HalfFormat::Bf16];

#[test]
fn sm100_mxfp4_tails_pairs_and_split_k_close() {
    let mxfp4 = |config: Sm100| Config::Sm100(Sm100 { formats: Formats::MXFP4, ..config });
    check(mxfp4(TOKENS), (130, 72, 352));
    check(mxfp4(TOKENS), (3, 37, 96));
    check(mxfp4(FEATURES), (7, 130, 608));
    check(mxfp4(Sm100 { cta_group: 2, n: 96, accumulators: 1, ..TOKENS }), (131, 136, 352));
    check(mxfp4(Sm100 { split_k: 4, ..FEATURES }), (5, 130, 1056));
}

#[test]
fn sm100_every_mxfp4_configuration_of_the_menu_close() {
    for config in Sm100::menu(Formats::MXFP4) {
        let tokens = if config.side == Side::Features { config.n as usize - 1 } else { 140 };
        check(Config::Sm100(config), (tokens, 136, if config.split_k == 4 { 1056 } else { 608 }));
    }
}

#[test]
fn sm120_every_mxfp4_configuration_of_the_menu_close() {
    for config in Sm120::menu(BlockFormat::Mxfp4) {
        let (tokens, features) = (config.tokens as usize, config.features as usize);
        check(Config::Sm120(config), (tokens + 3, features + 13, 608));
        check(Config::Sm120(config), (1, 8, 96));
    }
}

#[test]
fn sm100_wide_tails_close() {
    for half in HALVES {
        let config = Sm100 { formats: Formats::Wide(half), ..WIDE };
        check(Config::Sm100(config), (16, 128, 128));
        for k in [16, 48, 80, 144, 208, 592] {
            check(Config::Sm100(config), (3, 37, k));
        }
        check(Config::Sm100(config), (7, 130, 592));
    }
}

/// More tokens than a tile, and more stages and buffers than there are.
#[test]
fn sm100_wide_many_tiles_close() {
    check(Config::Sm100(WIDE), (50, 260, 336));
    check(Config::Sm100(Sm100 { n: 48, ..WIDE }), (100, 130, 400));
}

#[test]
fn sm100_wide_split_k_close() {
    for split_k in [2, 4] {
        check(Config::Sm100(Sm100 { split_k, ..WIDE }), (5, 130, 528));
        check(Config::Sm100(Sm100 { split_k, n: 64, ..WIDE }), (64, 128, 656));
    }
}

#[test]
fn sm100_every_wide_configuration_of_the_menu_close() {
    for config in HALVES.into_iter().flat_map(|half| Sm100::menu(Formats::Wide(half))) {
        check(Config::Sm100(config), (config.n as usize - 1, 136, 560));
    }
}

#[test]
fn operands_of_other_formats_are_refused_by_name() {
    let wide = Config::Sm100(WIDE);
    let gpu = gpu(wide);
    let output = Output::new(DevicePtr(4096), [1.0; 2]);
    let message = |config: Config, [a, gate, up]: [Operand; 3]| {
        let args = FusedArgs { a, gate, up, output, groups: None };
        config.spec(&gpu, &f32_out(), 40, &args).unwrap_err().to_string()
    };
    let of = |formats| {
        let (a, weights) = matrices(formats, 7, (3, 40, 96));
        operands(&gpu, &a, &weights)
    };
    let (nvfp4, mxfp4) = (of(Formats::NVFP4), of(Formats::MXFP4));
    let [f16, bf16] = HALVES.map(|half| of(Formats::Wide(half)));
    assert_eq!(message(wide, nvfp4), "A is nvfp4; the problem asks for f16, for which the kernel is");
    assert_eq!(message(wide, bf16), "A is bf16; the problem asks for f16, for which the kernel is");
    assert_eq!(
        message(wide, [f16[0], mxfp4[1], mxfp4[2]]),
        "gate is mxfp4; the problem asks for nvfp4, for which the kernel is"
    );
    assert_eq!(
        message(Config::Sm100(TOKENS), mxfp4),
        "A is mxfp4; the problem asks for nvfp4, for which the kernel is"
    );
    let pairs = Config::Sm100(Sm100 { split_k: 2, ..WIDE });
    assert_eq!(
        message(pairs, f16),
        "sm100a fused: CTAs that split K, each at least 128 of it: 2 asked for; valid: 1"
    );
    let floats = dualgemm_bench::inputs::Inputs::seeded(1).floats("A", FloatType::F32, 3, 96).unwrap();
    assert_eq!(
        Operand::upload_floats(&gpu, &floats).unwrap_err().to_string(),
        "A is f32; the problem asks for f16 or bf16"
    );
}
