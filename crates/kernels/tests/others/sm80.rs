//! The fused kernel by `mma.sync` against the f64 reference.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::Device;
use dualgemm_formats::quantize::Quantizer;
use dualgemm_formats::{
    BlockFormat, FloatMatrix, FloatType, GlobalScale, Matrix, Producer, QuantizedMatrix, ScaleLayout, Search,
};
use dualgemm_gemm::{
    AOperand, Activation, Comparison, Epilogue, GateUp, Linear, bounded_reference, reference,
};
use dualgemm_kernels::parts::rows::{self, Out, Output};
use dualgemm_kernels::parts::tiles::GroupArgs;
use dualgemm_kernels::sm80::config::Config;
use dualgemm_kernels::sm80::fused::Variant;
use dualgemm_kernels::sm80::host::{Fused, FusedArgs};
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;
use half::{bf16, f16};

use crate::common::*;

/// Weights whose products with activations of unit variance are of the order of 1.
pub fn weights((n, k): (usize, usize)) -> GateUp<'static> {
    let mut inputs = Inputs::seeded(7);
    let mut half = |name, scale| {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, GlobalScale::multiplier(scale)).unwrap()
    };
    GateUp::new(half("gate", 0.011), half("up", 0.023))
}

/// Relative error of C's bytes, in the type `out`, which says what overflows.
pub fn error_of(bytes: &[u8], out: FloatType, want: &[f64], n: usize) -> f64 {
    let c = floats(bytes, out);
    let error = match out {
        FloatType::F32 => Comparison::new(&c, want, n),
        FloatType::F16 => Comparison::new(&c.into_iter().map(f16::from_f32).collect::<Vec<_>>(), want, n),
        FloatType::Bf16 => Comparison::new(&c.into_iter().map(bf16::from_f32).collect::<Vec<_>>(), want, n),
    };
    error.unwrap().rel_l2
}

/// Most relative error of the type: rounding C alone is 0.7 of it.
pub fn bound(out: FloatType) -> f64 {
    match out {
        FloatType::F32 => 1e-6,
        FloatType::F16 => 3e-4,
        FloatType::Bf16 => 2.4e-3,
    }
}

fn check(
    gpu: &dyn Device,
    config: Config,
    (compute, out): (HalfFormat, FloatType),
    activation: Activation,
    (m, n, k): (usize, usize, usize),
    biased: bool,
) {
    let mut inputs = Inputs::seeded(5);
    let ty = if compute == HalfFormat::F16 { FloatType::F16 } else { FloatType::Bf16 };
    let size = size(out);
    let a = inputs.floats("a", ty, m, k).unwrap();
    let mut weights = weights((n, k));
    let pack = Pack::new(&weights).unwrap();
    let rows = rows::Variant {
        out: Out::float(out),
        bias: biased,
        a_scale: biased,
        ..rows::Variant::new(activation.program())
    };
    let variant = Variant { compute, linear: false, rows: rows.for_features(n) };
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let on_device = upload_floats(gpu, &a);
    let c = poisoned(gpu, m * n * size);
    let mut output = Output::new(c, pack.alpha());
    if biased {
        let values: [Vec<f32>; 2] = [0.25f32, -0.5].map(|x| (0..n).map(|i| x + i as f32 * 0.01).collect());
        output.bias = [0, 1].map(|half| upload_f32s(gpu, &values[half]));
        output.alpha = output.alpha.map(|alpha| alpha * 4.0);
        output.a_scale = upload(gpu, &0.25f32.to_le_bytes());
        let [gate, up] = values;
        (weights.gate_bias, weights.up_bias) = (Some(gate.into()), Some(up.into()));
    }
    let args = FusedArgs {
        size: (m, n, k),
        a: on_device.values,
        a_pitch: on_device.pitch,
        weights: upload(gpu, pack.bytes()),
        groups: None,
        output,
    };
    run(gpu, &kernel.spec(&args).unwrap());
    let epilogue = Epilogue { activation, ..Epilogue::default() };
    let want = reference(&epilogue, &AOperand::Float(a), 0..m, &weights);
    let error = error_of(&read(gpu, c, m * n * size), out, &want, n);
    assert!(error < bound(out), "{} {compute:?} {out:?} {m}x{n}x{k}: {error}", config.name());
}

#[test]
fn every_tile_of_the_sm80_kernel_close() {
    for config in Config::MENU {
        let tokens = config.tokens as usize;
        check(gpu(), config, (HalfFormat::F16, FloatType::F16), Activation::Silu, (tokens, 64, 192), false);
    }
}

