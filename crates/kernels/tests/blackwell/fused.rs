//! Every way through the kernels: tiles, tails, pairs, split K, persistent CTAs, outputs, bias, groups.

use dualgemm_bench::inputs::Inputs;
use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::quantize::quantize_with;
use dualgemm_formats::{
    FloatMatrix, FloatType, GlobalScale, Matrix, Producer, QuantizedMatrix, ScaleLayout, Search,
};
use dualgemm_gemm::{
    AOperand, Activation, Comparison, Epilogue, GateUp, Linear, bounded_reference, reference,
};
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::operand::{FusedArgs, Operand};
use dualgemm_kernels::parts::rows::{Out, Output, Variant};
use dualgemm_kernels::parts::tiles::GroupArgs;
use dualgemm_kernels::sm100a::config::Side;
use dualgemm_kernels::{sm100a, sm120a};

use crate::common::{
    Config, FEATURES, TOKENS, WIDE, alpha, check, download, every_way, f32_out, floats, gpu, matrices,
    operands, run, scale_of, upload,
};

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

/// Tiles of an odd number of 16 features: every second one starts in the middle of a column of scales, some at the end of
/// an atom, and the ring wraps around.
#[test]
fn sm100_tiles_in_the_middle_of_columns_close() {
    let tokens = sm100a::config::Config { accumulators: 1, ..TOKENS };
    check(Config::Sm100(sm100a::config::Config { n: 16, ..tokens }), (40, 160, 256));
    check(Config::Sm100(sm100a::config::Config { n: 48, ..tokens }), (128, 4 * 48, 848));
    let pairs = sm100a::config::Config { n: 112, cta_group: 2, ..tokens };
    check(Config::Sm100(pairs), (256, 4 * 112, 768));
    check(Config::Sm100(sm100a::config::Config { formats: Formats::MXFP4, ..pairs }), (131, 300, 352));
    check(Config::Sm100(sm100a::config::Config { n: 16, accumulators: 2, ..pairs }), (40, 16 * 150, 320));
}

/// Both halves of whole atoms, and of one that ends in its first half's first 16 features; K that ends inside a stage.
#[test]
fn sm100_half_atoms_close() {
    let half_atoms = sm100a::config::Config { side: Side::HalfAtoms, ..TOKENS };
    for cta_group in [1, 2] {
        let config = sm100a::config::Config { cta_group, ..half_atoms };
        check(Config::Sm100(config), (128 * cta_group as usize, 256, 768));
        check(Config::Sm100(config), (131, 128 + 24, 336));
        check(Config::Sm100(sm100a::config::Config { formats: Formats::MXFP4, ..config }), (131, 120, 352));
    }
    // More tiles than CTAs.
    check(Config::Sm100(half_atoms), (1, 64 * 160, 80));
}

#[test]
fn sm100_split_k_close() {
    for split_k in [2, 4] {
        let features = sm100a::config::Config { split_k, ..FEATURES };
        check(Config::Sm100(features), (5, 130, 1040));
        check(Config::Sm100(sm100a::config::Config { n: 32, ..features }), (64, 128, 1280));
    }
    let tokens = sm100a::config::Config { split_k: 2, accumulators: 1, ..TOKENS };
    check(Config::Sm100(tokens), (130, 100, 1040));
}

