//! Strategies of this project's fused kernels: both products in one pass over A, the activation in registers, C written once.
//! A is brought into the kernel's form before it, and behind it stands what a C needs whose dynamic scale needs all of it.

use dualgemm_device::DeviceInfo;
use dualgemm_formats::FloatType;
use dualgemm_gemm::{AFormat, DualGemmDesc, Operation, OutFormat, OutScale, QuantizeA};
use dualgemm_kernels::fused::Config;
use dualgemm_kernels::parts::format::Formats;
use dualgemm_kernels::parts::variant::{Out, Products, Scheduler, Variant};
use dualgemm_kernels::{fp8, plain, sm80, sm90a, sm100a, sm120a, warpwise};
use dualgemm_ptx::builder::HalfFormat;

use super::launched::Ready;
use super::{Facts, Prepared, Rounding, Strategy};
use crate::prologue::{Order, compute_type, half_format};
use crate::{Error, Gpu, GpuPlan, WeightForm, model};

/// A kernel of a plan: one configuration, or two that share a problem.
pub(super) type Configs = Vec<Config>;

/// What stands between the names of two configurations.
const AND: char = '+';
/// Most rows that the decode strategy is for.
const DECODE_ROWS: usize = 128;
/// Most rows of a group on average for the kernel for few tokens: of more, weights are read too often.
const GROUP_ROWS: usize = 4;

/// A problem that a strategy is asked about, and what its kernel would compute.
struct Problem<'a> {
    desc: &'a DualGemmDesc,
    groups: usize,
    info: &'a DeviceInfo,
    variant: Variant,
}

