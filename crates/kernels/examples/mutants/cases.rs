//! Host programs: small problems, a configuration of each family. A kernel writes A first, and every launch may start
//! before the one before has ended, so that each has something to wait for. Rings have few stages and wrap around, the last
//! stage of a tile is the ring's first, where the epilogue writes, and kernels whose CTAs take several tiles get fewer CTAs than the card holds.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatMatrix, FloatType, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{Activation, GateUp};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::atoms::ScaleAtoms;
use dualgemm_kernels::generic::copy::Copy;
use dualgemm_kernels::generic::dequantize::Dequantize;
use dualgemm_kernels::generic::expand::{Codes, Expand};
use dualgemm_kernels::generic::pack::GpuPack;
use dualgemm_kernels::generic::quantize::{Floats, Out, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::generic::silu_mul::{Products as Both, SiluMul};
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::operand::{FusedArgs, Operand};
use dualgemm_kernels::parts::{rows, tiles};
use dualgemm_kernels::sm90a::operands::Operands;
use dualgemm_kernels::sm90a::pack::Pack;
use dualgemm_kernels::sm90a::variant::{Products, Scheduler, Variant};
use dualgemm_kernels::{fp8, plain, sm80, sm90a, sm100a, sm120a};
use dualgemm_mutate::Refused;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::Card;

use crate::few_tokens::{mixture, warpwise};

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
    pub fn new(
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
    let nvfp4 = rows::Out::Nvfp4 { scale_layout: ScaleLayout::Linear };
    let grouped = |scheduler| Variant { scheduler, grouped: true, ..silu() };
    let mut cases = elementwise();
    cases.extend(mixture());
    cases.extend(warpwise());
    cases.extend([
        sm80(sm80::config::Config { stages: 3, ..sm80::config::Config::MENU[0] }, (8, 40, 784)),
        plain(
            plain::config::Config { row_groups: 2, stages: 2, ..plain::config::Config::MENU[0] },
            (16, 136, 1120),
        ),
        fp8(fp8::config::Config { row_groups: 2, stages: 2, ..fp8::config::Config::MENU[0] }, (16, 136, 592)),
        sm90a(hopper(2, 16, 2, 2, 1), silu(), (16, 40, 592), None),
        sm90a(hopper(1, 8, 4, 3, 4), silu(), (8, 40, 2512), None),
        sm90a(hopper(2, 16, 2, 2, 1).split_k(), silu(), (16, 68, 1232), None),
        sm90a(hopper(2, 8, 2, 2, 1), persistent(), (9, 200, 192), Some(3)),
        sm90a(hopper(2, 16, 2, 2, 1), stream(), (32, 300, 192), Some(4)),
        sm90a(hopper(2, 16, 2, 2, 1), Variant { out: nvfp4, ..silu() }, (16, 80, 592), None),
        sm90a(hopper(2, 16, 2, 2, 1), Variant { products: Products::Linear, ..silu() }, (16, 80, 592), None),
    ]);
    cases.extend(apart(hopper(2, 16, 2, 2, 1), (16, 40, 592)));
    cases.extend([
        sm90a(hopper(2, 8, 2, 2, 1), grouped(Scheduler::Grid), (16, 40, 592), None),
        sm90a(hopper(2, 8, 2, 2, 1), grouped(Scheduler::Persistent), (16, 200, 192), Some(3)),
    ]);
    cases.extend(sm100a_cases());
    let sm120 = sm120a::config::Config { stages: 2, ..sm120a::config::Config::MENU[0] };
    cases.extend([false, true].map(|grouped| sm120a(sm120, grouped, (16, 40, 1104))));
    cases
}

fn sm100a_cases() -> Vec<Case> {
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
    let pairs = Config { cta_group: 2, accumulators: 1, ..tokens };
    let nvfp4 = rows::Out::Nvfp4 { scale_layout: ScaleLayout::Linear };
    let plain = || rows::Variant::new(Activation::Silu.program());
    let grouped = rows::Variant { grouped: true, out: nvfp4, ..plain() };
    vec![
        sm100a(tokens, plain(), (40, 280, 592), Some(2)),
        sm100a(tokens, grouped, (48, 96, 592), Some(2)),
        sm100a(features, plain(), (16, 130, 1104), None),
        sm100a(pairs, plain(), (131, 100, 592), Some(4)),
        // Tiles that start in the middle of a column of scales, tiles of half atoms, and halves of K in pairs.
        sm100a(Config { n: 48, ..pairs }, plain(), (131, 96, 592), Some(2)),
        sm100a(Config { side: Side::HalfAtoms, n: 64, ..pairs }, plain(), (131, 128, 592), Some(2)),
        sm100a(Config { split_k: 2, ..pairs }, plain(), (131, 32, 1104), None),
        sm100a(Config { n: 32, split_k: 2, ..features }, plain(), (20, 130, 2320), None),
        sm100a(
            Config { formats: Formats::Wide(HalfFormat::F16), stages: 3, ..features },
            plain(),
            (16, 130, 688),
            None,
        ),
    ]
}

fn silu() -> Variant {
    Variant::new(Activation::Silu.program())
}

pub fn bytes_of(a: &FloatMatrix<'_>) -> Vec<u8> {
    match a {
        FloatMatrix::F32(m) => (0..m.rows()).flat_map(|r| m.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
        FloatMatrix::F16(m) => (0..m.rows()).flat_map(|r| m.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
        FloatMatrix::Bf16(m) => (0..m.rows()).flat_map(|r| m.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
    }
}

pub fn floats(rows: usize, k: usize) -> FloatMatrix<'static> {
    Inputs::seeded(5).floats("a", FloatType::F16, rows, k).expect("a matrix that fits")
}

pub fn weights((_, n, k): Shape) -> GateUp<'static> {
    let mut inputs = Inputs::seeded(7);
    let mut half = |name, scale| {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        let scale = GlobalScale::multiplier(scale);
        inputs.quantized(name, BlockFormat::Nvfp4, (n, k), sets, scale).expect("a matrix that fits")
    };
    GateUp::new(half("gate", 0.011), half("up", 0.023))
}

pub fn upload(device: &dyn Device, bytes: &[u8]) -> Result<DevicePtr, Refused> {
    let ptr = device.alloc(bytes.len())?;
    device.copy_to(ptr, bytes)?;
    Ok(ptr)
}

pub fn poisoned(device: &dyn Device, bytes: usize) -> Result<DevicePtr, Refused> {
    upload(device, &vec![0xA5; bytes])
}

fn upload_codes(device: &dyn Device, matrix: &QuantizedMatrix<'_>) -> Result<Codes, Refused> {
    let (m, k) = (matrix.rows(), matrix.k());
    let (codes, scales) = (upload(device, matrix.codes())?, upload(device, matrix.scales())?);
    Ok(Codes { m, k, codes, pitch: matrix.row_stride(), scales })
}

/// Launches that may overlap, then what lies at an address.
pub fn finish(
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

/// Groups of a grouped problem: where their rows begin and end is 16 bytes of device memory.
const GROUPS: usize = 3;

/// Where the rows of the groups begin, and the end: the second group has none.
fn group_rows(m: usize) -> Vec<u8> {
    [0, m / 3, m / 3, m].into_iter().flat_map(|row| (row as u32).to_le_bytes()).collect()
}

/// A copy of what is at an address, and the launch that makes it.
pub fn copied(
    device: &dyn Device,
    from: DevicePtr,
    bytes: usize,
) -> Result<(DevicePtr, LaunchSpec), Refused> {
    let to = poisoned(device, bytes)?;
    Ok((to, Copy::new(device)?.spec("A", (from, to), bytes)?))
}

/// What writes A in the order of a sink to `values`, rows `pitch` bytes apart.
pub fn writes_a(
    device: &dyn Device,
    (m, k): (usize, usize),
    sink: Sink,
    (values, pitch): (DevicePtr, usize),
) -> Result<LaunchSpec, Refused> {
    let a = Floats { m, k, values: upload(device, &bytes_of(&floats(m, k)))?, pitch: 2 * k };
    let scale = Scale::Static(GlobalScale::multiplier(0.01));
    Ok(Quantize::new(device, FloatType::F16, sink, false)?.spec(&a, &Out::Image { values, pitch }, &scale)?)
}

/// Every elementwise kernel, on what those before it have made: a case for each.
fn elementwise() -> Vec<Case> {
    let (m, k) = (40, 208);
    let run = move |device: &dyn Device| {
        let amax = Amax::new(device, FloatType::F16)?;
        let quantize = Quantize::new(device, FloatType::F16, Sink::Codes(ScaleLayout::Linear), true)?;
        let atoms = ScaleAtoms::new(device, ScaleLayout::Linear)?;
        let expand = Expand::new(device, ScaleLayout::Sf128x4, FloatType::F16)?;
        let dequantize = Dequantize::new(device, ScaleLayout::Sf128x4, FloatType::F16)?;
        let program = Activation::Silu.program();
        let gated = SiluMul::new(
            device,
            (FloatType::F16, false, false),
            Sink::Float(FloatType::F16),
            &program,
            true,
        )?;
        let pack = GpuPack::new(device, ScaleLayout::Sf128x4)?;
        let (bytes, pitch) = (m * k * 2, 2 * k);
        let [image, expanded, dequantized, products] = [(); 4].map(|()| poisoned(device, bytes));
        let (image, expanded, dequantized, products) = (image?, expanded?, dequantized?, products?);
        let first = writes_a(device, (m, k), Sink::Image(FloatType::F16), (image, pitch))?;
        let a = Floats { m, k, values: image, pitch };
        let (parts, scale) = (poisoned(device, MAX_PARTS as usize * 4)?, poisoned(device, 4)?);
        let codes = poisoned(device, m * k / 2)?;
        let linear = poisoned(device, ScaleLayout::Linear.len(m, k / 16))?;
        let scales = poisoned(device, ScaleLayout::Sf128x4.len(m, k / 16))?;
        let coded = Codes { m, k, codes, pitch: k / 2, scales };
        let pack_bytes = GpuPack::bytes(m, k);
        let out = poisoned(device, bytes + pack_bytes)?;
        let both = Both {
            m,
            n: k,
            gate: expanded,
            up: dequantized,
            pitch,
            alpha: [0.5, 2.0],
            a_scale: scale,
            bias: [DevicePtr::NULL; 2],
        };
        let launches = [
            first,
            amax.spec(&a, parts, None)?,
            quantize.spec(&a, &Out::Codes { codes, scales: linear }, &Scale::Dynamic { parts, scale })?,
            atoms.spec((m, k / 16), linear, scales, None)?,
            expand.spec(&coded, expanded, pitch)?,
            dequantize.spec(&coded, 0.5, dequantized, pitch)?,
            gated.spec(&both, &Out::Image { values: products, pitch }, GlobalScale::ONE)?,
            pack.spec(&coded, &coded, DevicePtr(out.0 + bytes as u64))?,
            Copy::new(device)?.spec("C", (products, out), bytes)?,
        ];
        finish(device, launches, (out, bytes + pack_bytes))
    };
    // In the order in which they are loaded; the eighth is that of the first launch.
    let names =
        ["amax_f16", "quantize_f16_dynamic", "scale_atoms", "expand_nvfp4", "dequantize", "silu_mul", "pack"];
    let names = names.into_iter().enumerate().chain([(8, "copy")]);
    names.map(|(module, name)| Case { module, ..Case::new(name.into(), Card::H100, run) }).collect()
}

/// C in f16 of `n` features, nothing added.
fn rows_of_c(n: usize) -> rows::Variant {
    rows::Variant::new(Activation::Silu.program()).for_features(n)
}

fn sm80(config: sm80::config::Config, shape: Shape) -> Case {
    let (m, n, k) = shape;
    let pack = Pack::new(&weights(shape)).expect("weights that fit");
    Case::new(config.name(), Card::H100, move |device| {
        let variant = sm80::fused::Variant { compute: HalfFormat::F16, linear: false, rows: rows_of_c(n) };
        let kernel = sm80::host::Fused::new(device, config, &variant)?;
        let (a, c) = (poisoned(device, m * k * 2)?, poisoned(device, m * n * 2)?);
        let first = writes_a(device, (m, k), Sink::Image(FloatType::F16), (a, 2 * k))?;
        let output = rows::Output::new(c, pack.alpha());
        let weights = upload(device, pack.bytes())?;
        let args = sm80::host::FusedArgs { size: shape, a, a_pitch: 2 * k, weights, groups: None, output };
        let spec = kernel.spec(&args)?;
        finish(device, [first, spec.clone(), spec], (c, m * n * 2))
    })
}

fn plain(config: plain::config::Config, shape: Shape) -> Case {
    let (m, n, k) = shape;
    let GateUp { gate, up, .. } = weights(shape);
    let halves = [gate, up].map(|half| half.with_scale_layout(config.scale_layout));
    Case::new(config.name(), Card::H100, move |device| {
        let kernel = plain::host::Fused::new(device, config, &rows_of_c(n))?;
        let a_pitch = 2 * k.next_multiple_of(plain::order::SPAN);
        let (a, c) = (poisoned(device, m * a_pitch)?, poisoned(device, m * n * 2)?);
        let first = writes_a(device, (m, k), Sink::Permuted(FloatType::F16), (a, a_pitch))?;
        let [gate, up] = &halves;
        let weights = [upload_codes(device, gate)?, upload_codes(device, up)?];
        let output = rows::Output::new(c, [0.011, 0.023]);
        let args = plain::host::FusedArgs { size: shape, a, a_pitch, weights, output };
        let spec = kernel.spec(&args)?;
        finish(device, [first, spec.clone(), spec], (c, m * n * 2))
    })
}

fn fp8(config: fp8::config::Config, shape: Shape) -> Case {
    let (m, n, k) = shape;
    Case::new(config.name(), Card::H100, move |device| {
        let kernel = fp8::host::Fused::new(device, config, &rows_of_c(n))?;
        let (a, c) = (poisoned(device, m * k)?, poisoned(device, m * n * 2)?);
        let first = writes_a(device, (m, k), Sink::E4m3, (a, k))?;
        // Numbers of every size but NaN.
        let codes: Vec<u8> = (0..n * k).map(|i| (i * 37 % 0x60) as u8).collect();
        let (gate, up) = (upload(device, &codes)?, upload(device, &codes[..n * k])?);
        let output = rows::Output::new(c, [0.001, 0.002]);
        let args = fp8::host::FusedArgs { size: shape, a, gate, up, output };
        let spec = kernel.spec(&args)?;
        finish(device, [first, spec.clone(), spec], (c, m * n * 2))
    })
}

fn sm90a(config: sm90a::config::Config, variant: Variant, shape: Shape, ctas: Option<u32>) -> Case {
    let (m, n, k) = shape;
    let variant = variant.for_weights(n, k);
    let pair = weights(shape);
    let pack = match variant.products {
        Products::Linear => Pack::of_matrix(&pair.gate),
        _ => Pack::new(&pair),
    };
    let packs = vec![pack.expect("weights that fit"); if variant.grouped { GROUPS } else { 1 }];
    let name = format!("{}, {}", config.name(), variant.name());
    Case::new(name, Card::H100, move |device| {
        let kernel = sm90a::host::Fused::new(device, config, &variant)?;
        let mut launches = Vec::new();
        let mut operands = if variant.grouped {
            let mut operands = Operands::upload_groups(device, &kernel, &floats(m, k), &packs, &[])?;
            let (rows, copy) = copied(device, upload(device, &group_rows(m))?, 4 * (GROUPS + 1))?;
            launches.push(copy);
            operands.args_mut().groups =
                operands.args().groups.map(|groups| tiles::GroupArgs { rows, ..groups });
            operands
        } else {
            Operands::upload(device, &kernel, &floats(m, k), &packs[0])?
        };
        operands.args_mut().a = poisoned(device, m * k * 2)?;
        operands.args_mut().output.scale = 0.003;
        let args = operands.args();
        launches.push(writes_a(device, (m, k), Sink::Image(FloatType::F16), (args.a, 2 * k))?);
        let mut spec = kernel.spec(args)?;
        spec.grid[0] = ctas.unwrap_or(spec.grid[0]);
        launches.extend([spec.clone(), spec]);
        let mut c = finish(device, launches, (args.output.c, 0))?;
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
            let mut c = finish(device, twice, (args.output.c, 0))?;
            c.extend(operands.read_c(device)?);
            Ok(c)
        };
        Case { module, ..Case::new(name, Card::H100, run) }
    })
}

/// What a kernel of Blackwell is launched with, and the launches that write A.
fn operands(
    device: &dyn Device,
    (formats, grouped): (Formats, bool),
    (m, n, k): Shape,
) -> Result<(Vec<LaunchSpec>, FusedArgs), Refused> {
    let weights = weights((m, n, k));
    let mut inputs = Inputs::seeded(3);
    let mut quantized =
        |format, m| inputs.quantized("a", format, (m, k), (CodeSet::Full, ScaleSet::Unit), GlobalScale::ONE);
    let (launches, a, groups) = match formats {
        Formats::Scaled(format) if grouped => {
            let parts = [quantized(format, m / 3)?, quantized(format, m - m / 3)?];
            let a = Operand::upload_groups(device, &[&parts[0], &parts[1]])?;
            let (codes, first) = copied(device, a.codes, m * a.pitch)?;
            let (rows, second) = copied(device, upload(device, &group_rows(m))?, 4 * (GROUPS + 1))?;
            let alphas = [0.5f32, 2.0].map(f32::to_le_bytes).concat().repeat(GROUPS);
            let groups = tiles::GroupArgs { count: GROUPS, rows, alphas: upload(device, &alphas)? };
            (vec![first, second], Operand { codes, ..a }, Some(groups))
        }
        Formats::Scaled(format) => {
            let a = Operand::upload(device, &quantized(format, m)?)?;
            let from = upload(device, &bytes_of(&floats(m, k)))?;
            let from = Floats { m, k, values: from, pitch: 2 * k };
            let sink = Sink::Codes(ScaleLayout::Sf128x4);
            let out = Out::Codes { codes: a.codes, scales: a.scales };
            let scale = Scale::Static(GlobalScale::multiplier(0.01));
            (vec![Quantize::new(device, FloatType::F16, sink, false)?.spec(&from, &out, &scale)?], a, None)
        }
        Formats::Wide(_) => {
            let a = Operand::upload_floats(device, &floats(m, k))?;
            let first = writes_a(device, (m, k), Sink::Image(FloatType::F16), (a.codes, a.pitch))?;
            (vec![first], a, None)
        }
    };
    let half = |of: &QuantizedMatrix<'_>| match grouped {
        true => Operand::upload_groups(device, &[of; GROUPS]),
        false => Operand::upload(device, of),
    };
    let mut output = rows::Output::new(poisoned(device, m * n * 2)?, [0.011 * 0.01, 0.023 * 0.01]);
    // Behind C in memory, and read with it.
    output.scales = DevicePtr(output.c.0 + (m * n / 2) as u64);
    Ok((launches, FusedArgs { a, gate: half(&weights.gate)?, up: half(&weights.up)?, output, groups }))
}

/// The launches that write A, then a kernel twice, then what it wrote.
fn blackwell(
    device: &dyn Device,
    mut launches: Vec<LaunchSpec>,
    mut spec: LaunchSpec,
    (args, ctas): (&FusedArgs, Option<u32>),
    bytes: usize,
) -> Result<Vec<u8>, Refused> {
    spec.grid[0] = ctas.unwrap_or(spec.grid[0]);
    launches.extend([spec.clone(), spec]);
    finish(device, launches, (args.output.c, bytes))
}

fn sm100a(config: sm100a::config::Config, variant: rows::Variant, shape: Shape, ctas: Option<u32>) -> Case {
    let (m, n, _) = shape;
    let name = format!("{}{}", config.name(), if variant.grouped { "_grouped" } else { "" });
    Case::new(name, Card::B200, move |device| {
        let kernel = sm100a::host::Fused::new(device, config, &variant, n)?;
        let (launches, args) = operands(device, (config.formats, variant.grouped), shape)?;
        blackwell(device, launches, kernel.spec(&args)?, (&args, ctas), m * n * 2)
    })
}

fn sm120a(config: sm120a::config::Config, grouped: bool, shape: Shape) -> Case {
    let (m, n, _) = shape;
    let name = format!("{}{}", config.name(), if grouped { "_grouped" } else { "" });
    Case::new(name, Card::RtxPro6000, move |device| {
        let variant = rows::Variant { grouped, ..rows::Variant::new(Activation::Silu.program()) };
        let kernel = sm120a::host::Fused::new(device, config, &variant, n)?;
        let (launches, args) = operands(device, (Formats::Scaled(config.format), grouped), shape)?;
        blackwell(device, launches, kernel.spec(&args)?, (&args, None), m * n * 2)
    })
}
