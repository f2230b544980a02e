//! The fused kernel for few tokens against the f64 reference.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Device, DevicePtr};
use dualgemm_formats::quantize::Quantizer;
use dualgemm_formats::{
    BlockFormat, FloatMatrix, FloatType, GlobalScale, Matrix, Producer, QuantizedMatrix, ScaleLayout, Search,
};
use dualgemm_gemm::{
    AOperand, Activation, Bounded, Comparison, Epilogue, GateUp, Linear, bounded_reference, reference,
};
use dualgemm_kernels::generic::mixture::{Lists, Mixture, Sizes};
use dualgemm_kernels::parts::rows::{self, Out, Output};
use dualgemm_kernels::parts::tiles::GroupArgs;
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_kernels::warpwise::config::Config;
use dualgemm_kernels::warpwise::fused::{A, Variant};
use dualgemm_kernels::warpwise::host::{Fused, FusedArgs};
use dualgemm_ptx::builder::HalfFormat;

use crate::common::*;
use crate::sm80::{bound, error_of, weights};

const F16: A = A::Half(HalfFormat::F16);

fn out(ty: FloatType) -> Out {
    match ty {
        FloatType::F32 => Out::F32,
        FloatType::F16 => Out::F16,
        FloatType::Bf16 => Out::Bf16,
    }
}

fn check(
    gpu: &dyn Device,
    config: Config,
    (a, ty): (A, FloatType),
    activation: Activation,
    (m, n, k): (usize, usize, usize),
    more: bool,
) {
    let what = format!("{} {a:?} {ty:?} {m}x{n}x{k}", config.name());
    let size = if ty == FloatType::F32 { 4 } else { 2 };
    let mut weights = weights((n, k));
    let pack = Pack::new(&weights).unwrap();
    let rows =
        rows::Variant { out: out(ty), bias: more, a_scale: more, ..rows::Variant::new(activation.program()) };
    let variant =
        Variant { a, whole_blocks: k.is_multiple_of(64), linear: false, rows: rows.for_features(n) };
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let c = poisoned(gpu, m * n * size + 64);
    let mut output = Output::new(c, pack.alpha());
    let (operand, (a, a_pitch, a_scales)) = match a {
        A::Half(format) => {
            let ty = if format == HalfFormat::F16 { FloatType::F16 } else { FloatType::Bf16 };
            let a = Inputs::seeded(5).floats("a", ty, m, k).unwrap();
            let there = upload_floats(gpu, &a);
            (AOperand::Float(a), (there.values, there.pitch, DevicePtr::NULL))
        }
        A::Nvfp4(layout) => {
            let a = quantized("a", (m, k), layout);
            let there = upload_codes(gpu, &a);
            output.alpha = output.alpha.map(|alpha| alpha * a.global_scale().value());
            (AOperand::Quantized(a), (there.codes, 0, there.scales))
        }
    };
    if more {
        let values: [Vec<f32>; 2] = [0.25f32, -0.5].map(|x| (0..n).map(|i| x + i as f32 * 0.01).collect());
        output.bias = [&values[0], &values[1]]
            .map(|bias| upload(gpu, &bias.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()));
        output.alpha = output.alpha.map(|alpha| alpha * 4.0);
        output.a_scale = upload(gpu, &0.25f32.to_le_bytes());
        let [gate, up] = values;
        (weights.gate_bias, weights.up_bias) = (Some(gate.into()), Some(up.into()));
    }
    let weights_there = upload(gpu, pack.bytes());
    let args = FusedArgs {
        size: (m, n, k),
        a,
        a_pitch,
        a_scales,
        weights: weights_there,
        groups: None,
        settled: false,
        output,
    };
    run(gpu, &kernel.spec(&args).unwrap());
    let epilogue = Epilogue { activation, ..Epilogue::default() };
    let want = reference(&epilogue, &operand, 0..m, &weights);
    let got = read(gpu, c, m * n * size + 64);
    let error = error_of(&got[..m * n * size], ty, &want, n);
    assert!(error < bound(ty), "{what}: {error}");
    assert!(got[m * n * size..].iter().all(|&byte| byte == 0xA5), "{what} wrote behind C");
}

#[test]
fn every_tile_of_the_kernel_for_few_tokens_close() {
    // Half a chunk, whole ones, and both.
    let sizes = Config::menu().filter(|config| [1, 2, 3, 7].contains(&config.halves));
    for (i, config) in sizes.enumerate() {
        let a = if i % 2 == 0 || !config.expands_codes() { F16 } else { A::Nvfp4(ScaleLayout::Linear) };
        // More than one CTA, the last one not full; a warp's ring goes round.
        let n = config.halves as usize * 16 * 2 + 8;
        let blocks = (config.k_groups * (config.chunks + 1) + 1).min(30) as usize;
        let shape = (config.tokens as usize, n, 64 * blocks);
        check(gpu(), config, (a, FloatType::F16), Activation::Silu, shape, false);
    }
}

