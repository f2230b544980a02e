//! The fused kernel by `mma.sync`, for every NVIDIA GPU from sm_80 on: slower than what is written for one architecture,
//! but nobody is turned away. It reads the same pack.

use dualgemm_device::{DeviceInfo, LaunchSpec};
use dualgemm_formats::FloatType;
use dualgemm_gemm::DualGemmDesc;
use dualgemm_kernels::sm80::config::Config;
use dualgemm_kernels::sm80::fused::Variant;
use dualgemm_kernels::sm80::host::{Fused as Kernel, FusedArgs};
use dualgemm_ptx::builder::HalfFormat;

use super::launched::{Kernels, Launched, Weights};
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
        let out = float_c(self.name(), desc)?;
        let fits = |config: &Config| config.layout(out).is_ok();
        Ok(Config::MENU.into_iter().filter(fits).map(|config| config.name()).collect())
    }

    fn estimate_us(&self, desc: &DualGemmDesc, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        Some(model::portable_us(desc, info, &Config::named(kernel).ok()?))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let desc = plan.desc;
        let variant = Variant {
            compute: match compute_type(&desc) {
                Ok(FloatType::Bf16) => HalfFormat::Bf16,
                _ => HalfFormat::F16,
            },
            out: float_c(self.name(), &desc)?,
            aligned: rows_are_aligned(&desc),
        };
        let program = desc.epilogue.activation.program();
        let kernel = Kernel::new(gpu, Config::named(&plan.kernel)?, &variant, &program)?;
        let prologue = Prologue::new(gpu, plan, Order::Rows)?;
        Ok(Launched::prepared(gpu, Ready { gpu, desc, prologue, kernel }))
    }
}

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    kernel: Kernel,
}

impl Kernels for Ready {
    fn warm(&self, weights: Weights<'_>) -> Result<(), Error> {
        weights.one()?.packed_too(self.gpu).map(drop)
    }

    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let DualGemmDesc { n, k, .. } = self.desc;
        let (weights, mut specs) = (Weights::One(weights.one()?.packed_too(self.gpu)?), Vec::new());
        let a = self.prologue.specs(call.m, &call.a, None, &mut specs)?;
        let output = weights.output(call, &self.desc, &a, 1.0)?;
        let size = (call.m, n, k);
        let weights = weights.one()?.packed()?;
        let args = FusedArgs { size, a: a.values, a_pitch: a.pitch, weights, output };
        specs.push(self.kernel.spec(&args)?);
        Ok(specs)
    }
}
