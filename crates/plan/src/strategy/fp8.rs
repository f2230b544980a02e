//! What one would run if 4-bit weights were 8-bit ones: both operands rounded to e4m3, one fused kernel on the products
//! that Hopper has.
//!
//! For comparison only. A code and a block scale together have six significant bits; e4m3 keeps four of them, and A
//! loses as much: C is off by about 5 %, which the column of errors shows. No plan takes it unasked. Scales are one per
//! tensor, as in the plain form of e4m3 serving: that of a weight matrix makes the largest value which its block scales
//! allow 448, an nvfp4 A fills the range in the same way, and a float A gets its scale on each call, from its largest
//! magnitude.

use dualgemm_device::{DeviceInfo, LaunchSpec};
use dualgemm_formats::BlockFormat;
use dualgemm_gemm::{DualGemmDesc, QuantizeA};
use dualgemm_kernels::fp8::config::Config;
use dualgemm_kernels::fp8::host::{Fused as Kernel, FusedArgs};
use dualgemm_kernels::parts::rows::{Output, Variant};

use super::launched::Weights;
use super::one_product::{OneProduct, Product};
use super::{Prepared, Rounding, Strategy, kernels_for_c, require_sm90a};
use crate::prologue::{Order, PreparedA, compute_type};
use crate::{Error, Gpu, GpuPlan, WeightForm, model};

/// See the [module](self).
#[derive(Debug)]
pub struct Fp8;

impl Strategy for Fp8 {
    fn name(&self) -> &'static str {
        "fp8"
    }

    fn doc(&self) -> &'static str {
        "fused, A and weights rounded to e4m3: not exact, for comparison only"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::E4m3
    }

    fn rounding(&self) -> Rounding {
        Rounding::Operands
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        require_sm90a(self.name(), info)?;
        let unsupported = |reason: String| Err(Error::Unsupported { strategy: self.name(), reason });
        if let Err(reason) = compute_type(desc) {
            return unsupported(reason);
        }
        if desc.quantize_a != QuantizeA::No {
            return unsupported("A is quantized to nvfp4 on the way in; it rounds A to e4m3 itself".into());
        }
        if desc.b != BlockFormat::Nvfp4 {
            return unsupported(format!("B is {}; it takes nvfp4", desc.b));
        }
        kernels_for_c(self.name(), desc, Config::MENU, |config, out| {
            config.layout(out).is_ok().then(|| config.name())
        })
    }

    fn estimate_us(&self, desc: &DualGemmDesc, _: usize, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        Some(model::fp8_us(desc, info, &Config::named(kernel).ok()?))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        OneProduct::prepared(gpu, plan, Order::E4m3, Fp8Product(Config::named(&plan.kernel)?))
    }
}

#[derive(Debug)]
struct Fp8Product(Config);

impl Product for Fp8Product {
    type Kernel = Kernel<'static>;

    fn load(&self, gpu: &'static Gpu, rows: &Variant) -> Result<Self::Kernel, Error> {
        Ok(Kernel::new(gpu, self.0, rows)?)
    }

    fn spec(
        &self,
        kernel: &Self::Kernel,
        size: (usize, usize, usize),
        a: &PreparedA,
        weights: Weights<'_>,
        output: Output,
    ) -> Result<LaunchSpec, Error> {
        let [gate, up] = weights.one()?.e4m3()?;
        Ok(kernel.spec(&FusedArgs { size, a: a.values, gate, up, output })?)
    }
}
