//! `sim --arch ARCH --shape MxNxK`: a GPU kernel in the simulator, every check on, against the f64 reference.
//!
//! Flow: generated operands → kernel text → [`Gpu`] → C, compared; what the launch did → the least time a card needs.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use clap::Args;
use dualgemm::SimArch;
use dualgemm::check::{Reference, RowSample};
use dualgemm::formats::{BlockFormat, FloatType, GlobalScale};
use dualgemm::gemm::{AFormat, AOperand, Activation, Comparison, DualGemmDesc, Epilogue, GateUp};
use dualgemm::strategies::blackwell::Estimate;
use dualgemm_bench::Shape;
use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Error as DeviceError, LaunchSpec};
use dualgemm_kernels::fused::{Config, Fused};
use dualgemm_kernels::operands::Operands;
use dualgemm_kernels::parts::format::{Format, Formats};
use dualgemm_kernels::parts::variant::Variant;
use dualgemm_kernels::registry::{KERNELS, Kernel, seen_on};
use dualgemm_kernels::{sm90a, sm120a};
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_sim::report::Report as LaunchReport;
use dualgemm_sim::{Card, Check, Checks, Config as SimConfig, Gpu, Trap};
use half::f16;
use serde::Serialize;
use serde_json::{Value, json};

use super::bench::shape;
use super::{Verdict, ptx};
use crate::failure::Interrupted;
use crate::report::Output;
use crate::tolerance::{Statement, Tolerance};
use crate::{interrupt, simulated};

/// Tensor scales of the generated operands: different ones, so that a mix-up shows.
const A_SCALE: f32 = 0.5;
const GATE_SCALE: f32 = 0.011;
const UP_SCALE: f32 = 0.023;
/// Kernels that are simulated: for nvfp4, for mxfp4, and for A in 16 bits.
const FUSED: [&str; 3] = ["fused", "fused_mxfp4", "fused_w4a16"];

/// Arguments of `sim`.
#[derive(Debug, Args)]
pub struct SimArgs {
    /// Not taken: kernels are named by --arch and --config.
    #[arg(hide = true, value_name = "FILE", value_parser = not_a_file)]
    pub file: Option<std::convert::Infallible>,
    /// Architecture whose fused kernel runs: sm_90a, sm_100a, sm_103a, sm_120a or sm_121a.
    #[arg(long, value_name = "ARCH")]
    pub arch: String,
    /// Tokens, features and K. Simulated time grows with their product.
    #[arg(long, value_name = "MxNxK", value_parser = shape)]
    pub shape: Shape,
    /// Seed of the operands and of the interleaving.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Tile and pipeline, see `ptx --list` [default: on Hopper the one whose tile fits M, on sm_100a and sm_103a the one
    /// with the lowest estimate].
    ///
    /// On Blackwell the operands are what the configuration takes: nvfp4 without one, mxfp4, or A in f16 or bf16.
    #[arg(long, value_name = "NAME")]
    pub config: Option<String>,
    /// Activation; `dualgemm run --help` lists them.
    #[arg(long, value_name = "NAME", default_value = "silu")]
    pub activation: Activation,
    /// A warp that executes more instructions than this is taken to hang.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_instructions: Option<u64>,
}

/// Says what runs a file of somebody's own.
fn not_a_file(text: &str) -> Result<std::convert::Infallible, String> {
    Err(format!(
        "dualgemm's own kernels are simulated here, by --arch; `ptxsim {text}` of simulator/ runs PTX files (cargo run \
         --release -p dualgemm-conformance --bin ptxsim {text})"
    ))
}

/// The tensor scale of a generated operand: block scales of mxfp4 reach 2⁷ where those of nvfp4 stay below 1.
fn tensor_scale(format: BlockFormat, scale: f32) -> GlobalScale {
    GlobalScale::multiplier(match format {
        BlockFormat::Nvfp4 => scale,
        BlockFormat::Mxfp4 => scale / 128.0,
    })
}