/// An nvfp4 C is what the CPU path makes of the same kernel's f32 C, and every launch leaves the same bits.
#[test]
fn an_nvfp4_c_of_few_tokens_is_its_f32_quantized_exact() {
    let (gpu, (m, n, k), scale) = (gpu(), (3, 80, 448), 0.003);
    let config = Config { halves: 3, tokens: 4, k_groups: 2, chunks: 2 };
    let a = upload_floats(gpu, &Inputs::seeded(5).floats("a", FloatType::F16, m, k).unwrap());
    let pack = Pack::new(&weights((n, k))).unwrap();
    let pack_there = upload(gpu, pack.bytes());
    let launch = |out, bytes| {
        let rows = rows::Variant { out, ..rows::Variant::new(Activation::Silu.program()) };
        let variant = Variant { a: F16, whole_blocks: true, linear: false, rows: rows.for_features(n) };
        let (c, scales) = (poisoned(gpu, bytes), poisoned(gpu, m * n / 16));
        let output = Output { scales, scale, ..Output::new(c, pack.alpha()) };
        let (a, a_pitch, a_scales) = (a.values, a.pitch, DevicePtr::NULL);
        let args = FusedArgs {
            size: (m, n, k),
            a,
            a_pitch,
            a_scales,
            weights: pack_there,
            groups: None,
            settled: false,
            output,
        };
        let kernel = Fused::new(gpu, config, &variant).unwrap();
        run(gpu, &kernel.spec(&args).unwrap());
        let first = (read(gpu, c, bytes), read(gpu, scales, m * n / 16));
        run(gpu, &kernel.spec(&args).unwrap());
        assert!(first == (read(gpu, c, bytes), read(gpu, scales, m * n / 16)), "other bits");
        first
    };
    let (floats, _) = launch(Out::F32, m * n * 4);
    let values: Vec<f32> = floats.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect();
    let scale = GlobalScale::multiplier(scale);
    let quantizer = Quantizer::new(Producer::Te, scale, FloatType::F32, Search::Plain);
    let want = quantizer.matrix("c", &FloatMatrix::F32(Matrix::new("c", m, n, values).unwrap())).unwrap();
    let (codes, scales) = launch(Out::Nvfp4 { scale_layout: ScaleLayout::Linear }, m * n / 2);
    assert!(codes == want.codes(), "codes");
    assert!(scales == want.scales(), "scales");
}

#[test]
fn tails_and_types_of_the_kernel_for_few_tokens_close() {
    let gelu = Activation::GeluTanh;
    for (i, layout) in ScaleLayout::ALL.into_iter().enumerate() {
        let config = Config { halves: 4 - 2 * (i as u32 % 2), tokens: 2 << i, k_groups: 2, chunks: 3 };
        check(gpu(), config, (A::Nvfp4(layout), FloatType::F32), gelu, (21, 37, 208), true);
        check(gpu(), config, (F16, FloatType::F32), gelu, (3, 37, 80), true);
        let bf16 = A::Half(HalfFormat::Bf16);
        check(gpu(), Config { halves: 3, ..config }, (bf16, FloatType::Bf16), gelu, (7, 100, 144), true);
    }
    // Fewer blocks than warps.
    let config = Config { halves: 1, tokens: 1, k_groups: 16, chunks: 3 };
    check(gpu(), config, (F16, FloatType::F16), Activation::SWIGLU_OAI, (2, 40, 16), true);
}

