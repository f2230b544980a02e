//! The fused kernel of Hopper under its schedulers: both products in one pass over A, the activation in registers, C
//! written once. Weights are packed beforehand into the order in which registers want them.

use std::sync::{Arc, OnceLock};

use dualgemm_device::{Device, DeviceInfo, DevicePtr, LaunchSpec, Stream};
use dualgemm_formats::{FloatType, ScaleLayout};
use dualgemm_gemm::{DualGemmDesc, OutFormat, OutScale, QuantizeA};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::quantize::{Floats, Out as QuantizeOut, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::host::{Fused as Kernel, FusedArgs};
use dualgemm_kernels::sm90a::variant::{Compute, Out, Scheduler, Variant};

use super::{Prepared, Strategy};
use crate::launches::Launches;
use crate::prologue::{Order, Prologue, compute_type};
use crate::{Buffer, DeviceC, DeviceCall, DeviceWeights, Error, Gpu, GpuPlan, WeightForm, model};

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
    pub const GRID: Self = Self {
        name: "fused",
        doc: "one kernel: both products in one pass over A, activation in registers; a CTA for each tile",
        scheduler: Scheduler::Grid,
        few_rows: false,
        waves: false,
    };
    /// As many CTAs as the card holds.
    pub const PERSISTENT: Self = Self {
        name: "persistent",
        doc: "fused, with as many CTAs as the card holds, each taking tile after tile",
        scheduler: Scheduler::Persistent,
        few_rows: false,
        waves: false,
    };
    /// Equal shares of all work.
    pub const STREAM_K: Self = Self {
        name: "stream-k",
        doc: "fused, with the K blocks of all tiles in equal shares, added up in a fixed order",
        scheduler: Scheduler::StreamK,
        few_rows: false,
        waves: false,
    };
    /// Few rows.
    pub const DECODE: Self = Self {
        name: "decode",
        doc: "fused, for few tokens: narrow tiles, warpgroups that split K",
        scheduler: Scheduler::Grid,
        few_rows: true,
        waves: false,
    };
    /// Two launches.
    pub const WAVES: Self = Self {
        name: "waves",
        doc: "fused, in two launches: large tiles in full waves of CTAs, smaller ones for the features that are left",
        scheduler: Scheduler::Grid,
        few_rows: false,
        waves: true,
    };

    fn unsupported<T>(&self, reason: String) -> Result<T, Error> {
        Err(Error::Unsupported { strategy: self.name, reason })
    }

    fn variant(&self, desc: &DualGemmDesc) -> Result<Variant, Error> {
        let compute = match compute_type(desc).or_else(|reason| self.unsupported(reason))? {
            FloatType::Bf16 => Compute::Bf16,
            _ => Compute::F16,
        };
        let variant = Variant {
            compute,
            out: match desc.out {
                // A dynamic scale needs all of C first.
                OutFormat::F32 | OutFormat::Nvfp4 { global_scale: OutScale::Dynamic, .. } => Out::F32,
                OutFormat::F16 => Out::F16,
                OutFormat::Bf16 => Out::Bf16,
                OutFormat::Nvfp4 { scale_layout, .. } => Out::Nvfp4 { scale_layout },
            },
            a_scale: desc.quantize_a == QuantizeA::Dynamic,
            round_gate_up_to_bf16: desc.epilogue.round_gate_up_to_bf16,
            scheduler: self.scheduler,
            ..Variant::new(desc.epilogue.activation.program())
        };
        Ok(variant.for_weights(desc.n, desc.k))
    }

    /// The configurations of a kernel's name.
    fn configs(name: &str) -> Result<(Config, Option<Config>), Error> {
        match name.split_once(AND) {
            None => Ok((Config::named(name)?, None)),
            Some((main, rest)) => Ok((Config::named(main)?, Some(Config::named(rest)?))),
        }
    }

    fn is_for(&self, config: &Config) -> bool {
        if self.few_rows { config.tokens < 128 } else { config.k_groups == 1 }
    }
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

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        if (info.arch.major, info.arch.minor) != (9, 0) {
            return self
                .unsupported(format!("its kernel is for sm_90a; this is {}, {}", info.name, info.arch));
        }
        if self.few_rows && desc.m > DECODE_ROWS {
            return self.unsupported(format!("M = {}; it is for up to {DECODE_ROWS} rows", desc.m));
        }
        let variant = self.variant(desc)?;
        let fits = |config: &Config| self.is_for(config) && config.layout(&variant).is_ok();
        let fitting = Config::MENU.into_iter().filter(fits);
        let names: Vec<String> = if self.waves {
            let floats = variant.aligned && !matches!(variant.out, Out::Nvfp4 { .. });
            let pairs = fitting.clone().flat_map(|main| fitting.clone().map(move |rest| (main, rest)));
            pairs
                .filter(|(main, rest)| {
                    floats && full_waves(desc.m, desc.n, info.sm_count, main, rest).is_some()
                })
                .map(|(main, rest)| format!("{}{AND}{}", main.name(), rest.name()))
                .collect()
        } else {
            fitting.map(|config| config.name()).collect()
        };
        if names.is_empty() {
            return self.unsupported(format!("no configuration fits {desc}, {}", variant.name()));
        }
        Ok(names)
    }

    fn estimate_us(&self, desc: &DualGemmDesc, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        let (config, rest) = Self::configs(kernel).ok()?;
        let Some(rest) = rest else {
            return Some(model::fused_us(desc, info, &config, self.scheduler));
        };
        let features = full_waves(desc.m, desc.n, info.sm_count, &config, &rest)?;
        let part = |n, config| model::fused_us(&DualGemmDesc { n, ..*desc }, info, config, self.scheduler);
        Some(part(features, &config) + part(desc.n - features, &rest))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let (desc, device) = (plan.desc, gpu as &'static dyn Device);
        let ((config, rest), variant) = (Self::configs(&plan.kernel)?, self.variant(&desc)?);
        let kernels = Kernels::new(device, config, rest, &variant)?;
        let workspace = match kernels.main.workspace_bytes() {
            0 => None,
            bytes => Some(Buffer::zeroed(gpu, bytes)?),
        };
        let requantize = match desc.out {
            OutFormat::Nvfp4 { scale_layout, global_scale: OutScale::Dynamic } => {
                Some(Requantize::new(gpu, &desc, scale_layout)?)
            }
            _ => None,
        };
        Ok(Box::new(Ready {
            gpu,
            desc,
            prologue: Prologue::new(gpu, &desc, plan.a_scale_layout, Order::Rows)?,
            kernels,
            with_bias: OnceLock::new(),
            workspace,
            requantize,
            launches: Launches::default(),
        }))
    }
}

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    kernels: Kernels,
    /// The kernels for weights with biases, loaded when the first ones come.
    with_bias: OnceLock<Kernels>,
    workspace: Option<Buffer>,
    requantize: Option<Requantize>,
    launches: Launches,
}