/// Every tile, chunks that are not full, and rows of C that start anywhere.
#[test]
fn linear_layers_by_the_sm80_kernel_close() {
    let gpu = gpu();
    for (config, n) in Config::MENU.into_iter().zip([64, 37, 200, 104, 301]) {
        let (m, k, mut inputs) = (config.tokens as usize + 3, 144, Inputs::seeded(3));
        let a = inputs.floats("a", FloatType::F16, m, k).unwrap();
        let bias: Vec<f32> = (0..n).map(|i| 0.25 + i as f32 * 0.01).collect();
        let layer = Linear { bias: Some(bias.clone().into()), ..Linear::new(weights((n, k)).gate) };
        let pack = Pack::of_matrix(&layer.weight).unwrap();
        let rows =
            rows::Variant { out: Out::F32, bias: true, ..rows::Variant::new(Activation::Silu.program()) };
        let variant = Variant { compute: HalfFormat::F16, linear: true, rows: rows.for_features(n) };
        let (on_device, c) = (upload_floats(gpu, &a), poisoned(gpu, m * n * 4));
        let output = Output { bias: [upload_f32s(gpu, &bias); 2], ..Output::new(c, pack.alpha()) };
        let (values, a_pitch) = (on_device.values, on_device.pitch);
        let args = FusedArgs {
            size: (m, n, k),
            a: values,
            a_pitch,
            weights: upload(gpu, pack.bytes()),
            groups: None,
            output,
        };
        run(gpu, &Fused::new(gpu, config, &variant).unwrap().spec(&args).unwrap());
        let want = bounded_reference(&Epilogue::default(), &AOperand::Float(a), 0..m, &layer);
        let want: Vec<f64> = want.into_iter().map(|c| c.value).collect();
        let error = error_of(&read(gpu, c, m * n * 4), FloatType::F32, &want, n);
        assert!(error < bound(FloatType::F32), "{} {m}x{n}x{k}: {error}", config.name());
    }
}

/// Groups without rows first, last and between, of more rows than a tile, pairs of weights and linear layers.
#[test]
fn groups_by_the_sm80_kernel_close() {
    const COUNTS: [usize; 6] = [0, 130, 1, 0, 35, 0];
    let (gpu, k, m) = (gpu(), 144, COUNTS.iter().sum());
    let starts: Vec<usize> = (0..=COUNTS.len()).map(|e| COUNTS[..e].iter().sum()).collect();
    let a = Inputs::seeded(5).floats("a", FloatType::F16, m, k).unwrap();
    let on_device = upload_floats(gpu, &a);
    let a = AOperand::Float(a);
    for (config, (linear, n)) in
        Config::MENU.into_iter().zip([(false, 40), (true, 72), (false, 72), (true, 200)])
    {
        let experts: Vec<GateUp<'_>> = (0..COUNTS.len())
            .map(|e| {
                let of = |half: &QuantizedMatrix<'_>| {
                    let scale = GlobalScale::multiplier(half.global_scale().value() * (1.0 + e as f32));
                    let (codes, scales) = half.dense_rows((0..n).rev());
                    let linear = ScaleLayout::Linear;
                    QuantizedMatrix::new("half", BlockFormat::Nvfp4, n, k, codes, scales, linear, scale)
                        .unwrap()
                };
                let GateUp { gate, up, .. } = weights((n, k));
                if e % 2 == 0 { GateUp::new(gate, up) } else { GateUp::new(of(&up), of(&gate)) }
            })
            .collect();
        let pack = |pair: &GateUp<'_>| match linear {
            false => Pack::new(pair).unwrap(),
            true => Pack::of_matrix(&pair.gate).unwrap(),
        };
        let packs: Vec<Pack> = experts.iter().map(pack).collect();
        let bytes: Vec<u8> = packs.iter().flat_map(|pack| pack.bytes().to_vec()).collect();
        let rows: Vec<u8> = starts.iter().flat_map(|&row| (row as u32).to_le_bytes()).collect();
        let alphas: Vec<f32> = packs.iter().flat_map(Pack::alpha).collect();
        let groups =
            GroupArgs { count: COUNTS.len(), rows: upload(gpu, &rows), alphas: upload_f32s(gpu, &alphas) };
        let variant =
            rows::Variant { out: Out::F32, grouped: true, ..rows::Variant::new(Activation::Silu.program()) };
        let variant = Variant { compute: HalfFormat::F16, linear, rows: variant.for_features(n) };
        let c = poisoned(gpu, m * n * 4);
        let args = FusedArgs {
            size: (m, n, k),
            a: on_device.values,
            a_pitch: on_device.pitch,
            weights: upload(gpu, &bytes),
            groups: Some(groups),
            output: Output::new(c, [1.0; 2]),
        };
        run(gpu, &Fused::new(gpu, config, &variant).unwrap().spec(&args).unwrap());
        let got = read(gpu, c, m * n * 4);
        for (e, pair) in experts.iter().enumerate().filter(|(e, _)| COUNTS[*e] > 0) {
            let rows = starts[e]..starts[e + 1];
            let want = match linear {
                false => bounded_reference(&Epilogue::default(), &a, rows.clone(), pair),
                true => {
                    let layer = Linear::new(pair.gate.clone());
                    bounded_reference(&Epilogue::default(), &a, rows.clone(), &layer)
                }
            };
            let want: Vec<f64> = want.into_iter().map(|c| c.value).collect();
            let error = error_of(&got[rows.start * n * 4..rows.end * n * 4], FloatType::F32, &want, n);
            assert!(error < bound(FloatType::F32), "{} linear {linear}, group {e}: {error}", config.name());
        }
    }
}

