//! Host programs: small problems, a configuration of each family. A kernel writes A first, and every launch may start
//! before the one before has ended, so that each has something to wait for. Rings have few stages and wrap around, the last
//! stage of a tile is the ring's first, where the epilogue writes, and kernels whose CTAs take several tiles get fewer CTAs than the card holds.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_cases::parse;
use dualgemm_device::{Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatMatrix, FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::{AOperand, Activation, GateUp};
use dualgemm_kernels::fused::{Config, Fused, FusedArgs};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::atoms::ScaleAtoms;
use dualgemm_kernels::generic::copy::Copy;
use dualgemm_kernels::generic::expand::{Codes, Expand};
use dualgemm_kernels::generic::pack::GpuPack;
use dualgemm_kernels::generic::quantize::{Floats, Out as To, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::generic::silu_mul::{Products as Both, SiluMul};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::format::{ATOM_BYTES, Format, atom_k};
use dualgemm_kernels::parts::variant::{Products, Variant};
use dualgemm_mutate::Refused;
use dualgemm_sim::Card;

use crate::mixture::mixture;
use crate::words::{configs, variant};

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
    let mut cases = elementwise();
    cases.extend(mixture());
    for line in include_str!("cases.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let [config, words, size] = line.split(" | ").collect::<Vec<_>>()[..] else { panic!("{line}") };
        let config = configs(&config.split(' ').collect::<Vec<_>>())[0];
        let (variant, _) = variant(&words.split(' ').collect::<Vec<_>>());
        let (shape, ctas) =
            size.split_once(' ').map_or((size, None), |(shape, ctas)| (shape, Some(parse(ctas))));
        let [m, n, k] = shape.split('x').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let groups: Vec<u32> = m.split('/').map(parse).collect();
        let first_rows = (0..=groups.len()).map(|g| groups[..g].iter().sum());
        let (m, rows) = match (variant.choices, variant.grouped) {
            (true, _) => (groups.len(), groups),
            (false, true) => (groups.iter().sum::<u32>() as usize, first_rows.collect()),
            (false, false) => (groups[0] as usize, Vec::new()),
        };
        let shape = (m, parse(n), parse(k));
        match variant.products {
            Products::Up => cases.extend(apart(config, shape)),
            _ => cases.push(fused(config, variant, shape, &rows, ctas)),
        }
    }
    cases
}

pub fn floats(rows: usize, k: usize) -> FloatMatrix<'static> {
    Inputs::seeded(5).floats("a", FloatType::F16, rows, k).expect("a matrix that fits")
}

pub fn upload(device: &dyn Device, bytes: &[u8]) -> Result<DevicePtr, Refused> {
    let ptr = device.alloc(bytes.len())?;
    device.copy_to(ptr, bytes)?;
    Ok(ptr)
}

