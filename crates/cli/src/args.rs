//! Arguments shared by subcommands, and the list of subcommands. Each subcommand's own arguments stand in its file.

use std::fmt;
use std::io::Write as _;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context as _;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use dualgemm::GpuId;
use dualgemm::checkpoint::convention::CONVENTIONS;
use dualgemm::checkpoint::{GateUpOrder, NibbleOrder};
use dualgemm::cpu::Isa;
use dualgemm::formats::ScaleLayout;
use dualgemm::gemm::{AFormat, Activation, OutFormat, OutScale, RouterWeights};

use crate::command::{
    bench, completions, convert, doctor, inspect, ptx, quantize, run, sim, tune, validate, verify,
};
#[cfg(feature = "lab")]
use crate::command::{conformance, estimate, export};

/// NVFP4 gated-MLP products C = act(A·B1ᵀ, A·B2ᵀ) on real checkpoints.
#[derive(Debug, Parser)]
#[command(name = "dualgemm", version, max_term_width = 110, after_help = EXIT_CODES, arg_required_else_help = false)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Print one JSON document on stdout instead of text.
    #[arg(long, global = true, display_order = 900)]
    pub json: bool,
    /// Log to stderr: -v info, -vv debug, -vvv trace.
    ///
    /// If the environment variable DUALGEMM_LOG is set, it decides instead, module by module.
    #[arg(short, long, global = true, display_order = 901, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

const EXIT_CODES: &str = "Exit codes: 0 done; 1 the thing checked is wrong; 2 bad input or usage; 3 not supported on \
                          this machine or in this build; 130 interrupted.";

/// The subcommands, the most used first.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Compute a layer of a checkpoint, time it and compare it with the f64 reference.
    Run(run::RunArgs),
    /// Compare a result file with the f64 reference or with another result.
    Verify(verify::VerifyArgs),
    /// List the gated MLPs of a checkpoint with their scales.
    Inspect(inspect::InspectArgs),
    /// Check a checkpoint against every rule.
    Validate(validate::ValidateArgs),
    /// Quantize the linear layers of a model as a producer would.
    Quantize(quantize::QuantizeArgs),
    /// Convert a checkpoint between ModelOpt, compressed-tensors and GGUF.
    Convert(convert::ConvertArgs),
    /// Time the kernels and compare them with the measured roofline.
    Bench(bench::BenchArgs),
    /// Show what this machine has and which kernels run on it.
    Doctor(doctor::DoctorArgs),
    /// Measure the kernels on a GPU and remember the fastest.
    Tune(tune::TuneArgs),
    /// Run a GPU kernel in the simulator with every check on.
    Sim(sim::SimArgs),
    /// Print the PTX of a GPU kernel.
    Ptx(ptx::PtxArgs),
    /// Estimate what the fused kernel takes on a B200, with the arithmetic.
    #[cfg(feature = "lab")]
    Estimate(estimate::EstimateArgs),
    /// Write kernels with their launches as one file that runs without this program.
    #[cfg(feature = "lab")]
    Export(export::ExportArgs),
    /// Run the PTX conformance cases in the simulator or on a GPU.
    #[cfg(feature = "lab")]
    Conformance(conformance::ConformanceArgs),
    /// Print a completion script for a shell.
    Completions(completions::CompletionsArgs),
}

/// How to read a checkpoint that does not describe itself fully.
#[derive(Debug, Clone, Default, Args)]
pub struct ReadArgs {
    /// Convention of names and scales, instead of the one that the configuration or the metadata declares.
    #[arg(long, hide_short_help = true, help_heading = READING, value_name = "NAME", value_parser = conventions())]
    pub convention: Option<String>,
    /// Order of the rows of a fused gate/up tensor: gate-up, up-gate, up-gate-64, up-gate-32, gate-up-rows,
    /// up-gate-rows or trtllm-gen. It is never guessed.
    #[arg(long, hide_short_help = true, help_heading = READING, value_name = "ORDER")]
    pub gate_up_order: Option<GateUpOrder>,
    /// Which nibble of a byte holds the even element along K, where it is not the convention's.
    #[arg(long, hide_short_help = true, help_heading = READING, value_name = "ORDER", value_parser = named(NIBBLE_ORDERS))]
    pub nibble_order: Option<NibbleOrder>,
    /// Order of the stored block scales, where it is not the convention's.
    #[arg(long, hide_short_help = true, help_heading = READING, value_name = "LAYOUT", value_parser = named(SCALE_LAYOUTS))]
    pub scale_layout: Option<ScaleLayout>,
    /// Look only at MLPs whose name starts with this, where several parts of a model number their layers.
    #[arg(long, hide_short_help = true, help_heading = READING, value_name = "PREFIX")]
    pub within: Option<String>,
    /// Use 1 for activation scales that are zero, infinite or NaN, as calibration leaves them for modules that saw
    /// no activations, instead of refusing them.
    #[arg(long, hide_short_help = true, help_heading = READING)]
    pub unusable_input_scale_is_one: bool,
}

