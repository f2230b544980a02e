//! The fused kernels of Blackwell. Its tensor cores multiply nvfp4 and apply block scales, so codes stay as they are and
//! scales are brought into 128x4 atoms: those of the weights once, those of A, where they lie in rows, on each call. Beside
//! A in f16 or bf16, which they do not multiply with nvfp4, the kernel of sm_100 widens the weights on their way.
//!
//! Simulated and assembled, not yet run on silicon.

use std::sync::{Arc, OnceLock};

use dualgemm_device::{Arch, Device, DeviceInfo, DevicePtr, LaunchSpec, Stream};
use dualgemm_formats::{BlockFormat, FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::{AFormat, DualGemmDesc, OutFormat, OutScale, QuantizeA};
use dualgemm_kernels::generic::amax::{Amax, MAX_PARTS};
use dualgemm_kernels::generic::atoms::ScaleAtoms;
use dualgemm_kernels::generic::expand::Codes;
use dualgemm_kernels::generic::quantize::{self, Floats, Quantize, Scale};
use dualgemm_kernels::generic::rowwise::Sink;
use dualgemm_kernels::parts::operand::{ATOM_ROWS, Format, Formats, FusedArgs, Operand};
use dualgemm_kernels::parts::rows::{Out, Output, Variant};
use dualgemm_kernels::{sm100a, sm120a};
use dualgemm_ptx::builder::HalfFormat;

use super::{Prepared, Strategy};
use crate::blackwell::{self, Estimate};
use crate::launches::Launches;
use crate::{Buffer, DeviceA, DeviceC, DeviceCall, DeviceWeights, Error, Gpu, GpuPlan, WeightForm, model};

/// See the [module](self).
#[derive(Debug)]
pub struct Native;

/// The kernels of one architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Sm100,
    Sm120,
}

impl Family {
    fn of(arch: Arch) -> Option<Self> {
        match arch.major {
            10 => Some(Self::Sm100),
            12 => Some(Self::Sm120),
            _ => None,
        }
    }

    /// What its kernels take A and the weights as.
    fn formats(self, desc: &DualGemmDesc) -> Option<Formats> {
        match (self, desc.a_compute()) {
            (_, AFormat::Nvfp4) => Some(Formats::NVFP4),
            (Self::Sm100, AFormat::F16) => Some(Formats::Wide(HalfFormat::F16)),
            (Self::Sm100, AFormat::Bf16) => Some(Formats::Wide(HalfFormat::Bf16)),
            _ => None,
        }
    }

    /// Configurations for the problem. Scales let tiles of less than 32 tokens only hold all of them, and CTAs that split K
    /// have a part of it each.
    fn kernels(self, desc: &DualGemmDesc, formats: Formats) -> Vec<String> {
        let Self::Sm100 = self else {
            return sm120a::config::Config::MENU.map(|config| config.name()).into();
        };
        let fits = |c: &sm100a::config::Config| {
            let (tokens, scaled) = (c.tile_tokens(), matches!(formats, Formats::Scaled(_)));
            (!scaled || tokens.is_multiple_of(32) || desc.m <= tokens as usize)
                && c.split_k as usize <= desc.k.div_ceil(c.stage_k() as usize)
        };
        let menu = sm100a::config::Config::menu(formats).into_iter();
        menu.filter(fits).map(|config| config.name()).collect()
    }
}

impl Native {
    fn unsupported<T>(&self, reason: String) -> Result<T, Error> {
        Err(Error::Unsupported { strategy: self.name(), reason })
    }

    fn out(&self, desc: &DualGemmDesc) -> Result<Out, Error> {
        match desc.out {
            OutFormat::F16 => Ok(Out::F16),
            OutFormat::Bf16 => Ok(Out::Bf16),
            OutFormat::F32 => Ok(Out::F32),
            OutFormat::Nvfp4 { scale_layout, global_scale: OutScale::Static(_) } => {
                Ok(Out::Nvfp4 { scale_layout })
            }
            OutFormat::Nvfp4 { .. } => {
                self.unsupported("C is nvfp4 with a dynamic scale; it takes a static one".into())
            }
        }
    }
}