pub fn poisoned(device: &dyn Device, bytes: usize) -> Result<DevicePtr, Refused> {
    upload(device, &vec![0xA5; bytes])
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

/// Where a kernel brings these bytes, whole pieces of 16, and its launch.
pub fn written(device: &dyn Device, mut bytes: Vec<u8>) -> Result<(DevicePtr, LaunchSpec), Refused> {
    bytes.resize(bytes.len().next_multiple_of(16), 0);
    let to = poisoned(device, bytes.len())?;
    Ok((to, Copy::new(device)?.spec("A", (upload(device, &bytes)?, to), bytes.len())?))
}

/// Every elementwise kernel, on what those before it have made: a case for each.
fn elementwise() -> Vec<Case> {
    let (m, k) = (40, 208);
    let run = move |device: &dyn Device| {
        let amax = Amax::new(device, FloatType::F16, false)?;
        let quantize = Quantize::new(device, FloatType::F16, Sink::Codes(ScaleLayout::Linear), true)?;
        let atoms = ScaleAtoms::new(device, ScaleLayout::Linear, false)?;
        let expand = Expand::new(device, ScaleLayout::Sf128x4, FloatType::F16)?;
        let program = Activation::Silu.program();
        let (ty, sink) = (FloatType::F16, Sink::Float(FloatType::F16));
        let gated = SiluMul::new(device, (ty, false), sink, &program)?;
        let pack = GpuPack::new(device, ScaleLayout::Sf128x4)?;
        let (bytes, pitch) = (m * k * 2, 2 * k);
        let [image, expanded, products] = [(); 3].map(|()| poisoned(device, bytes));
        let (image, expanded, products) = (image?, expanded?, products?);
        let a = Floats { m, k, values: upload(device, &floats(m, k).to_le_bytes())?, pitch };
        let scale = Scale::Static(GlobalScale::multiplier(0.01));
        let first = Quantize::new(device, FloatType::F16, Sink::Image, false)?;
        let first = first.spec(&a, &To::Image { values: image, pitch }, &scale)?;
        let a = Floats { m, k, values: image, pitch };
        let (parts, scale) = (poisoned(device, MAX_PARTS as usize * 4)?, poisoned(device, 4)?);
        let codes = poisoned(device, m * k / 2)?;
        let linear = poisoned(device, ScaleLayout::Linear.len(m, k / 16))?;
        let scales = poisoned(device, ScaleLayout::Sf128x4.len(m, k / 16))?;
        let coded = Codes { m, k, codes, pitch: k / 2, scales };
        let pack_bytes = GpuPack::bytes(m, k);
        let out = poisoned(device, bytes + pack_bytes)?;
        let both =
            Both { m, n: k, gate: expanded, up: image, pitch, alpha: [0.5, 2.0], bias: [DevicePtr::NULL; 2] };
        let launches = [
            first,
            amax.spec(&a, parts, None)?,
            quantize.spec(&a, &To::Codes { codes, scales: linear }, &Scale::Dynamic { parts, scale })?,
            atoms.spec((m, k / 16), linear, scales, None)?,
            expand.spec(&coded, expanded, pitch)?,
            gated.spec(&both, &To::Image { values: products, pitch }, GlobalScale::ONE)?,
            pack.spec(&coded, &coded, DevicePtr(out.0 + bytes as u64))?,
            Copy::new(device)?.spec("C", (products, out), bytes)?,
        ];
        finish(device, launches, (out, bytes + pack_bytes))
    };
    // In the order in which they are loaded; the seventh is that of the first launch.
    let names = ["amax_f16", "quantize_f16_dynamic", "scale_atoms", "expand_nvfp4", "silu_mul", "pack"];
    let names = names.into_iter().enumerate().chain([(7, "copy")]);
    names.map(|(module, name)| Case { module, ..Case::new(name.into(), Card::H100, run) }).collect()
}

/// The operands of a fused kernel's host program.
struct Problem {
    config: Config,
    variant: Variant,
    a: AOperand<'static>,
    weights: Vec<GateUp<'static>>,
    rows: Vec<u32>,
}

impl Problem {
    fn new(config: Config, variant: Variant, (m, n, k): Shape, rows: &[u32]) -> Self {
        let sets = (CodeSet::Full, ScaleSet::Unit);
        let matrix = |seed, format, rows, scale| {
            let matrix = Inputs::seeded(seed).quantized(
                "matrix",
                format,
                (rows, k),
                sets,
                GlobalScale::multiplier(scale),
            );
            matrix.expect("a matrix that fits")
        };
        let a = match config.a_format(&variant) {
            Format::Block(format) => AOperand::Quantized(matrix(3, format, m, 1.0)),
            Format::Half(_) | Format::E4m3 => AOperand::Float(floats(m, k)),
        };
        let half = |seed, scale| matrix(seed, BlockFormat::Nvfp4, n, scale);
        let weights = vec![GateUp::new(half(7, 0.011), half(8, 0.023)); rows.len().saturating_sub(1).max(1)];
        Self { config, variant: variant.for_weights(n, k), a, weights, rows: rows.into() }
    }

    /// The operands of a kernel, and the launches that write A and the table of the groups' rows.
    fn operands<'d>(
        &self,
        kernel: &Fused<'d>,
        device: &dyn Device,
    ) -> Result<(Operands<'d>, Vec<LaunchSpec>), Refused> {
        let mut there = Operands::upload(kernel, &self.a, &self.weights, &self.rows)?;
        there.args.output.scale = 0.003;
        let ((m, _, k), a) = (there.args.size, there.args.a);
        let scales = match (a.format, self.variant.codes) {
            (Format::Block(_), Some(layout)) => layout.len(m, k / 16),
            (Format::Block(format), None) => {
                a.atoms * k.div_ceil(atom_k(format) as usize) * ATOM_BYTES as usize
            }
            (Format::Half(_) | Format::E4m3, _) => 0,
        };
        let mut launches = Vec::new();
        let args = &mut there.args;
        let table = args.groups.as_mut().map(|groups| (&mut groups.of.rows, 4 * self.rows.len()));
        let a = [(&mut args.a.codes, m * a.pitch), (&mut args.a.scales, scales)];
        for (from, bytes) in a.into_iter().filter(|(_, bytes)| *bytes > 0).chain(table) {
            let mut copy = vec![0; bytes];
            device.copy_from(&mut copy, *from)?;
            let (to, launch) = written(device, copy)?;
            *from = to;
            launches.push(launch);
        }
        Ok((there, launches))
    }
}