#[test]
fn tails_and_types_of_the_sm80_kernel_close() {
    let [few, .., many] = Config::MENU;
    check(gpu(), few, (HalfFormat::F16, FloatType::F32), Activation::GeluTanh, (3, 37, 80), true);
    check(gpu(), many, (HalfFormat::Bf16, FloatType::Bf16), Activation::Silu, (131, 40, 144), true);
    check(
        gpu(),
        Config::MENU[3],
        (HalfFormat::Bf16, FloatType::F32),
        Activation::SWIGLU_OAI,
        (65, 100, 16),
        true,
    );
}

#[test]
fn the_sm80_kernel_runs_on_cards_of_other_generations_close() {
    for card in [Card::B200, Card::RtxPro6000] {
        let gpu = dualgemm_sim::Gpu::new(
            dualgemm_sim::Config::default().card(card).checks(dualgemm_sim::Checks::ALL),
        );
        let types = (HalfFormat::Bf16, FloatType::F16);
        check(&gpu, Config::MENU[1], types, Activation::Silu, (9, 40, 144), true);
    }
}

/// An nvfp4 C is what the quantizer makes of the same kernel's f32.
#[test]
fn nvfp4_c_of_the_sm80_kernel_equals_its_f32_quantized_exact() {
    let (gpu, (m, n, k)) = (gpu(), (9, 80, 144));
    let (config, scale, layout) = (Config::MENU[1], GlobalScale::multiplier(0.003), ScaleLayout::Sf128x4);
    let a = upload_floats(gpu, &Inputs::seeded(5).floats("a", FloatType::F16, m, k).unwrap());
    let pack = Pack::new(&weights((n, k))).unwrap();
    let weights = upload(gpu, pack.bytes());
    let run_to = |out, output| {
        let rows = rows::Variant { out, ..rows::Variant::new(Activation::Silu.program()) };
        let variant = Variant { compute: HalfFormat::F16, linear: false, rows: rows.for_features(n) };
        let kernel = Fused::new(gpu, config, &variant).unwrap();
        let args =
            FusedArgs { size: (m, n, k), a: a.values, a_pitch: a.pitch, weights, groups: None, output };
        run(gpu, &kernel.spec(&args).unwrap());
    };
    let floats = poisoned(gpu, m * n * 4);
    run_to(Out::F32, Output::new(floats, pack.alpha()));
    let values = read(gpu, floats, m * n * 4);
    let values: Vec<f32> = values.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect();
    let values = FloatMatrix::F32(Matrix::new("c", m, n, values).unwrap());
    let quantizer = Quantizer::new(Producer::Te, scale, FloatType::F32, Search::Plain);
    let want = quantizer.matrix("c", &values).unwrap().with_scale_layout(layout);

    let (codes, scales) = (poisoned(gpu, m * n / 2), upload(gpu, &vec![0; layout.len(m, n / 16)]));
    run_to(
        Out::Nvfp4 { scale_layout: layout },
        Output { scales, scale: scale.value(), ..Output::new(codes, pack.alpha()) },
    );
    assert_eq!(read(gpu, codes, m * n / 2), want.codes());
    assert_eq!(read(gpu, scales, layout.len(m, n / 16)), want.scales());
}
