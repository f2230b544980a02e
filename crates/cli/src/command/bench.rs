//! `bench --shapes NAME,…`: times the kernels on generated operands and holds them against the measured roofline.
//!
//! A run is the whole job: A brought into kernel order (or quantized), both products, the epilogue, the store. Weights
//! are packed beforehand. Cold, the default, several sets of weights take turns, so that they come from memory as in
//! a real decoder; warm, one set is used again and again.

pub(super) mod gpu;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use dualgemm::check::{RowSample, bounded_rows};
use dualgemm::cpu::{CpuOptions, Isa, limits};
use dualgemm::formats::{BlockFormat, FloatType, GlobalScale};
use dualgemm::gemm::{AFormat, AOperand, DualGemmDesc, GateUp, OutFormat, OutScale, QuantizeA};
use dualgemm::strategies::STRATEGIES;
use dualgemm::{DualGemm, Plan, Target};
use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_bench::report::{NamedRoofline, Subject};
use dualgemm_bench::{Protocol, Report, Roofline, Row, SHAPE_SETS, Shape, plot, shapes};
use serde::Serialize;

use super::Verdict;
use crate::args::{AFormatArg, DeviceArg, OutFormatArg};
use crate::files::{writable, write_whole};
use crate::machine::{self, Machine};
use crate::report::Output;
use crate::result::OwnedResult;
use crate::tolerance::{Statement, Tolerance};

/// Weights that take turns when cold: several times the last-level cache of the machines that this runs on.
const BEYOND_CACHES: usize = 192 << 20;
/// Multiplications of the reference per shape.
pub(super) const REFERENCE_BUDGET: f64 = 4e8;
/// Seed of the operands.
const SEED: u64 = 1;
/// Mean square of a generated nvfp4 value before its tensor scale: 8.56 of the codes, a third of the block scales.
const MEAN_SQUARE: f32 = 2.85;
/// Tensor scale of a re-quantized C.
const OUT_SCALE: f32 = 1e-2;

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Shape sets (challenge, decode, prefill, llama) or single shapes as MxNxK, comma-separated.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "challenge")]
    pub shapes: Vec<String>,
    /// Formats of A, comma-separated. f32, f16 and bf16 are used as they are.
    #[arg(long, value_enum, value_name = "FORMATS", value_delimiter = ',', default_value = "nvfp4")]
    pub a_format: Vec<AFormatArg>,
    /// Format of C.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = OutFormatArg::F16)]
    pub out_dtype: OutFormatArg,
    /// How a GPU puts the operation together: a name of --list, several of them comma-separated, all, or auto, the
    /// fastest that is known. Processors have one way, the fused kernel.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "auto")]
    pub strategy: Vec<String>,
    /// Where to compute: cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cpu)]
    pub device: DeviceArg,
    /// Whether a processor's weights come from memory or from the cache. On a GPU they come from memory.
    #[arg(long, value_enum, default_value_t = CacheArg::Cold)]
    pub cache: CacheArg,
    /// Instruction set of the kernels: portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16 or amxbf16. Without it, the best one
    /// here.
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
    /// Threads; without it, all there are.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub threads: Option<u16>,
    /// Time to spend on each measurement, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, value_parser = parse_seconds)]
    pub budget: f64,
    /// One run of each, to see that everything works.
    #[arg(long)]
    pub smoke: bool,
    /// Do not compare with the f64 reference.
    #[arg(long)]
    pub no_check: bool,
    /// Write the measurements as CSV.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw them under the roofline, as .svg or .png.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// List the shape sets and the strategies, and end.
    #[arg(long)]
    pub list: bool,
}

/// Where weights come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CacheArg {
    /// Memory: sets of weights take turns.
    Cold,
    /// The cache, as far as they fit.
    Warm,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds is needed".to_string())?;
    if (0.0..=600.0).contains(&seconds) { Ok(seconds) } else { Err("valid are 0 to 600 seconds".into()) }
}

/// The measurements as table and document.
#[derive(Debug, Serialize)]
#[serde(transparent)]
struct Measurements(Report);