/// A strategy of one fused kernel.
#[derive(Debug)]
pub(super) struct OfKernel {
    facts: Facts,
    order: Order,
    scheduler: Scheduler,
    /// The kernels for a problem, or why it takes none.
    kernels: fn(&Problem<'_>) -> Result<Vec<Configs>, String>,
}

/// The fused kernel of Hopper: weights are packed beforehand into the order in which registers want them.
const fn hoppers(name: &'static str, doc: &'static str, scheduler: Scheduler) -> OfKernel {
    let facts = Facts::new(name, doc, WeightForm::Packed);
    let facts = Facts { automatic: true, linear: true, groups: true, ..facts };
    OfKernel { facts, order: Order::Rows, scheduler, kernels: |problem| singles(problem.hopper(many_rows)?) }
}

/// One CTA for each tile.
pub(super) const FUSED: OfKernel = hoppers(
    "fused",
    "one kernel: both products in one pass over A, activation in registers; a CTA for each tile",
    Scheduler::Grid,
);
/// As many CTAs as the card holds.
pub(super) const PERSISTENT: OfKernel = hoppers(
    "persistent",
    "fused, with as many CTAs as the card holds, each taking tile after tile",
    Scheduler::Persistent,
);
/// Equal shares of all work. Nowhere the fastest by more than 1 %, and of thousands of rows, whose tiles it takes out of step, a
/// quarter slower than tiles one after another: to be compared with.
pub(super) const STREAM_K: OfKernel = {
    let doc = "fused, with the K blocks of all tiles in equal shares, added up in a fixed order";
    let of = hoppers("stream-k", doc, Scheduler::StreamK);
    OfKernel { facts: Facts { automatic: false, groups: false, ..of.facts }, ..of }
};
/// Kernels of narrow tiles, several warpgroups to a tile.
pub(super) const DECODE: OfKernel = OfKernel {
    kernels: |problem| {
        problem.require_sm90a()?;
        let rows = problem.desc.m.div_ceil(problem.groups);
        if rows > DECODE_ROWS {
            return Err(format!("M = {rows}; it is for up to {DECODE_ROWS} rows"));
        }
        singles(problem.hopper(|config| config.tokens < 128)?)
    },
    ..hoppers("decode", "fused, for few tokens: narrow tiles, warpgroups that split K", Scheduler::Grid)
};
/// Two launches: large tiles in full waves, and smaller ones for the features that are left.
pub(super) const WAVES: OfKernel = {
    let doc = "fused, in two launches: large tiles in full waves of CTAs, smaller ones for the features that are left";
    let of = hoppers("waves", doc, Scheduler::Grid);
    OfKernel { facts: Facts { groups: false, linear: false, ..of.facts }, kernels: waves, ..of }
};
/// Two products one after the other, each on a pack of one matrix: gate's sums go to memory, and the epilogue of up's product
/// reads them and stores C. What a library with epilogues of one's own makes possible without a dual kernel: A is read twice,
/// and 8 bytes for each element of C are written and read.
pub(super) const FUSED_EPILOGUE: OfKernel = OfKernel {
    facts: Facts::new(
        "fused-epilogue",
        "two products by the kernel of fused: gate's sums to memory, then up, whose epilogue reads them",
        WeightForm::PackedApart,
    ),
    kernels: |problem| {
        let kernels = singles(problem.hopper(|_| true)?);
        match problem.desc.out {
            OutFormat::Nvfp4 { .. } => Err(format!("C is {}; it writes floats", problem.desc.out)),
            _ => kernels,
        }
    },
    order: Order::Rows,
    scheduler: Scheduler::Grid,
};
/// By `mma.sync`: each warp brings weights of its own from memory, ahead of the end of the kernel before. It reads the same
/// pack, and nvfp4 activations as they are; of more than eight rows a kernel before expands them.
pub(super) const WARPWISE: OfKernel = OfKernel {
    order: Order::Codes,
    kernels: few_tokens,
    ..hoppers(
        "warpwise",
        "fused, for up to 16 rows: each warp brings weights of its own, by mma.sync",
        Scheduler::Grid,
    )
};
/// Without prepack: weights are read as producers write them, so nothing is kept between calls but what the checkpoint
/// holds. A is brought into the order of K that makes rows of codes fragments of registers.
pub(super) const PLAIN: OfKernel = OfKernel {
    facts: Facts::new(
        "plain",
        "fused, on weights as the checkpoint has them: nothing prepacked, A permuted on each call",
        WeightForm::Plain,
    ),
    order: Order::Permuted,
    kernels: |problem| {
        let desc = problem.desc;
        problem.require_sm90a()?;
        if compute_type(desc) != Ok(FloatType::F16) || desc.quantize_a != QuantizeA::No {
            return Err(format!("A is {}, or quantized on the way in; it takes f16 and nvfp4", desc.a));
        }
        if desc.b != AFormat::Nvfp4 || !desc.k.is_multiple_of(32) {
            let found = format!("B is {} with K = {}", desc.b, desc.k);
            return Err(format!("{found}; it takes nvfp4 with K a multiple of 32"));
        }
        problem.check_c()?;
        let fits = |config: &plain::config::Config| config.layout(problem.variant.out).is_ok();
        singles(plain::config::Config::MENU.into_iter().filter(fits).map(Config::Plain))
    },
    scheduler: Scheduler::Grid,
};
/// What one would run if 4-bit weights were 8-bit ones: both operands rounded to e4m3, one fused kernel on the products that
/// Hopper has.
///
/// A code and a block scale together have six significant bits; e4m3 keeps four of them, and A loses as much: C is off by
/// about 5 %, which the column of errors shows. Scales are one per tensor, as in the plain form of e4m3 serving: that of a
/// weight matrix makes the largest value which its block scales allow 448, an nvfp4 A fills the range in the same way, and a
/// float A gets its scale on each call, from its largest magnitude.
pub(super) const FP8: OfKernel = OfKernel {
    facts: Facts {
        rounding: Rounding::Operands,
        ..Facts::new(
            "fp8",
            "fused, A and weights rounded to e4m3: not exact, for comparison only",
            WeightForm::E4m3,
        )
    },
    order: Order::E4m3,
    kernels: |problem| {
        let desc = problem.desc;
        problem.require_sm90a()?;
        compute_type(desc)?;
        if desc.quantize_a != QuantizeA::No {
            return Err("A is quantized to nvfp4 on the way in; it rounds A to e4m3 itself".into());
        }
        if desc.b != AFormat::Nvfp4 {
            return Err(format!("B is {}; it takes nvfp4", desc.b));
        }
        problem.check_c()?;
        let fits = |config: &fp8::config::Config| config.layout(problem.variant.out).is_ok();
        singles(fp8::config::Config::MENU.into_iter().filter(fits).map(Config::Fp8))
    },
    scheduler: Scheduler::Grid,
};
/// Slower than what is written for one architecture, but nobody is turned away. It reads the same pack.
pub(super) const PORTABLE: OfKernel = OfKernel {
    kernels: |problem| {
        let Problem { desc, info, variant, .. } = problem;
        if info.arch.major < 8 {
            return Err(format!("its kernel needs sm_80; this is {}, {}", info.name, info.arch));
        }
        compute_type(desc)?;
        problem.check_c()?;
        let variant = Variant { grouped: true, ..variant.clone() };
        let fits = |config: &sm80::config::Config| config.layout(&variant).is_ok();
        singles(sm80::config::Config::MENU.into_iter().filter(fits).map(Config::Sm80))
    },
    ..hoppers("portable", "fused by mma.sync, for every NVIDIA GPU from sm_80 on", Scheduler::Grid)
};
/// Blackwell's: its tensor cores multiply nvfp4 and mxfp4 and apply block scales, so codes stay as they are and scales are
/// brought into 128x4 atoms: those of the weights once, those of A, where they lie in rows, on each call. Beside A in f16 or
/// bf16, which they do not multiply with nvfp4, the kernel of sm_100 widens the weights on their way.
pub(super) const NATIVE: OfKernel = {
    let doc = "one kernel on tensor cores that multiply nvfp4 and mxfp4, nothing packed; simulated, not yet run on silicon";
    let of = hoppers("native", doc, Scheduler::Grid);
    OfKernel {
        facts: Facts { form: WeightForm::Atoms, ..of.facts },
        order: Order::Atoms,
        kernels: native,
        ..of
    }
};

fn singles(configs: impl IntoIterator<Item = Config>) -> Result<Vec<Configs>, String> {
    Ok(configs.into_iter().map(|config| vec![config]).collect())
}

fn many_rows(config: &sm90a::config::Config) -> bool {
    config.k_groups == 1
}

impl Problem<'_> {
    /// Refuses what is not Hopper, for kernels of `sm_90a`.
    fn require_sm90a(&self) -> Result<(), String> {
        let info = self.info;
        match (info.arch.major, info.arch.minor) {
            (9, 0) => Ok(()),
            _ => Err(format!("its kernel is for sm_90a; this is {}, {}", info.name, info.arch)),
        }
    }

