//! The fused kernels of every architecture by one interface, the same on a simulated and on a real device: a [`Config`] is
//! a tile and a pipeline, a [`Variant`] what is computed. [`Fused`] is both, loaded once; [`FusedArgs`], plain device
//! addresses, become a [`LaunchSpec`]. Making a launch allocates no device memory and waits for nothing, so it can be
//! recorded. [`operands`](crate::operands) uploads what tests and benchmarks launch on.

use std::fmt;
use std::ops::Range;

use dualgemm_device::{Args, Device, DevicePtr, FunctionId, LaunchSpec};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;

use crate::error::{one_of, refused};
use crate::generic::{load, target_for};
use crate::limits::{Rules, block_rule, check_address};
use crate::parts::format::Format;
use crate::parts::groups::{GroupArgs, MOST_CHOICES};
use crate::parts::operand::Operand;
use crate::parts::rows::Output;
use crate::parts::variant::Variant;
use crate::registry::{KERNELS, Kernel};
use crate::{Error, fp8, plain, sm80, sm90a, sm100a, sm120a, warpwise};

/// Name of every fused kernel in its module.
pub const ENTRY: &str = "dual_gemm";

/// What a configuration of each kernel says of itself.
pub(crate) trait Tile {
    /// What refuses a configuration, a variant or operands.
    fn rules(&self) -> Rules;

    /// The kernel's text.
    fn generate(&self, variant: &Variant, target: Target) -> Result<Module, Error>;

    /// Bytes of shared memory of a CTA.
    fn shared(&self, variant: &Variant) -> Result<u32, Error>;

    /// What it takes A as, and gate and up: rows of these, or the pack of [`sm90a`].
    fn formats(&self, variant: &Variant) -> (Format, Option<Format>);

    /// The launch on operands that are what [`formats`](Self::formats) says.
    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error>;
}

/// A configuration of one of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Config {
    /// Hopper's.
    Sm90a(sm90a::config::Config),
    /// Hopper's for few tokens.
    Warpwise(warpwise::config::Config),
    /// Hopper's on weights as a checkpoint has them.
    Plain(plain::config::Config),
    /// Hopper's on e4m3.
    Fp8(fp8::config::Config),
    /// That for every card from sm_80 on.
    Sm80(sm80::config::Config),
    /// That of Blackwell's data-centre cards.
    Sm100a(sm100a::config::Config),
    /// That of Blackwell's other cards.
    Sm120a(sm120a::config::Config),
}

impl Config {
    fn tile(&self) -> &dyn Tile {
        match self {
            Self::Sm90a(config) => config,
            Self::Warpwise(config) => config,
            Self::Plain(config) => config,
            Self::Fp8(config) => config,
            Self::Sm80(config) => config,
            Self::Sm100a(config) => config,
            Self::Sm120a(config) => config,
        }
    }

    /// Every configuration of the [registry](crate::registry), once where architectures share a menu.
    pub fn all() -> impl Iterator<Item = Self> {
        let twin = |kernel: &Kernel| matches!(kernel.arch, Target::Sm103a | Target::Sm121a);
        KERNELS.iter().filter(move |kernel| !twin(kernel)).flat_map(Kernel::fused)
    }

    /// The configuration of any menu that [`name`](Self::name) calls so.
    pub fn named(name: &str) -> Result<Self, Error> {
        one_of(name, Self::all(), Self::name)
    }

    /// A name that tells configurations apart.
    pub fn name(&self) -> String {
        match self {
            Self::Sm90a(config) => config.name(),
            Self::Warpwise(config) => config.name(),
            Self::Plain(config) => config.name(),
            Self::Fp8(config) => config.name(),
            Self::Sm80(config) => config.name(),
            Self::Sm100a(config) => config.name(),
            Self::Sm120a(config) => config.name(),
        }
    }

    /// Its kernel's text for a variant on a target.
    pub fn generate(&self, variant: &Variant, target: Target) -> Result<Module, Error> {
        self.tile().generate(variant, target)
    }

    /// What it takes A as.
    pub fn a_format(&self, variant: &Variant) -> Format {
        self.tile().formats(variant).0
    }

    /// What it takes gate and up as: rows of these, or the pack of [`sm90a`].
    pub fn weight_format(&self, variant: &Variant) -> Option<Format> {
        self.tile().formats(variant).1
    }
}

