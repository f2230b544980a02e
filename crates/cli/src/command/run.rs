//! `run CHECKPOINT --layer I`: gate and up of a layer on activations, timed and compared with the f64 reference.
//!
//! Memory holds the weights once: packing reads them from the mapped file and lets go of its pages on the way, and
//! the reference maps them again after the packed ones are dropped. C is there once too, in its own format.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use dualgemm::check::{RowSample, bounded_runs};
use dualgemm::checkpoint::Checkpoint;
use dualgemm::cpu::{CpuOptions, Isa};
use dualgemm::device::Device as _;
use dualgemm::formats::QuantizedMatrix;
use dualgemm::gemm::{AFormat, AOperand, Comparison, DualGemmDesc, OutFormat, OutScale};
use dualgemm::{DualGemm, GpuId, GpuOptions, PackedWeights, Plan, Target};
use dualgemm_bench::{Bound, Protocol, Timing};
use serde::Serialize;

use super::Verdict;
use crate::activation::{Activation, Source};
use crate::args::{ActivationArgs, DeviceArg, EpilogueArgs, LayerArgs, OutFormatArg, ScaleLayoutArg};
use crate::layer::{self, Layer};
use crate::limits::Limits;
use crate::machine::{self, Machine};
use crate::report::{Bytes, Output, Time};
use crate::result::OwnedResult;
use crate::scales::Scales;
use crate::tolerance::{Statement, Tolerance};
use crate::{files, gpu, simulated};

/// Multiplications of the reference that a run is worth; above that, rows are sampled.
const REFERENCE_BUDGET: f64 = 2e9;
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
    pub layer: LayerArgs,
    #[command(flatten)]
    pub activations: ActivationArgs,
    #[command(flatten)]
    pub epilogue: EpilogueArgs,
    /// Format of C. nvfp4 re-quantizes C for the down projection, with that one's input scale where there is one.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = OutFormatArg::F32)]
    pub out_dtype: OutFormatArg,
    /// Order of the block scales of an nvfp4 C; without it, row by row.
    #[arg(long, value_enum, value_name = "LAYOUT")]
    pub out_scale_layout: Option<ScaleLayoutArg>,
    /// Where to compute: cpu, cuda, cuda:N, or a simulated GPU, sim:sm_90a, for up to 2^34 multiplications.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cpu)]
    pub device: DeviceArg,
    /// How a GPU puts the operation together, see bench --list; without it, the fastest that is known.
    #[arg(long, value_name = "NAME")]
    pub strategy: Option<String>,
    /// Instruction set of the kernels: portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16 or amxbf16. Without it, the best one
    /// here.
    #[arg(long, value_name = "ISA")]
    pub isa: Option<Isa>,
    /// Threads; without it, all there are.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub threads: Option<u16>,
    /// Timed runs; without it, as many as fit 0.3 s, at least one, and one if simulated.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub repeat: Option<u32>,
    /// Rows to compare with the f64 reference: all, none, or how many. Without it, as many as take a few seconds.
    #[arg(long, value_name = "ROWS", value_parser = parse_check)]
    pub check: Option<Check>,
    /// Do not measure the limits of this machine, which takes half a second.
    #[arg(long)]
    pub no_roofline: bool,
    /// Safetensors file for C: tensor `c`, or c_packed, c_scale and c_scale_2.
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
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