    /// Configurations of Hopper's kernel for the problem.
    fn hopper(&self, is_for: fn(&sm90a::config::Config) -> bool) -> Result<Vec<Config>, String> {
        self.require_sm90a()?;
        compute_type(self.desc)?;
        let fits = |config: &sm90a::config::Config| is_for(config) && config.layout(&self.variant).is_ok();
        Ok(sm90a::config::Config::MENU.into_iter().filter(fits).map(Config::Sm90a).collect())
    }

    /// Refuses what kernels do not make of the sums that do not round gate and up.
    fn check_c(&self) -> Result<(), String> {
        if self.desc.epilogue.round_gate_up_to_bf16 {
            return Err("it does not round gate and up to bf16".into());
        }
        self.variant.check(self.desc.n).map_err(|error| error.to_string())
    }
}

fn waves(problem: &Problem<'_>) -> Result<Vec<Configs>, String> {
    let (fitting, desc, sms) = (problem.hopper(many_rows)?, problem.desc, problem.info.sm_count);
    if !problem.variant.aligned || matches!(problem.variant.out, Out::Nvfp4 { .. }) {
        let found = format!("C is {} of {} features", desc.out, desc.n);
        return Err(format!("{found}; it writes floats in rows of whole 16 bytes"));
    }
    let pairs = fitting.iter().flat_map(|main| fitting.iter().map(|rest| vec![*main, *rest]));
    let fill = |pair: &Configs| model::full_waves((desc.m, desc.n), sms, &pair[0], &pair[1]).is_some();
    let pairs: Vec<Configs> = pairs.filter(fill).collect();
    match pairs.is_empty() {
        false => Ok(pairs),
        true => Err(format!(
            "M = {}, N = {}: no tiles fill waves of {sms} multiprocessors and leave whole smaller ones",
            desc.m, desc.n
        )),
    }
}

fn few_tokens(problem: &Problem<'_>) -> Result<Vec<Configs>, String> {
    let &Problem { desc, groups, .. } = problem;
    problem.require_sm90a()?;
    compute_type(desc)?;
    if desc.quantize_a != QuantizeA::No {
        return Err("A is quantized on the way in, by a kernel that finds no room beside this one".into());
    }
    if desc.out.is_dynamic() {
        return Err("C has a dynamic scale; it writes floats, or nvfp4 under a static one".into());
    }
    problem.check_c()?;
    let menu = || warpwise::config::Config::menu();
    // A tile no larger than it must be: rows beyond the last one are read again.
    let mut rows = desc.m;
    let most = menu().map(|config| config.tokens as usize).max().unwrap_or(0);
    if groups > 1 {
        if desc.a == AFormat::Nvfp4 {
            return Err(format!("{groups} groups of rows in {}; it takes those of floats", desc.a));
        }
        if desc.m > GROUP_ROWS * groups {
            let rows = desc.m / groups;
            return Err(format!("groups of {rows} rows; it takes those of up to {GROUP_ROWS}"));
        }
        // Routers choose some experts more often than others: a tile holds twice the mean, so that few weights are read twice.
        rows = (2 * desc.m).div_ceil(groups);
    } else if desc.m > most {
        return Err(format!("M = {}; it takes up to {most} rows", desc.m));
    }
    let tokens = rows.next_power_of_two().max(2);
    singles(menu().filter(|config| config.tokens as usize == tokens).map(Config::Warpwise))
}

