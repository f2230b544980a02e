//! The fused kernel by `mma.sync`, for every NVIDIA GPU from sm_80 on: slower than what is written for one architecture,
//! but nobody is turned away. It reads the same pack. C in nvfp4 is made of its f32 by a kernel of its own.

use dualgemm_device::{DeviceInfo, LaunchSpec};
use dualgemm_formats::FloatType;
use dualgemm_gemm::{DualGemmDesc, Operation};
use dualgemm_kernels::sm80::config::Config;
use dualgemm_kernels::sm80::fused::Variant;
use dualgemm_kernels::sm80::host::{Fused as Kernel, FusedArgs};
use dualgemm_ptx::builder::HalfFormat;

use super::launched::{Destination, Kernels, Launched, Weights};
use super::requantize::Requantize;
use super::{Prepared, Strategy, float_c, rows_are_aligned};
use crate::prologue::{Order, Prologue, compute_type};
use crate::{DeviceCall, Error, Gpu, GpuPlan, WeightForm, model};

/// See the [module](self).
#[derive(Debug)]
pub struct Portable;

impl Strategy for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn doc(&self) -> &'static str {
        "fused by mma.sync, for every NVIDIA GPU from sm_80 on"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Packed
    }

    fn automatic(&self) -> bool {
        true
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        let unsupported = |reason: String| Err(Error::Unsupported { strategy: self.name(), reason });
        if info.arch.major < 8 {
            return unsupported(format!("its kernel needs sm_80; this is {}, {}", info.name, info.arch));
        }
        if let Err(reason) = compute_type(desc) {
            return unsupported(reason);
        }
        let out = float_c(self.name(), &Requantize::float_problem(desc))?;
        let fits = |config: &Config| config.layout(out).is_ok();
        Ok(Config::MENU.into_iter().filter(fits).map(|config| config.name()).collect())
    }

    fn estimate_us(&self, desc: &DualGemmDesc, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        Some(model::portable_us(desc, info, &Config::named(kernel).ok()?))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let (desc, product) = (plan.desc, Requantize::float_problem(&plan.desc));
        let variant = Variant {
            compute: match compute_type(&desc) {
                Ok(FloatType::Bf16) => HalfFormat::Bf16,
                _ => HalfFormat::F16,
            },
            out: float_c(self.name(), &product)?,
            aligned: rows_are_aligned(&product),
        };
        let program = desc.epilogue.activation.program();
        let kernel = Kernel::new(gpu, Config::named(&plan.kernel)?, &variant, &program)?;
        let prologue = Prologue::new(gpu, plan, Order::Rows)?;
        let requantize = Requantize::of_floats(gpu, &desc)?;
        Ok(Launched::prepared(gpu, Ready { gpu, desc, prologue, kernel, requantize }))
    }
}

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    kernel: Kernel,
    requantize: Option<Requantize>,
}

impl Kernels for Ready {
    fn warm(&self, weights: Weights<'_>) -> Result<(), Error> {
        weights.one()?.packed_too(self.gpu).map(drop)
    }

    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let DualGemmDesc { n, k, .. } = self.desc;
        let (weights, mut specs) = (Weights::One(weights.one()?.packed_too(self.gpu)?), Vec::new());
        let a = self.prologue.specs(call.m, &call.a, None, &mut specs)?;
        let (to, mut output) =
            (Destination::of(call, &self.desc)?, weights.output(call, &self.desc, &a, 1.0)?);
        output.c = self.requantize.as_ref().map_or(to, Requantize::product).c;
        let size = (call.m, n, k);
        let weights = weights.one()?.packed(Operation::GateUp)?;
        let args = FusedArgs { size, a: a.values, a_pitch: a.pitch, weights, output };
        specs.push(self.kernel.spec(&args)?);
        if let Some(requantize) = &self.requantize {
            requantize.specs(call.m, &to, &mut specs)?;
        }
        Ok(specs)
    }
}