impl ReadArgs {
    /// What was given, as it is written on the command line: reports keep it, since results depend on it.
    pub fn overrides(&self) -> Vec<String> {
        let nibbles = self.nibble_order.map(|order| name_of(NIBBLE_ORDERS, order));
        let options = [
            ("--convention", self.convention.clone()),
            ("--gate-up-order", self.gate_up_order.map(|order| order.to_string())),
            ("--nibble-order", nibbles.map(Into::into)),
            ("--scale-layout", self.scale_layout.map(|layout| name_of(SCALE_LAYOUTS, layout).into())),
            ("--within", self.within.clone()),
        ];
        let given = options.into_iter().filter_map(|(name, value)| Some(format!("{name} {}", value?)));
        let one = self.unusable_input_scale_is_one.then(|| "--unusable-input-scale-is-one".into());
        given.chain(one).collect()
    }
}

/// [`ReadArgs::overrides`] behind what was read.
pub fn read_with(overrides: &[String]) -> String {
    if overrides.is_empty() { String::new() } else { format!(", read with {}", overrides.join(" ")) }
}

/// Where a command writes.
#[derive(Debug, Clone, Copy, Args)]
pub struct WriteArgs {
    /// Replace the output file if it exists.
    #[arg(long)]
    pub force: bool,
}

/// How a processor computes.
#[derive(Debug, Clone, Copy, Args)]
pub struct ProcessorArgs {
    /// Number of threads [default: one for each processor].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub threads: Option<u16>,
    /// Instruction set of the kernels: portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16 or amxbf16; on ARM64
    /// neon, neondot, neoni8mm or neonbf16 [default: the best one here].
    #[arg(long, hide_short_help = true, value_name = "ISA", help_heading = RUNNING)]
    pub isa: Option<Isa>,
}