fn native(problem: &Problem<'_>) -> Result<Vec<Configs>, String> {
    let &Problem { desc, groups, info, .. } = problem;
    let sm100 = match info.arch.major {
        10 => true,
        12 => false,
        _ => {
            return Err(format!(
                "its kernels are for sm_100 and sm_120; this is {}, {}",
                info.name, info.arch
            ));
        }
    };
    let formats = match (desc.a_compute(), desc.b) {
        (AFormat::Nvfp4, AFormat::Nvfp4) => Some(Formats::NVFP4),
        (AFormat::Mxfp4, AFormat::Mxfp4) => Some(Formats::MXFP4),
        (AFormat::F16, AFormat::Nvfp4) if sm100 => Some(Formats::Wide(HalfFormat::F16)),
        (AFormat::Bf16, AFormat::Nvfp4) if sm100 => Some(Formats::Wide(HalfFormat::Bf16)),
        _ => None,
    };
    let Some(formats) = formats.filter(|_| desc.k.is_multiple_of(32)) else {
        return Err(format!(
            "A is {}, B is {}, K = {}; it takes nvfp4 (also floats quantized to it) with nvfp4, mxfp4 with mxfp4, on sm_100 \
             f16 and bf16 with nvfp4, and K a multiple of 32",
            desc.a, desc.b, desc.k
        ));
    };
    if desc.epilogue.round_gate_up_to_bf16 {
        return Err("it does not round gate and up to bf16".into());
    }
    if !sm100 {
        return singles(sm120a::config::Config::menu(formats.weights()).map(Config::Sm120a));
    }
    // No tile is sure to hold all tokens of a group.
    let tokens = if groups > 1 { usize::MAX } else { desc.m };
    let menu = sm100a::config::Config::menu(formats).into_iter();
    singles(menu.filter(|config| config.takes(tokens, desc.k)).map(Config::Sm100a))
}

impl OfKernel {
    /// What its kernel computes for a problem, of weights without biases. A dynamic scale of C needs all of C first, so it
    /// writes f32 then.
    fn variant(&self, desc: &DualGemmDesc) -> Variant {
        let out = match desc.out {
            OutFormat::F32 | OutFormat::Nvfp4 { global_scale: OutScale::Dynamic, .. } => Out::F32,
            OutFormat::F16 => Out::F16,
            OutFormat::Bf16 => Out::Bf16,
            OutFormat::Nvfp4 { scale_layout, .. } => Out::Nvfp4 { scale_layout },
        };
        let products = match desc.op {
            Operation::Linear => Products::Linear,
            Operation::GateUp if self.facts.form == WeightForm::PackedApart => Products::Up,
            Operation::GateUp => Products::Both,
        };
        let variant = Variant {
            out,
            products,
            compute: half_format(desc).unwrap_or(HalfFormat::F16),
            a_scale: desc.quantize_a == QuantizeA::Dynamic,
            round_gate_up_to_bf16: desc.epilogue.round_gate_up_to_bf16,
            scheduler: self.scheduler,
            ..Variant::new(desc.epilogue.activation.program())
        };
        variant.for_weights(desc.n, desc.k)
    }
}

fn name(configs: &Configs) -> String {
    configs.iter().map(Config::name).collect::<Vec<_>>().join(&AND.to_string())
}

fn named(kernel: &str) -> Result<Configs, Error> {
    Ok(kernel.split(AND).map(Config::named).collect::<Result<_, _>>()?)
}

impl Strategy for OfKernel {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn fitting(&self, desc: &DualGemmDesc, groups: usize, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        let variant = Variant { grouped: groups > 1, ..self.variant(desc) };
        let problem = Problem { desc, groups, info, variant };
        let kernels = (self.kernels)(&problem).map_err(|reason| self.unsupported(reason))?;
        match kernels.is_empty() {
            true => {
                Err(self.unsupported(format!("no configuration fits {desc}, {}", problem.variant.name())))
            }
            false => Ok(kernels.iter().map(name).collect()),
        }
    }

    fn estimate_us(
        &self,
        desc: &DualGemmDesc,
        groups: usize,
        info: &DeviceInfo,
        kernel: &str,
    ) -> Option<f64> {
        let apart = self.facts.form == WeightForm::PackedApart;
        model::estimate_us(desc, groups, info, (self.scheduler, apart), &named(kernel).ok()?)
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let (configs, variant) = (named(&plan.kernel)?, self.variant(&plan.desc));
        Ok(Box::new(Ready::new(gpu, plan, (self.facts.form, self.order), configs, variant)?))
    }
}
