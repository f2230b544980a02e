//! Blackwell's kernels: every way through them, tiles, tails, pairs, split K, persistent CTAs, outputs, bias, groups.

use dualgemm_device::DevicePtr;
use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::Activation;
use dualgemm_kernels::fused::{Config, Fused, FusedArgs, Weights};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::rows::Output;
use dualgemm_kernels::parts::variant::{Out, Variant};
use dualgemm_kernels::sm100a::config::{Config as Sm100, Side};
use dualgemm_kernels::sm120a::config::Config as Sm120;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;

use crate::problem::{self, Shape, check_groups, float, gpu, linear, operands, run, simulator};

const HALVES: [HalfFormat; 2] = [HalfFormat::F16, HalfFormat::Bf16];

pub const TOKENS: Sm100 = Sm100 {
    formats: Formats::NVFP4,
    side: Side::Tokens,
    n: 64,
    cta_group: 1,
    split_k: 1,
    stages: 2,
    accumulators: 2,
};
pub const FEATURES: Sm100 = Sm100 { side: Side::Features, n: 8, accumulators: 1, ..TOKENS };
pub const WIDE: Sm100 = Sm100 { formats: Formats::Wide(HalfFormat::F16), n: 16, ..FEATURES };
/// A pair of CTAs with a pair of accumulators.
const PAIRS: Sm100 = Sm100 { cta_group: 2, accumulators: 1, ..TOKENS };

fn check(config: Config, shape: Shape) {
    problem::check(config, &float(Activation::Silu), shape);
}

fn sm100(config: Sm100, shapes: &[Shape]) {
    shapes.iter().for_each(|&shape| check(Config::Sm100a(config), shape));
}

/// One configuration of each way through the kernels.
fn every_way() -> [Config; 9] {
    let [sm120, ..] = Sm120::MENU;
    let sm100 = [
        TOKENS,
        FEATURES,
        Sm100 { split_k: 2, ..PAIRS },
        Sm100 { split_k: 2, ..FEATURES },
        Sm100 { formats: Formats::MXFP4, side: Side::HalfAtoms, ..TOKENS },
        WIDE,
        Sm100 { split_k: 2, formats: Formats::Wide(HalfFormat::Bf16), ..WIDE },
    ];
    let mxfp4 = Sm120 { format: BlockFormat::Mxfp4, ..sm120 };
    let [a, b, c, d, e, f, g] = sm100.map(Config::Sm100a);
    [a, b, c, d, e, f, g, Config::Sm120a(sm120), Config::Sm120a(mxfp4)]
}

#[test]
fn sm100_one_tile_and_tails_in_every_dimension_close() {
    sm100(TOKENS, &[(128, 64, 256), (130, 72, 336), (3, 37, 80)]);
    sm100(FEATURES, &[(8, 128, 256), (3, 37, 80), (7, 130, 592)]);
}

#[test]
fn sm100_pairs_of_ctas_close() {
    for n in [32, 64, 96, 128] {
        sm100(Sm100 { n, ..PAIRS }, &[(256, 2 * n as usize, 256), (131, n as usize + 40, 336)]);
    }
}

#[test]
fn sm100_tiles_across_scale_atoms_close() {
    sm100(Sm100 { n: 96, accumulators: 1, ..TOKENS }, &[(128, 4 * 96, 256)]);
}

/// Tiles of an odd number of 16 features: every second one starts in the middle of a column of scales, some at the end of
/// an atom, and the ring wraps around.
#[test]
fn sm100_tiles_in_the_middle_of_columns_close() {
    let tokens = Sm100 { accumulators: 1, ..TOKENS };
    sm100(Sm100 { n: 16, ..tokens }, &[(40, 160, 256)]);
    sm100(Sm100 { n: 48, ..tokens }, &[(128, 4 * 48, 848)]);
    let pairs = Sm100 { n: 112, ..PAIRS };
    sm100(pairs, &[(256, 4 * 112, 768)]);
    sm100(Sm100 { formats: Formats::MXFP4, ..pairs }, &[(131, 300, 352)]);
    sm100(Sm100 { n: 16, accumulators: 2, ..pairs }, &[(40, 16 * 150, 320)]);
}

/// Both halves of whole atoms, and of one that ends in its first half's first 16 features; K that ends inside a stage.
#[test]
fn sm100_half_atoms_close() {
    let half_atoms = Sm100 { side: Side::HalfAtoms, ..TOKENS };
    for cta_group in [1, 2] {
        let config = Sm100 { cta_group, ..half_atoms };
        sm100(config, &[(128 * cta_group as usize, 256, 768), (131, 128 + 24, 336)]);
        sm100(Sm100 { formats: Formats::MXFP4, ..config }, &[(131, 120, 352)]);
    }
    // More tiles than CTAs.
    sm100(half_atoms, &[(1, 64 * 160, 80)]);
}

