//! The fused Blackwell kernels in the simulator, all checkers on, against the f64 reference.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Device, DevicePtr, LaunchSpec};
use dualgemm_formats::quantize::quantize_with;
use dualgemm_formats::{
    BlockFormat, FloatMatrix, FloatType, GlobalScale, Matrix, Producer, QuantizedMatrix, ScaleLayout, Search,
};
use dualgemm_gemm::{AOperand, Activation, Comparison, Epilogue, GateUp, reference};
use dualgemm_kernels::parts::operand::{FusedArgs, Operand};
use dualgemm_kernels::parts::rows::{Out, Output, Variant};
use dualgemm_kernels::parts::tiles::GroupArgs;
use dualgemm_kernels::sm100a::config::Side;
use dualgemm_kernels::{Error, sm100a, sm120a};
use dualgemm_sim::{Card, Checks, Gpu};

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

    fn spec(self, gpu: &Gpu, variant: &Variant, n: usize, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        match self {
            Self::Sm100(config) => sm100a::host::Fused::new(gpu, config, variant, n)?.spec(args),
            Self::Sm120(config) => sm120a::host::Fused::new(gpu, config, variant, n)?.spec(args),
        }
    }
}

fn gpu(config: Config) -> Gpu {
    Gpu::new(dualgemm_sim::Config::default().card(config.card()).checks(Checks::ALL))
}

fn f32_out() -> Variant {
    Variant { out: Out::F32, ..Variant::new(Activation::Silu.program()) }
}

fn alpha(a: &QuantizedMatrix<'_>, weights: &GateUp<'_>) -> [f32; 2] {
    [&weights.gate, &weights.up].map(|w| a.global_scale().value() * w.global_scale().value())
}

fn upload(gpu: &Gpu, bytes: &[u8]) -> DevicePtr {
    let ptr = gpu.alloc(bytes.len()).unwrap();
    gpu.copy_to(ptr, bytes).unwrap();
    ptr
}

