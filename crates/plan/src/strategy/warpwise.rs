//! The fused kernel for a few rows on Hopper, by `mma.sync`: each warp brings weights of its own from memory, ahead of the
//! end of the kernel before. It reads the same pack, and nvfp4 activations as they are, without a kernel that expands them.

use dualgemm_device::{DeviceInfo, DevicePtr, LaunchSpec};
use dualgemm_gemm::{AFormat, DualGemmDesc, QuantizeA};
use dualgemm_kernels::parts::rows;
use dualgemm_kernels::warpwise::config::Config;
use dualgemm_kernels::warpwise::fused::{A, Variant};
use dualgemm_kernels::warpwise::host::{Fused as Kernel, FusedArgs};
use dualgemm_ptx::builder::HalfFormat;

use super::launched::{Destination, Kernels, Launched, Variants, Weights, rows_of};
use super::{Prepared, Strategy, require_sm90a};
use crate::prologue::half_format;
use crate::{DeviceA, DeviceCall, Error, Gpu, GpuPlan, WeightForm, model};

/// See the [module](self).
#[derive(Debug)]
pub struct Warpwise;

impl Warpwise {
    /// What the kernel makes of the sums, and its type of A if that is floats.
    fn variant(&self, desc: &DualGemmDesc) -> Result<(Option<HalfFormat>, rows::Variant), String> {
        let half = half_format(desc)?;
        let half = (desc.a != AFormat::Nvfp4).then_some(half);
        if desc.quantize_a != QuantizeA::No {
            return Err("A is quantized on the way in, by a kernel that finds no room beside this one".into());
        }
        if desc.epilogue.round_gate_up_to_bf16 {
            return Err("it does not round gate and up to bf16".into());
        }
        if desc.out.is_dynamic() {
            return Err("C has a dynamic scale; it writes floats, or nvfp4 under a static one".into());
        }
        Ok((half, rows_of(desc)))
    }
}

impl Strategy for Warpwise {
    fn name(&self) -> &'static str {
        "warpwise"
    }

    fn doc(&self) -> &'static str {
        "fused, for up to 16 rows: each warp brings weights of its own, by mma.sync"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Packed
    }

    fn automatic(&self) -> bool {
        true
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        require_sm90a(self.name(), info)?;
        let unsupported = |reason: String| Err(Error::Unsupported { strategy: self.name(), reason });
        let half = match self.variant(desc) {
            Ok((half, rows)) if rows.check(desc.n).is_ok() => half,
            Ok(_) => return unsupported(format!("C is nvfp4 of {} features, no multiple of 16", desc.n)),
            Err(reason) => return unsupported(reason),
        };
        let most = Config::menu().filter(|config| half.is_some() || config.expands_codes());
        let most = most.map(|config| config.tokens as usize).max().unwrap_or(0);
        if desc.m > most {
            return unsupported(format!("M = {}; of {} it takes up to {most} rows", desc.m, desc.a));
        }
        // A tile no larger than it must be: rows beyond the last one are read again.
        let tokens = desc.m.next_power_of_two().max(2);
        let fits = |config: &Config| config.tokens as usize == tokens;
        Ok(Config::menu().filter(fits).map(|config| config.name()).collect())
    }

    fn estimate_us(&self, desc: &DualGemmDesc, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        Some(model::warpwise_us(desc, info, &Config::named(kernel).ok()?))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let desc = plan.desc;
        let (half, rows) =
            self.variant(&desc).map_err(|reason| Error::Unsupported { strategy: self.name(), reason })?;
        let a = half.map_or(A::Nvfp4(plan.a_scale_layout), A::Half);
        let variant = Variant { a, whole_blocks: desc.k.is_multiple_of(64), rows };
        let kernels = Variants::new(false);
        let ready = Ready { gpu, desc, config: Config::named(&plan.kernel)?, variant, kernels };
        ready.kernels.first(|_, bias| ready.load(bias))?;
        Ok(Launched::prepared(gpu, ready))
    }
}

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    config: Config,
    variant: Variant,
    kernels: Variants<Kernel<'static>>,
}

impl Ready {
    fn load(&self, bias: bool) -> Result<Kernel<'static>, Error> {
        let rows = rows::Variant { bias, ..self.variant.rows.clone() };
        Ok(Kernel::new(self.gpu, self.config, &Variant { rows, ..self.variant.clone() })?)
    }
}

impl Kernels for Ready {
    fn warm(&self, weights: Weights<'_>) -> Result<(), Error> {
        self.kernels.get(weights, |_, bias| self.load(bias)).map(drop)
    }

    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let &DualGemmDesc { n, k, epilogue, .. } = &self.desc;
        let kernel = self.kernels.get(weights, |_, bias| self.load(bias))?;
        let (a, a_pitch, a_scales, a_scale) = match (call.a, self.variant.a) {
            (DeviceA::Float { values, pitch }, A::Half(_)) => (values, pitch, DevicePtr::NULL, 1.0),
            (DeviceA::Nvfp4 { codes, scales, global_scale }, A::Nvfp4(_)) => (codes, 0, scales, global_scale),
            (found, _) => {
                let (found, expected) = (found.kind().into(), self.desc.a.to_string());
                return Err(Error::Operand { tensor: "A", found, expected });
            }
        };
        let to = Destination::of(call, &self.desc)?;
        let output = weights.output(&to, &epilogue, a_scale, DevicePtr::NULL)?;
        let weights = weights.one()?.packed(self.desc.op)?;
        let args = FusedArgs { size: (call.m, n, k), a, a_pitch, a_scales, weights, output };
        Ok(vec![kernel.spec(&args)?])
    }
}