impl ProcessorArgs {
    /// Runs on so many threads.
    pub fn install<T: Send>(&self, work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        let Some(threads) = self.threads else { return work() };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        if usize::from(threads) > processors {
            let slow = "threads that take turns are slower";
            let _ = writeln!(
                std::io::stderr(),
                "warning: --threads {threads}: there are {processors} processors; {slow}"
            );
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build();
        pool.with_context(|| format!("--threads: cannot start {threads} threads"))?.install(work)
    }
}

/// Which MLP of a checkpoint.
#[derive(Debug, Clone, Default, Args)]
pub struct LayerArgs {
    /// Layer of the checkpoint; may be left out if there is only one.
    #[arg(long, value_name = "I")]
    pub layer: Option<usize>,
    /// Expert of a mixture-of-experts layer.
    #[arg(long, hide_short_help = true, value_name = "E", help_heading = MIXTURES)]
    pub expert: Option<usize>,
    /// The expert that every token goes through.
    #[arg(long, hide_short_help = true, conflicts_with = "expert", help_heading = MIXTURES)]
    pub shared_expert: bool,
    /// How to read the checkpoint.
    #[command(flatten)]
    pub read: ReadArgs,
}

const READING: &str = "Reading a checkpoint that does not describe itself";
const MIXTURES: &str = "Mixtures of experts";
/// Options of `run` and `verify` that few need.
pub const MORE: &str = "More about A, C and what is between";
/// Where and how kernels run.
pub const RUNNING: &str = "Where and how to compute";

/// What is computed of a checkpoint.
#[derive(Debug, Args)]
pub struct OperationArgs {
    /// What to compute.
    #[arg(long, value_enum, value_name = "OPERATION", default_value_t = OpArg::GateUp)]
    pub op: OpArg,
    /// The layer of --op linear by its name, such as model.layers.0.self_attn.q_proj or lm_head.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["layer", "expert", "shared_expert"])]
    pub module: Option<String>,
    /// Format between gate/up and the down projection of --op mlp and moe [default: bf16].
    ///
    /// nvfp4 takes the down projection's input scale, or the largest one of a mixture. An MLP without one takes that of its values.
    #[arg(long, hide_short_help = true, value_name = "FORMAT", value_parser = named(FORMATS), help_heading = MORE)]
    pub between: Option<AFormat>,
    /// Experts of each token of --op moe [default: what --routing has, or what the configuration or the metadata says]. A number
    /// that differs from theirs is refused.
    #[arg(long, hide_short_help = true, value_name = "N", help_heading = MIXTURES, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub top_k: Option<u32>,
    /// Safetensors file with topk_ids [M, k] (I32 or I64; -1 skips an expert) and topk_weights [M, k] (F32) for --op moe.
    /// Without it, experts and weights are drawn with --seed.
    #[arg(long, hide_short_help = true, value_name = "FILE", help_heading = MIXTURES)]
    pub routing: Option<PathBuf>,
    /// Whether the weights of --op moe multiply what comes out of an expert or what goes in, as in Llama 4 [default: as
    /// the model's family has it].
    #[arg(long, hide_short_help = true, value_name = "SIDE", value_parser = named(ROUTER_WEIGHTS), help_heading = MIXTURES)]
    pub router_weights: Option<RouterWeights>,
    /// Leave out the shared expert of --op moe, which is added otherwise.
    #[arg(long, hide_short_help = true, help_heading = MIXTURES)]
    pub routed_only: bool,
}

impl OperationArgs {
    /// Refuses options of another operation.
    pub fn check(&self) -> anyhow::Result<()> {
        let mixture = [
            ("--top-k", self.top_k.is_some()),
            ("--routing", self.routing.is_some()),
            ("--router-weights", self.router_weights.is_some()),
            ("--routed-only", self.routed_only),
        ];
        let mlp = matches!(self.op, OpArg::Mlp | OpArg::Moe);
        let of = [("--module", self.module.is_some(), self.op == OpArg::Linear, "linear")]
            .into_iter()
            .chain([("--between", self.between.is_some(), mlp, "mlp and moe")])
            .chain(mixture.map(|(option, given)| (option, given, self.op == OpArg::Moe, "moe")));
        for (option, given, fits, valid) in of {
            if given && !fits {
                anyhow::bail!("{option}: is for --op {valid}; this is --op {}", self.op.name());
            }
        }
        Ok(())
    }
}

dualgemm::formats::named! {
    /// Spellings of the operations.
    #[derive(ValueEnum)]
    pub enum OpArg {
        /// act(A·gateᵀ, A·upᵀ).
        GateUp = "gate-up",
        /// A·Wᵀ.
        Linear = "linear",
        /// Gate and up, then the down projection.
        Mlp = "mlp",
        /// The weighted sum of the MLPs of each token's experts.
        Moe = "moe",
    }
}

/// What A is.
#[derive(Debug, Args)]
pub struct ActivationArgs {
    /// Safetensors file with A, [M, K] in floats or nvfp4. Without it, A is generated.
    ///
    /// In nvfp4 it is the triple a_packed, a_scale, a_scale_2. A generated A has normally distributed numbers.
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Which tensor of the file is A, where there are several.
    #[arg(long, hide_short_help = true, value_name = "NAME", requires = "input", conflicts_with = "m", help_heading = MORE)]
    pub input_tensor: Option<String>,
    /// Rows of a generated A [default: 64].
    #[arg(long, value_name = "M", conflicts_with = "input")]
    pub m: Option<usize>,
    /// Seed of a generated A [default: 0].
    #[arg(long, hide_short_help = true, conflicts_with = "input", help_heading = MORE)]
    pub seed: Option<u64>,
    /// Format in which A is multiplied [default: as it is; bf16 where it is generated].
    ///
    /// Floats are rounded to f16 or bf16, or quantized to nvfp4 by the scale that --quantize names.
    #[arg(long, value_name = "FORMAT", value_parser = named(FORMATS))]
    pub a_format: Option<AFormat>,
    /// Quantize a float A to nvfp4 by this tensor scale, after --a-format has rounded it where that is f16 or bf16.
    /// --a-format nvfp4 alone means static where the checkpoint has an input scale, and dynamic elsewhere.
    #[arg(long, hide_short_help = true, value_enum, value_name = "SCALE", help_heading = MORE)]
    pub quantize: Option<QuantizeArg>,
}

/// What happens between the products and C.
#[derive(Debug, Args)]
pub struct EpilogueArgs {
    /// Activation, if not the one that the checkpoint states: silu, gelu-tanh, relu or others.
    ///
    /// All are silu, clamped-silu(:LIMIT), swiglustep(:LIMIT), swigluoai(:ALPHA,BETA,LIMIT), gelu-tanh, relu, relu2 and
    /// identity.
    #[arg(long, value_name = "NAME")]
    pub activation: Option<Activation>,
    /// Round both products to bf16 before the activation, as unfused bf16 pipelines do.
    #[arg(long, hide_short_help = true, help_heading = MORE)]
    pub round_gate_up_to_bf16: bool,
}

/// A problem on a checkpoint, which `run` solves and `verify` checks a solution of.
#[derive(Debug, Args)]
pub struct ProblemArgs {
    /// The layer.
    #[command(flatten)]
    pub layer: LayerArgs,
    /// What is computed.
    #[command(flatten)]
    pub operation: OperationArgs,
    /// A, or where it comes from.
    #[command(flatten)]
    pub activations: ActivationArgs,
    /// What follows the products.
    #[command(flatten)]
    pub epilogue: EpilogueArgs,
}

/// Where the tensor scale of a quantized A comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum QuantizeArg {
    /// The checkpoint's input scale.
    Static,
    /// The largest magnitude in A.
    Dynamic,
}

