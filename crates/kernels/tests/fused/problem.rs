//! Problems of any kernel, launched in the simulator with every check on, and C against the f64 reference; on a GPU with
//! `DUALGEMM_TEST_DEVICE=cuda`.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::Device;
use dualgemm_formats::quantize::Quantizer;
use dualgemm_formats::scalar::e4m3;
use dualgemm_formats::{
    BlockFormat, FloatMatrix, FloatType, GlobalScale, Matrix, Producer, QuantizedMatrix, ScaleLayout, Search,
};
use dualgemm_gemm::{AOperand, Activation, Bounded, Comparison, Epilogue, GateUp, Linear, bounded_reference};
use dualgemm_kernels::fused::{Config, Fused, FusedArgs};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::format::Format;
use dualgemm_kernels::parts::variant::{Out, Products, Variant};
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::{Card, Checks, Gpu};

pub type Shape = (usize, usize, usize);

/// Tensor scale of an nvfp4 C.
const C_SCALE: f32 = 0.004;
/// The epilogue's factors of gate and up where rows come in groups.
const ALPHA: [f32; 2] = [0.5, -2.0];

/// The card that a configuration is for, or the first GPU of this machine.
pub fn gpu(config: &Config) -> Box<dyn Device> {
    if std::env::var("DUALGEMM_TEST_DEVICE").as_deref() == Ok("cuda") {
        return Box::new(dualgemm_cuda::Cuda::open(0).unwrap());
    }
    Box::new(simulator(match config {
        Config::Sm100a(_) => Card::B200,
        Config::Sm120a(_) => Card::RtxPro6000,
        _ => Card::H100,
    }))
}

pub fn simulator(card: Card) -> Gpu {
    Gpu::new(dualgemm_sim::Config::default().card(card).checks(Checks::ALL))
}

/// C in f32.
pub fn float(activation: Activation) -> Variant {
    Variant { out: Out::F32, ..Variant::new(activation.program()) }
}

pub fn linear(bias: bool) -> Variant {
    Variant { products: Products::Linear, bias, ..float(Activation::Silu) }
}

/// A with a tensor scale if it has one, and weights with different ones for each group; products of the order of 1.
pub fn operands(
    config: &Config,
    variant: &Variant,
    groups: usize,
    (m, n, k): Shape,
) -> (AOperand<'static>, Vec<GateUp<'static>>) {
    let (mut inputs, sets) = (Inputs::seeded(7), (CodeSet::Full, ScaleSet::Unit));
    let format = match config.weight_format(variant) {
        Some(Format::Block(format)) => format,
        _ => BlockFormat::Nvfp4,
    };
    let mut quantized = |name: &str, format, rows, scale: f32| {
        // Block scales of mxfp4 reach 2⁷ where those of nvfp4 stay below 1.
        let scale = if format == BlockFormat::Nvfp4 { scale } else { scale / 128.0 };
        inputs.quantized(name, format, (rows, k), sets, GlobalScale::multiplier(scale)).unwrap()
    };
    let mut half = |name, scale| {
        let matrix = quantized(name, format, n, scale);
        match config {
            // e4m3 holds powers of two times a block scale.
            Config::Fp8(_) => {
                let (codes, scales) = matrix.dense_rows(0..n);
                let codes: Vec<u8> = codes.into_iter().map(|pair| pair & 0xEE).collect();
                let (one, layout) = (GlobalScale::multiplier(scale), ScaleLayout::Linear);
                QuantizedMatrix::new("e4m3", format, n, k, codes, scales, layout, one).unwrap()
            }
            _ => matrix,
        }
    };
    let pair = |group: usize| {
        let scale = (group % 7 + 1) as f32;
        let bias = |first: f32| -> Option<std::borrow::Cow<'_, [f32]>> {
            let value = |i: usize| first + group as f32 / 8.0 - i as f32 / 32.0;
            variant.bias.then(|| (0..n).map(value).collect::<Vec<f32>>().into())
        };
        let (gate_bias, up_bias) = (bias(0.25), bias(-0.5));
        GateUp { gate_bias, up_bias, ..GateUp::new(half("gate", 0.011 * scale), half("up", 0.023)) }
    };
    let weights = (0..groups).map(pair).collect();
    let floats = |ty| Inputs::seeded(5).floats("A", ty, m, k).unwrap();
    let a = match config.a_format(variant) {
        Format::Block(format) => AOperand::Quantized(quantized("A", format, m, 0.5)),
        Format::Half(HalfFormat::F16) => AOperand::Float(floats(FloatType::F16)),
        Format::Half(HalfFormat::Bf16) => AOperand::Float(floats(FloatType::Bf16)),
        Format::E4m3 => {
            let a = floats(FloatType::F32);
            let place = (0..m).flat_map(|r| (0..k).map(move |c| (r, c)));
            let values = place.map(|(r, c)| e4m3::decode(e4m3::encode(a.value(r, c)))).collect::<Vec<f32>>();
            AOperand::Float(FloatMatrix::F32(Matrix::new("A", m, k, values).unwrap()))
        }
    };
    (a, weights)
}

