//! `bench --shapes NAME,…`: times the kernels on generated operands and holds them against the measured roofline.
//!
//! A run is the whole job: A brought into kernel order (or quantized), both products, the epilogue, the store. Weights
//! are packed beforehand. Cold, the default, several sets of weights take turns, so that they come from memory as in
//! a real decoder; warm, one set is used again and again.

pub(super) mod gpu;
pub(super) mod operands;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use dualgemm::cpu::{CpuOptions, Isa, Team, limits};
use dualgemm::gemm::AFormat;
use dualgemm::strategies::STRATEGIES;
use dualgemm::{AnyDesc, Target};
use dualgemm_bench::report::NamedRoofline;
use dualgemm_bench::{Report, Roofline, SHAPE_SETS, Shape, ShapeSet, plot, shapes};
use serde_json::json;

use self::operands::{Operands, desc, memory};
use super::Verdict;
use crate::args::{DeviceArg, FORMATS, OpArg, ProcessorArgs, RUNNING, WriteArgs, named};
use crate::computation::{Costs as _, Routed};
use crate::files::{writable, write_whole};
use crate::machine::{self, Machine};
use crate::report::Output;

/// Multiplications of the reference per shape.
pub(super) const REFERENCE_BUDGET: f64 = 4e8;
/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Shape sets (challenge, decode, prefill, llama) or single shapes as MxNxK, comma-separated.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "challenge")]
    pub shapes: Vec<String>,
    /// What to compute; an MLP's down projection goes back to K.
    #[arg(long, value_enum, value_name = "OPERATION", default_value_t = OpArg::GateUp)]
    pub op: OpArg,
    /// Format between gate/up and the down projection of --op mlp and moe [default: bf16].
    #[arg(long, hide_short_help = true, value_name = "FORMAT", value_parser = named(FORMATS))]
    pub between: Option<AFormat>,
    /// Experts of --op moe [default: 32].
    #[arg(long, hide_short_help = true, value_name = "E", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub experts: Option<u16>,
    /// Experts of each token of --op moe [default: 8].
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub top_k: Option<u16>,
    /// Formats of A, comma-separated. f32, f16 and bf16 are used as they are.
    #[arg(long, value_name = "FORMATS", value_delimiter = ',', default_value = "nvfp4", value_parser = named(FORMATS))]
    pub a_format: Vec<AFormat>,
    /// Format of C.
    #[arg(long, value_name = "FORMAT", default_value = "f16", value_parser = named(FORMATS))]
    pub out_dtype: AFormat,
    /// Where to compute: cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cpu)]
    pub device: DeviceArg,
    /// How a GPU puts the operation together: names of --list, comma-separated, all, or auto, the fastest known.
    ///
    /// Processors have one way, the fused kernel.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "auto")]
    pub strategy: Vec<String>,
    /// Whether a processor's weights come from memory or from the cache. On a GPU they come from memory.
    #[arg(long, hide_short_help = true, value_enum, default_value_t = CacheArg::Cold, help_heading = RUNNING)]
    pub cache: CacheArg,
    #[command(flatten)]
    pub processor: ProcessorArgs,
    /// Let a processor's threads stay awake between calls, which pays for few tokens.
    #[arg(long)]
    pub team: bool,
    /// Time to spend on each measurement, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, value_parser = parse_seconds)]
    pub budget: f64,
    /// One run of each, to see that everything works.
    #[arg(long, hide_short_help = true, conflicts_with = "budget", help_heading = RUNNING)]
    pub smoke: bool,
    /// Do not compare with the f64 reference.
    #[arg(long, hide_short_help = true, help_heading = RUNNING)]
    pub no_check: bool,
    /// Write the measurements as CSV.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw them under the roofline, as .svg or .png.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    #[command(flatten)]
    pub write: WriteArgs,
    /// List the shape sets and the strategies, and end.
    #[arg(long, conflicts_with_all = ["csv", "plot"])]
    pub list: bool,
}

