//! `run CHECKPOINT --layer I`: gate and up of a layer on activations, or another operation (`--op`), timed and compared with
//! the f64 reference.
//!
//! Memory holds the weights once: packing reads them from the mapped file and lets go of its pages on the way, and
//! the reference maps them again after the packed ones are dropped. C is there once too, in its own format.

pub(super) mod report;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use dualgemm::check::{Reference, RowSample, reference_rate};
use dualgemm::checkpoint::Checkpoint;
use dualgemm::cpu::CpuOptions;
use dualgemm::device::Device as _;
use dualgemm::formats::ScaleLayout;
use dualgemm::gemm::{AFormat, AOperand, Bounded, OutFormat, OutScale};
use dualgemm::{AnyDesc, AnyPlan, AnyWeights, GpuId, GpuOptions, OwnedMatrix, Target};
use dualgemm_bench::{Protocol, Timing};

use self::report::{ErrorReport, Report, RooflineReport};
use super::Verdict;
use crate::activation::Source;
use crate::args::{
    DeviceArg, FORMATS, MORE, ProblemArgs, ProcessorArgs, RUNNING, SCALE_LAYOUTS, WriteArgs, named,
};
use crate::computation::{Costs as _, Routed, kernels, measure_limits};
use crate::layer;
use crate::machine::{self, Machine};
use crate::operation::{Given, Operation, Problem};
use crate::report::Output;
use crate::result::{matrix_of, write};
use crate::routing::OwnedRouting;
use crate::tolerance::Tolerance;
use crate::{files, gpu, simulated};

/// Multiplications of the reference that a run is worth; above that, rows are sampled.
const REFERENCE_BUDGET: f64 = 2e9;
/// Seconds that they may take. An emulated machine does fewer in this time.
const REFERENCE_SECONDS: f64 = 10.0;
/// Rows that are compared however long it takes.
const LEAST_ROWS: usize = 4;

/// How large a C in f32 may be beside the packed weights, where its tensor scale comes from its values; a larger one is
/// computed twice instead.
const MAX_C_IN_F32: f64 = 0.1;

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Directory, .safetensors, .safetensors.index.json or .gguf file.
    pub checkpoint: PathBuf,
    #[command(flatten)]
    pub problem: ProblemArgs,
    /// Format of C.
    ///
    /// nvfp4 re-quantizes C for the down projection, with that one's input scale where there is one.
    #[arg(long, value_name = "FORMAT", default_value = "f32", value_parser = named(FORMATS))]
    pub out_dtype: AFormat,
    /// Order of the block scales of an nvfp4 C [default: linear].
    #[arg(long, hide_short_help = true, value_name = "LAYOUT", value_parser = named(SCALE_LAYOUTS), help_heading = MORE)]
    pub out_scale_layout: Option<ScaleLayout>,
    /// Safetensors file to write C to: tensor `c`, or c_packed, c_scale and c_scale_2.
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub write: WriteArgs,
    /// Rows to compare with the f64 reference: all, none, or how many [default: what a few seconds allow].
    #[arg(long, value_name = "ROWS", value_parser = parse_check)]
    pub check: Option<Check>,
    /// Where to compute: cpu, cuda, cuda:N, or a simulated GPU, sim:sm_90a, for up to 2^34 multiplications.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cpu)]
    pub device: DeviceArg,
    /// How a GPU puts the operation together, see bench --list; without it, the fastest that is known.
    #[arg(long, hide_short_help = true, value_name = "NAME", help_heading = RUNNING)]
    pub strategy: Option<String>,
    #[command(flatten)]
    pub processor: ProcessorArgs,
    /// Timed runs; without it, as many as fit 0.3 s, at least one, and one if simulated.
    #[arg(long, hide_short_help = true, value_name = "N", help_heading = RUNNING, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub repeat: Option<u32>,
    /// Do not measure the limits of this machine, which takes half a second.
    #[arg(long, hide_short_help = true, help_heading = RUNNING)]
    pub no_roofline: bool,
}

/// How much of C is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Every row.
    All,
    /// That many rows, evenly spread; none if 0.
    Rows(usize),
}

fn parse_check(text: &str) -> Result<Check, String> {
    match text {
        "all" => Ok(Check::All),
        "none" => Ok(Check::Rows(0)),
        _ => text.parse().map(Check::Rows).map_err(|_| "valid are all, none or a number of rows".into()),
    }
}

