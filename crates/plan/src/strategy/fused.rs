//! The fused kernel of Hopper under its schedulers: both products in one pass over A, the activation in registers, C
//! written once. Weights are packed beforehand into the order in which registers want them.

use dualgemm_device::{Device, DeviceInfo, DevicePtr, LaunchSpec};
use dualgemm_gemm::{DualGemmDesc, Operation};
use dualgemm_kernels::parts::rows;
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::host::{Fused as Kernel, FusedArgs};
use dualgemm_kernels::sm90a::variant::{Out, Products, Scheduler, Variant};

use super::launched::{Destination, Kernels, Launched, Variants, Weights, rows_of};
use super::requantize::Requantize;
use super::{Prepared, Strategy, require_sm90a};
use crate::prologue::{Order, Prologue, half_format};
use crate::{Buffer, DeviceCall, Error, Gpu, GpuPlan, WeightForm, model};

/// Most rows that the decode strategy is for.
const DECODE_ROWS: usize = 128;

/// See the [module](self).
#[derive(Debug)]
pub struct Fused {
    name: &'static str,
    doc: &'static str,
    scheduler: Scheduler,
    /// Whether it is for few rows: kernels of narrow tiles, several warpgroups to a tile.
    few_rows: bool,
    /// Whether it takes two launches: large tiles in full waves, and smaller ones for the features that are left.
    waves: bool,
}

/// What stands between the names of the two configurations of waves.
const AND: char = '+';

impl Fused {
    /// One CTA for each tile.
    pub const GRID: Self = Self::new(
        "fused",
        "one kernel: both products in one pass over A, activation in registers; a CTA for each tile",
        Scheduler::Grid,
    );
    /// As many CTAs as the card holds.
    pub const PERSISTENT: Self = Self::new(
        "persistent",
        "fused, with as many CTAs as the card holds, each taking tile after tile",
        Scheduler::Persistent,
    );
    /// Equal shares of all work.
    pub const STREAM_K: Self = Self::new(
        "stream-k",
        "fused, with the K blocks of all tiles in equal shares, added up in a fixed order",
        Scheduler::StreamK,
    );
    /// Few rows.
    pub const DECODE: Self = {
        let doc = "fused, for few tokens: narrow tiles, warpgroups that split K";
        Self { few_rows: true, ..Self::new("decode", doc, Scheduler::Grid) }
    };
    /// Two launches.
    pub const WAVES: Self = {
        let doc = "fused, in two launches: large tiles in full waves of CTAs, smaller ones for the features that are left";
        Self { waves: true, ..Self::new("waves", doc, Scheduler::Grid) }
    };

    const fn new(name: &'static str, doc: &'static str, scheduler: Scheduler) -> Self {
        Self { name, doc, scheduler, few_rows: false, waves: false }
    }

    fn unsupported<T>(&self, reason: String) -> Result<T, Error> {
        Err(Error::Unsupported { strategy: self.name, reason })
    }

    fn variant(&self, desc: &DualGemmDesc) -> Result<Variant, Error> {
        let variant = variant_of(desc).or_else(|reason| self.unsupported(reason))?;
        Ok(Variant { scheduler: self.scheduler, ..variant })
    }

    /// The configurations of a kernel's name.
    fn configs(name: &str) -> Result<(Config, Option<Config>), Error> {
        match name.split_once(AND) {
            None => Ok((Config::named(name)?, None)),
            Some((main, rest)) => Ok((Config::named(main)?, Some(Config::named(rest)?))),
        }
    }

    /// The configurations for a variant.
    fn fitting(&self, variant: &Variant) -> Vec<Config> {
        let is_for = |config: &Config| {
            if self.few_rows { config.tokens < 128 } else { config.k_groups == 1 }
        };
        let fits = |config: &Config| is_for(config) && config.layout(variant).is_ok();
        Config::MENU.into_iter().filter(fits).collect()
    }

    /// What a problem is to this strategy, if rows come in groups of about one size.
    fn check(&self, desc: &DualGemmDesc, groups: usize, info: &DeviceInfo) -> Result<Variant, Error> {
        require_sm90a(self.name, info)?;
        let rows = desc.m.div_ceil(groups);
        if self.few_rows && rows > DECODE_ROWS {
            return self.unsupported(format!("M = {rows}; it is for up to {DECODE_ROWS} rows"));
        }
        self.variant(desc)
    }