/// What a launch left: C's bytes, its values if it is floats, and its scales if it is nvfp4.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    pub c: Vec<u8>,
    pub values: Vec<f32>,
    pub scales: Vec<u8>,
}

/// Launches so many times. Each launch leaves the same bits, and nothing behind C.
pub fn run(
    gpu: &dyn Device,
    (config, variant): (Config, &Variant),
    a: &AOperand<'_>,
    weights: &[GateUp<'_>],
    (rows, launches): (&[u32], usize),
) -> Found {
    let (m, n, k) = (a.rows(), weights[0].n(), weights[0].k());
    let variant = variant.clone().for_weights(n, k);
    let kernel = Fused::new(gpu, config, &variant).unwrap_or_else(|e| panic!("{}: {e}", config.name()));
    let mut there = Operands::upload(&kernel, a, weights, rows).unwrap();
    if !rows.is_empty() {
        there.args.output.alpha = ALPHA;
    }
    let a_scale = gpu.alloc(4).unwrap();
    if variant.a_scale {
        gpu.copy_to(a_scale, &0.25f32.to_le_bytes()).unwrap();
        there.args.output.a_scale = a_scale;
        there.args.output.alpha = there.args.output.alpha.map(|alpha| alpha * 4.0);
    }
    there.args.output.scale = C_SCALE;
    let mut specs = vec![kernel.spec(&there.args).unwrap()];
    // Gate in a launch before, whose sums up's epilogue reads.
    let gate = (variant.products == Products::Up).then(|| {
        let gate = Fused::new(gpu, config, &variant.gate_before()).unwrap();
        let of_gate = Operands::upload(&gate, a, weights, rows).unwrap();
        specs.insert(0, gate.spec(&FusedArgs { weights: of_gate.args.weights, ..there.args }).unwrap());
        of_gate
    });
    let mut first = None;
    for _ in 0..launches {
        for spec in &specs {
            // SAFETY: the operands were allocated here, as large as the launch says.
            unsafe { gpu.launch(spec) }.unwrap_or_else(|e| panic!("{kernel:?} {m}x{n}x{k}: {e}"));
        }
        let [c, scales] = [there.read_c(), there.read_scales()].map(Result::unwrap);
        let found = Found { c, values: there.read_values().unwrap(), scales };
        assert!(there.guard_is_whole().unwrap(), "{kernel:?} {m}x{n}x{k} wrote behind C");
        gpu.memset(there.args.output.c, 0xEE, found.c.len()).unwrap();
        assert!(first.get_or_insert_with(|| found.clone()) == &found, "{kernel:?} {m}x{n}x{k}: other bits");
    }
    gate.map(Operands::free).transpose().unwrap();
    there.free().unwrap();
    gpu.free(a_scale).unwrap();
    first.unwrap()
}

/// C of each group, one after the other, by the reference.
fn wanted(variant: &Variant, a: &AOperand<'_>, weights: &[GateUp<'_>], sizes: &[u32]) -> Vec<Bounded> {
    let activation = Activation::EXAMPLES.into_iter().find(|a| a.program() == variant.program).unwrap();
    let [alpha_gate, alpha_up] = if variant.grouped { ALPHA } else { [1.0; 2] };
    let round_gate_up_to_bf16 = variant.round_gate_up_to_bf16;
    let epilogue = Epilogue { activation, alpha_gate, alpha_up, round_gate_up_to_bf16 };
    let (mut want, mut first) = (Vec::new(), 0);
    for (pair, &size) in weights.iter().zip(sizes) {
        let rows = first..first + size as usize;
        first = rows.end;
        want.extend(match variant.products {
            Products::Linear => {
                let layer = Linear { weight: pair.gate.clone().into(), bias: pair.gate_bias.clone() };
                bounded_reference(&epilogue, a, rows, &layer)
            }
            _ => bounded_reference(&epilogue, a, rows, pair),
        });
    }
    want
}