/// C, and its scales if it is nvfp4.
fn read(there: &Operands<'_>) -> Result<Vec<u8>, Refused> {
    Ok([there.read_c()?, there.read_scales()?].concat())
}

/// A kernel twice on rows in groups or in one, of as many CTAs along x if they are given.
fn fused(config: Config, variant: Variant, shape: Shape, rows: &[u32], ctas: Option<u32>) -> Case {
    let problem = Problem::new(config, variant, shape, rows);
    let (what, kind) = (problem.variant.name(), if problem.variant.grouped { "_grouped" } else { "" });
    let (card, suffix) = match config {
        Config::Sm90a(_) => (Card::H100, format!(", {what}")),
        Config::Warpwise(_) if problem.variant.choices => (Card::H100, ", choices".into()),
        Config::Warpwise(_) if problem.variant.grouped => (Card::H100, ", experts".into()),
        Config::Warpwise(_) => (Card::H100, problem.variant.codes.map_or(", f16", |_| ", nvfp4").into()),
        Config::Sm100a(_) => (Card::B200, kind.into()),
        Config::Sm120a(_) => (Card::RtxPro6000, kind.into()),
        Config::Sm80(_) | Config::Plain(_) | Config::Fp8(_) => (Card::H100, String::new()),
    };
    Case::new(config.name() + &suffix, card, move |device| {
        let kernel = Fused::new(device, problem.config, &problem.variant)?;
        let (there, mut launches) = problem.operands(&kernel, device)?;
        for settled in [false, matches!(config, Config::Warpwise(_))] {
            let choices = problem.variant.choices.then_some(1);
            let mut spec = kernel.spec(&FusedArgs { settled, choices, ..there.args })?;
            spec.grid[0] = ctas.unwrap_or(spec.grid[0]);
            launches.push(spec);
        }
        finish(device, launches, (there.args.output.c, 0))?;
        read(&there)
    })
}

/// Gate in one launch, up in the next: a case for each of the two kernels.
fn apart(config: Config, shape: Shape) -> [Case; 2] {
    [0, 1].map(|module| {
        let silu = Variant::new(Activation::Silu.program());
        let up = Problem::new(config, Variant { products: Products::Up, ..silu }, shape, &[]);
        let variants = [up.variant.gate_before(), up.variant.clone()];
        let name = format!("{}, {}", config.name(), variants[module].name());
        let run = move |device: &dyn Device| -> Result<Vec<u8>, Refused> {
            let [gate, up_kernel] =
                [Fused::new(device, config, &variants[0])?, Fused::new(device, config, &variants[1])?];
            let (there, mut launches) = up.operands(&up_kernel, device)?;
            let of_gate = Operands::upload(&gate, &up.a, &up.weights, &[])?;
            let gate = gate.spec(&FusedArgs { weights: of_gate.args.weights, ..there.args })?;
            let up = up_kernel.spec(&there.args)?;
            launches.extend([gate.clone(), up.clone(), gate, up]);
            finish(device, launches, (there.args.output.c, 0))?;
            read(&there)
        };
        Case { module, ..Case::new(name, Card::H100, run) }
    })
}