impl fmt::Display for Measurements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.0.rows.first().map_or("", |row| row.device.as_str());
        writeln!(f, "{device}")?;
        for NamedRoofline { name, roofline } in &self.0.rooflines {
            let (flops, bytes) = (roofline.flops_per_s * 1e-9, roofline.bytes_per_s * 1e-9);
            writeln!(f, "measured limits, {name}: {flops:.0} GFLOP/s, {bytes:.1} GB/s read")?;
        }
        f.write_str(&self.0.to_table())
    }
}

/// The shape sets that exist.
#[derive(Debug, Serialize)]
struct Sets {
    shape_sets: Vec<Set>,
    strategies: Vec<StrategyReport>,
}

#[derive(Debug, Serialize)]
struct StrategyReport {
    name: &'static str,
    doc: &'static str,
}

#[derive(Debug, Serialize)]
struct Set {
    name: &'static str,
    doc: &'static str,
    shapes: &'static [Shape],
}

impl fmt::Display for Sets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for set in &self.shape_sets {
            let shapes: Vec<String> = set.shapes.iter().map(Shape::to_string).collect();
            writeln!(f, "{:<10} {}\n           {}", set.name, set.doc, shapes.join(" "))?;
        }
        writeln!(f, "\nstrategies of GPUs")?;
        self.strategies.iter().try_for_each(|s| writeln!(f, "{:<18} {}", s.name, s.doc))
    }
}

/// Measures, reports, writes.
pub fn run(args: &BenchArgs, output: &Output) -> anyhow::Result<Verdict> {
    if args.list {
        let set = |set: &dualgemm_bench::ShapeSet| Set { name: set.name, doc: set.doc, shapes: set.shapes };
        let strategies = STRATEGIES.iter().map(|s| StrategyReport { name: s.name(), doc: s.doc() }).collect();
        output.emit(&Sets { shape_sets: SHAPE_SETS.iter().map(set).collect(), strategies })?;
        return Ok(Verdict::Right);
    }
    let shapes = parse_shapes(&args.shapes)?;
    let plot = args.plot.as_deref().map(plot_file).transpose()?;
    args.csv.as_deref().map(writable).transpose()?;
    if let DeviceArg::Gpu(id) = &args.device {
        return gpu::run(args, id, &shapes, plot.as_deref(), output);
    }
    if args.strategy.iter().any(|name| !["auto", "all", "fused"].contains(&name.as_str())) {
        bail!(
            "--strategy {}: a processor has one, fused; the others are for --device cuda",
            args.strategy.join(",")
        );
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(args.threads.unwrap_or(0).into()).build();
    let report = pool
        .context("--threads: cannot start the threads")?
        .install(|| measure_all(args, &shapes, output))?;
    if let Some(path) = &args.csv {
        write_whole(path, report.to_csv().as_bytes())?;
    }
    if let Some(path) = &plot {
        plot::roofline(&report, path)?;
    }
    output.emit(&Measurements(report))?;
    Ok(Verdict::Right)
}

/// Where a plot will be written, if it can be.
fn plot_file(path: &Path) -> anyhow::Result<PathBuf> {
    plot::format(path)?;
    writable(path)
}

/// Names of sets and shapes, in the order given.
pub(super) fn parse_shapes(names: &[String]) -> anyhow::Result<Vec<Shape>> {
    let mut shapes = Vec::new();
    for name in names {
        match shape(name) {
            Ok(shape) => shapes.push(shape),
            Err(_) => {
                let neither = || format!("--shapes {name}: neither a shape such as 64x128x256 nor a set");
                shapes.extend_from_slice(shapes::shape_set(name).with_context(neither)?.shapes);
            }
        }
    }
    Ok(shapes)
}

/// `MxNxK`, or what it should be.
pub(super) fn shape(text: &str) -> Result<Shape, String> {
    let numbers: Option<Vec<usize>> = text.split('x').map(|part| part.parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[m, n, k]) => Ok(Shape::new(m, n, k)),
        _ => Err("three numbers are needed, such as 64x128x256".into()),
    }
}