/// Two pairs with the same tokens, each over its part of K; the last tile lacks tokens and features.
#[test]
fn sm100_pairs_that_split_k_close() {
    for n in [32, 96, 128] {
        let pairs = sm100a::config::Config { n, cta_group: 2, split_k: 2, accumulators: 1, ..TOKENS };
        check(Config::Sm100(pairs), (256, 2 * n as usize, 768));
        check(Config::Sm100(pairs), (300, n as usize + 40, 1040));
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
        // Stages enough for each part of K, the last one not full.
        check(Config::Sm100(config), (tokens, 200, if config.split_k == 4 { 1072 } else { 592 }));
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

#[test]
fn outputs_of_16_bits_are_the_rounded_floats_exact() {
    for config in every_way() {
        for (m, n) in [(7, 72), (5, 69)] {
            let (a, weights) = matrices(config.formats(), 7, (m, n, 608));
            let floats = floats(&run(config, &f32_out(), &a, &weights));
            let f16 = run(config, &Variant { out: Out::F16, ..f32_out() }, &a, &weights);
            let bf16 = run(config, &Variant { out: Out::Bf16, ..f32_out() }, &a, &weights);
            for ((f16, bf16), want) in f16.chunks_exact(2).zip(bf16.chunks_exact(2)).zip(floats) {
                assert_eq!(half::f16::from_le_bytes([f16[0], f16[1]]), half::f16::from_f32(want));
                assert_eq!(half::bf16::from_le_bytes([bf16[0], bf16[1]]), half::bf16::from_f32(want));
            }
        }
    }
}

#[test]
fn an_nvfp4_c_is_the_quantized_floats_exact() {
    let (m, n, scale) = (5, 48, 0.02);
    for config in every_way() {
        let (a, weights) = matrices(config.formats(), 7, (m, n, 608));
        let floats = floats(&run(config, &f32_out(), &a, &weights));
        let floats = FloatMatrix::F32(Matrix::new("C", m, n, floats).unwrap());
        let scale_of = GlobalScale::multiplier(scale);
        let want = quantize_with("C", &floats, Producer::Te, Search::Plain, scale_of).unwrap();
        for layout in ScaleLayout::ALL {
            let gpu = gpu(config);
            let [x, gate, up] = operands(&gpu, &a, &weights);
            let c = upload(&gpu, &vec![0xEE; m * n / 2]);
            let scales = upload(&gpu, &vec![0; layout.len(m, n / 16)]);
            let output = Output { scales, scale, ..Output::new(c, alpha(&a, &weights)) };
            let variant = Variant { out: Out::Nvfp4 { scale_layout: layout }, ..f32_out() };
            let args = FusedArgs { a: x, gate, up, output, groups: None };
            let spec = config.spec(&gpu, &variant, n, &args).unwrap();
            // SAFETY: the operands were allocated here, as large as the launch says.
            unsafe { gpu.launch(&spec) }.unwrap_or_else(|e| panic!("{}: {e}", config.name()));
            assert_eq!(download(&gpu, c, m * n / 2), want.codes(), "{} {layout}", config.name());
            let want = want.scale_layout().convert(want.scales(), layout, m, n / 16);
            assert_eq!(download(&gpu, scales, want.len()), want, "{} {layout}", config.name());
        }
    }
}

fn bias(inputs: &mut Inputs, n: usize) -> Vec<f32> {
    match inputs.floats("bias", FloatType::F32, 1, n).unwrap() {
        FloatMatrix::F32(bias) => bias.as_dense().unwrap().to_vec(),
        FloatMatrix::F16(_) | FloatMatrix::Bf16(_) => panic!("f32 was asked for"),
    }
}

/// Less than an atom of features, halves that end inside a tile, and halves of one atom and of two.
#[test]
fn linear_layers_close() {
    let mut inputs = Inputs::seeded(12);
    for (i, config) in every_way().into_iter().enumerate() {
        for (n, m) in [(72, 5), (200, 6), (256, 1), (301, 7)] {
            let (a, GateUp { gate: weight, .. }) = matrices(config.formats(), i as u64, (m, n, 608));
            let layer = Linear { bias: Some(bias(&mut inputs, n).into()), ..Linear::new(weight) };
            let gpu = gpu(config);
            let both = GateUp::new(layer.weight.clone(), layer.weight.clone());
            let [x, gate, _] = operands(&gpu, &a, &both);
            let bytes: Vec<u8> =
                layer.bias.iter().flat_map(|b| b.iter()).flat_map(|x| x.to_le_bytes()).collect();
            let c = upload(&gpu, &vec![0xEE; m * n * 4 + 256]);
            let output = Output { bias: [upload(&gpu, &bytes); 2], ..Output::new(c, alpha(&a, &both)) };
            let variant = Variant { linear: true, bias: true, ..f32_out() };
            let args = FusedArgs { a: x, gate, up: gate, output, groups: None };
            let spec = config.spec(&gpu, &variant, n, &args).unwrap();
            // SAFETY: the operands were allocated here, as large as the launch says.
            unsafe { gpu.launch(&spec) }.unwrap_or_else(|e| panic!("{} {n}: {e}", config.name()));
            let mut got = download(&gpu, c, m * n * 4 + 256);
            assert!(got.split_off(m * n * 4).iter().all(|&byte| byte == 0xEE), "{} {n}", config.name());
            let want = bounded_reference(&Epilogue::default(), &a, 0..m, &layer);
            let comparison = Comparison::new(&floats(&got), &want, n).unwrap();
            assert!(comparison.rel_l2 < 1e-6, "{} {m}x{n}: {comparison:?}", config.name());
        }
    }
}

#[test]
fn bias_scale_of_a_and_activations_close() {
    let (m, n) = (5, 40);
    let mut inputs = Inputs::seeded(11);
    let [gate_bias, up_bias] = [0, 1].map(|_| bias(&mut inputs, n));
    for (config, activation) in every_way().into_iter().zip(Activation::EXAMPLES.into_iter().cycle()) {
        let gpu = gpu(config);
        let (a, weights) = matrices(config.formats(), 7, (m, n, 608));
        let [x, gate, up] = operands(&gpu, &a, &weights);
        let bytes = |floats: &[f32]| floats.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let variant = Variant { bias: true, a_scale: true, program: activation.program(), ..f32_out() };
        // A's tensor scale comes from device memory instead of the parameters.
        let alpha = alpha(&a, &weights).map(|alpha| alpha / scale_of(&a));
        let output = Output {
            bias: [upload(&gpu, &bytes(&gate_bias)), upload(&gpu, &bytes(&up_bias))],
            a_scale: upload(&gpu, &scale_of(&a).to_le_bytes()),
            ..Output::new(upload(&gpu, &vec![0; m * n * 4]), alpha)
        };
        let args = FusedArgs { a: x, gate, up, output, groups: None };
        // SAFETY: the operands were allocated here, as large as the launch says.
        unsafe { gpu.launch(&config.spec(&gpu, &variant, n, &args).unwrap()) }.unwrap();
        let got = floats(&download(&gpu, output.c, m * n * 4));
        let epilogue = Epilogue { activation, ..Epilogue::default() };
        let weights = GateUp {
            gate_bias: Some(gate_bias.clone().into()),
            up_bias: Some(up_bias.clone().into()),
            ..weights
        };
        let want = reference(&epilogue, &a, 0..m, &weights);
        let comparison = Comparison::new(&got, &want, n).unwrap();
        assert!(comparison.rel_l2 < 2e-6, "{} {activation}: {comparison:?}", config.name());
    }
}

/// Experts with rows of their own: an empty first and last one, tails, more rows than a tile.
#[test]
fn groups_close() {
    groups_of(false, 72);
}

/// The same of their down projections, with and without a second half of features.
#[test]
fn groups_of_linear_layers_close() {
    groups_of(true, 72);
    groups_of(true, 328);
}

fn groups_of(linear: bool, n: usize) {
    const COUNTS: [usize; 5] = [0, 130, 1, 35, 0];
    let k = 352;
    let rows: Vec<u32> = (0..=COUNTS.len()).map(|e| COUNTS[..e].iter().sum::<usize>() as u32).collect();
    let m: usize = COUNTS.iter().sum();
    let [few, .., many] = sm120a::config::Config::MENU;
    let configs = [
        Config::Sm100(TOKENS),
        Config::Sm100(sm100a::config::Config { cta_group: 2, ..TOKENS }),
        Config::Sm100(sm100a::config::Config { cta_group: 2, split_k: 2, accumulators: 1, ..TOKENS }),
        Config::Sm100(sm100a::config::Config { side: Side::HalfAtoms, cta_group: 2, ..TOKENS }),
        Config::Sm100(sm100a::config::Config { split_k: 2, n: 32, ..FEATURES }),
        Config::Sm100(sm100a::config::Config { formats: Formats::MXFP4, ..TOKENS }),
        Config::Sm100(sm100a::config::Config { split_k: 2, n: 32, ..WIDE }),
        Config::Sm120(few),
        Config::Sm120(many),
    ];
    for config in configs {
        let gpu = gpu(config);
        let problems: Vec<(AOperand<'_>, GateUp<'_>)> = COUNTS
            .iter()
            .enumerate()
            .map(|(e, &m)| matrices(config.formats(), e as u64, (m.max(1), n, k)))
            .collect();
        let full = problems.iter().zip(COUNTS).filter(|(_, m)| *m > 0).map(|((a, _), _)| a);
        let x = match &problems[0].0 {
            AOperand::Quantized(_) => {
                let parts: Vec<_> = full
                    .map(|a| match a {
                        AOperand::Quantized(a) => a,
                        AOperand::Float(_) => panic!("one format"),
                    })
                    .collect();
                Operand::upload_groups(&gpu, &parts).unwrap()
            }
            AOperand::Float(_) => {
                let values =
                    full.flat_map(|a| (0..a.rows()).flat_map(move |r| (0..k).map(move |c| a.value(r, c))));
                let values: Vec<_> = values.map(half::f16::from_f64).collect();
                let a = FloatMatrix::F16(Matrix::new("A", m, k, values).unwrap());
                Operand::upload_floats(&gpu, &a).unwrap()
            }
        };
        let half = |of: for<'w> fn(&'w GateUp<'static>) -> &'w QuantizedMatrix<'static>| {
            let parts: Vec<_> = problems.iter().map(|(_, weights)| of(weights)).collect();
            Operand::upload_groups(&gpu, &parts).unwrap()
        };
        let gate = half(|weights| &weights.gate);
        let up = if linear { gate } else { half(|weights| &weights.up) };
        // Tensor scales differ from group to group, beside what all have in common.
        let factor = |e: usize| 1.0 + e as f32;
        let alphas = problems
            .iter()
            .enumerate()
            .flat_map(|(e, (a, weights))| alpha(a, weights).map(|alpha| alpha * factor(e)))
            .flat_map(f32::to_le_bytes);
        let groups = GroupArgs {
            count: COUNTS.len(),
            rows: upload(&gpu, &rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<u8>>()),
            alphas: upload(&gpu, &alphas.collect::<Vec<u8>>()),
        };
        let variant = Variant { grouped: true, linear, ..f32_out() };
        let output = Output::new(upload(&gpu, &vec![0xEE; m * n * 4]), [0.5, 2.0]);
        let args = FusedArgs { a: x, gate, up, output, groups: Some(groups) };
        let spec = config.spec(&gpu, &variant, n, &args).unwrap();
        // SAFETY: the operands were allocated here, as large as the launch says.
        unsafe { gpu.launch(&spec) }.unwrap_or_else(|e| panic!("{}: {e}", config.name()));
        let got = floats(&download(&gpu, output.c, m * n * 4));
        for (e, &count) in COUNTS.iter().enumerate().filter(|(_, m)| **m > 0) {
            let (a, weights) = &problems[e];
            let [alpha_gate, alpha_up] = output.alpha.map(|alpha| alpha * factor(e));
            let epilogue = Epilogue { alpha_gate, alpha_up, ..Epilogue::default() };
            let want = match linear {
                false => bounded_reference(&epilogue, a, 0..count, weights),
                true => bounded_reference(&epilogue, a, 0..count, &Linear::new(weights.gate.clone())),
            };
            let own = &got[rows[e] as usize * n..rows[e + 1] as usize * n];
            let comparison = Comparison::new(own, &want, n).unwrap();
            assert!(comparison.rel_l2 < 1e-6, "{} group {e}: {comparison:?}", config.name());
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let config = Config::Sm100(TOKENS);
    let gpu = gpu(config);
    let (a, weights) = matrices(Formats::NVFP4, 7, (3, 40, 64));
    let [x, gate, up] = operands(&gpu, &a, &weights);
    let output = Output::new(upload(&gpu, &[0; 480]), [1.0; 2]);
    let args = FusedArgs { a: x, gate, up, output, groups: None };
    let message =
        |config: Config, n, args: &FusedArgs| config.spec(&gpu, &f32_out(), n, args).unwrap_err().to_string();
    assert_eq!(
        message(config, 48, &args),
        "gate is [40, 64]; the problem asks for [48, 64], for which the kernel and A are"
    );
    let odd = Output { c: DevicePtr(output.c.0 + 4), ..output };
    let text = message(config, 40, &FusedArgs { output: odd, ..args });
    assert!(text.starts_with("C is at 0x") && text.ends_with("on a multiple of 16 bytes"), "{text}");
    let split = Config::Sm100(sm100a::config::Config { split_k: 2, ..FEATURES });
    assert_eq!(
        message(split, 40, &args),
        "sm100a fused: CTAs that split K, each at least 256 of it: 2 asked for; valid: 1"
    );
    let variant = Variant { out: Out::Nvfp4 { scale_layout: ScaleLayout::Linear }, ..f32_out() };
    let text = config.spec(&gpu, &variant, 40, &args).unwrap_err().to_string();
    assert_eq!(text, "an nvfp4 C is N = 40; the problem asks for a multiple of 16, whole blocks");
}
