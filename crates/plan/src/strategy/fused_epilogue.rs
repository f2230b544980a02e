//! Two products one after the other, each by Hopper's kernel on a pack of one matrix: gate's sums go to memory, and the
//! epilogue of up's product reads them and stores C. What a library with epilogues of one's own makes possible without a
//! dual kernel: A is read twice, and 8 bytes for each element of C are written and read.

use dualgemm_device::{DeviceInfo, LaunchSpec};
use dualgemm_gemm::DualGemmDesc;
use dualgemm_kernels::sm90a::config::Config;
use dualgemm_kernels::sm90a::host::{Fused as Kernel, FusedArgs};
use dualgemm_kernels::sm90a::variant::{Products, Variant};

use super::fused::variant_of;
use super::launched::{Destination, Kernels, Launched, Variants, Weights};
use super::{Prepared, Strategy, float_out, require_sm90a};
use crate::prologue::{Order, Prologue};
use crate::{Buffer, DeviceCall, Error, Gpu, GpuPlan, WeightForm, model};

/// See the [module](self).
#[derive(Debug)]
pub struct FusedEpilogue;

impl FusedEpilogue {
    /// What the launch of up computes.
    fn variant(&self, desc: &DualGemmDesc) -> Result<Variant, Error> {
        let unsupported = |reason| Error::Unsupported { strategy: self.name(), reason };
        if float_out(desc.out).is_none() {
            return Err(unsupported(format!("C is {}; it writes floats", desc.out)));
        }
        Ok(Variant { products: Products::Up, ..variant_of(desc).map_err(unsupported)? })
    }
}

impl Strategy for FusedEpilogue {
    fn name(&self) -> &'static str {
        "fused-epilogue"
    }

    fn doc(&self) -> &'static str {
        "two products by the kernel of fused: gate's sums to memory, then up, whose epilogue reads them"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::PackedApart
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        require_sm90a(self.name(), info)?;
        let variant = self.variant(desc)?;
        let fits = |config: &Config| config.layout(&variant).is_ok();
        Ok(Config::MENU.into_iter().filter(fits).map(|config| config.name()).collect())
    }

    fn estimate_us(&self, desc: &DualGemmDesc, _: usize, info: &DeviceInfo, kernel: &str) -> Option<f64> {
        Some(model::apart_us(desc, info, &Config::named(kernel).ok()?))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let desc = plan.desc;
        let (config, variant) = (Config::named(&plan.kernel)?, self.variant(&desc)?);
        let gate = Kernel::new(gpu, config, &variant.gate_before())?;
        let ready = Ready {
            gpu,
            desc,
            prologue: Prologue::new(gpu, plan, Order::Rows)?,
            sums: Buffer::new(gpu, gate.gate_sums_bytes(desc.m, desc.n))?,
            gate,
            variant,
            up: Variants::new(false),
        };
        ready.up.first(|_, bias| ready.load_up(bias))?;
        Ok(Launched::prepared(gpu, ready))
    }
}

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    prologue: Prologue,
    gate: Kernel<'static>,
    sums: Buffer,
    /// What the launch of up computes.
    variant: Variant,
    up: Variants<Kernel<'static>>,
}

impl Ready {
    fn load_up(&self, bias: bool) -> Result<Kernel<'static>, Error> {
        let variant = Variant { bias, ..self.variant.clone() };
        Ok(Kernel::new(self.gpu, *self.gate.config(), &variant)?)
    }

    fn up(&self, weights: Weights<'_>) -> Result<&Kernel<'static>, Error> {
        self.up.get(weights, |_, bias| self.load_up(bias))
    }
}

impl Kernels for Ready {
    fn warm(&self, weights: Weights<'_>) -> Result<(), Error> {
        self.up(weights).map(drop)
    }

    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let &DualGemmDesc { n, k, epilogue, .. } = &self.desc;
        let mut specs = Vec::new();
        let a = self.prologue.specs(call.m, &call.a, None, &mut specs)?;
        let to = Destination::of(call, &self.desc)?;
        let output = weights.output(&to, &epilogue, a.scale, a.device_scale)?;
        let [gate, up] = weights.one()?.packed_apart()?;
        let args = FusedArgs {
            lda: a.pitch / 2,
            gate_sums: self.sums.ptr(),
            ..FusedArgs::new(a.values, gate, output, (call.m, n, k))
        };
        specs.push(self.gate.spec(&args)?);
        specs.push(self.up(weights)?.spec(&FusedArgs { pack: up, ..args })?);
        Ok(specs)
    }
}