fn measure_all(args: &BenchArgs, shapes: &[Shape], output: &Output) -> anyhow::Result<Report> {
    let isa = args.isa.map_or_else(Isa::detect, Ok)?;
    let limits = limits::measure(isa, rayon::current_num_threads())?;
    let roofline = |desc: &DualGemmDesc| {
        let (name, flops_per_s) = limits.operations(desc);
        let roofline = Roofline { flops_per_s, bytes_per_s: limits.dram_read };
        NamedRoofline { name: format!("{isa} {name}"), roofline }
    };
    let mut rooflines = Vec::<NamedRoofline>::new();
    let mut rows = Vec::new();
    let bar = output.progress("bench", shapes.len() * args.a_format.len());
    for &shape in shapes {
        // Checked before the operands of a shape are made: those may take gigabytes.
        let descs = args.a_format.iter().map(|&a| desc(shape, a, args.out_dtype)).collect::<Vec<_>>();
        descs.iter().try_for_each(DualGemmDesc::check).with_context(|| format!("--shapes {shape}"))?;
        machine::fits(memory(shape, args.cache), || format!("--shapes {shape}"))?;
        let operands = Operands::new(shape, args.cache)?;
        for desc in &descs {
            let named = roofline(desc);
            rows.push(operands.measure(args, desc, &named.roofline)?);
            if rooflines.iter().all(|other| other.name != named.name) {
                rooflines.push(named);
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(Report::new(rooflines, rows))
}

pub(super) fn desc(Shape { m, n, k }: Shape, a: AFormatArg, out: OutFormatArg) -> DualGemmDesc {
    let a = match a {
        AFormatArg::F32 => AFormat::F32,
        AFormatArg::F16 => AFormat::F16,
        AFormatArg::Bf16 => AFormat::Bf16,
        AFormatArg::Nvfp4 => AFormat::Nvfp4,
    };
    let out = match out {
        OutFormatArg::F32 => OutFormat::F32,
        OutFormatArg::F16 => OutFormat::F16,
        OutFormatArg::Bf16 => OutFormat::Bf16,
        OutFormatArg::Nvfp4 => OutFormat::Nvfp4 {
            scale_layout: dualgemm::formats::ScaleLayout::Linear,
            global_scale: OutScale::Static(OUT_SCALE),
        },
    };
    DualGemmDesc { out, quantize_a: QuantizeA::No, ..DualGemmDesc::new(m, n, k, a, BlockFormat::Nvfp4) }
}

/// The weights of a shape.
struct Operands {
    weights: GateUp<'static>,
    /// Sets that take turns.
    sets: usize,
}

/// B1 and B2 of a shape.
pub(super) fn weights(Shape { n, k, .. }: Shape) -> anyhow::Result<GateUp<'static>> {
    let mut inputs = Inputs::seeded(SEED);
    // A has unit variance, so both products have it too: no format of C overflows or loses its small values.
    let scale = GlobalScale::multiplier((MEAN_SQUARE * k as f32).powf(-0.5));
    let mut half =
        |name| inputs.quantized(name, BlockFormat::Nvfp4, (n, k), (CodeSet::Full, ScaleSet::Unit), scale);
    Ok(GateUp::new(half("gate")?, half("up")?))
}

/// A of a problem.
pub(super) fn activations(desc: &DualGemmDesc) -> anyhow::Result<AOperand<'static>> {
    let mut inputs = Inputs::seeded(SEED + 1);
    Ok(match desc.a {
        AFormat::F32 => AOperand::Float(inputs.floats("A", FloatType::F32, desc.m, desc.k)?),
        AFormat::F16 => AOperand::Float(inputs.floats("A", FloatType::F16, desc.m, desc.k)?),
        AFormat::Bf16 => AOperand::Float(inputs.floats("A", FloatType::Bf16, desc.m, desc.k)?),
        AFormat::Nvfp4 | AFormat::Mxfp4 => {
            let sets = (CodeSet::Full, ScaleSet::Unit);
            let scale = GlobalScale::multiplier(MEAN_SQUARE.powf(-0.5));
            AOperand::Quantized(inputs.quantized("A", BlockFormat::Nvfp4, (desc.m, desc.k), sets, scale)?)
        }
    })
}

/// Sets of packed weights that take turns.
fn sets(Shape { n, k, .. }: Shape, cache: CacheArg) -> usize {
    match cache {
        CacheArg::Cold => BEYOND_CACHES.div_ceil(n * k / 8 * 9).max(1),
        CacheArg::Warm => 1,
    }
}

/// Bytes of memory that a shape which was checked takes at least: weights and their packs, A in f32 as it is drawn and as
/// the kernels take it, C.
fn memory(shape: Shape, cache: CacheArg) -> f64 {
    let [m, n, k] = [shape.m, shape.n, shape.k].map(|x| x as f64);
    n * k * 1.125 * (1 + sets(shape, cache)) as f64 + m * k * 8.0 + m * n * 2.0
}

impl Operands {
    fn new(shape: Shape, cache: CacheArg) -> anyhow::Result<Self> {
        Ok(Self { weights: weights(shape)?, sets: sets(shape, cache) })
    }

    fn measure(&self, args: &BenchArgs, desc: &DualGemmDesc, roofline: &Roofline) -> anyhow::Result<Row> {
        let options = CpuOptions { isa: args.isa, ..CpuOptions::default() };
        let plan = DualGemm::plan(desc, &Target::Cpu(options))?;
        let packed = plan.prepack(&self.weights)?;
        let sets = vec![packed; self.sets];
        let a = activations(desc)?;
        let mut c = OwnedResult::zeroed(desc);
        let mut runner = plan.runner(1)?;
        let protocol = if args.smoke {
            Protocol::SMOKE
        } else {
            Protocol { budget: Duration::from_secs_f64(args.budget), ..Protocol::default() }
        };
        let timing = protocol.measure(|run| -> Result<(), dualgemm::Error> {
            let scale = runner.run(&a, &sets[run % sets.len()], c.as_output())?;
            c.set_global_scale(scale);
            Ok(())
        })?;
        let rel_l2 = if args.no_check { None } else { Some(self.check(&plan, &a, &c)?) };
        let subject = Subject {
            device: Machine::detect().cpu_model,
            driver: String::new(),
            commit: machine::COMMIT.into(),
            strategy: "fused".into(),
            kernel: plan.kernel().into(),
            threads: plan.threads(),
        };
        Ok(Row::new(subject, desc, roofline, timing, rel_l2))
    }

    /// The relative L2 error on some rows; a wrong result ends the benchmark.
    fn check(&self, plan: &Plan, a: &AOperand<'_>, c: &OwnedResult) -> anyhow::Result<f64> {
        let desc = plan.desc();
        let sample = RowSample::within(desc.m, desc.n, desc.k, REFERENCE_BUDGET, 1);
        let want = bounded_rows(&desc.epilogue, a, &sample, &self.weights, &|_| {})?;
        let c = c.as_matrix(desc.m, desc.n)?;
        let comparison = c.compare(&want, &sample)?;
        let tolerance = Tolerance::bounded(c.format(), &desc.epilogue);
        if !tolerance.holds(&comparison) {
            bail!(
                "{} on {}x{}x{} is wrong; please report it: {}",
                plan.kernel(),
                desc.m,
                desc.n,
                desc.k,
                Statement { found: &comparison, tolerance: &tolerance, compared: sample.to_string() }
            );
        }
        Ok(comparison.rel_l2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_sets_or_three_numbers() {
        let parse = |names: &[&str]| parse_shapes(&names.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(parse(&["1x16x32", "challenge"]).unwrap().len(), 5);
        for bad in ["1x2", "1x2x3x4", "ax2x3", "", "-1x2x3"] {
            assert!(parse(&[bad]).is_err(), "{bad}");
        }
    }
}
