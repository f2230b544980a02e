//! The fused kernel without prepack: weights are read as producers write them, so nothing is kept between calls but
//! what the checkpoint holds. A is brought into the order of K that makes rows of codes fragments of registers.

use dualgemm_device::{DeviceInfo, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatType};
use dualgemm_gemm::{DualGemmDesc, QuantizeA};
use dualgemm_kernels::parts::rows::{Output, Variant};
use dualgemm_kernels::plain::config::Config;
use dualgemm_kernels::plain::host::{Fused as Kernel, FusedArgs};
use dualgemm_kernels::sm90a::decode::WEIGHT_FACTOR;

use super::launched::Weights;
use super::one_product::{OneProduct, Product};
use super::{Prepared, Strategy, kernels_for_c, require_sm90a};
use crate::prologue::{Order, PreparedA, compute_type};
use crate::{Error, Gpu, GpuPlan, WeightForm, model};

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
        kernels_for_c(self.name(), desc, Config::MENU, |config, out| {
            config.layout(out).is_ok().then(|| config.name())
        })
    }

    fn estimate_us(&self, desc: &DualGemmDesc, _: usize, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        let config = Config::named(kernel).ok()?;
        Some(model::plain_us(desc, info, &config))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        OneProduct::prepared(gpu, plan, Order::Permuted, PlainProduct(Config::named(&plan.kernel)?))
    }
}

#[derive(Debug)]
struct PlainProduct(Config);

impl Product for PlainProduct {
    type Kernel = Kernel<'static>;

    fn load(&self, gpu: &'static Gpu, rows: &Variant) -> Result<Self::Kernel, Error> {
        Ok(Kernel::new(gpu, self.0, rows)?)
    }

    fn factor(&self) -> f32 {
        WEIGHT_FACTOR
    }

    fn spec(
        &self,
        kernel: &Self::Kernel,
        size: (usize, usize, usize),
        a: &PreparedA,
        weights: Weights<'_>,
        output: Output,
    ) -> Result<LaunchSpec, Error> {
        let weights = weights.one()?.plain()?;
        Ok(kernel.spec(&FusedArgs { size, a: a.values, a_pitch: a.pitch, weights, output })?)
    }
}