/// What C is stored as; an nvfp4 C takes the next layer's input scale, or one of its own.
fn out_format(args: &RunArgs, operation: &Operation<'_>) -> anyhow::Result<OutFormat> {
    let nvfp4 = args.out_dtype == AFormat::Nvfp4;
    if args.out_scale_layout.is_some() && !nvfp4 {
        bail!("--out-scale-layout: C has no block scales; they come with --out-dtype nvfp4");
    }
    let scale = if nvfp4 { operation.output_scale()? } else { None };
    let layout = args.out_scale_layout.unwrap_or(ScaleLayout::Linear);
    Ok(crate::args::out_format(args.out_dtype, layout, scale.map_or(OutScale::Dynamic, OutScale::Static)))
}

/// Computes, compares, writes.
pub fn run(args: &RunArgs, output: &Output) -> anyhow::Result<Verdict> {
    args.processor.install(|| compute(args, output))
}

fn compute(args: &RunArgs, output: &Output) -> anyhow::Result<Verdict> {
    let ProblemArgs { operation, layer, activations, epilogue } = &args.problem;
    let checkpoint = layer::open(&args.checkpoint, &layer.read, epilogue.activation)?;
    if let Some(path) = &args.output {
        let inputs =
            [Some(&args.checkpoint), activations.input.as_ref(), operation.routing.as_ref()].into_iter();
        let inputs = inputs.flatten().map(PathBuf::as_path);
        files::is_no_input("--output", path, inputs.chain(checkpoint.files().paths()))?;
        files::writable(path, args.write)?;
        if path.extension().is_some_and(|ending| ending != "safetensors") {
            bail!("--output: {}: results are written as .safetensors", path.display());
        }
    }
    let source = Source::open(activations)?;
    let report = report(args, &checkpoint, &source, output)?;
    let right = report.error.as_ref().is_none_or(|e| e.right);
    output.emit(&report)?;
    Ok(right.into())
}

/// What was computed, compared and written.
fn report(
    args: &RunArgs,
    checkpoint: &Checkpoint,
    source: &Source,
    output: &Output,
) -> anyhow::Result<Report> {
    let given = Given::of(checkpoint, &args.problem, source)?;
    let (operation, a) = (&given.operation, &given.a.a);
    let out = out_format(args, operation)?;
    let problem = given.problem(&args.problem, out)?;
    let (desc, routing) = (&problem.desc, problem.routing.as_ref());
    let (m, n, k) = (a.rows(), desc.last().n, a.k());
    let routed = routing.map(OwnedRouting::routed).unwrap_or_default();
    let (target, device_name) = target(args, desc)?;
    let plan = gpu::supported(AnyPlan::new(desc, &target))?;
    tracing::info!(%plan, "planned");
    let no_clock = matches!(args.device, DeviceArg::Gpu(GpuId::Sim(_)));
    // Without a clock one run says all.
    let runs = args.repeat.map(|runs| runs as usize).or(no_clock.then_some(1));
    if no_clock {
        let (asked, runs) = (format!("--device {}", args.device), runs.unwrap_or(1));
        for (product, _) in desc.products(routed) {
            simulated::fits((product.m, product.n, product.k), runs, &asked)?;
        }
    }
    let work = desc.work(routed);
    machine::fits(desc.memory(routed), || format!("C [{m}, {n}] of A [{m}, {k}]"))?;
    let limits = match args.no_roofline || no_clock {
        true => None,
        false => Some(measure_limits(&plan, desc, work, routed)?),
    };

    let begin = Instant::now();
    let bar = output.progress("pack", operation.features(desc));
    let packed = operation.prepack(&plan, routing, &|done| bar.set_position(done as u64))?;
    checkpoint.files().release_pages();
    bar.finish_and_clear();
    let prepack_us = begin.elapsed().as_secs_f64() * 1e6;
    let bar = no_clock.then(|| output.simulation());
    let (c, timing) = multiply((runs, no_clock), (&plan, desc), a, packed, routing)?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    if let Some(path) = &args.output {
        write(&c, path, (m, n))?;
    }
    let compare = |sample| -> anyhow::Result<ErrorReport> {
        let want = reference(checkpoint, operation, (&problem, a), &sample, output)?;
        let c = matrix_of(&c, (m, n))?;
        Ok(ErrorReport::new(c.compare(&want, &sample)?, Tolerance::of_plan(&plan, c.format())?, sample))
    };
    let error = sample(args.check, m, desc.multiplications_per_row()).map(compare).transpose()?;
    Ok(Report {
        checkpoint: args.checkpoint.clone(),
        convention: checkpoint.convention().name,
        op: args.problem.operation.op.name(),
        layer: operation.layer(),
        expert: args.problem.layer.expert,
        module: args.problem.operation.module.clone(),
        between: desc.between(),
        a: given.a.origin.clone(),
        m,
        n,
        k,
        a_format: desc.first().a_compute(),
        out_dtype: desc.last().out.name(),
        device: args.device.to_string(),
        device_name,
        kernel: kernels(&plan),
        threads: plan.products().0.threads(),
        prepack_us,
        timing,
        simulated: no_clock,
        gflops: (!no_clock).then(|| work.flops / timing.median_us * 1e-3),
        gbps: (!no_clock).then(|| work.bytes / timing.median_us * 1e-3),
        roofline: limits.map(|limits| RooflineReport::new(limits, work, &timing)),
        error,
        basis: given.basis(&args.problem, routing),
        plan,
        output: args.output.clone(),
        peak_rss_bytes: machine::peak_rss(),
    })
}