/// Weights of each group, biased if `bias`; C in f32 of rows in groups of these sizes, or of one problem.
fn check_groups(config: Config, (linear, bias): (bool, bool), sizes: &[u32], (n, k): (usize, usize)) {
    let (gpu, what) = (gpu(), format!("{} linear: {linear} {sizes:?} {n}x{k}", config.name()));
    let rows: Vec<u32> = (0..=sizes.len()).map(|g| sizes[..g].iter().sum()).collect();
    let mut inputs = Inputs::seeded(17);
    let mut matrix = |scale: f32| -> QuantizedMatrix<'static> {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        inputs.quantized("w", BlockFormat::Nvfp4, (n, k), sets, GlobalScale::multiplier(scale)).unwrap()
    };
    let weights: Vec<GateUp<'_>> = (0..sizes.len())
        .map(|group| {
            let scale = 0.011 * (group % 7 + 1) as f32;
            let biased = |x: f32| bias.then(|| (0..n).map(|i| x + group as f32 - i as f32 / 32.0).collect());
            let (gate_bias, up_bias) = (biased(0.0), biased(1.0));
            GateUp { gate_bias, up_bias, ..GateUp::new(matrix(scale), matrix(0.023)) }
        })
        .collect();
    let layer = |of: &GateUp<'static>| Linear { weight: of.gate.clone(), bias: of.gate_bias.clone() };
    let pack = |of| if linear { Pack::of_matrix(&layer(of).weight) } else { Pack::new(of) };
    let packs: Vec<Pack> = weights.iter().map(|of| pack(of).unwrap()).collect();
    let m = rows[sizes.len()] as usize;
    let a = inputs.floats("a", FloatType::F16, m, k).unwrap();
    let grouped = sizes.len() > 1;
    let rows_of_c =
        rows::Variant { out: Out::F32, bias, grouped, ..rows::Variant::new(Activation::Silu.program()) };
    let variant =
        Variant { a: F16, whole_blocks: k.is_multiple_of(64), linear, rows: rows_of_c.for_features(n) };
    let kernel = Fused::new(gpu, config, &variant).unwrap();
    let floats =
        |values: Vec<f32>| upload(gpu, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    let c = poisoned(gpu, m * n * 4 + 64);
    let mut output = Output::new(c, if grouped { [1.0; 2] } else { packs[0].alpha() });
    if bias {
        let gate = weights.iter().flat_map(|w| w.gate_bias.as_deref().unwrap()).copied();
        let up = weights.iter().flat_map(|w| w.up_bias.as_deref().unwrap()).copied();
        output.bias = [floats(gate.collect()), floats(up.collect())];
    }
    let groups = grouped.then(|| GroupArgs {
        count: sizes.len(),
        rows: upload(gpu, &rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<_>>()),
        alphas: floats(packs.iter().flat_map(Pack::alpha).collect()),
    });
    let there = upload_floats(gpu, &a);
    let (pitch, a_scales) = (there.pitch, DevicePtr::NULL);
    let bytes: Vec<u8> = packs.iter().flat_map(|pack| pack.bytes().to_vec()).collect();
    let weights_there = upload(gpu, &bytes);
    let args = FusedArgs {
        size: (m, n, k),
        a: there.values,
        a_pitch: pitch,
        a_scales,
        weights: weights_there,
        groups,
        settled: false,
        output,
    };
    run(gpu, &kernel.spec(&args).unwrap());
    let a = AOperand::Float(a);
    let want = weights.iter().zip(rows.windows(2)).flat_map(|(weights, rows)| {
        let rows = rows[0] as usize..rows[1] as usize;
        match linear {
            true => bounded_reference(&Epilogue::default(), &a, rows, &layer(weights)),
            false => bounded_reference(&Epilogue::default(), &a, rows, weights),
        }
    });
    let want: Vec<Bounded> = want.collect();
    let got = read(gpu, c, m * n * 4 + 64);
    let (values, guard) = got.split_at(m * n * 4);
    let values: Vec<f32> = values.as_chunks().0.iter().copied().map(f32::from_le_bytes).collect();
    let within = |(got, want): (&f32, &Bounded)| (f64::from(*got) - want.value).abs() <= want.error;
    assert!(
        values.iter().zip(&want).all(within),
        "{what}: {:?}",
        Comparison::new(&values, &want, n).unwrap()
    );
    assert!(guard.iter().all(|&byte| byte == 0xA5), "{what} wrote behind C");
}

#[test]
fn linear_layers_of_few_tokens_close() {
    let config = |halves, tokens, k_groups| Config { halves, tokens, k_groups, chunks: 2 };
    check_groups(config(1, 2, 3), (true, true), &[2], (72, 448));
    check_groups(config(3, 4, 2), (true, false), &[3], (104, 336));
    check_groups(config(2, 8, 2), (true, false), &[11], (56, 208));
    check_groups(config(4, 16, 2), (true, false), &[16], (132, 320));
}

#[test]
fn rows_in_groups_of_few_tokens_close() {
    let config = |halves, tokens, k_groups| Config { halves, tokens, k_groups, chunks: 2 };
    for linear in [false, true] {
        // Groups without rows at the start, within and at the end; more rows than a tile; more groups than a warp looks at
        // at once.
        check_groups(config(2, 2, 2), (linear, true), &[0, 3, 0, 0, 1, 2, 0], (40, 208));
        check_groups(config(3, 8, 2), (linear, false), &[9, 1], (72, 320));
    }
    let mut many = vec![0; 300];
    (many[7], many[255], many[256], many[299]) = (1, 2, 1, 3);
    check_groups(config(1, 2, 1), (true, false), &many, (8, 16));
}

