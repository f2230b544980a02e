//! The fused kernel without prepack: weights are read as producers write them, so nothing is kept between calls but
//! what the checkpoint holds. A is brought into the order of K that makes rows of codes fragments of registers.

use dualgemm_device::{DeviceInfo, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatType};
use dualgemm_gemm::{DualGemmDesc, QuantizeA};
use dualgemm_kernels::plain::config::Config;
use dualgemm_kernels::plain::host::{Fused as Kernel, FusedArgs};
use dualgemm_kernels::sm90a::decode::WEIGHT_FACTOR;

use super::launched::{Kernels, Launched, Weights};
use super::{Prepared, Strategy, float_c, require_sm90a, rows_are_aligned};
use crate::prologue::{Order, Prologue, compute_type};
use crate::{DeviceCall, Error, Gpu, GpuPlan, WeightForm, model};

/// See the [module](self).
#[derive(Debug)]
pub struct Plain;

impl Strategy for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn doc(&self) -> &'static str {
        "fused, on weights as the checkpoint has them: nothing prepacked, A permuted on each call"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Plain
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        require_sm90a(self.name(), info)?;
        let unsupported = |reason: String| Err(Error::Unsupported { strategy: self.name(), reason });
        if compute_type(desc) != Ok(FloatType::F16) || desc.quantize_a != QuantizeA::No {
            return unsupported(format!(
                "A is {}, or quantized on the way in; it takes f16 and nvfp4",
                desc.a
            ));
        }
        if desc.b != BlockFormat::Nvfp4 || !desc.k.is_multiple_of(32) {
            return unsupported(format!(
                "B is {} with K = {}; it takes nvfp4 with K a multiple of 32",
                desc.b, desc.k
            ));
        }
        let out = float_c(self.name(), desc)?;
        let fits = |config: &Config| config.layout(out).is_ok();
        Ok(Config::MENU.into_iter().filter(fits).map(|config| config.name()).collect())
    }

    fn estimate_us(&self, desc: &DualGemmDesc, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        let config = Config::named(kernel).ok()?;
        Some(model::plain_us(desc, info, &config))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let desc = plan.desc;
        let out = float_c(self.name(), &desc)?;
        let aligned = rows_are_aligned(&desc);
        let program = desc.epilogue.activation.program();
        let kernel = Kernel::new(gpu, Config::named(&plan.kernel)?, out, &program, aligned)?;
        let prologue = Prologue::new(gpu, plan, Order::Permuted)?;
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
    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let DualGemmDesc { n, k, .. } = self.desc;
        let mut specs = Vec::new();
        let a = self.prologue.specs(call.m, &call.a, None, &mut specs)?;
        let output = weights.output(call, &self.desc, &a, WEIGHT_FACTOR)?;
        let (size, weights) = ((call.m, n, k), weights.one()?.plain()?);
        let args = FusedArgs { size, a: a.values, a_pitch: a.pitch, weights, output };
        specs.push(self.kernel.spec(self.gpu, &args)?);
        Ok(specs)
    }
}