    fn nothing_fits<T>(&self, desc: &DualGemmDesc, variant: &Variant) -> Result<T, Error> {
        self.unsupported(format!("no configuration fits {desc}, {}", variant.name()))
    }
}

/// What the kernel computes for a problem, on the grid scheduler.
pub(super) fn variant_of(desc: &DualGemmDesc) -> Result<Variant, String> {
    let rows::Variant { out, a_scale, program, .. } = rows_of(desc);
    let variant = Variant {
        compute: half_format(desc)?,
        out,
        products: match desc.op {
            Operation::GateUp => Products::Both,
            Operation::Linear => Products::Linear,
        },
        a_scale,
        round_gate_up_to_bf16: desc.epilogue.round_gate_up_to_bf16,
        ..Variant::new(program)
    };
    Ok(variant.for_weights(desc.n, desc.k))
}

impl Strategy for Fused {
    fn name(&self) -> &'static str {
        self.name
    }

    fn doc(&self) -> &'static str {
        self.doc
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Packed
    }

    fn automatic(&self) -> bool {
        true
    }

    fn takes(&self, op: Operation) -> bool {
        op == Operation::GateUp || !self.waves
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        let variant = self.check(desc, 1, info)?;
        let fitting = self.fitting(&variant);
        let names: Vec<String> = if self.waves {
            if !variant.aligned || matches!(variant.out, Out::Nvfp4 { .. }) {
                let found = format!("C is {} of {} features", desc.out, desc.n);
                return self.unsupported(format!("{found}; it writes floats in rows of whole 16 bytes"));
            }
            let pairs = fitting.iter().flat_map(|main| fitting.iter().map(move |rest| (main, rest)));
            pairs
                .filter(|(main, rest)| full_waves(desc.m, desc.n, info.sm_count, main, rest).is_some())
                .map(|(main, rest)| format!("{}{AND}{}", main.name(), rest.name()))
                .collect()
        } else {
            fitting.iter().map(Config::name).collect()
        };
        match names.is_empty() {
            true if self.waves => self.unsupported(format!(
                "M = {}, N = {}: no tiles fill waves of {} multiprocessors and leave whole smaller ones",
                desc.m, desc.n, info.sm_count
            )),
            true => self.nothing_fits(desc, &variant),
            false => Ok(names),
        }
    }

    fn grouped_kernels(
        &self,
        desc: &DualGemmDesc,
        groups: usize,
        info: &DeviceInfo,
    ) -> Result<Vec<String>, Error> {
        let variant = Variant { grouped: true, ..self.check(desc, groups.max(1), info)? };
        Requantize::check_grouped(self.name, desc)?;
        if self.waves || self.scheduler == Scheduler::StreamK {
            return self.unsupported(format!("{groups} groups of rows; it takes one pair of weights a call"));
        }
        let names: Vec<String> = self.fitting(&variant).iter().map(Config::name).collect();
        if names.is_empty() { self.nothing_fits(desc, &variant) } else { Ok(names) }
    }

    fn estimate_us(
        &self,
        desc: &DualGemmDesc,
        groups: usize,
        info: &DeviceInfo,
        kernel: &str,
    ) -> Option<f64> {
        if groups > 1 {
            return Some(model::grouped_us(desc, groups, info, &Config::named(kernel).ok()?, self.scheduler));
        }
        let (config, rest) = Self::configs(kernel).ok()?;
        let Some(rest) = rest else {
            return Some(model::fused_us(desc, info, &config, self.scheduler));
        };
        let features = full_waves(desc.m, desc.n, info.sm_count, &config, &rest)?;
        let part = |n, config| model::fused_us(&DualGemmDesc { n, ..*desc }, info, config, self.scheduler);
        Some(part(features, &config) + part(desc.n - features, &rest))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let desc = plan.desc;
        let mut ready = Ready {
            gpu,
            desc,
            prologue: Prologue::new(gpu, plan, Order::Rows)?,
            configs: Self::configs(&plan.kernel)?,
            variant: self.variant(&desc)?,
            kernels: Variants::new(plan.groups > 1),
            workspace: None,
            requantize: Requantize::of(gpu, &desc)?,
        };
        let workspace =
            ready.kernels.first(|grouped, bias| ready.load(grouped, bias))?.main.workspace_bytes();
        if workspace > 0 {
            ready.workspace = Some(Buffer::zeroed(gpu, workspace)?);
        }
        Ok(Launched::prepared(gpu, ready))
    }
}

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    configs: (Config, Option<Config>),
    variant: Variant,
    kernels: Variants<Pair>,
    workspace: Option<Buffer>,
    requantize: Option<Requantize>,
}

