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
}

impl Fused {
    /// One CTA for each tile.
    pub const GRID: Self = Self {
        name: "fused",
        doc: "one kernel: both products in one pass over A, activation in registers; a CTA for each tile",
        scheduler: Scheduler::Grid,
        few_rows: false,
    };
    /// As many CTAs as the card holds.
    pub const PERSISTENT: Self = Self {
        name: "persistent",
        doc: "fused, with as many CTAs as the card holds, each taking tile after tile",
        scheduler: Scheduler::Persistent,
        few_rows: false,
    };
    /// Equal shares of all work.
    pub const STREAM_K: Self = Self {
        name: "stream-k",
        doc: "fused, with the K blocks of all tiles in equal shares, added up in a fixed order",
        scheduler: Scheduler::StreamK,
        few_rows: false,
    };
    /// Few rows.
    pub const DECODE: Self = Self {
        name: "decode",
        doc: "fused, for few tokens: narrow tiles, warpgroups that split K",
        scheduler: Scheduler::Grid,
        few_rows: true,
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
        let names: Vec<String> = Config::MENU.into_iter().filter(fits).map(|config| config.name()).collect();
        if names.is_empty() {
            return self.unsupported(format!("no configuration fits {}", variant.name()));
        }
        Ok(names)
    }

    fn estimate_us(&self, desc: &DualGemmDesc, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        let config = Config::named(kernel).ok()?;
        Some(model::fused_us(desc, info, &config, self.scheduler))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let (desc, device) = (plan.desc, gpu as &'static dyn Device);
        let (config, variant) = (Config::named(&plan.kernel)?, self.variant(&desc)?);
        let kernel = Kernel::new(device, config, &variant)?;
        let workspace = match kernel.workspace_bytes() {
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
            kernel,
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
    kernel: Kernel<'static>,
    /// The kernel for weights with biases, loaded when the first ones come.
    with_bias: OnceLock<Kernel<'static>>,
    workspace: Option<Buffer>,
    requantize: Option<Requantize>,
    launches: Launches,
}

impl Ready {
    fn kernel(&self, weights: &DeviceWeights) -> Result<&Kernel<'static>, Error> {
        if weights.bias() == [DevicePtr::NULL; 2] {
            return Ok(&self.kernel);
        }
        if let Some(kernel) = self.with_bias.get() {
            return Ok(kernel);
        }
        let variant = Variant { bias: true, ..self.kernel.variant().clone() };
        let kernel = Kernel::new(self.gpu, *self.kernel.config(), &variant)?;
        Ok(self.with_bias.get_or_init(|| kernel))
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
        specs.push(self.kernel(weights)?.spec(&args)?);
        if let (Some(requantize), DeviceC::Nvfp4 { codes, scales, global_scale }) = (&self.requantize, call.c)
        {
            specs.extend(requantize.specs((call.m, n), [codes, scales, global_scale])?);
        }
        Ok(specs)
    }
}

impl Prepared for Ready {
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error> {
        self.kernel(weights).map(drop)
    }

    fn run(&self, call: &DeviceCall, weights: &Arc<DeviceWeights>, stream: Stream) -> Result<(), Error> {
        self.launches.run(self.gpu, call, weights, stream, || self.specs(call, weights))
    }
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