#[test]
fn sm100_split_k_close() {
    for split_k in [2, 4] {
        sm100(Sm100 { split_k, ..FEATURES }, &[(5, 130, 1040)]);
        sm100(Sm100 { split_k, n: 32, ..FEATURES }, &[(64, 128, 1280)]);
        sm100(Sm100 { split_k, ..WIDE }, &[(5, 130, 528)]);
        sm100(Sm100 { split_k, n: 64, ..WIDE }, &[(64, 128, 656)]);
    }
    sm100(Sm100 { split_k: 2, accumulators: 1, ..TOKENS }, &[(130, 100, 1040)]);
}

/// Two pairs with the same tokens, each over its part of K; the last tile lacks tokens and features.
#[test]
fn sm100_pairs_that_split_k_close() {
    for n in [32, 96, 128] {
        let shapes = [(256, 2 * n as usize, 768), (300, n as usize + 40, 1040)];
        sm100(Sm100 { n, split_k: 2, ..PAIRS }, &shapes);
    }
}

/// More tiles than CTAs: the ring and both pairs of accumulators wrap around several times.
#[test]
fn sm100_persistent_ctas_close() {
    let config = Sm100 { n: 32, ..TOKENS };
    sm100(config, &[(1, 32 * 160, 64)]);
    sm100(Sm100 { cta_group: 2, ..config }, &[(129, 32 * 80, 320)]);
}

#[test]
fn sm100_mxfp4_tails_pairs_and_split_k_close() {
    let mxfp4 = |config: Sm100| Sm100 { formats: Formats::MXFP4, ..config };
    sm100(mxfp4(TOKENS), &[(130, 72, 352), (3, 37, 96)]);
    sm100(mxfp4(FEATURES), &[(7, 130, 608)]);
    sm100(mxfp4(Sm100 { n: 96, ..PAIRS }), &[(131, 136, 352)]);
    sm100(mxfp4(Sm100 { split_k: 4, ..FEATURES }), &[(5, 130, 1056)]);
}

#[test]
fn sm100_wide_tails_close() {
    for half in HALVES {
        let config = Sm100 { formats: Formats::Wide(half), ..WIDE };
        sm100(config, &[(16, 128, 128), (7, 130, 592)]);
        sm100(config, &[16, 48, 80, 144, 208, 592].map(|k| (3, 37, k)));
    }
}

/// More tokens than a tile, and more stages and buffers than there are.
#[test]
fn sm100_wide_many_tiles_close() {
    sm100(WIDE, &[(50, 260, 336)]);
    sm100(Sm100 { n: 48, ..WIDE }, &[(100, 130, 400)]);
}

/// Stages enough for each part of K, the last one not full.
#[test]
fn sm100_every_configuration_of_every_menu_close() {
    for config in Formats::ALL.into_iter().flat_map(Sm100::menu) {
        let tokens = if config.side == Side::Features { config.n as usize - 1 } else { 140 };
        let (n, k) = match config.formats {
            Formats::Scaled(BlockFormat::Nvfp4) => (200, if config.split_k == 4 { 1072 } else { 592 }),
            Formats::Scaled(BlockFormat::Mxfp4) => (136, if config.split_k == 4 { 1056 } else { 608 }),
            Formats::Wide(_) => (136, 560),
        };
        sm100(config, &[(tokens, n, k)]);
    }
}

#[test]
fn sm120_every_configuration_of_every_menu_close() {
    for config in BlockFormat::ALL.into_iter().flat_map(Sm120::menu) {
        let (tokens, features) = (config.tokens as usize, config.features as usize);
        let shapes: &[Shape] = match config.format {
            BlockFormat::Nvfp4 => &[
                (tokens, features, 256),
                (tokens + 3, features + 13, 592),
                (1, 8, 80),
                (2, 4 * features, 1344),
            ],
            BlockFormat::Mxfp4 => &[(tokens + 3, features + 13, 608), (1, 8, 96)],
        };
        shapes.iter().for_each(|&shape| check(Config::Sm120a(config), shape));
    }
}

#[test]
fn outputs_of_16_bits_are_the_rounded_floats_exact() {
    for config in every_way() {
        for (m, n) in [(7, 72), (5, 69)] {
            let variant = float(Activation::Silu);
            let (a, weights) = operands(&config, &variant, 1, (m, n, 608));
            let gpu = gpu(&config);
            let values = |out| {
                run(&*gpu, (config, &Variant { out, ..variant.clone() }), &a, &weights, (&[], 1)).values
            };
            let [floats, f16, bf16] = [Out::F32, Out::F16, Out::Bf16].map(values);
            for ((f16, bf16), want) in f16.into_iter().zip(bf16).zip(floats) {
                assert_eq!(f16, half::f16::from_f32(want).to_f32());
                assert_eq!(bf16, half::bf16::from_f32(want).to_f32());
            }
        }
    }
}

#[test]
fn an_nvfp4_c_is_the_quantized_floats_exact() {
    for (config, scale_layout) in
        every_way().into_iter().flat_map(|config| ScaleLayout::ALL.map(|layout| (config, layout)))
    {
        let variant = Variant { out: Out::Nvfp4 { scale_layout }, ..float(Activation::Silu) };
        problem::check(config, &variant, (5, 48, 608));
    }
}

