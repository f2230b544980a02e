//! The fused kernels of Blackwell. Its tensor cores multiply nvfp4 and mxfp4 and apply block scales, so codes stay as they
//! are and scales are brought into 128x4 atoms: those of the weights once, those of A, where they lie in rows, on each call.
//! Beside A in f16 or bf16, which they do not multiply with nvfp4, the kernel of sm_100 widens the weights on their way.
//!
//! Simulated and assembled, not yet run on silicon.

use dualgemm_device::{Arch, Device, DeviceInfo, LaunchSpec};
use dualgemm_formats::BlockFormat;
use dualgemm_gemm::{AFormat, DualGemmDesc, Operation};
use dualgemm_kernels::parts::operand::{Formats, FusedArgs};
use dualgemm_kernels::parts::rows::Variant;
use dualgemm_kernels::{sm100a, sm120a};
use dualgemm_ptx::builder::HalfFormat;

use super::launched::{Destination, Kernels, Launched, Variants, Weights, rows_of};
use super::requantize::Requantize;
use super::scaled::Prologue;
use super::{Prepared, Strategy};
use crate::blackwell::{self, Estimate};
use crate::{DeviceCall, Error, Gpu, GpuPlan, WeightForm, model};

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
        match (self, desc.a_compute(), desc.b) {
            (_, AFormat::Nvfp4, BlockFormat::Nvfp4) => Some(Formats::NVFP4),
            (_, AFormat::Mxfp4, BlockFormat::Mxfp4) => Some(Formats::MXFP4),
            (Self::Sm100, AFormat::F16, BlockFormat::Nvfp4) => Some(Formats::Wide(HalfFormat::F16)),
            (Self::Sm100, AFormat::Bf16, BlockFormat::Nvfp4) => Some(Formats::Wide(HalfFormat::Bf16)),
            _ => None,
        }
    }

    fn kernels(self, desc: &DualGemmDesc, formats: Formats, grouped: bool) -> Vec<String> {
        let Self::Sm100 = self else {
            return sm120a::config::Config::menu(formats.weights()).map(|config| config.name()).into();
        };
        // No tile is sure to hold all tokens of a group.
        let tokens = if grouped { usize::MAX } else { desc.m };
        let menu = sm100a::config::Config::menu(formats).into_iter();
        menu.filter(|config| config.takes(tokens, desc.k)).map(|config| config.name()).collect()
    }
}

impl Native {
    fn unsupported<T>(&self, reason: String) -> Result<T, Error> {
        Err(Error::Unsupported { strategy: self.name(), reason })
    }

    /// Whether it takes the problem, by which kernels and as what.
    fn check(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<(Family, Formats), Error> {
        let Some(family) = Family::of(info.arch) else {
            return self.unsupported(format!(
                "its kernels are for sm_100 and sm_120; this is {}, {}",
                info.name, info.arch
            ));
        };
        let Some(formats) = family.formats(desc).filter(|_| desc.k.is_multiple_of(32)) else {
            return self.unsupported(format!(
                "A is {}, B is {}, K = {}; it takes nvfp4 (also floats quantized to it) with nvfp4, mxfp4 with mxfp4, \
                 on sm_100 f16 and bf16 with nvfp4, and K a multiple of 32",
                desc.a, desc.b, desc.k
            ));
        };
        if desc.epilogue.round_gate_up_to_bf16 {
            return self.unsupported("it does not round gate and up to bf16".into());
        }
        Ok((family, formats))
    }
}

impl Strategy for Native {
    fn name(&self) -> &'static str {
        "native"
    }