/// Which of `m` rows are compared, of so many multiplications each.
fn sample(check: Option<Check>, m: usize, multiplications_per_row: f64) -> Option<RowSample> {
    match check {
        None => {
            let budget = REFERENCE_BUDGET.min(REFERENCE_SECONDS * reference_rate());
            Some(RowSample::within(m, multiplications_per_row, budget, LEAST_ROWS))
        }
        Some(Check::All) => Some(RowSample::all(m)),
        Some(Check::Rows(0)) => None,
        Some(Check::Rows(rows)) => Some(RowSample::spread(m, rows)),
    }
}

/// So many runs, or what fits the time.
fn protocol(runs: Option<usize>, warmup: usize) -> Protocol {
    match runs {
        Some(runs) => Protocol { warmup, min_runs: runs, max_runs: runs, ..Protocol::default() },
        None => Protocol { warmup, min_runs: 1, max_runs: 1000, budget: Duration::from_millis(300) },
    }
}

/// Where to compute, and what it is called.
fn target(args: &RunArgs, desc: &AnyDesc) -> anyhow::Result<(Target, String)> {
    match &args.device {
        DeviceArg::Cpu => {
            if args.strategy.is_some() {
                bail!("--strategy: a processor has one way; the strategies are for --device cuda");
            }
            let last = desc.last();
            let c_in_f32 = 4.0 * last.m as f64 * last.n as f64;
            let dynamic_c_twice = c_in_f32 > MAX_C_IN_F32 * desc.packed_bytes(Routed::default());
            let options = CpuOptions { isa: args.processor.isa, dynamic_c_twice, ..CpuOptions::default() };
            Ok((Target::Cpu(options), Machine::detect().cpu_model))
        }
        DeviceArg::Gpu(id) => {
            if args.processor.isa.is_some() {
                bail!("--isa: {id} is a GPU; instruction sets are those of --device cpu");
            }
            let options = GpuOptions { strategy: args.strategy.clone(), ..GpuOptions::default() };
            Ok((Target::Gpu(id.clone(), options), gpu::open(id)?.info().name.clone()))
        }
    }
}

/// Runs, timed, and drops the weights. Where there is a clock, one run before does not count.
fn multiply(
    (runs, no_clock): (Option<usize>, bool),
    (plan, desc): (&AnyPlan, &AnyDesc),
    a: &AOperand<'_>,
    packed: AnyWeights,
    routing: Option<&OwnedRouting>,
) -> anyhow::Result<(OwnedMatrix, Timing)> {
    let mut running = gpu::supported(plan.runner())?;
    let mut c = OwnedMatrix::of_c("C", desc.last())?;
    let (m, n) = (desc.last().m, desc.last().n);
    let protocol = protocol(runs, usize::from(!no_clock));
    let routing = routing.map(OwnedRouting::places);
    let mut scale = None;
    let timing = protocol.measure(|_| {
        scale = running.run(a, &packed, routing, (c.output(m, n), false))?;
        Ok::<_, dualgemm::Error>(())
    })?;
    c.set_global_scale(scale);
    // A GPU has a clock of its own, and in real use its operands are there already.
    let timing = running.time(a, &packed, routing.as_slice())?.unwrap_or(timing);
    Ok((c, timing))
}

/// The f64 reference of some rows; pages that were read for it are let go of on the way.
pub(super) fn reference(
    checkpoint: &Checkpoint,
    operation: &Operation<'_>,
    (problem, a): (&Problem, &AOperand<'_>),
    sample: &RowSample,
    output: &Output,
) -> anyhow::Result<Vec<Bounded>> {
    let bar = output.progress("reference", operation.features(&problem.desc));
    let a = dualgemm::quantize_a(a, problem.desc.first().quantize_a)?;
    let run = dualgemm::plan::features_per_run(a.k());
    let progress = |done: usize| {
        let before = bar.position() as usize;
        bar.inc(done as u64);
        if before / run != (before + done) / run {
            checkpoint.files().release_pages();
        }
    };
    let want = operation.reference(problem, Reference { a: &a, sample, progress: &progress })?;
    bar.finish_and_clear();
    Ok(want)
}