impl Strategy for Native {
    fn name(&self) -> &'static str {
        "native"
    }

    fn doc(&self) -> &'static str {
        "one kernel on tensor cores that multiply nvfp4, nothing packed; simulated, not yet run on silicon"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Atoms
    }

    fn automatic(&self) -> bool {
        true
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        let Some(family) = Family::of(info.arch) else {
            return self.unsupported(format!(
                "its kernels are for sm_100 and sm_120; this is {}, {}",
                info.name, info.arch
            ));
        };
        let Some(formats) = family.formats(desc) else {
            return self.unsupported(format!(
                "A is {}; it takes nvfp4 and floats to be quantized, and f16 and bf16 on sm_100",
                desc.a
            ));
        };
        if desc.b != BlockFormat::Nvfp4 || !desc.k.is_multiple_of(32) {
            return self.unsupported(format!(
                "B is {} with K = {}; it takes nvfp4 with K a multiple of 32",
                desc.b, desc.k
            ));
        }
        if desc.epilogue.round_gate_up_to_bf16 {
            return self.unsupported("it does not round gate and up to bf16".into());
        }
        self.out(desc)?;
        Ok(family.kernels(desc, formats))
    }

    fn estimate_us(&self, desc: &DualGemmDesc, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        let size = (desc.m, desc.n, desc.k);
        let kernel_us = match Family::of(info.arch)? {
            Family::Sm100 => {
                Estimate::new(&sm100a::config::Config::named(kernel).ok()?, size).ok()?.kernel_us()
            }
            Family::Sm120 => {
                blackwell::workstation_us(&sm120a::config::Config::named(kernel).ok()?, size, info)
            }
        };
        Some(kernel_us + model::ENDS)
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let desc = plan.desc;
        let variant = Variant { out: self.out(&desc)?, ..Variant::new(desc.epilogue.activation.program()) };
        let variant = Variant { a_scale: desc.quantize_a == QuantizeA::Dynamic, ..variant };
        let kernel = Kernel::new(gpu, &plan.kernel, &variant, desc.n)?;
        let prologue = Prologue::new(gpu, &desc, plan.a_scale_layout)?;
        let (with_bias, launches) = (OnceLock::new(), Launches::default());
        let name = plan.kernel.clone();
        Ok(Box::new(Ready { gpu, desc, prologue, name, variant, kernel, with_bias, launches }))
    }
}

/// The kernel of either architecture, loaded.
enum Kernel {
    Sm100(sm100a::host::Fused<'static>),
    Sm120(sm120a::host::Fused<'static>),
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Sm100(_) => "Sm100",
            Self::Sm120(_) => "Sm120",
        })
    }
}

impl Kernel {
    fn new(gpu: &'static Gpu, name: &str, variant: &Variant, n: usize) -> Result<Self, Error> {
        Ok(match Family::of(gpu.info().arch) {
            Some(Family::Sm120) => {
                let config = sm120a::config::Config::named(name)?;
                Self::Sm120(sm120a::host::Fused::new(gpu, config, variant, n)?)
            }
            _ => {
                let config = sm100a::config::Config::named(name)?;
                Self::Sm100(sm100a::host::Fused::new(gpu, config, variant, n)?)
            }
        })
    }

    fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        Ok(match self {
            Self::Sm100(kernel) => kernel.spec(args)?,
            Self::Sm120(kernel) => kernel.spec(args)?,
        })
    }
}

/// An nvfp4 matrix of rows of codes and 128x4 scales.
fn operand(&Codes { m, k, codes, pitch, scales }: &Codes) -> Operand {
    let (format, atoms) = (Format::Block(BlockFormat::Nvfp4), m.div_ceil(ATOM_ROWS as usize));
    Operand { format, rows: m, k, codes, pitch, scales, atoms }
}

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    name: String,
    variant: Variant,
    kernel: Kernel,
    /// The kernel for weights with biases, loaded when the first ones come.
    with_bias: OnceLock<Kernel>,
    launches: Launches,
}