#[derive(Debug, Serialize)]
struct Report {
    checkpoint: PathBuf,
    convention: &'static str,
    layer: usize,
    expert: Option<usize>,
    gate: TensorReport,
    up: TensorReport,
    /// Which tensor scales were used.
    scales: Scales,
    /// Where A comes from and what was done to it.
    a: String,
    m: usize,
    n: usize,
    k: usize,
    a_format: AFormat,
    out_dtype: &'static str,
    activation: dualgemm::gemm::Activation,
    /// What says so: file and entry, the family, or the option.
    activation_from: String,
    device: String,
    device_name: String,
    kernel: String,
    threads: usize,
    plan: Plan,
    prepack_us: f64,
    #[serde(flatten)]
    timing: Timing,
    /// A simulated GPU has no clock: the time is this machine's, and says nothing about a card.
    simulated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    gflops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gbps: Option<f64>,
    #[serde(flatten)]
    roofline: Option<RooflineReport>,
    #[serde(flatten)]
    error: Option<ErrorReport>,
    output: Option<PathBuf>,
    peak_rss_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct RooflineReport {
    floor_us: f64,
    bound: Bound,
    roofline_fraction: f64,
    limits: Limits,
}

impl RooflineReport {
    fn new(limits: Limits, desc: &DualGemmDesc, timing: &Timing) -> Self {
        let roofline = limits.roofline();
        let floor_us = roofline.floor_us(desc);
        let roofline_fraction = floor_us / timing.median_us;
        Self { floor_us, bound: roofline.bound(desc), roofline_fraction, limits }
    }
}

#[derive(Debug, Serialize)]
struct TensorReport {
    name: String,
    format: String,
    tensor_scale: f32,
}

#[derive(Debug, Serialize)]
struct ErrorReport {
    #[serde(flatten)]
    comparison: Comparison,
    rows_compared: usize,
    #[serde(skip)]
    sample: RowSample,
    tolerance: Tolerance,
    right: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let expert = self.expert.map_or(String::new(), |e| format!(", expert {e}"));
        writeln!(f, "layer {}{expert} of {} ({})", self.layer, self.checkpoint.display(), self.convention)?;
        for (half, t, scale) in [("gate", &self.gate, &self.scales.gate), ("up", &self.up, &self.scales.up)] {
            writeln!(f, "  {half:<8} {}, {}, {scale}", t.name, t.format)?;
        }
        let static_scale = self.scales.a.as_ref().filter(|scale| scale.value.is_some());
        let from = static_scale.map_or(String::new(), |scale| format!(", {}", scale.from));
        writeln!(f, "  A        {}{from}", self.a)?;
        writeln!(f, "  activation {} ({})", self.activation, self.activation_from)?;
        writeln!(f, "  plan     {}", self.plan.to_string().replace('\n', "\n         "))?;
        let Timing { median_us, p10_us, p90_us, runs } = self.timing;
        let time = |us: f64| Time(Duration::from_secs_f64(us * 1e-6));
        let packing = time(self.prepack_us);
        match self.gflops.zip(self.gbps) {
            Some((gflops, gbps)) => writeln!(
                f,
                "  time     {} (median of {runs}, 80 % within {} to {}), {gflops:.1} GFLOP/s, {gbps:.1} GB/s; packing \
                 {packing}",
                time(median_us),
                time(p10_us),
                time(p90_us),
            )?,
            None => writeln!(f, "  simulated in {} on this machine; packing {packing}", time(median_us))?,
        }
        if let Some(r) = &self.roofline {
            writeln!(
                f,
                "  roofline {:.0} % of what {} allows: {} ({}: {})",
                r.roofline_fraction * 100.0,
                self.device_name,
                time(r.floor_us),
                r.bound,
                r.limits,
            )?;
        }
        match &self.error {
            Some(e) => {
                let compared = format!("against the f64 reference, {}", e.sample);
                let statement = Statement { found: &e.comparison, tolerance: &e.tolerance, compared };
                writeln!(f, "  error    {}", statement.to_string().replace('\n', "\n           "))?;
            }
            None => writeln!(f, "  error    not compared")?,
        }
        if let Some(path) = &self.output {
            let scale = match self.plan.desc().out {
                OutFormat::Nvfp4 { global_scale: OutScale::Static(scale), .. } => {
                    format!(", tensor scale {scale:e} of the down projection,")
                }
                OutFormat::Nvfp4 { .. } => ", tensor scale of its largest value,".into(),
                _ => String::new(),
            };
            let Self { out_dtype, m, n, .. } = self;
            writeln!(f, "  output   {out_dtype} [{m}, {n}]{scale} to {}", path.display())?;
        }
        match self.peak_rss_bytes {
            Some(bytes) => write!(f, "  memory   {} at most", Bytes(bytes)),
            None => Ok(()),
        }
    }
}

/// What C is stored as; an nvfp4 C takes the down projection's input scale, or one of its own.
fn out_format(args: &RunArgs, layer: &Layer<'_>) -> anyhow::Result<OutFormat> {
    if args.out_scale_layout.is_some() && args.out_dtype != OutFormatArg::Nvfp4 {
        bail!("--out-scale-layout: C has no block scales; they come with --out-dtype nvfp4");
    }
    Ok(match args.out_dtype {
        OutFormatArg::F32 => OutFormat::F32,
        OutFormatArg::F16 => OutFormat::F16,
        OutFormatArg::Bf16 => OutFormat::Bf16,
        OutFormatArg::Nvfp4 => OutFormat::Nvfp4 {
            scale_layout: args.out_scale_layout.unwrap_or(ScaleLayoutArg::Linear).into(),
            global_scale: layer.output_scale()?.map_or(OutScale::Dynamic, OutScale::Static),
        },
    })
}