/// Gate and up in device memory, or the matrix of a linear layer; of groups, one behind the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weights {
    /// The pack of [`sm90a::pack`], on a multiple of 16 bytes.
    Pack(DevicePtr),
    /// Rows, `[n, k]` of gate and of up, or twice the matrix of a linear layer.
    Rows([Operand; 2]),
}

/// The operands of one launch, as device addresses. Those that the variant does not use are not looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedArgs {
    /// Rows of A, of all groups together; features; elements that are summed.
    pub size: (usize, usize, usize),
    /// A, `[m, k]`.
    pub a: Operand,
    /// B1 and B2.
    pub weights: Weights,
    /// The groups of a grouped problem: experts, or entries of a batch.
    pub groups: Option<GroupArgs>,
    /// Where rows are tokens' choices of groups, a few, in the order of the tokens: how many a row of A serves. M counts choices, and
    /// [`Groups::rows`](crate::parts::groups::Groups::rows) are the groups chosen, one u32 each; of groups that there are not, C has no
    /// row.
    pub choices: Option<usize>,
    /// Whether the launch just before triggers the start of this one only after it has waited for what wrote the groups' rows,
    /// so that this one may read them at once.
    pub settled: bool,
    /// C and what belongs to it; alpha is the product of the tensor scales, and what the order of the weights asks for.
    pub output: Output,
    /// [`Fused::gate_sums_bytes`] bytes, of products apart: the launch of gate writes them, that of up reads them. Both
    /// take the same arguments but for the weights.
    pub gate_sums: DevicePtr,
    /// [`Fused::workspace_bytes`] bytes, zero before the first launch; launches that may run at once need their own.
    pub workspace: DevicePtr,
}

impl FusedArgs {
    /// One problem.
    pub fn new(size: (usize, usize, usize), a: Operand, weights: Weights, output: Output) -> Self {
        let null = DevicePtr::NULL;
        let (groups, choices, gate_sums, workspace) = (None, None, null, null);
        Self { size, a, weights, groups, choices, settled: false, output, gate_sums, workspace }
    }

    /// How many groups, if rows come in groups.
    pub(crate) fn count(&self) -> Option<usize> {
        self.groups.map(|groups| groups.of.count)
    }

    /// Appends A's first element and the bytes from row to row.
    pub(crate) fn a_rows(&self, args: Args) -> Args {
        args.ptr(self.a.codes).u32(self.a.pitch as u32)
    }

    /// Appends the address of the pack.
    pub(crate) fn pack(&self, args: Args) -> Args {
        match self.weights {
            Weights::Pack(pack) => args.ptr(pack),
            Weights::Rows(_) => args,
        }
    }

    /// Appends the table of the groups' rows, if there are groups.
    pub(crate) fn group_rows(&self, args: Args) -> Result<Args, Error> {
        self.groups.map_or(Ok(args.clone()), |groups| groups.of.args(args))
    }

    /// Appends M, N and what counts K.
    pub(crate) fn sizes(&self, args: Args, k: usize) -> Args {
        args.u32(self.size.0 as u32).u32(self.size.1 as u32).u32(k as u32)
    }

    /// Appends C and what belongs to it.
    pub(crate) fn outputs(&self, args: Args, variant: &Variant) -> Result<Args, Error> {
        self.output.args(args, variant, self.groups.as_ref())
    }
}

/// A fused kernel, loaded on a device.
#[derive(Clone)]
pub struct Fused<'d> {
    pub(crate) device: &'d dyn Device,
    /// What it computes.
    pub(crate) variant: Variant,
    config: Config,
    function: FunctionId,
    /// Bytes of shared memory of a CTA.
    shared: u32,
}

impl fmt::Debug for Fused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.config.name(), self.variant.name())
    }
}

impl<'d> Fused<'d> {
    /// Generates and loads the kernel.
    ///
    /// # Errors
    /// If the configuration does not fit, it has no such variant, or the device refuses the text.
    pub fn new(device: &'d dyn Device, config: Config, variant: &Variant) -> Result<Self, Error> {
        let (tile, target) = (config.tile(), target_for(device.info().arch));
        let shared = tile.shared(variant)?;
        let function = load(device, &tile.generate(variant, target)?, ENTRY)?;
        Ok(Self { device, variant: variant.clone(), config, function, shared })
    }