/// Names of values, with what each means where the name does not say it.
pub type Names<T> = &'static [(&'static str, T, &'static str)];

/// Formats of A, of C and of what is between two products.
pub const FORMATS: Names<AFormat> = &[
    ("f32", AFormat::F32, ""),
    ("f16", AFormat::F16, ""),
    ("bf16", AFormat::Bf16, ""),
    ("nvfp4", AFormat::Nvfp4, ""),
];
/// Orders of block scales in memory.
pub const SCALE_LAYOUTS: Names<ScaleLayout> = &[
    ("linear", ScaleLayout::Linear, "row-major, no padding"),
    ("128x4", ScaleLayout::Sf128x4, "tiles of 128 rows by 4 blocks, as cuBLAS and CUTLASS read them"),
    ("8x4", ScaleLayout::Sf8x4, "tiles of 8 rows by 4 blocks (TensorRT-LLM, small M)"),
];
/// Orders of the two codes in a byte.
pub const NIBBLE_ORDERS: Names<NibbleOrder> = &[
    ("lo-hi", NibbleOrder::LoHi, "even element in the low nibble, as nearly every producer writes it"),
    ("hi-lo", NibbleOrder::HiLo, "even element in the high nibble (ComfyUI)"),
];
const ROUTER_WEIGHTS: Names<RouterWeights> = &[
    ("output", RouterWeights::Output, "they multiply each expert's result"),
    ("input", RouterWeights::Input, "they multiply each expert's input"),
];

/// Reads a value by its name; help and errors list all.
pub fn named<T: Copy + Send + Sync + 'static>(all: Names<T>) -> impl TypedValueParser<Value = T> {
    let values = all.iter().map(|(name, _, doc)| match *doc {
        "" => PossibleValue::new(*name),
        doc => PossibleValue::new(*name).help(doc),
    });
    PossibleValuesParser::new(values).map(|text| {
        let (_, value, _) = all.iter().find(|(name, ..)| *name == text).expect("one of the possible values");
        *value
    })
}

/// The name of one of the values.
pub fn name_of<T: PartialEq>(all: Names<T>, value: T) -> &'static str {
    all.iter().find(|(_, known, _)| *known == value).expect("every value has a name").0
}

/// Reads the name of a convention.
fn conventions() -> PossibleValuesParser {
    CONVENTIONS.iter().map(|convention| convention.name).into()
}

/// C in a format; one in nvfp4 has block scales in this order and this tensor scale.
pub fn out_format(format: AFormat, scale_layout: ScaleLayout, global_scale: OutScale) -> OutFormat {
    format.float_type().map_or(OutFormat::Nvfp4 { scale_layout, global_scale }, OutFormat::from)
}

/// Where to compute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceArg {
    /// This machine's processor.
    Cpu,
    /// A GPU.
    Gpu(GpuId),
}

impl FromStr for DeviceArg {
    type Err = dualgemm::Error;

    fn from_str(text: &str) -> Result<Self, dualgemm::Error> {
        if text == "cpu" { Ok(Self::Cpu) } else { text.parse().map(Self::Gpu) }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Gpu(id) => id.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_argument_definitions_are_consistent() {
        Cli::command().debug_assert();
    }
}