/// Computes, compares, writes.
pub fn run(args: &RunArgs, output: &Output) -> anyhow::Result<Verdict> {
    match args.threads {
        None => compute(args, output),
        Some(threads) => {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build();
            pool.with_context(|| format!("--threads: cannot start {threads} threads"))?
                .install(|| compute(args, output))
        }
    }
}

fn compute(args: &RunArgs, output: &Output) -> anyhow::Result<Verdict> {
    let checkpoint = layer::open(&args.checkpoint, &args.layer.read, args.epilogue.activation)?;
    if let Some(path) = &args.output {
        let inputs = [Some(args.checkpoint.as_path()), args.activations.input.as_deref()];
        files::is_no_input("--output", path, inputs.into_iter().flatten().chain(checkpoint.files().paths()))?;
        files::writable(path)?;
    }
    let layer = Layer::of(&checkpoint, &args.layer)?;
    let (epilogue, stated) = layer::epilogue(&layer, &args.epilogue)?;
    let (n, k) = (layer.n(), layer.k());
    let source = Source::open(&args.activations)?;
    let input_scales = || Ok(layer.input_scales()?);
    let Activation { a, quantize, origin } = source.activation(&args.activations, k, input_scales)?;
    let m = a.rows();
    let desc = DualGemmDesc {
        quantize_a: quantize,
        out: out_format(args, &layer)?,
        epilogue,
        ..DualGemmDesc::new(m, n, k, AFormat::of(&a), layer.format())
    };
    let (target, device_name) = match &args.device {
        DeviceArg::Cpu => {
            if args.strategy.is_some() {
                bail!("--strategy: a processor has one way; the strategies are for --device cuda");
            }
            let dynamic_c_twice = c_in_f32(&desc) > MAX_C_IN_F32 * packed_weights(&desc);
            let options = CpuOptions { isa: args.isa, dynamic_c_twice, ..CpuOptions::default() };
            (Target::Cpu(options), Machine::detect().cpu_model)
        }
        DeviceArg::Gpu(id) => {
            if args.isa.is_some() {
                bail!("--isa: {id} is a GPU; instruction sets are those of --device cpu");
            }
            let options = GpuOptions { strategy: args.strategy.clone(), ..GpuOptions::default() };
            (Target::Gpu(id.clone(), options), gpu::open(id)?.info().name.clone())
        }
    };
    let plan = gpu::supported(DualGemm::plan(&desc, &target))?;
    tracing::info!(%plan, "planned");
    let no_clock = matches!(args.device, DeviceArg::Gpu(GpuId::Sim(_)));
    // Without a clock one run says all.
    let runs = args.repeat.map(|runs| runs as usize).or(no_clock.then_some(1));
    if no_clock {
        simulated::fits((m, n, k), runs.unwrap_or(1), &format!("--device {}", args.device))?;
    }
    machine::fits(memory(&desc), || format!("C [{m}, {n}] of A [{m}, {k}]"))?;
    let limits = if args.no_roofline || no_clock { None } else { Some(Limits::measure(&plan)?) };

    let begin = Instant::now();
    let bar = output.progress("pack", n);
    let packed = layer.prepack(&plan, 0..n, |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    let prepack_us = begin.elapsed().as_secs_f64() * 1e6;
    let bar = no_clock.then(|| output.simulation());
    let (c, timing) = multiply(runs, no_clock, &plan, &a, packed)?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    if let Some(path) = &args.output {
        c.write(path, m, n)?;
    }

    // Names and scales are those of any feature; the whole is not read for them.
    let first = layer.features(0..1)?;
    let half = |m: &QuantizedMatrix<'_>| TensorReport {
        name: m.name().into(),
        format: format!("{} [{n}, {k}]", m.format()),
        tensor_scale: m.global_scale().value(),
    };
    let sample = match args.check {
        None => Some(RowSample::within(m, n, k, REFERENCE_BUDGET, LEAST_ROWS)),
        Some(Check::All) => Some(RowSample::all(m)),
        Some(Check::Rows(0)) => None,
        Some(Check::Rows(rows)) => Some(RowSample::spread(m, rows)),
    };
    let error =
        sample.map(|sample| compare(&plan, &a, (&checkpoint, &layer), &c, sample, output)).transpose()?;
    let right = error.as_ref().is_none_or(|e| e.right);
    output.emit(&Report {
        checkpoint: args.checkpoint.clone(),
        convention: checkpoint.convention().name,
        layer: layer.number,
        expert: args.layer.expert,
        gate: half(&first.gate),
        up: half(&first.up),
        scales: layer.scales(&a, desc.quantize_a),
        a: origin,
        m,
        n,
        k,
        a_format: desc.a_compute(),
        out_dtype: desc.out.name(),
        activation: stated.activation,
        activation_from: stated.origin.to_string(),
        device: args.device.to_string(),
        device_name,
        kernel: plan.kernel().into(),
        threads: plan.threads(),
        prepack_us,
        simulated: no_clock,
        gflops: (!no_clock).then(|| desc.flops() / timing.median_us * 1e-3),
        gbps: (!no_clock).then(|| desc.bytes() / timing.median_us * 1e-3),
        roofline: limits.map(|limits| RooflineReport::new(limits, &desc, &timing)),
        timing,
        plan,
        error,
        output: args.output.clone(),
        peak_rss_bytes: machine::peak_rss(),
    })?;
    Ok(right.into())
}