/// More CTAs than a card has multiprocessors: warps ask for all their chunks ahead of A.
#[test]
fn ctas_that_share_multiprocessors_close() {
    let config = |tokens| Config { halves: 1, tokens, k_groups: 2, chunks: 2 };
    for (tokens, a) in [(2, F16), (2, A::Nvfp4(ScaleLayout::Linear)), (16, F16)] {
        check(
            gpu(),
            config(tokens),
            (a, FloatType::F16),
            Activation::Silu,
            (tokens as usize, 133 * 16 + 8, 400),
            false,
        );
    }
}

/// The second of two products may read the table of rows before the first has ended, which has waited for it; the first may not.
#[test]
fn settled_rows_are_read_early_exact() {
    let (n, k, sizes) = (64, 64, Sizes { tokens: 2, top_k: 2, experts: 3 });
    let run = |settled: &[bool]| {
        let gpu = gpu();
        let config = Config { halves: 2, tokens: 2, k_groups: 1, chunks: 2 };
        let rows = rows::Variant { grouped: true, ..rows::Variant::new(Activation::Silu.program()) };
        let variant = Variant { a: F16, whole_blocks: true, linear: true, rows: rows.for_features(n) };
        let kernel = Fused::new(gpu, config, &variant).unwrap();
        let words = |words: usize| poisoned(gpu, 4 * words);
        let lists = Lists { rows: words(4), row_of: words(4), choice_of: words(4) };
        let ids = upload(gpu, &[2i32, 0, 2, 1].map(i32::to_le_bytes).concat());
        let a = upload_floats(gpu, &Inputs::seeded(5).floats("a", FloatType::F16, 2, k).unwrap());
        let between: Vec<DevicePtr> = (0..=settled.len()).map(|_| poisoned(gpu, 4 * n * 2)).collect();
        let mixture = Mixture::new(gpu, FloatType::F32).unwrap();
        let mut specs = mixture.by_expert(&sizes, ids, (a.values, a.pitch, k), &lists, between[0]).unwrap();
        let pack = Pack::of_matrix(&weights((n, k)).gate).unwrap();
        let weights = upload(gpu, &pack.bytes().repeat(3));
        let alphas = upload(gpu, &[1e-3f32; 6].map(f32::to_le_bytes).concat());
        let groups = Some(GroupArgs { count: 3, rows: lists.rows, alphas });
        for (ends, &settled) in between.windows(2).zip(settled) {
            let (a, a_scales, output) = (ends[0], DevicePtr::NULL, Output::new(ends[1], [1.0; 2]));
            let args =
                FusedArgs { size: (4, n, k), a, a_pitch: 2 * k, a_scales, weights, groups, settled, output };
            specs.push(kernel.spec(&args).unwrap());
        }
        // SAFETY: the operands were allocated here, as large as the launches say.
        let launched = specs.into_iter().try_for_each(|spec| unsafe { gpu.launch(&spec.programmatic(true)) });
        launched.map(|()| read(gpu, between[settled.len()], 4 * n * 2)).map_err(|e| e.to_string())
    };
    assert_eq!(run(&[false, true]).unwrap(), run(&[false, false]).unwrap());
    let early = run(&[true]).unwrap_err();
    assert!(early.contains("is not ordered with a write by an earlier launch of `sort`"), "{early}");
}

/// Two CTAs of a kernel fit on a multiprocessor, unless each can have one to itself: then they must not lie in pairs.
#[test]
fn ctas_that_can_be_alone_are() {
    let (gpu, config, (m, k)) = (gpu(), Config { halves: 2, tokens: 2, k_groups: 16, chunks: 2 }, (1, 64));
    let rows = rows::Variant::new(Activation::Silu.program());
    let kernel =
        Fused::new(gpu, config, &Variant { a: F16, whole_blocks: true, linear: false, rows }).unwrap();
    let there = DevicePtr(1 << 20);
    for (ctas, alone) in [(132, true), (133, false)] {
        let (a, output) = (there, Output::new(there, [1.0; 2]));
        let size = (m, 32 * ctas, k);
        let args = FusedArgs {
            size,
            a,
            a_pitch: 2 * k,
            a_scales: a,
            weights: there,
            groups: None,
            settled: false,
            output,
        };
        let spec = kernel.spec(&args).unwrap();
        assert_eq!(spec.grid, [ctas as u32, 1, 1]);
        assert_eq!(2 * (spec.dynamic_shared + 1024) > gpu.info().shared_per_sm, alone, "{ctas} CTAs");
    }
}