/// The most relative error: half a unit in the last place of C, or what sums and the activation leave of f32.
///
/// `wgmma` adds 16 products to a sum and cuts the result off to f32: towards zero, so that losses add up. A cut loses 0.36 · 2⁻²³ of
/// the sum on average, and the i-th of s sums is as large as the last one times √(i / s): together s · 2⁻²⁵ of it, and C has two such
/// factors.
fn bound(config: &Config, out: Out, k: usize) -> f64 {
    match (config, out) {
        // Hopper keeps about 14 bits of the sums of e4m3 products.
        (Config::Fp8(_), _) => 4e-3,
        (_, Out::F16) => 3e-4,
        (_, Out::Bf16) => 2.4e-3,
        (Config::Sm90a(config), Out::F32) => {
            let sums = k.div_ceil(16) as f64 / f64::from(config.k_groups * config.k_split);
            1e-6 + 2.0 * sums * 2f64.powi(-25)
        }
        (_, Out::F32 | Out::Nvfp4 { .. }) => 1e-6,
    }
}

/// Rows in groups of these sizes, or in one. C is near the reference; one in nvfp4 is what the CPU path makes of the same
/// kernel's f32, and one of products apart has the bits of one launch.
pub fn check_on(
    gpu: &dyn Device,
    config: Config,
    variant: &Variant,
    sizes: &[u32],
    (n, k): (usize, usize),
    launches: usize,
) {
    let mut rows: Vec<u32> = (0..=sizes.len()).map(|g| sizes[..g].iter().sum()).collect();
    let m = rows[sizes.len()] as usize;
    let variant = Variant { grouped: sizes.len() > 1, ..variant.clone() };
    if !variant.grouped {
        rows.clear();
    }
    let (a, weights) = operands(&config, &variant, sizes.len(), (m, n, k));
    let run = |variant: &Variant, launches| run(gpu, (config, variant), &a, &weights, (&rows, launches));
    let (found, what) =
        (run(&variant, launches), format!("{}, {} {m}x{n}x{k}", config.name(), variant.name()));
    if let Out::Nvfp4 { scale_layout } = variant.out {
        let float = run(&Variant { out: Out::F32, ..variant.clone() }, 1);
        let scale = GlobalScale::multiplier(C_SCALE);
        let quantizer = Quantizer::new(Producer::Te, scale, FloatType::F32, Search::Plain);
        let c = FloatMatrix::F32(Matrix::new("c", m, n, float.values).unwrap());
        let want = quantizer.matrix("c", &c).unwrap().with_scale_layout(scale_layout);
        assert!(found.c == want.codes() && found.scales == want.scales(), "{what}");
    } else {
        let want = wanted(&variant, &a, &weights, sizes);
        let comparison = Comparison::new(&found.values, &want, n).unwrap();
        assert!(comparison.rel_l2 < bound(&config, variant.out, k), "{what}: {comparison:?}");
        let within = |(got, want): (&f32, &Bounded)| (f64::from(*got) - want.value).abs() <= want.error;
        let exact = variant.out == Out::F32 && !matches!(config, Config::Fp8(_));
        assert!(!exact || found.values.iter().zip(&want).all(within), "{what}: {comparison:?}");
    }
    if variant.products == Products::Up {
        assert!(found == run(&Variant { products: Products::Both, ..variant.clone() }, 1), "{what}");
    }
}

/// C in 16 bits is the rounded C in f32 of the same kernel.
pub fn check_halves(gpu: &dyn Device, config: Config, variant: &Variant, shape: Shape) {
    let (a, weights) = operands(&config, variant, 1, shape);
    let values = |out| {
        let variant = Variant { out, ..variant.clone() };
        run(gpu, (config, &variant), &a, &weights, (&[], 1)).values
    };
    let [floats, f16, bf16] = [Out::F32, Out::F16, Out::Bf16].map(values);
    for ((f16, bf16), want) in f16.into_iter().zip(bf16).zip(floats) {
        assert_eq!(f16, half::f16::from_f32(want).to_f32(), "{}", config.name());
        assert_eq!(bf16, half::bf16::from_f32(want).to_f32(), "{}", config.name());
    }
}