/// What a launch did and how fast a card could do it, for programs.
fn launch_document(report: &LaunchReport, card: Card) -> Value {
    let (floor, counters) = (report.floor(card), &report.counters);
    let (bound, seconds) = floor.bound();
    // Time of each resource alone at its peak rate; no run can be faster than the longest.
    let resources_us: BTreeMap<&str, f64> =
        floor.times.iter().map(|&(what, seconds)| (what, seconds * 1e6)).collect();
    json!({
        "ctas": report.size.0,
        "threads": report.size.1,
        "shared_bytes": report.shared.0 + report.shared.1,
        "warp_instructions": counters.total(),
        "tensor_operations": counters.tensor_ops.iter().sum::<u64>(),
        "global_bytes_touched": counters.unique_bytes,
        "global_bytes_read": counters.global_read,
        "global_bytes_written": counters.global_written,
        "card": card.data().name,
        "bound": bound,
        "least_us": seconds * 1e6,
        "resources_us": resources_us,
    })
}

/// C against the reference, after a launch that came to its end.
#[derive(Debug, Serialize)]
struct Finished {
    #[serde(flatten)]
    comparison: Comparison,
    tolerance: Tolerance,
    launch: Value,
    /// The whole report for people.
    #[serde(skip)]
    text: String,
}

#[derive(Debug, Serialize)]
struct Report {
    kernel: &'static str,
    arch: &'static str,
    config: String,
    m: usize,
    n: usize,
    k: usize,
    activation: String,
    seed: u64,
    /// Whether this kernel has been run on a real card too.
    ran_on_silicon: bool,
    right: bool,
    /// What a B200 should take, see `estimate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    estimate: Option<Estimate>,
    /// The message of the check that stopped the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    trap: Option<String>,
    #[serde(flatten)]
    finished: Option<Finished>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, m, n, k, activation, seed, .. } = self;
        writeln!(f, "{config} {m}x{n}x{k} {activation}, simulated with every check on, seed {seed}")?;
        if !self.ran_on_silicon {
            writeln!(f, "this kernel is simulated and assembled, not yet run on silicon")?;
        }
        if let Some(message) = &self.trap {
            writeln!(f, "{message}")?;
        }
        if let Some(Finished { comparison, tolerance, text, .. }) = &self.finished {
            let compared = format!(" against the f64 reference, all {} elements", comparison.elements);
            writeln!(f, "{}", Statement { found: comparison, tolerance, compared })?;
            writeln!(f, "{text}")?;
        }
        if let Some(estimate) = &self.estimate {
            let (kernel, total) = (estimate.kernel_us(), estimate.total_us());
            writeln!(
                f,
                "estimate, not measured: {kernel:.1} µs for the loop over K, {total:.1} µs with all else that a launch \
                 of its own takes"
            )?;
        }
        Ok(())
    }
}

/// The card that an architecture is simulated as.
fn card_of(arch: &str) -> Option<Card> {
    SimArch::by_name(arch).map(SimArch::card)
}

/// The configuration that was asked for, or the one whose tile fits M.
fn config_of(args: &SimArgs, card: Card) -> anyhow::Result<Config> {
    let Shape { m, n, k } = args.shape;
    Ok(match (&args.config, card) {
        (Some(name), _) => Config::named(name)?,
        (None, Card::H100) => Config::Sm90a(sm90a::config::Config::for_tokens(m)),
        (None, Card::B200 | Card::B300) => Config::Sm100a(Estimate::best(Formats::NVFP4, (m, n, k))?.0),
        (None, _) => Config::Sm120a(sm120a::config::Config::for_tokens(m)),
    })
}