    fn doc(&self) -> &'static str {
        "one kernel on tensor cores that multiply nvfp4 and mxfp4, nothing packed; simulated, not yet run on silicon"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Atoms
    }

    fn automatic(&self) -> bool {
        true
    }

    fn takes(&self, _: Operation) -> bool {
        true
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        let (family, formats) = self.check(desc, info)?;
        Ok(family.kernels(desc, formats, false))
    }

    fn grouped_kernels(
        &self,
        desc: &DualGemmDesc,
        _: usize,
        info: &DeviceInfo,
    ) -> Result<Vec<String>, Error> {
        let (family, formats) = self.check(desc, info)?;
        Requantize::check_grouped(self.name(), desc)?;
        Ok(family.kernels(desc, formats, true))
    }

    /// Groups of `rows` rows with weights of their own are to tiles and memory what so many times the features would be.
    fn estimate_us(
        &self,
        desc: &DualGemmDesc,
        groups: usize,
        info: &DeviceInfo,
        kernel: &str,
    ) -> Option<f64> {
        let (groups, rows) = model::groups_of(desc.m, groups);
        // Gate and up of a linear layer are the halves of its features.
        let n = match desc.op {
            Operation::GateUp => desc.n,
            Operation::Linear => desc.n.div_ceil(2),
        };
        // Each group ends with whole tiles.
        let size = |tiles: usize, features: u32| match groups {
            1 => (rows, n, desc.k),
            _ => (rows, groups * tiles * features as usize, desc.k),
        };
        let kernel_us = match Family::of(info.arch)? {
            Family::Sm100 => {
                let config = sm100a::config::Config::named(kernel).ok()?;
                let size = size(config.feature_tiles(n), config.tile_features());
                Estimate::new(&config, size).ok()?.kernel_us()
            }
            Family::Sm120 => {
                let config = sm120a::config::Config::named(kernel).ok()?;
                let size = size(n.div_ceil(config.features as usize), config.features);
                blackwell::workstation_us(&config, size, info)
            }
        };
        Some(kernel_us + model::ENDS)
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let (desc, prologue) = (plan.desc, Prologue::new(gpu, plan)?);
        let variant = Variant { linear: desc.op == Operation::Linear, ..rows_of(&desc) };
        let (name, kernels) = (plan.kernel.clone(), Variants::new(plan.groups > 1));
        let requantize = Requantize::of(gpu, &desc)?;
        let ready = Ready { gpu, desc, prologue, name, variant, kernels, requantize };
        ready.kernels.first(|grouped, bias| ready.load(grouped, bias))?;
        Ok(Launched::prepared(gpu, ready))
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

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    name: String,
    variant: Variant,
    kernels: Variants<Kernel>,
    requantize: Option<Requantize>,
}

impl Ready {
    fn load(&self, grouped: bool, bias: bool) -> Result<Kernel, Error> {
        let variant = Variant { grouped, bias, ..self.variant.clone() };
        Kernel::new(self.gpu, &self.name, &variant, self.desc.n)
    }

    fn kernel(&self, weights: Weights<'_>) -> Result<&Kernel, Error> {
        self.kernels.get(weights, |grouped, bias| self.load(grouped, bias))
    }
}

impl Kernels for Ready {
    fn warm(&self, weights: Weights<'_>) -> Result<(), Error> {
        self.kernel(weights)?;
        if let Weights::Groups(experts, ..) = weights {
            self.prologue.reserve(Some(experts.count()))?;
        }
        Ok(())
    }

    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let kernel = self.kernel(weights)?;
        let [gate, up] = match weights {
            Weights::One(weights) => weights.atoms(self.desc.op)?,
            Weights::Groups(experts, ..) => experts.atoms(self.desc.op)?,
        };
        let mut specs = Vec::new();
        let a = self.prologue.specs(call.m, &call.a, weights.groups().as_ref(), &mut specs)?;
        let to = Destination::of(call, &self.desc)?;
        let product = self.requantize.as_ref().map_or(to, Requantize::product);
        let output = weights.output(&product, &self.desc.epilogue, a.scale, a.device_scale)?;
        specs.push(kernel.spec(&FusedArgs {
            a: a.operand,
            gate,
            up,
            output,
            groups: weights.group_args(),
        })?);
        if let Some(requantize) = &self.requantize {
            requantize.specs(call.m, &to, &mut specs)?;
        }
        Ok(specs)
    }
}
