//! Host programs: small problems, a configuration of each family. A kernel writes A first, and every launch may start
//! before the one before has ended, so that each has something to wait for. Rings have few stages and wrap around, the last
//! stage of a tile is the ring's first, where the epilogue writes, and kernels whose CTAs take several tiles get fewer CTAs than the card holds.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatMatrix, FloatType, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{Activation, GateUp};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::expand::{Codes, Expand};
use dualgemm_kernels::generic::finish;
use dualgemm_kernels::generic::quantize::{Floats, Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::operand::{FusedArgs, Operand};
use dualgemm_kernels::parts::rows;
use dualgemm_kernels::sm90a::operands::Operands;
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_kernels::sm90a::variant::{Products, Scheduler, Variant};
use dualgemm_kernels::{fp8, plain, sm80, sm90a, sm100a, sm120a};
use dualgemm_mutate::Refused;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;

type Shape = (usize, usize, usize);
type Run = Box<dyn Fn(&dyn Device) -> Result<Vec<u8>, Refused> + Sync>;

/// A kernel and a host program that launches it.
pub struct Case {
    /// Its configuration.
    pub name: String,
    pub card: Card,
    /// Which module of those that the program loads has the kernel.
    pub module: usize,
    pub run: Run,
}

impl Case {
    fn new(
        name: String,
        card: Card,
        run: impl Fn(&dyn Device) -> Result<Vec<u8>, Refused> + Sync + 'static,
    ) -> Case {
        Case { name, card, module: 0, run: Box::new(run) }
    }
}

/// Every case, the smallest of each family first.
pub fn cases() -> Vec<Case> {
    let hopper = sm90a::config::Config::new;
    let stream = || Variant { scheduler: Scheduler::StreamK, ..silu() };
    let persistent = || Variant { scheduler: Scheduler::Persistent, ..silu() };
    let [tokens, features, pairs, split, wide] = blackwell();
    let nvfp4 = rows::Out::Nvfp4 { scale_layout: ScaleLayout::Linear };
    let mut cases = elementwise();
    cases.extend([
        sm80(sm80::config::Config { stages: 3, ..sm80::config::Config::MENU[0] }, (8, 40, 784)),
        plain(
            plain::config::Config { row_groups: 2, stages: 2, ..plain::config::Config::MENU[0] },
            (16, 136, 1120),
        ),
        fp8(fp8::config::Config { row_groups: 2, stages: 2, ..fp8::config::Config::MENU[0] }, (16, 136, 592)),
        sm90a(hopper(2, 16, 2, 2, 1), silu(), (16, 40, 592), None),
        sm90a(hopper(1, 8, 4, 3, 4), silu(), (8, 40, 1744), None),
        sm90a(hopper(2, 16, 2, 2, 1).split_k(), silu(), (16, 68, 1232), None),
        sm90a(hopper(2, 8, 2, 2, 1), persistent(), (9, 200, 192), Some(3)),
        sm90a(hopper(2, 16, 2, 2, 1), stream(), (32, 300, 192), Some(4)),
        sm90a(hopper(2, 16, 2, 2, 1), Variant { out: nvfp4, ..silu() }, (16, 80, 592), None),
    ]);
    cases.extend(apart(hopper(2, 16, 2, 2, 1), (16, 40, 592)));
    cases.extend([
        sm100a(tokens, (40, 280, 592), Some(2)),
        sm100a(features, (16, 130, 1104), None),
        sm100a(pairs, (131, 100, 592), Some(4)),
        sm100a(split, (16, 130, 2320), None),
        sm100a(wide, (16, 130, 688), None),
        sm120a(sm120a::config::Config { stages: 2, ..sm120a::config::Config::MENU[0] }, (9, 40, 1104)),
    ]);
    cases
}

fn silu() -> Variant {
    Variant::new(Activation::Silu.program())
}

fn blackwell() -> [sm100a::config::Config; 5] {
    use sm100a::config::{Config, Side};
    let tokens = Config {
        formats: Formats::NVFP4,
        side: Side::Tokens,
        n: 32,
        cta_group: 1,
        split_k: 1,
        stages: 2,
        accumulators: 2,
    };
    let features = Config { side: Side::Features, n: 16, accumulators: 1, ..tokens };
    let wide = Config { formats: Formats::Wide(HalfFormat::F16), ..features };
    let pairs = Config { cta_group: 2, accumulators: 1, ..tokens };
    [tokens, features, pairs, Config { split_k: 2, ..features }, wide]
}

fn bytes_of(a: &FloatMatrix<'_>) -> Vec<u8> {
    match a {
        FloatMatrix::F32(m) => (0..m.rows()).flat_map(|r| m.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
        FloatMatrix::F16(m) => (0..m.rows()).flat_map(|r| m.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
        FloatMatrix::Bf16(m) => (0..m.rows()).flat_map(|r| m.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn floats(rows: usize, k: usize) -> FloatMatrix<'static> {
    Inputs::seeded(5).floats("a", FloatType::F16, rows, k).expect("a matrix that fits")
}

fn weights((_, n, k): Shape) -> GateUp<'static> {
    let mut inputs = Inputs::seeded(7);
    let mut half = |name, scale| {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        let scale = GlobalScale::multiplier(scale);
        inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, scale).expect("a matrix that fits")
    };
    GateUp::new(half("gate", 0.011), half("up", 0.023))
}

fn upload(device: &dyn Device, bytes: &[u8]) -> Result<DevicePtr, Refused> {
    let ptr = device.alloc(bytes.len())?;
    device.copy_to(ptr, bytes)?;
    Ok(ptr)
}

fn poisoned(device: &dyn Device, bytes: usize) -> Result<DevicePtr, Refused> {
    upload(device, &vec![0xA5; bytes])
}

fn upload_codes(device: &dyn Device, matrix: &QuantizedMatrix<'_>) -> Result<Codes, Refused> {
    let (m, k) = (matrix.rows(), matrix.k());
    let (codes, scales) = (upload(device, matrix.codes())?, upload(device, matrix.scales())?);
    Ok(Codes { m, k, codes, pitch: matrix.row_stride(), scales })
}

/// Launches that may overlap, then what lies at an address.
fn finish(
    device: &dyn Device,
    specs: impl IntoIterator<Item = LaunchSpec>,
    (from, bytes): (DevicePtr, usize),
) -> Result<Vec<u8>, Refused> {
    for spec in specs {
        // SAFETY: the device is simulated and stops a launch that leaves its memory.
        unsafe { device.launch(&spec.programmatic(true)) }?;
    }
    let mut read = vec![0; bytes];
    device.copy_from(&mut read, from)?;
    Ok(read)
}

/// What writes A in the order of a sink to `values`, rows `pitch` bytes apart.
fn writes_a(
    device: &dyn Device,
    (m, k): (usize, usize),
    sink: Sink,
    (values, pitch): (DevicePtr, usize),
) -> Result<LaunchSpec, Refused> {
    let a = Floats { m, k, values: upload(device, &bytes_of(&floats(m, k)))?, pitch: 2 * k };
    let scale = Scale::Static(GlobalScale::multiplier(0.01));
    Ok(Quantize::new(device, FloatType::F16, sink, false)?.spec(&a, &Out::Image { values, pitch }, &scale)?)
}

/// The largest magnitude, codes under a scale from it, and floats from the codes again, each a kernel of its own.
fn elementwise() -> Vec<Case> {
    let (m, k) = (40, 208);
    let run = move |device: &dyn Device| {
        let amax = Amax::new(device, FloatType::F16)?;
        let quantize = Quantize::new(device, FloatType::F16, Sink::Codes(ScaleLayout::Sf128x4), true)?;
        let expand = Expand::new(device, ScaleLayout::Sf128x4, FloatType::F16)?;
        let image = poisoned(device, m * k * 2)?;
        let first = writes_a(device, (m, k), Sink::Image(FloatType::F16), (image, 2 * k))?;
        let a = Floats { m, k, values: image, pitch: 2 * k };
        let (parts, scale) = (poisoned(device, MAX_PARTS as usize * 4)?, poisoned(device, 4)?);
        let scales = poisoned(device, ScaleLayout::Sf128x4.len(m, k / 16))?;
        let codes = poisoned(device, m * k / 2)?;
        let out = Out::Codes { codes, scales };
        let coded = Codes { m, k, codes, pitch: k / 2, scales };
        let expanded = poisoned(device, m * k * 2)?;
        let amax = amax.spec(&a, parts, None)?;
        let quantize = quantize.spec(&a, &out, &Scale::Dynamic { parts, scale })?;
        let expand = expand.spec(&coded, expanded, 2 * k)?;
        finish(device, [first, amax, quantize, expand], (expanded, m * k * 2))
    };
    let names = ["amax_f16", "quantize_f16_dynamic", "expand_nvfp4"];
    let case = |(module, name): (usize, &str)| Case { module, ..Case::new(name.into(), Card::H100, run) };
    names.into_iter().enumerate().map(case).collect()
}

fn sm80(config: sm80::config::Config, shape: Shape) -> Case {
    let (m, n, k) = shape;
    let pack = Pack::new(&weights(shape)).expect("weights that fit");
    Case::new(config.name(), Card::H100, move |device| {
        let variant = sm80::fused::Variant {
            compute: HalfFormat::F16,
            out: FloatType::F16,
            aligned: n.is_multiple_of(8),
        };
        let kernel = sm80::host::Fused::new(device, config, &variant, &Activation::Silu.program())?;
        let (a, c) = (poisoned(device, m * k * 2)?, poisoned(device, m * n * 2)?);
        let first = writes_a(device, (m, k), Sink::Image(FloatType::F16), (a, 2 * k))?;
        let output = finish::Output::new(c, pack.alpha());
        let weights = upload(device, pack.bytes())?;
        let args = sm80::host::FusedArgs { size: shape, a, a_pitch: 2 * k, weights, output };
        let spec = kernel.spec(&args)?;
        finish(device, [first, spec.clone(), spec], (c, m * n * 2))
    })
}

fn plain(config: plain::config::Config, shape: Shape) -> Case {
    let (m, n, k) = shape;
    let GateUp { gate, up, .. } = weights(shape);
    let halves = [gate, up].map(|half| half.with_scale_layout(config.scale_layout));
    Case::new(config.name(), Card::H100, move |device| {
        let aligned = n.is_multiple_of(8);
        let program = Activation::Silu.program();
        let kernel = plain::host::Fused::new(device, config, FloatType::F16, &program, aligned)?;
        let a_pitch = 2 * k.next_multiple_of(plain::order::SPAN);
        let (a, c) = (poisoned(device, m * a_pitch)?, poisoned(device, m * n * 2)?);
        let first = writes_a(device, (m, k), Sink::Permuted(FloatType::F16), (a, a_pitch))?;
        let [gate, up] = &halves;
        let weights = [upload_codes(device, gate)?, upload_codes(device, up)?];
        let output = finish::Output::new(c, [0.011, 0.023]);
        let args = plain::host::FusedArgs { size: shape, a, a_pitch, weights, output };
        let spec = kernel.spec(device, &args)?;
        finish(device, [first, spec.clone(), spec], (c, m * n * 2))
    })
}

fn fp8(config: fp8::config::Config, shape: Shape) -> Case {
    let (m, n, k) = shape;
    Case::new(config.name(), Card::H100, move |device| {
        let program = Activation::Silu.program();
        let kernel = fp8::host::Fused::new(device, config, FloatType::F16, &program, n.is_multiple_of(8))?;
        let (a, c) = (poisoned(device, m * k)?, poisoned(device, m * n * 2)?);
        let first = writes_a(device, (m, k), Sink::E4m3, (a, k))?;
        // Numbers of every size but NaN.
        let codes: Vec<u8> = (0..n * k).map(|i| (i * 37 % 0x60) as u8).collect();
        let (gate, up) = (upload(device, &codes)?, upload(device, &codes[..n * k])?);
        let output = finish::Output::new(c, [0.001, 0.002]);
        let args = fp8::host::FusedArgs { size: shape, a, row_scales: DevicePtr::NULL, gate, up, output };
        let spec = kernel.spec(device, &args)?;
        finish(device, [first, spec.clone(), spec], (c, m * n * 2))
    })
}

fn sm90a(config: sm90a::config::Config, variant: Variant, shape: Shape, ctas: Option<u32>) -> Case {
    let (m, n, k) = shape;
    let variant = variant.for_weights(n, k);
    let pack = Pack::new(&weights(shape)).expect("weights that fit");
    let name = format!("{}, {}", config.name(), variant.name());
    Case::new(name, Card::H100, move |device| {
        let kernel = sm90a::host::Fused::new(device, config, &variant)?;
        let mut operands = Operands::upload(device, &kernel, &floats(m, k), &pack)?;
        operands.args_mut().a = poisoned(device, m * k * 2)?;
        operands.args_mut().c_scale = 0.003;
        let args = operands.args();
        let first = writes_a(device, (m, k), Sink::Image(FloatType::F16), (args.a, 2 * k))?;
        let mut spec = kernel.spec(args)?;
        spec.grid[0] = ctas.unwrap_or(spec.grid[0]);
        let mut c = finish(device, [first, spec.clone(), spec], (args.c, 0))?;
        c.extend(operands.read_c(device)?);
        c.extend(operands.read_scales(device)?);
        Ok(c)
    })
}

/// Gate in one launch, up in the next: a case for each of the two kernels.
fn apart(config: sm90a::config::Config, shape: Shape) -> [Case; 2] {
    let (m, n, k) = shape;
    [0, 1].map(|module| {
        let up = Variant { products: Products::Up, ..silu() }.for_weights(n, k);
        let variants = [up.clone().gate_before(), up];
        let GateUp { gate, up, .. } = weights(shape);
        let packs = [gate, up].map(|half| Pack::of_matrix(&half).expect("weights that fit"));
        let name = format!("{}, {}", config.name(), variants[module].name());
        let run = move |device: &dyn Device| -> Result<Vec<u8>, Refused> {
            let [gate, up] = &variants;
            let gate = sm90a::host::Fused::new(device, config, gate)?;
            let up = sm90a::host::Fused::new(device, config, up)?;
            let mut operands = Operands::upload(device, &up, &floats(m, k), &packs[1])?;
            operands.args_mut().a = poisoned(device, m * k * 2)?;
            let args = *operands.args();
            let first = writes_a(device, (m, k), Sink::Image(FloatType::F16), (args.a, 2 * k))?;
            let pack = upload(device, packs[0].bytes())?;
            let gate = gate.spec(&sm90a::host::FusedArgs { pack, ..args })?;
            let up = up.spec(&args)?;
            let twice = [first, gate.clone(), up.clone(), gate, up];
            let mut c = finish(device, twice, (args.c, 0))?;
            c.extend(operands.read_c(device)?);
            Ok(c)
        };
        Case { module, ..Case::new(name, Card::H100, run) }
    })
}

/// What a kernel of Blackwell is launched with, and the launch that writes A.
fn operands(
    device: &dyn Device,
    formats: Formats,
    (m, n, k): Shape,
) -> Result<(LaunchSpec, FusedArgs), Refused> {
    let weights = weights((m, n, k));
    let mut inputs = Inputs::seeded(3);
    let (first, a) = match formats {
        Formats::Scaled(format) => {
            let sets = (CodeSet::Full, ScaleSet::Unit);
            let a = inputs.quantized("a", format, (m, k), sets, GlobalScale::ONE)?;
            let a = Operand::upload(device, &a)?;
            let from = upload(device, &bytes_of(&floats(m, k)))?;
            let from = Floats { m, k, values: from, pitch: 2 * k };
            let sink = Sink::Codes(ScaleLayout::Sf128x4);
            let out = Out::Codes { codes: a.codes, scales: a.scales };
            let scale = Scale::Static(GlobalScale::multiplier(0.01));
            (Quantize::new(device, FloatType::F16, sink, false)?.spec(&from, &out, &scale)?, a)
        }
        Formats::Wide(_) => {
            let a = Operand::upload_floats(device, &floats(m, k))?;
            (writes_a(device, (m, k), Sink::Image(FloatType::F16), (a.codes, a.pitch))?, a)
        }
    };
    let c = poisoned(device, m * n * 2)?;
    let output = rows::Output::new(c, [0.011 * 0.01, 0.023 * 0.01]);
    let gate = Operand::upload(device, &weights.gate)?;
    let up = Operand::upload(device, &weights.up)?;
    Ok((first, FusedArgs { a, gate, up, output, groups: None }))
}

fn sm100a(config: sm100a::config::Config, shape: Shape, ctas: Option<u32>) -> Case {
    let (m, n, _) = shape;
    Case::new(config.name(), Card::B200, move |device| {
        let variant = rows::Variant::new(Activation::Silu.program());
        let kernel = sm100a::host::Fused::new(device, config, &variant, n)?;
        let (first, args) = operands(device, config.formats, shape)?;
        let mut spec = kernel.spec(&args)?;
        spec.grid[0] = ctas.unwrap_or(spec.grid[0]);
        finish(device, [first, spec.clone(), spec], (args.output.c, m * n * 2))
    })
}

fn sm120a(config: sm120a::config::Config, shape: Shape) -> Case {
    let (m, n, _) = shape;
    Case::new(config.name(), Card::RtxPro6000, move |device| {
        let variant = rows::Variant::new(Activation::Silu.program());
        let kernel = sm120a::host::Fused::new(device, config, &variant, n)?;
        let (first, args) = operands(device, Formats::Scaled(config.format), shape)?;
        let spec = kernel.spec(&args)?;
        finish(device, [first, spec.clone(), spec], (args.output.c, m * n * 2))
    })
}