/// Formats of a configuration's operands, tokens of its tile, and what a B200 should take. Hopper's are all for nvfp4 weights.
fn about(config: &Config, Shape { m, n, k }: Shape) -> (Formats, u32, Option<Estimate>) {
    match config {
        Config::Sm100a(config) => {
            (config.formats, config.tile_tokens(), Estimate::new(config, (m, n, k)).ok())
        }
        Config::Sm120a(config) => (Formats::Scaled(config.format), config.tokens, None),
        Config::Sm90a(config) => (Formats::NVFP4, config.tokens, None),
        Config::Warpwise(config) => (Formats::NVFP4, config.tokens, None),
        Config::Plain(config) => (Formats::NVFP4, config.tokens, None),
        Config::Fp8(config) => (Formats::NVFP4, config.tokens, None),
        Config::Sm80(config) => (Formats::NVFP4, config.tokens, None),
    }
}

/// A in the format that a kernel takes.
fn operand(inputs: &mut Inputs, format: Format, (m, k): (usize, usize)) -> anyhow::Result<AOperand<'static>> {
    Ok(match format {
        Format::Block(format) => {
            let sets = (CodeSet::Full, ScaleSet::Unit);
            AOperand::Quantized(inputs.quantized("A", format, (m, k), sets, tensor_scale(format, A_SCALE))?)
        }
        Format::Half(HalfFormat::Bf16) => AOperand::Float(inputs.floats("A", FloatType::Bf16, m, k)?),
        Format::Half(HalfFormat::F16) | Format::E4m3 => {
            AOperand::Float(inputs.floats("A", FloatType::F16, m, k)?)
        }
    })
}

/// Launches, and shows how far it has come: of the operations of tensor cores, which take most of the time, it is known how
/// many there will be.
///
/// # Errors
/// What the device says of the launch.
fn launch(gpu: &Gpu, spec: &LaunchSpec, operations: u64, output: &Output) -> Result<(), DeviceError> {
    let (bar, begin, progress) = (output.fraction(operations), Instant::now(), gpu.progress());
    let show = || {
        let done = progress.tensor_operations();
        let left = simulated::left(begin.elapsed(), done, operations);
        let left =
            left.map_or_else(|| "time left unknown".into(), |t| format!("{} left", simulated::about(t)));
        let (finished, ctas) = progress.ctas();
        bar.set_position(done.min(operations));
        bar.set_message(format!("simulated, {finished} of {ctas} CTAs finished, {left}"));
    };
    std::thread::scope(|scope| {
        let (ended, end) = mpsc::channel::<()>();
        scope.spawn(move || {
            while end.recv_timeout(Duration::from_millis(200)) == Err(mpsc::RecvTimeoutError::Timeout) {
                show();
            }
        });
        let result = interrupt::stopping(progress, || gpu.launch(spec));
        drop(ended);
        result
    })
}

/// What had happened when a launch was stopped.
fn interrupted(gpu: &Gpu, trap: Option<Trap>) -> Interrupted {
    let (finished, ctas) = gpu.progress().ctas();
    let found = trap.filter(|trap| trap.check != Check::Stopped);
    let found =
        found.map_or_else(|| "no check has failed".into(), |trap| format!("a check has failed: {trap}"));
    Interrupted(format!("{finished} of {ctas} CTAs have finished; {found}"))
}

/// Compares C with the reference, and says what the launch did.
fn finished(
    args: &SimArgs,
    (gpu, card): (&Gpu, Card),
    operands: &Operands<'_>,
    (a, weights): (&AOperand<'_>, &GateUp<'_>),
    output: &Output,
) -> anyhow::Result<Finished> {
    let launched = gpu.take_outcome().ok_or_else(|| anyhow!("the launch left no report"))?;
    let bytes = operands.read_c()?;
    let got: Vec<f16> = bytes.as_chunks().0.iter().copied().map(f16::from_le_bytes).collect();
    let epilogue = Epilogue { activation: args.activation, ..Epilogue::default() };
    // C is f16 whatever A is.
    let tolerance = Tolerance::bounded(AFormat::F16, &epilogue);
    let bar = output.progress("reference", weights.n());
    let count = |done: usize| bar.inc(done as u64);
    let all = RowSample::all(a.rows());
    let want = Reference { a, sample: &all, progress: &count }.bounded(&epilogue, weights)?;
    bar.finish_and_clear();
    let comparison = Comparison::new(&got, &want, weights.n())?;
    let report = LaunchReport::new(&launched, None);
    let (launch, text) = (launch_document(&report, card), format!("{report}{}", report.floor(card)));
    Ok(Finished { comparison, tolerance, launch, text })
}