/// Bytes of memory that a problem takes at least beside its operands: C, A as the kernels take it, the packed weights.
fn memory(desc: &DualGemmDesc) -> f64 {
    let c = c_in_f32(desc) * desc.out.bits_per_element() / 32.0;
    c + (desc.m * desc.k) as f64 + packed_weights(desc)
}

/// Bytes of gate and up, packed.
fn packed_weights(desc: &DualGemmDesc) -> f64 {
    1.125 * desc.n as f64 * desc.k as f64
}

/// Bytes of C in f32.
fn c_in_f32(desc: &DualGemmDesc) -> f64 {
    4.0 * desc.m as f64 * desc.n as f64
}

/// Runs, timed, and drops the weights. Where there is a clock, one run before does not count.
fn multiply(
    runs: Option<usize>,
    no_clock: bool,
    plan: &Plan,
    a: &AOperand<'_>,
    packed: PackedWeights,
) -> anyhow::Result<(OwnedResult, Timing)> {
    let mut runner = gpu::supported(plan.runner(1))?;
    let mut c = OwnedResult::zeroed(plan.desc());
    let warmup = usize::from(!no_clock);
    let protocol = match runs {
        Some(runs) => Protocol { warmup, min_runs: runs, max_runs: runs, ..Protocol::default() },
        None => Protocol { warmup, min_runs: 1, max_runs: 1000, budget: Duration::from_millis(300) },
    };
    let timing = protocol.measure(|_| -> Result<(), dualgemm::Error> {
        let scale = runner.run(a, &packed, c.as_output())?;
        c.set_global_scale(scale);
        Ok(())
    })?;
    // A GPU has a clock of its own, and in real use its operands are there already.
    let timing = runner.time(a, &packed)?.unwrap_or(timing);
    Ok((c, timing))
}

/// Compares some rows of C with the reference.
fn compare(
    plan: &Plan,
    a: &AOperand<'_>,
    (checkpoint, layer): (&Checkpoint, &Layer<'_>),
    c: &OwnedResult,
    sample: RowSample,
    output: &Output,
) -> anyhow::Result<ErrorReport> {
    let desc = plan.desc();
    let bar = output.progress("reference", desc.n);
    let a = dualgemm::quantize_a(a, desc.quantize_a)?;
    let features = |run| Ok(layer.features(run)?);
    let run = layer.features_per_run();
    let progress = |done: usize| {
        let before = bar.position() as usize;
        bar.inc(done as u64);
        if before / run != (before + done) / run {
            checkpoint.files().release_pages();
        }
    };
    let want = bounded_runs(&desc.epilogue, &a, &sample, desc.n, &features, &progress)?;
    bar.finish_and_clear();
    let c = c.as_matrix(desc.m, desc.n)?;
    let (comparison, tolerance) = (c.compare(&want, &sample)?, Tolerance::of_plan(plan, c.format())?);
    let right = tolerance.holds(&comparison);
    Ok(ErrorReport { comparison, rows_compared: sample.rows().len(), sample, tolerance, right })
}