    /// Tile and pipeline.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What it computes.
    pub fn variant(&self) -> &Variant {
        &self.variant
    }

    /// Bytes of [`FusedArgs::workspace`]; 0 for all schedulers but stream-K.
    pub fn workspace_bytes(&self) -> usize {
        match &self.config {
            Config::Sm90a(config) => config.workspace_bytes(self),
            _ => 0,
        }
    }

    /// Bytes of [`FusedArgs::gate_sums`] for `m` rows and `n` features: f32, whole tiles; 0 if both products are one
    /// launch.
    pub fn gate_sums_bytes(&self, m: usize, n: usize) -> usize {
        match &self.config {
            Config::Sm90a(config) => config.gate_sums_bytes(&self.variant, m, n),
            _ => 0,
        }
    }

    fn check(&self, args: &FusedArgs) -> Result<(), Error> {
        let ((m, n, k), (a, weights)) = (args.size, self.config.tile().formats(&self.variant));
        block_rule("A", m, k)?;
        if n == 0 || n > i32::MAX as usize {
            return refused("C", format!("N = {n}"), "1 to 2147483647 features");
        }
        self.variant.check(n)?;
        if args.groups.is_some() != self.variant.grouped {
            return refused("the groups", "groups or none", "what the kernel was made for");
        }
        match args.choices {
            Some(per_row) if per_row == 0 || !m.is_multiple_of(per_row) || m > MOST_CHOICES => {
                let found = format!("{m}, {per_row} for a row of A");
                return refused("choices", found, format!("a multiple of that, at most {MOST_CHOICES}"));
            }
            _ if args.choices.is_some() != self.variant.choices => {
                return refused("choices", "choices or none", "what the kernel was made for");
            }
            _ => {}
        }
        let rows = m / args.choices.unwrap_or(1);
        let whole_stages = matches!(&self.config, Config::Sm90a(config) if config.whole_stage_loads());
        if args.a.blocked && !(whole_stages && self.variant.whole_blocks) {
            return refused("A", "blocks of 64 columns", "rows, which the kernel reads");
        }
        args.a.check("A", a, (rows, k), self.variant.codes.is_some())?;
        match (weights, &args.weights) {
            (None, &Weights::Pack(pack)) => check_address("the weight pack", pack, 16),
            (Some(format), Weights::Rows(halves)) => {
                let rows = n * args.count().unwrap_or(1);
                let mut named = ["gate", "up"].into_iter().zip(halves);
                named.try_for_each(|(name, half)| half.check(name, format, (rows, k), false))
            }
            (None, Weights::Rows(_)) => refused("gate and up", "rows", "the pack, which the kernel reads"),
            (Some(format), Weights::Pack(_)) => {
                refused("gate and up", "a pack", format!("rows of {format}, which the kernel reads"))
            }
        }
    }

    /// The launch on these operands; it can be repeated and recorded. With [`LaunchSpec::programmatic`] it may start
    /// before the launch ahead of it has ended: it reads weights and biases at once, everything else after that end.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        self.check(args)?;
        self.config.tile().launch(self, args)
    }

    /// The launch on some of the features, whole tiles of this configuration from a multiple of 32 on: launches of several
    /// configurations can share a problem, so that none leaves its last wave of CTAs half empty.
    ///
    /// # Errors
    /// As [`spec`](Self::spec), and if the range, the variant or the kernel does not allow it.
    pub fn spec_of(&self, args: &FusedArgs, features: Range<usize>) -> Result<LaunchSpec, Error> {
        self.check(args)?;
        match &self.config {
            Config::Sm90a(config) => config.launch_part(self, args, features),
            other => other.tile().rules().refuse("ranges of features are for Hopper's kernel"),
        }
    }

    /// A launch of CTAs of `threads`, its arguments yet to come.
    pub(crate) fn launch(&self, grid: [u32; 3], threads: u32) -> LaunchSpec {
        LaunchSpec::new(self.function, grid, [threads, 1, 1]).dynamic_shared(self.shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_configuration_of_every_menu_is_found_by_its_name() {
        Config::all().for_each(|config| assert_eq!(Config::named(&config.name()), Ok(config)));
    }
}