/// Simulates a launch.
pub fn run(args: &SimArgs, output: &Output) -> anyhow::Result<Verdict> {
    let Some(card) = card_of(&args.arch) else {
        bail!(
            "--arch {}: no card of it is simulated; valid are {}",
            args.arch,
            SimArch::ALL.map(SimArch::name).join(", ")
        );
    };
    let Shape { m, n, k } = args.shape;
    if let Some(config) = &args.config {
        let fused = |k: &&Kernel| k.arch.as_str() == args.arch && FUSED.contains(&k.name);
        ptx::check_config(config, KERNELS.iter().filter(fused))?;
    }
    let config = config_of(args, card)?;
    let (formats, tokens, estimate) = about(&config, args.shape);
    let estimate = estimate.filter(|_| card == Card::B200);
    let [nvfp4, mxfp4, w4a16] = FUSED;
    let name = match formats {
        Formats::Scaled(BlockFormat::Nvfp4) => nvfp4,
        Formats::Scaled(BlockFormat::Mxfp4) => mxfp4,
        Formats::Wide(_) => w4a16,
    };
    let kernel = ptx::find(name, &args.arch)?;
    DualGemmDesc::new(m, n, k, AFormat::F16, formats.weights()).check()?;
    simulated::fits((m, n, k), 1, "--shape")?;

    let mut inputs = Inputs::seeded(args.seed);
    let mut half = |name, scale| {
        let (format, sets) = (formats.weights(), (CodeSet::Full, ScaleSet::Unit));
        inputs.quantized(name, format, (n, k), sets, tensor_scale(format, scale))
    };
    let weights = GateUp::new(half("gate", GATE_SCALE)?, half("up", UP_SCALE)?);

    let mut settings = SimConfig::default().card(card).checks(Checks::ALL).seed(args.seed);
    settings.max_instructions = args.max_instructions.unwrap_or(settings.max_instructions);
    let gpu = Gpu::new(settings);
    let variant = Variant::new(args.activation.program()).for_weights(n, k);
    let a = operand(&mut inputs, config.a_format(&variant), (m, k))?;
    let fused = Fused::new(&gpu, config, &variant)?;
    let operands = Operands::upload(&fused, &a, std::slice::from_ref(&weights), &[])?;
    let (spec, config) = (fused.spec(&operands.args)?, config.name());
    let operations = 4 * (m.next_multiple_of(tokens as usize) * n * k) as u64;
    let launched = launch(&gpu, &spec, operations, output);
    let trap = gpu.take_trap();
    if gpu.progress().is_stopped() {
        return Err(interrupted(&gpu, trap).into());
    }
    let (right, trap, finished) = match launched {
        Ok(()) => {
            let finished = finished(args, (&gpu, card), &operands, (&a, &weights), output)?;
            (finished.tolerance.holds(&finished.comparison), None, Some(finished))
        }
        // A trap is a finding about the kernel; anything else is a fault of the call.
        Err(error) => match trap {
            Some(trap) => (false, Some(trap.to_string()), None),
            None => return Err(error.into()),
        },
    };
    output.emit(&Report {
        kernel: kernel.name,
        arch: kernel.arch.as_str(),
        ran_on_silicon: !seen_on(&config).is_empty(),
        config,
        m,
        n,
        k,
        activation: args.activation.to_string(),
        seed: args.seed,
        right,
        estimate,
        trap,
        finished,
    })?;
    Ok(right.into())
}