impl Ready {
    fn load(&self, grouped: bool, bias: bool) -> Result<Pair, Error> {
        let (main, rest) = self.configs;
        Pair::new(self.gpu, main, rest, &Variant { grouped, bias, ..self.variant.clone() })
    }

    fn kernels(&self, weights: Weights<'_>) -> Result<&Pair, Error> {
        self.kernels.get(weights, |grouped, bias| self.load(grouped, bias))
    }
}

impl Kernels for Ready {
    fn warm(&self, weights: Weights<'_>) -> Result<(), Error> {
        self.kernels(weights).map(drop)
    }

    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let &DualGemmDesc { n, k, op, epilogue, .. } = &self.desc;
        let mut specs = Vec::new();
        let a = self.prologue.specs(call.m, &call.a, weights.groups().as_ref(), &mut specs)?;
        let c = Destination::of(call, &self.desc)?;
        let to = self.requantize.as_ref().map_or(c, Requantize::product);
        let output = weights.output(&to, &epilogue, a.scale, a.device_scale)?;
        let args = FusedArgs {
            lda: a.pitch / 2,
            groups: weights.group_args(),
            workspace: self.workspace.as_ref().map_or(DevicePtr::NULL, Buffer::ptr),
            ..FusedArgs::new(a.values, weights.packed(op)?, output, (call.m, n, k))
        };
        self.kernels(weights)?.specs(&args, self.gpu.info(), &mut specs)?;
        if let Some(requantize) = &self.requantize {
            requantize.specs(call.m, &c, &mut specs)?;
        }
        Ok(specs)
    }
}

/// The kernel, or the two of waves.
#[derive(Debug)]
struct Pair {
    main: Kernel<'static>,
    rest: Option<Kernel<'static>>,
}

impl Pair {
    fn new(
        device: &'static dyn Device,
        main: Config,
        rest: Option<Config>,
        variant: &Variant,
    ) -> Result<Self, Error> {
        let rest = rest.map(|config| Kernel::new(device, config, variant)).transpose()?;
        Ok(Self { main: Kernel::new(device, main, variant)?, rest })
    }

    fn specs(&self, args: &FusedArgs, info: &DeviceInfo, specs: &mut Vec<LaunchSpec>) -> Result<(), Error> {
        let split = self.rest.as_ref().and_then(|rest| {
            let (main, sms) = (self.main.config(), info.sm_count);
            full_waves(args.m, args.n, sms, main, rest.config()).map(|features| (rest, features))
        });
        match split {
            // A call of fewer rows than planned may fill no wave.
            None => specs.push(self.main.spec(args)?),
            Some((rest, features)) => {
                specs.push(self.main.spec_of(args, 0..features)?);
                specs.push(rest.spec_of(args, features..args.n)?);
            }
        }
        Ok(())
    }
}

/// How many features `main` takes in full waves, so that whole, smaller tiles of `rest` are left; none if there is no
/// full wave or nothing left.
fn full_waves(m: usize, n: usize, sms: u32, main: &Config, rest: &Config) -> Option<usize> {
    let one_tile_each = |c: &Config| c.ctas_per_sm == 1 && c.k_split == 1;
    let area = |c: &Config| c.features() * c.tokens;
    if !one_tile_each(main) || !one_tile_each(rest) || area(rest) >= area(main) {
        return None;
    }
    let [token_tiles, feature_tiles] = main.tiles(m, n);
    let waves = token_tiles * feature_tiles / sms.max(1);
    let tiles = waves * sms / token_tiles.max(1);
    let features = tiles as usize * main.features() as usize;
    let left = n.checked_sub(features)?;
    (features > 0 && left > 0 && left.is_multiple_of(rest.features() as usize)).then_some(features)
}
