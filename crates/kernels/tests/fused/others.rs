//! The kernel by `mma.sync`, the one on a checkpoint's own layout, and the one on e4m3.

use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::Activation;
use dualgemm_kernels::fp8::config::Config as Fp8;
use dualgemm_kernels::fused::{Config, Fused, Weights};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::variant::{Out, Products, Scheduler, Variant};
use dualgemm_kernels::plain::config::Config as Plain;
use dualgemm_kernels::sm80::config::Config as Sm80;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;

use crate::problem::{check, check_groups, check_on, float, linear, operands, simulator};

fn silu() -> Variant {
    Variant::new(Activation::Silu.program())
}

#[test]
fn every_tile_of_the_sm80_kernel_close() {
    for config in Sm80::MENU {
        check(Config::Sm80(config), &silu(), (config.tokens as usize, 64, 192));
    }
}

/// Every tile, chunks that are not full, and rows of C that start anywhere.
#[test]
fn linear_layers_by_the_sm80_kernel_close() {
    for (config, n) in Sm80::MENU.into_iter().zip([64, 37, 200, 104, 301]) {
        check(Config::Sm80(config), &linear(true), (config.tokens as usize + 3, n, 144));
    }
}

/// Groups without rows first, last and between, of more rows than a tile, pairs of weights and linear layers.
#[test]
fn groups_by_the_sm80_kernel_close() {
    let both = || float(Activation::Silu);
    for (config, (variant, n)) in
        Sm80::MENU.into_iter().zip([(both(), 40), (linear(false), 72), (both(), 72), (linear(true), 200)])
    {
        check_groups(Config::Sm80(config), &variant, &[0, 130, 1, 0, 35, 0], (n, 144));
    }
}

#[test]
fn tails_and_types_of_the_sm80_kernel_close() {
    let more = |activation| Variant { bias: true, a_scale: true, ..float(activation) };
    let [few, .., many] = Sm80::MENU.map(Config::Sm80);
    check(few, &more(Activation::GeluTanh), (3, 37, 80));
    let bf16 = |variant| Variant { compute: HalfFormat::Bf16, ..variant };
    check(many, &bf16(Variant { out: Out::Bf16, ..more(Activation::Silu) }), (131, 40, 144));
    check(Config::Sm80(Sm80::MENU[3]), &bf16(more(Activation::SWIGLU_OAI)), (65, 100, 16));
    for card in [Card::B200, Card::RtxPro6000] {
        let variant = bf16(Variant { out: Out::F16, ..more(Activation::Silu) });
        check_on(&simulator(card), Config::Sm80(Sm80::MENU[1]), &variant, &[9], (40, 144), 1);
    }
}

#[test]
fn nvfp4_c_of_the_sm80_kernel_equals_its_f32_quantized_exact() {
    let out = Out::Nvfp4 { scale_layout: ScaleLayout::Sf128x4 };
    check(Config::Sm80(Sm80::MENU[1]), &Variant { out, ..silu() }, (9, 80, 144));
}

#[test]
fn every_tile_of_the_plain_kernel_close() {
    for config in Plain::MENU {
        check(Config::Plain(config), &silu(), (config.tokens as usize, 64, 256));
    }
}

#[test]
fn tails_and_scale_layouts_of_the_plain_kernel_close() {
    let [few, .., many] = Plain::MENU;
    check(Config::Plain(few), &float(Activation::GeluTanh), (3, 37, 96));
    check(Config::Plain(few), &silu(), (17, 40, 1184));
    let swizzled = Plain { scale_layout: ScaleLayout::Sf128x4, tokens: 128, stages: 4, ..many };
    check(Config::Plain(swizzled), &Variant { out: Out::Bf16, ..silu() }, (131, 72, 1120));
}

#[test]
fn every_tile_and_tails_of_the_fp8_kernel_close() {
    for config in Fp8::MENU {
        check(Config::Fp8(config), &silu(), (config.tokens as usize, 128, 256));
    }
    let [few, .., many] = Fp8::MENU.map(Config::Fp8);
    check(few, &Variant { bias: true, ..float(Activation::GeluTanh) }, (3, 37, 80));
    check(many, &silu(), (131, 72, 1424));
}

#[test]
fn what_a_kernel_does_not_have_is_refused_by_name() {
    let gpu = simulator(Card::H100);
    let plain = Config::Plain(Plain::MENU[0]);
    let kernel = Fused::new(&gpu, plain, &silu()).unwrap();
    let (a, weights) = operands(&plain, &silu(), 1, (1, 32, 80));
    let mut args = Operands::upload(&kernel, &a, &weights, &[]).unwrap().args;
    let message = kernel.spec(&args).unwrap_err().to_string();
    assert_eq!(
        message,
        "gate: row stride in bytes is 40; the problem asks for a multiple of 16, at least 40"
    );
    let Weights::Rows(halves) = &mut args.weights else { panic!("rows") };
    halves.iter_mut().for_each(|half| half.pitch = 48);
    let message = kernel.spec(&args).unwrap_err().to_string();
    assert!(message.contains("K a multiple of 32"), "{message}");
    let message = kernel.spec_of(&args, 0..32).unwrap_err().to_string();
    assert_eq!(message, "sm90a plain: ranges of features are for Hopper's kernel");
    let on_pack = Fused::new(&gpu, Config::Sm80(Sm80::MENU[0]), &silu()).unwrap();
    let message = on_pack.spec(&args).unwrap_err().to_string();
    assert_eq!(message, "gate and up is rows; the problem asks for the pack, which the kernel reads");
    for (config, variant, rule) in [
        (plain, linear(false), "it takes one problem, gate and up"),
        (Config::Fp8(Fp8::MENU[0]), Variant { grouped: true, ..silu() }, "it takes one problem, gate and up"),
        (plain, Variant { round_gate_up_to_bf16: true, ..silu() }, "it does not round gate and up to bf16"),
        (
            Config::Sm80(Sm80::MENU[0]),
            Variant { scheduler: Scheduler::Persistent, ..silu() },
            "it has one scheduler, the grid",
        ),
        (
            Config::Sm80(Sm80::MENU[0]),
            Variant { products: Products::Up, ..silu() },
            "gate and up are products of one launch",
        ),
    ] {
        let message = Fused::new(&gpu, config, &variant).unwrap_err().to_string();
        assert!(message.ends_with(rule), "{message}");
    }
}