fn download(gpu: &Gpu, from: DevicePtr, bytes: usize) -> Vec<u8> {
    let mut to = vec![0; bytes];
    gpu.copy_from(&mut to, from).unwrap();
    to
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Launches on one problem. C and what lies behind it are poisoned before.
fn run(config: Config, variant: &Variant, a: &QuantizedMatrix<'_>, weights: &GateUp<'_>) -> Vec<u8> {
    let gpu = gpu(config);
    let [x, gate, up] = [a, &weights.gate, &weights.up].map(|m| Operand::upload(&gpu, m).unwrap());
    let (m, n) = (a.rows(), weights.n());
    let bytes = m * variant.out.row_bytes(n);
    let c = upload(&gpu, &vec![0xEE; bytes + 256]);
    let output = Output::new(c, alpha(a, weights));
    let args = FusedArgs { a: x, gate, up, output, groups: None };
    let spec = config.spec(&gpu, variant, n, &args).unwrap();
    gpu.launch(&spec).unwrap_or_else(|e| panic!("{}: {e}", config.name()));
    gpu.synchronize().unwrap();
    let mut c = download(&gpu, c, bytes + 256);
    assert!(c.split_off(bytes).iter().all(|&byte| byte == 0xEE), "{} wrote behind C", config.name());
    c
}

fn check(config: Config, (m, n, k): (usize, usize, usize)) {
    let (a, weights) = matrices((m, n, k));
    let got = floats(&run(config, &f32_out(), &a, &weights));
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

/// One configuration of each way through the kernels.
fn every_way() -> [Config; 5] {
    [
        Config::Sm100(TOKENS),
        Config::Sm100(FEATURES),
        Config::Sm100(sm100a::config::Config { split_k: 2, accumulators: 1, ..TOKENS }),
        Config::Sm100(sm100a::config::Config { split_k: 2, ..FEATURES }),
        Config::Sm120(sm120a::config::Config::MENU[0]),
    ]
}

#[test]
fn outputs_of_16_bits_are_the_rounded_floats_exact() {
    let (a, weights) = matrices((7, 72, 592));
    for config in every_way() {
        let floats = floats(&run(config, &f32_out(), &a, &weights));
        for (m, n) in [(7, 72), (5, 69)] {
            let row = |matrix: &QuantizedMatrix<'static>, rows| {
                let (k, blocks) = (matrix.k(), matrix.blocks());
                let (codes, scales) = (&matrix.codes()[..rows * k / 2], &matrix.scales()[..rows * blocks]);
                QuantizedMatrix::new(
                    matrix.name(),
                    BlockFormat::Nvfp4,
                    rows,
                    k,
                    codes.to_vec(),
                    scales.to_vec(),
                    matrix.scale_layout(),
                    matrix.global_scale(),
                )
                .unwrap()
            };
            let (a, weights) = (row(&a, m), GateUp::new(row(&weights.gate, n), row(&weights.up, n)));
            let f16 = run(config, &Variant { out: Out::F16, ..f32_out() }, &a, &weights);
            let bf16 = run(config, &Variant { out: Out::Bf16, ..f32_out() }, &a, &weights);
            for (i, (f16, bf16)) in f16.chunks_exact(2).zip(bf16.chunks_exact(2)).enumerate() {
                let want = floats[i / n * 72 + i % n];
                assert_eq!(half::f16::from_le_bytes([f16[0], f16[1]]), half::f16::from_f32(want));
                assert_eq!(half::bf16::from_le_bytes([bf16[0], bf16[1]]), half::bf16::from_f32(want));
            }
        }
    }
}

#[test]
fn an_nvfp4_c_is_the_quantized_floats_exact() {
    let (a, weights) = matrices((5, 48, 592));
    let (m, n, scale) = (5, 48, 0.02);
    for config in every_way() {
        let floats = floats(&run(config, &f32_out(), &a, &weights));
        let floats = FloatMatrix::F32(Matrix::new("C", m, n, floats).unwrap());
        let scale_of = GlobalScale::multiplier(scale);
        let want = quantize_with("C", &floats, Producer::Te, Search::Plain, scale_of).unwrap();
        for layout in ScaleLayout::ALL {
            let gpu = gpu(config);
            let [x, gate, up] = [&a, &weights.gate, &weights.up].map(|m| Operand::upload(&gpu, m).unwrap());
            let c = upload(&gpu, &vec![0xEE; m * n / 2]);
            let scales = upload(&gpu, &vec![0; layout.len(m, n / 16)]);
            let output = Output { scales, scale, ..Output::new(c, alpha(&a, &weights)) };
            let variant = Variant { out: Out::Nvfp4 { scale_layout: layout }, ..f32_out() };
            let args = FusedArgs { a: x, gate, up, output, groups: None };
            let spec = config.spec(&gpu, &variant, n, &args).unwrap();
            gpu.launch(&spec).unwrap_or_else(|e| panic!("{}: {e}", config.name()));
            assert_eq!(download(&gpu, c, m * n / 2), want.codes(), "{} {layout}", config.name());
            let want = want.scale_layout().convert(want.scales(), layout, m, n / 16);
            assert_eq!(download(&gpu, scales, want.len()), want, "{} {layout}", config.name());
        }
    }
}

#[test]
fn bias_scale_of_a_and_activations_close() {
    let (a, weights) = matrices((5, 40, 592));
    let (m, n) = (5, 40);
    let mut inputs = Inputs::seeded(11);
    let mut bias = |name| match inputs.floats(name, FloatType::F32, 1, n).unwrap() {
        FloatMatrix::F32(bias) => bias.as_dense().unwrap().to_vec(),
        FloatMatrix::F16(_) | FloatMatrix::Bf16(_) => panic!("f32 was asked for"),
    };
    let [gate_bias, up_bias] = ["gate bias", "up bias"].map(&mut bias);
    let want_weights = GateUp {
        gate_bias: Some(gate_bias.clone().into()),
        up_bias: Some(up_bias.clone().into()),
        ..weights.clone()
    };
    for (config, activation) in every_way().into_iter().zip(Activation::EXAMPLES) {
        let gpu = gpu(config);
        let [x, gate, up] = [&a, &weights.gate, &weights.up].map(|m| Operand::upload(&gpu, m).unwrap());
        let bytes = |floats: &[f32]| floats.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let variant = Variant { bias: true, a_scale: true, program: activation.program(), ..f32_out() };
        // A's tensor scale comes from device memory instead of the parameters.
        let alpha = alpha(&a, &weights).map(|alpha| alpha / a.global_scale().value());
        let output = Output {
            bias: [upload(&gpu, &bytes(&gate_bias)), upload(&gpu, &bytes(&up_bias))],
            a_scale: upload(&gpu, &a.global_scale().value().to_le_bytes()),
            ..Output::new(upload(&gpu, &vec![0; m * n * 4]), alpha)
        };
        let args = FusedArgs { a: x, gate, up, output, groups: None };
        gpu.launch(&config.spec(&gpu, &variant, n, &args).unwrap()).unwrap();
        let got = floats(&download(&gpu, output.c, m * n * 4));
        let epilogue = Epilogue { activation, ..Epilogue::default() };
        let want = reference(&epilogue, &AOperand::Quantized(a.clone()), 0..m, &want_weights);
        let comparison = Comparison::new(&got, &want, n).unwrap();
        assert!(comparison.rel_l2 < 2e-6, "{} {activation}: {comparison:?}", config.name());
    }
}

/// Experts with rows of their own: an empty first and last one, tails, more rows than a tile.
#[test]
fn groups_close() {
    const COUNTS: [usize; 5] = [0, 130, 1, 35, 0];
    let (n, k) = (72, 336);
    let mut inputs = Inputs::seeded(5);
    let mut matrix = |name: String, rows, scale| {
        let (sets, scale) = ((CodeSet::Full, ScaleSet::Unit), GlobalScale::multiplier(scale));
        inputs.quantized(&name, BlockFormat::Nvfp4, (rows, k), sets, scale).unwrap()
    };
    let a: Vec<_> =
        COUNTS.iter().enumerate().map(|(e, &m)| matrix(format!("A {e}"), m.max(1), 0.5)).collect();
    let weights: Vec<_> = (0..COUNTS.len())
        .map(|e| {
            GateUp::new(matrix(format!("gate {e}"), n, 0.011), matrix(format!("up {e}"), n, 0.02 + e as f32))
        })
        .collect();
    let rows: Vec<u32> = (0..=COUNTS.len()).map(|e| COUNTS[..e].iter().sum::<usize>() as u32).collect();
    let m: usize = COUNTS.iter().sum();
    let configs = [
        Config::Sm100(TOKENS),
        Config::Sm100(sm100a::config::Config { cta_group: 2, ..TOKENS }),
        Config::Sm100(sm100a::config::Config { split_k: 2, n: 32, ..FEATURES }),
        Config::Sm120(sm120a::config::Config::MENU[0]),
        Config::Sm120(sm120a::config::Config::MENU[3]),
    ];
    for config in configs {
        let gpu = gpu(config);
        let full: Vec<_> = a.iter().zip(COUNTS).filter(|(_, m)| *m > 0).map(|(a, _)| a).collect();
        let x = Operand::upload_groups(&gpu, &full).unwrap();
        let gates: Vec<_> = weights.iter().map(|w| &w.gate).collect();
        let ups: Vec<_> = weights.iter().map(|w| &w.up).collect();
        let [gate, up] = [gates, ups].map(|half| Operand::upload_groups(&gpu, &half).unwrap());
        let alphas = weights.iter().zip(&a).flat_map(|(w, a)| alpha(a, w)).flat_map(|x| x.to_le_bytes());
        let groups = GroupArgs {
            count: COUNTS.len(),
            rows: upload(&gpu, &rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<u8>>()),
            alphas: upload(&gpu, &alphas.collect::<Vec<u8>>()),
        };
        let variant = Variant { grouped: true, ..f32_out() };
        let output = Output::new(upload(&gpu, &vec![0xEE; m * n * 4]), [f32::NAN; 2]);
        let args = FusedArgs { a: x, gate, up, output, groups: Some(groups) };
        let spec = config.spec(&gpu, &variant, n, &args).unwrap();
        gpu.launch(&spec).unwrap_or_else(|e| panic!("{}: {e}", config.name()));
        let got = floats(&download(&gpu, output.c, m * n * 4));
        for (e, &count) in COUNTS.iter().enumerate().filter(|(_, m)| **m > 0) {
            let operand = AOperand::Quantized(a[e].clone());
            let want = reference(&Epilogue::default(), &operand, 0..count, &weights[e]);
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
    let (a, weights) = matrices((3, 40, 64));
    let [x, gate, up] = [&a, &weights.gate, &weights.up].map(|m| Operand::upload(&gpu, m).unwrap());
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
    assert!(
        text.starts_with("C is address 0x") && text.ends_with("a multiple of 16 bytes, not null"),
        "{text}"
    );
    let split = Config::Sm100(sm100a::config::Config { split_k: 2, ..FEATURES });
    assert_eq!(
        message(split, 40, &args),
        "sm100a fused: CTAs that split K, each at least 256 of it: 2 asked for, 1 at most"
    );
    let variant = Variant { out: Out::Nvfp4 { scale_layout: ScaleLayout::Linear }, ..f32_out() };
    let text = config.spec(&gpu, &variant, 40, &args).unwrap_err().to_string();
    assert_eq!(text, "an nvfp4 C is N = 40; the problem asks for a multiple of 16, whole blocks");
}