impl Ready {
    fn kernels(&self, weights: &DeviceWeights) -> Result<&Kernels, Error> {
        if weights.bias() == [DevicePtr::NULL; 2] {
            return Ok(&self.kernels);
        }
        if let Some(kernels) = self.with_bias.get() {
            return Ok(kernels);
        }
        let Kernels { main, rest } = &self.kernels;
        let variant = Variant { bias: true, ..main.variant().clone() };
        let kernels = Kernels::new(self.gpu, *main.config(), rest.as_ref().map(|k| *k.config()), &variant)?;
        Ok(self.with_bias.get_or_init(|| kernels))
    }

    fn specs(&self, call: &DeviceCall, weights: &DeviceWeights) -> Result<Vec<LaunchSpec>, Error> {
        let &DualGemmDesc { n, k, out, epilogue, .. } = &self.desc;
        let mut specs = Vec::new();
        let a = self.prologue.specs(call.m, &call.a, &mut specs)?;
        let [gate, up] = weights.alpha();
        let alpha = [gate * epilogue.alpha_gate * a.scale, up * epilogue.alpha_up * a.scale];
        let (c, c_scales) = match (&self.requantize, call.c, out) {
            (Some(requantize), DeviceC::Nvfp4 { .. }, _) => (requantize.scratch.ptr(), DevicePtr::NULL),
            (None, DeviceC::Nvfp4 { codes, scales, .. }, OutFormat::Nvfp4 { .. }) => (codes, scales),
            (None, DeviceC::Float(c), OutFormat::F32 | OutFormat::F16 | OutFormat::Bf16) => {
                (c, DevicePtr::NULL)
            }
            (_, found, expected) => {
                let found = if matches!(found, DeviceC::Float(_)) { "floats" } else { "nvfp4" };
                return Err(Error::Operand {
                    tensor: "C",
                    found: found.into(),
                    expected: expected.to_string(),
                });
            }
        };
        let args = FusedArgs {
            lda: a.pitch / 2,
            c_scales,
            c_scale: match out {
                OutFormat::Nvfp4 { global_scale: OutScale::Static(scale), .. } => scale,
                _ => 1.0,
            },
            bias: weights.bias(),
            a_scale: a.device_scale,
            workspace: self.workspace.as_ref().map_or(DevicePtr::NULL, Buffer::ptr),
            ..FusedArgs::new(a.values, weights.packed()?, c, (call.m, n, k), alpha)
        };
        self.kernels(weights)?.specs(&args, self.gpu.info(), &mut specs)?;
        if let (Some(requantize), DeviceC::Nvfp4 { codes, scales, global_scale }) = (&self.requantize, call.c)
        {
            specs.extend(requantize.specs((call.m, n), [codes, scales, global_scale])?);
        }
        Ok(specs)
    }
}

impl Prepared for Ready {
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error> {
        self.kernels(weights).map(drop)
    }

    fn run(&self, call: &DeviceCall, weights: &Arc<DeviceWeights>, stream: Stream) -> Result<(), Error> {
        self.launches.run(self.gpu, call, weights, stream, || self.specs(call, weights))
    }
}

/// The kernel, or the two of waves.
#[derive(Debug)]
struct Kernels {
    main: Kernel<'static>,
    rest: Option<Kernel<'static>>,
}

impl Kernels {
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

/// C in f32, then its largest magnitude, then nvfp4 by it.
#[derive(Debug)]
struct Requantize {
    scratch: Buffer,
    parts: Buffer,
    amax: Amax,
    quantize: Quantize,
}

impl Requantize {
    fn new(gpu: &'static Gpu, desc: &DualGemmDesc, layout: ScaleLayout) -> Result<Self, Error> {
        Ok(Self {
            scratch: Buffer::new(gpu, desc.m * desc.n * 4)?,
            parts: Buffer::new(gpu, 4 * MAX_PARTS as usize)?,
            amax: Amax::new(gpu, FloatType::F32)?,
            quantize: Quantize::new(gpu, FloatType::F32, Sink::Codes(layout), true)?,
        })
    }

    fn specs(
        &self,
        (m, n): (usize, usize),
        [codes, scales, scale]: [DevicePtr; 3],
    ) -> Result<[LaunchSpec; 2], Error> {
        let c = Floats { m, k: n, values: self.scratch.ptr(), pitch: 4 * n };
        let (out, dynamic) =
            (QuantizeOut::Codes { codes, scales }, Scale::Dynamic { parts: self.parts.ptr(), scale });
        Ok([self.amax.spec(&c, self.parts.ptr())?, self.quantize.spec(&c, &out, &dynamic)?])
    }
}