/// Less than an atom of features, halves that end inside a tile, and halves of one atom and of two.
#[test]
fn linear_layers_close() {
    for config in every_way() {
        for (n, m) in [(72, 5), (200, 6), (256, 1), (301, 7)] {
            problem::check(config, &linear(true), (m, n, 608));
        }
    }
}

#[test]
fn bias_scale_of_a_and_activations_close() {
    for (config, activation) in every_way().into_iter().zip(Activation::EXAMPLES.into_iter().cycle()) {
        problem::check(config, &Variant { bias: true, a_scale: true, ..float(activation) }, (5, 40, 608));
    }
}

/// Experts with rows of their own: an empty first and last one, tails, more rows than a tile; and their down projections,
/// with and without a second half of features.
#[test]
fn groups_close() {
    let [few, .., many] = Sm120::MENU;
    let sm100 = [
        TOKENS,
        Sm100 { cta_group: 2, ..TOKENS },
        Sm100 { split_k: 2, ..PAIRS },
        Sm100 { side: Side::HalfAtoms, cta_group: 2, ..TOKENS },
        Sm100 { split_k: 2, n: 32, ..FEATURES },
        Sm100 { formats: Formats::MXFP4, ..TOKENS },
        Sm100 { split_k: 2, n: 32, ..WIDE },
    ];
    let configs = sm100.map(Config::Sm100a).into_iter().chain([few, many].map(Config::Sm120a));
    for config in configs {
        for (variant, n) in [(float(Activation::Silu), 72), (linear(false), 72), (linear(false), 328)] {
            check_groups(config, &variant, &[0, 130, 1, 35, 0], (n, 352));
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let (gpu, variant) = (simulator(Card::B200), float(Activation::Silu).for_weights(40, 96));
    let config = |of| Config::Sm100a(of);
    let wide = |half| config(Sm100 { formats: Formats::Wide(half), ..WIDE });
    let args = |config: Config| {
        let (a, weights) = operands(&config, &variant, 1, (3, 40, 96));
        let kernel = Fused::new(&gpu, config, &variant).unwrap();
        Operands::upload(&kernel, &a, &weights, &[]).unwrap().args
    };
    let message = |config: Config, args: &FusedArgs| {
        Fused::new(&gpu, config, &variant).unwrap().spec(args).unwrap_err().to_string()
    };
    let nvfp4 = args(config(TOKENS));
    let mxfp4 = args(config(Sm100 { formats: Formats::MXFP4, ..TOKENS }));
    let [f16, bf16] = HALVES.map(|half| args(wide(half)));
    let expected = |what: &str| format!("{what}, for which the kernel is");
    assert_eq!(message(wide(HalfFormat::F16), &nvfp4), expected("A is nvfp4; the problem asks for f16"));
    assert_eq!(message(wide(HalfFormat::F16), &bf16), expected("A is bf16; the problem asks for f16"));
    let mixed = FusedArgs { weights: mxfp4.weights, ..f16 };
    assert_eq!(message(wide(HalfFormat::F16), &mixed), expected("gate is mxfp4; the problem asks for nvfp4"));
    assert_eq!(message(config(TOKENS), &mxfp4), expected("A is mxfp4; the problem asks for nvfp4"));
    let packed = FusedArgs { weights: Weights::Pack(DevicePtr(256)), ..nvfp4 };
    let found = message(config(TOKENS), &packed);
    assert_eq!(found, "gate and up is a pack; the problem asks for rows of nvfp4, which the kernel reads");
    let more = FusedArgs { size: (3, 48, 96), ..nvfp4 };
    assert_eq!(message(config(TOKENS), &more), "gate is [40, 96]; the problem asks for [48, 96]");
    let odd = Output { c: DevicePtr(nvfp4.output.c.0 + 4), ..nvfp4.output };
    let text = message(config(TOKENS), &FusedArgs { output: odd, ..nvfp4 });
    assert!(text.starts_with("C is at 0x") && text.ends_with("on a multiple of 16 bytes"), "{text}");
    for (config, args, each) in
        [(Sm100 { split_k: 2, ..FEATURES }, nvfp4, 256), (Sm100 { split_k: 2, ..WIDE }, f16, 128)]
    {
        let rule =
            format!("sm100a fused: CTAs that split K, each at least {each} of it: 2 asked for; valid: 1");
        assert_eq!(message(Config::Sm100a(config), &args), rule);
    }
    let nvfp4_c = Variant { out: Out::Nvfp4 { scale_layout: ScaleLayout::Linear }, ..variant.clone() };
    let text = Fused::new(&gpu, config(TOKENS), &nvfp4_c).unwrap().spec(&nvfp4).unwrap_err().to_string();
    assert_eq!(text, "an nvfp4 C is N = 40; the problem asks for a multiple of 16, whole blocks");
    // A whose format is not the kernel's is not uploaded.
    let kernel = Fused::new(&gpu, wide(HalfFormat::F16), &variant).unwrap();
    let (a, weights) = operands(&wide(HalfFormat::Bf16), &variant, 1, (3, 40, 96));
    let message = Operands::upload(&kernel, &a, &weights, &[]).err().map(|e| e.to_string());
    assert_eq!(message.as_deref(), Some("A is bf16; the problem asks for f16"));
}