impl Ready {
    fn kernel(&self, weights: &DeviceWeights) -> Result<&Kernel, Error> {
        if weights.bias() == [DevicePtr::NULL; 2] {
            return Ok(&self.kernel);
        }
        if let Some(kernel) = self.with_bias.get() {
            return Ok(kernel);
        }
        let variant = Variant { bias: true, ..self.variant.clone() };
        let kernel = Kernel::new(self.gpu, &self.name, &variant, self.desc.n)?;
        Ok(self.with_bias.get_or_init(|| kernel))
    }

    fn specs(&self, call: &DeviceCall, weights: &DeviceWeights) -> Result<Vec<LaunchSpec>, Error> {
        let &DualGemmDesc { out, epilogue, .. } = &self.desc;
        let mut specs = Vec::new();
        let (a, scale, device_scale) = self.prologue.specs(call, &mut specs)?;
        let [gate, up] = weights.alpha();
        let alpha = [gate * epilogue.alpha_gate * scale, up * epilogue.alpha_up * scale];
        let (c, scales) = match (call.c, out) {
            (DeviceC::Nvfp4 { codes, scales, .. }, OutFormat::Nvfp4 { .. }) => (codes, scales),
            (DeviceC::Float(c), OutFormat::F32 | OutFormat::F16 | OutFormat::Bf16) => (c, DevicePtr::NULL),
            (found, expected) => {
                let found = if matches!(found, DeviceC::Float(_)) { "floats" } else { "nvfp4" };
                let expected = expected.to_string();
                return Err(Error::Operand { tensor: "C", found: found.into(), expected });
            }
        };
        let scale = match out {
            OutFormat::Nvfp4 { global_scale: OutScale::Static(scale), .. } => scale,
            _ => 1.0,
        };
        let output =
            Output { scales, scale, bias: weights.bias(), a_scale: device_scale, ..Output::new(c, alpha) };
        let [gate, up] = weights.atoms()?.map(|half| operand(&half));
        let args = FusedArgs { a, gate, up, output, groups: None };
        specs.push(self.kernel(weights)?.spec(&args)?);
        Ok(specs)
    }
}

impl Prepared for Ready {
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error> {
        self.kernel(weights).map(drop)
    }

    fn run(&self, call: &DeviceCall, weights: &Arc<DeviceWeights>, stream: Stream) -> Result<(), Error> {
        let key = (weights.id(), call.key());
        self.launches.run(self.gpu, key, stream, || self.specs(call, weights))
    }
}

/// What brings A to what the kernel takes.
#[derive(Debug)]
pub(super) struct Prologue {
    k: usize,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Codes and 128x4 scales.
    Direct,
    /// 16-bit floats, which the kernel multiplies.
    Halves(HalfFormat),
    /// Scales lie in rows.
    Rows { kernel: ScaleAtoms, scales: Buffer },
    /// A is floats.
    Floats { kernel: Quantize, codes: Buffer, scales: Buffer, scale: Tensor },
}

/// The tensor scale of a quantized A.
#[derive(Debug)]
enum Tensor {
    Static(GlobalScale),
    /// Parts of the largest magnitude, and the scale.
    Dynamic {
        amax: Amax,
        parts: Buffer,
        scale: Buffer,
    },
}