impl BenchArgs {
    /// Experts of a mixture, and of each of its tokens.
    fn mixture(&self) -> (usize, usize) {
        (self.experts.unwrap_or(32).into(), self.top_k.unwrap_or(8).into())
    }
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

/// The measurements for people.
fn text(report: &Report) -> String {
    let mut text = report.rows.first().map_or_else(String::new, |row| row.subject.device.clone()) + "\n";
    for NamedRoofline { name, roofline } in &report.rooflines {
        let (flops, bytes) = (roofline.flops_per_s * 1e-9, roofline.bytes_per_s * 1e-9);
        text += &format!("measured limits, {name}: {flops:.0} GFLOP/s, {bytes:.1} GB/s read\n");
    }
    text + &report.to_table()
}

/// The shape sets and strategies that exist.
fn list(output: &Output) -> anyhow::Result<()> {
    let (mut sets, mut strategies, mut text) = (Vec::new(), Vec::new(), String::new());
    for ShapeSet { name, doc, shapes } in SHAPE_SETS {
        let joined = shapes.iter().map(Shape::to_string).collect::<Vec<_>>().join(" ");
        text += &format!("{name:<10} {doc}\n           {joined}\n");
        sets.push(json!({ "name": name, "doc": doc, "shapes": shapes }));
    }
    text += "\nstrategies of GPUs\n";
    for (name, doc) in STRATEGIES.iter().map(|s| (s.name(), s.doc())) {
        text += &format!("{name:<18} {doc}\n");
        strategies.push(json!({ "name": name, "doc": doc }));
    }
    output.say(&json!({ "shape_sets": sets, "strategies": strategies }), &text)
}

/// Measures, reports, writes.
pub fn run(args: &BenchArgs, output: &Output) -> anyhow::Result<Verdict> {
    if args.list {
        list(output)?;
        return Ok(Verdict::Right);
    }
    let shapes = parse_shapes(&args.shapes)?;
    args.plot.as_deref().map(plot::format).transpose()?;
    let writable = |path: &PathBuf| writable(path, args.write);
    let plot = args.plot.as_ref().map(writable).transpose()?;
    args.csv.as_ref().map(writable).transpose()?;
    if args.between.is_some() && !matches!(args.op, OpArg::Mlp | OpArg::Moe) {
        bail!("--between: is for --op mlp and moe; this is --op {}", args.op.name());
    }
    for (option, given) in [("--experts", args.experts), ("--top-k", args.top_k)] {
        if given.is_some() && args.op != OpArg::Moe {
            bail!("{option}: is for --op moe; this is --op {}", args.op.name());
        }
    }
    let (experts, top_k) = args.mixture();
    if top_k > experts && args.top_k.is_none() {
        bail!("--top-k defaults to {top_k}, more than --experts {experts}; give one of 1 to {experts}");
    }
    if let DeviceArg::Gpu(id) = &args.device {
        return gpu::run(args, id, &shapes, plot.as_deref(), output);
    }
    if args.strategy.iter().any(|name| !["auto", "all", "fused"].contains(&name.as_str())) {
        bail!(
            "--strategy {}: a processor has one, fused; the others are for --device cuda",
            args.strategy.join(",")
        );
    }
    let report = args.processor.install(|| match args.team {
        true => Team::new(rayon::current_num_threads())?.install(|| measure_all(args, &shapes, output)),
        false => measure_all(args, &shapes, output),
    })?;
    keep(args, plot.as_deref(), &report)?;
    output.say(&report, &text(&report))?;
    Ok(Verdict::Right)
}

/// Writes the files that are asked for.
fn keep(args: &BenchArgs, plot: Option<&Path>, report: &Report) -> anyhow::Result<()> {
    if let Some(path) = &args.csv {
        write_whole(path, report.to_csv().as_bytes())?;
    }
    plot.map_or(Ok(()), |path| Ok(plot::roofline(report, path)?))
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
    let isa = args.processor.isa.map_or_else(Isa::detect, Ok)?;
    let limits = limits::measure(isa, rayon::current_num_threads())?;
    let roofline = |desc: &AnyDesc, routed: Routed| {
        let mut names: Vec<_> =
            desc.products(routed).iter().map(|(desc, _)| limits.operations(desc).0).collect();
        names.dedup();
        let flops_per_s = desc.rate(routed, |desc| limits.operations(desc).1);
        let roofline = Roofline { flops_per_s, bytes_per_s: limits.dram_read };
        NamedRoofline { name: format!("{isa} {}", names.join(" and ")), roofline }
    };
    let target = Target::Cpu(CpuOptions { isa: args.processor.isa, ..CpuOptions::default() });
    let mut rooflines = Vec::<NamedRoofline>::new();
    let mut rows = Vec::new();
    let bar = output.progress("bench", shapes.len() * args.a_format.len());
    for &shape in shapes {
        // Checked before the operands of a shape are made: those may take gigabytes.
        let descs = args.a_format.iter().map(|&a| desc(args, shape, a)).collect::<Vec<_>>();
        descs.iter().try_for_each(AnyDesc::check).with_context(|| format!("--shapes {shape}"))?;
        let Some(first) = descs.first() else { continue };
        machine::fits(memory(first, args.cache), || format!("--shapes {shape}"))?;
        let operands = Operands::new(first, shape)?;
        for desc in &descs {
            let named = roofline(desc, operands.routed());
            let names = [Machine::detect().cpu_model, String::new(), "fused".into()];
            rows.push(operands.measure(args, desc, &target, names, &named.roofline)?);
            if rooflines.iter().all(|other| other.name != named.name) {
                rooflines.push(named);
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(Report::new(rooflines, rows))
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