impl Prologue {
    pub(super) fn new(gpu: &'static Gpu, desc: &DualGemmDesc, layout: ScaleLayout) -> Result<Self, Error> {
        let &DualGemmDesc { m, k, a, quantize_a, .. } = desc;
        let scales = || Buffer::new(gpu, ScaleLayout::Sf128x4.len(m, k / 16));
        let floats = match a {
            AFormat::F32 => FloatType::F32,
            AFormat::Bf16 => FloatType::Bf16,
            _ => FloatType::F16,
        };
        let kind = match (quantize_a, layout) {
            (QuantizeA::No, _) if a == AFormat::F16 => Kind::Halves(HalfFormat::F16),
            (QuantizeA::No, _) if a == AFormat::Bf16 => Kind::Halves(HalfFormat::Bf16),
            (QuantizeA::No, ScaleLayout::Sf128x4) => Kind::Direct,
            (QuantizeA::No, ScaleLayout::Linear) => {
                Kind::Rows { kernel: ScaleAtoms::new(gpu)?, scales: scales()? }
            }
            (QuantizeA::No, ScaleLayout::Sf8x4) => {
                let reason = "A's scales are in 8x4 order; it takes rows and 128x4".into();
                return Err(Error::Unsupported { strategy: Native.name(), reason });
            }
            (how, _) => {
                let sink = Sink::Codes(ScaleLayout::Sf128x4);
                let kernel = Quantize::new(gpu, floats, sink, how == QuantizeA::Dynamic)?;
                let scale = match how {
                    QuantizeA::Static(scale) => Tensor::Static(GlobalScale::multiplier(scale)),
                    _ => Tensor::Dynamic {
                        amax: Amax::new(gpu, floats)?,
                        parts: Buffer::new(gpu, 4 * MAX_PARTS as usize)?,
                        scale: Buffer::new(gpu, 4)?,
                    },
                };
                Kind::Floats { kernel, codes: Buffer::new(gpu, m * k / 2)?, scales: scales()?, scale }
            }
        };
        Ok(Self { k, kind })
    }

    /// Lists the launches; A, its tensor scale, and one in device memory or null.
    pub(super) fn specs(
        &self,
        call: &DeviceCall,
        specs: &mut Vec<LaunchSpec>,
    ) -> Result<(Operand, f32, DevicePtr), Error> {
        let (m, k, null) = (call.m, self.k, DevicePtr::NULL);
        let rows = |codes, scales| operand(&Codes { m, k, codes, pitch: k / 2, scales });
        match (&self.kind, call.a) {
            (Kind::Halves(half), DeviceA::Float { values, pitch }) => {
                let format = Format::Half(*half);
                Ok((Operand { format, rows: m, k, codes: values, pitch, scales: null, atoms: 0 }, 1.0, null))
            }
            (Kind::Direct, DeviceA::Nvfp4 { codes, scales, global_scale }) => {
                Ok((rows(codes, scales), global_scale, null))
            }
            (Kind::Rows { kernel, scales: atoms }, DeviceA::Nvfp4 { codes, scales, global_scale }) => {
                specs.push(kernel.spec((m, k / 16), scales, atoms.ptr())?);
                Ok((rows(codes, atoms.ptr()), global_scale, null))
            }
            (Kind::Floats { kernel, codes, scales, scale }, DeviceA::Float { values, pitch }) => {
                let a = Floats { m, k, values, pitch };
                let out = quantize::Out::Codes { codes: codes.ptr(), scales: scales.ptr() };
                let (scale, host, device) = match scale {
                    Tensor::Static(scale) => (Scale::Static(*scale), scale.value(), null),
                    Tensor::Dynamic { amax, parts, scale } => {
                        specs.push(amax.spec(&a, parts.ptr())?);
                        (Scale::Dynamic { parts: parts.ptr(), scale: scale.ptr() }, 1.0, scale.ptr())
                    }
                };
                specs.push(kernel.spec(&a, &out, &scale)?);
                Ok((rows(codes.ptr(), scales.ptr()), host, device))
            }
            (kind, found) => {
                let name = |floats| if floats { "floats" } else { "nvfp4" };
                Err(Error::Operand {
                    tensor: "A",
                    found: name(matches!(found, DeviceA::Float { .. })).into(),
                    expected: name(matches!(kind, Kind::Floats { .. } | Kind::Halves(_))).into(),
                })
            }
        }
    }
}
