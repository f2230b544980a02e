//! The fused kernel for a few rows on Hopper, by `mma.sync`: each warp brings weights of its own from memory, ahead of the
//! end of the kernel before. It reads the same pack, and nvfp4 activations as they are; of more than eight rows a kernel before
//! expands them.

use dualgemm_device::{DeviceInfo, DevicePtr, LaunchSpec};
use dualgemm_gemm::{AFormat, DualGemmDesc, Operation, QuantizeA};
use dualgemm_kernels::parts::rows;
use dualgemm_kernels::warpwise::config::Config;
use dualgemm_kernels::warpwise::fused::{A, Variant};
use dualgemm_kernels::warpwise::host::{Fused as Kernel, FusedArgs};
use dualgemm_ptx::builder::HalfFormat;

use super::launched::{Destination, Kernels, Launched, Variants, Weights, rows_of};
use super::{Prepared, Strategy, require_sm90a};
use crate::prologue::{Order, Prologue, half_format};
use crate::{DeviceA, DeviceCall, Error, Gpu, GpuPlan, WeightForm, model};

/// See the [module](self).
#[derive(Debug)]
pub struct Warpwise;

/// Most rows of a group on average: of more, weights are read too often.
const GROUP_ROWS: usize = 4;

/// Names of the configurations for so many tokens.
fn of_tokens(tokens: usize) -> Vec<String> {
    let fits = |config: &Config| config.tokens as usize == tokens;
    Config::menu().filter(fits).map(|config| config.name()).collect()
}

impl Warpwise {
    fn unsupported<T>(&self, reason: String) -> Result<T, Error> {
        Err(Error::Unsupported { strategy: self.name(), reason })
    }

    /// The type of A if that is floats, of a problem that some kernel takes for few enough rows.
    fn check(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Option<HalfFormat>, Error> {
        require_sm90a(self.name(), info)?;
        match self.variant(desc) {
            Ok((half, rows)) if rows.check(desc.n).is_ok() => Ok(half),
            Ok(_) => self.unsupported(format!("C is nvfp4 of {} features, no multiple of 16", desc.n)),
            Err(reason) => self.unsupported(reason),
        }
    }

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

    fn takes(&self, _: Operation) -> bool {
        true
    }

    fn kernels(&self, desc: &DualGemmDesc, info: &DeviceInfo) -> Result<Vec<String>, Error> {
        self.check(desc, info)?;
        let most = Config::menu().map(|config| config.tokens as usize).max().unwrap_or(0);
        if desc.m > most {
            return self.unsupported(format!("M = {}; it takes up to {most} rows", desc.m));
        }
        // A tile no larger than it must be: rows beyond the last one are read again.
        Ok(of_tokens(desc.m.next_power_of_two().max(2)))
    }

    fn grouped_kernels(
        &self,
        desc: &DualGemmDesc,
        groups: usize,
        info: &DeviceInfo,
    ) -> Result<Vec<String>, Error> {
        if self.check(desc, info)?.is_none() {
            return self
                .unsupported(format!("{groups} groups of rows in {}; it takes those of floats", desc.a));
        }
        if desc.m > GROUP_ROWS * groups {
            let rows = desc.m / groups;
            return self.unsupported(format!("groups of {rows} rows; it takes those of up to {GROUP_ROWS}"));
        }
        // Routers choose some experts more often than others: a tile holds twice the mean, so that few weights are read twice.
        Ok(of_tokens((2 * desc.m).div_ceil(groups).next_power_of_two().max(2)))
    }

    fn estimate_us(
        &self,
        desc: &DualGemmDesc,
        groups: usize,
        info: &DeviceInfo,
        kernel: &str,
    ) -> Option<f64> {
        Some(model::warpwise_us(desc, groups, info, &Config::named(kernel).ok()?))
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let desc = plan.desc;
        let (half, rows) =
            self.variant(&desc).map_err(|reason| Error::Unsupported { strategy: self.name(), reason })?;
        let config = Config::named(&plan.kernel)?;
        let (a, prologue) = match half {
            None if config.expands_codes() => (A::Nvfp4(plan.a_scale_layout), None),
            _ => (A::Half(half.unwrap_or(HalfFormat::F16)), Some(Prologue::new(gpu, plan, Order::Rows)?)),
        };
        let linear = desc.op == Operation::Linear;
        let variant = Variant { a, whole_blocks: desc.k.is_multiple_of(64), linear, rows };
        let kernels = Variants::new(plan.groups > 1);
        let ready = Ready { gpu, desc, config, variant, prologue, kernels };
        ready.kernels.first(|grouped, bias| ready.load(grouped, bias))?;
        Ok(Launched::prepared(gpu, ready))
    }
}

#[derive(Debug)]
struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    config: Config,
    variant: Variant,
    /// What makes A of floats, unless the kernel expands codes itself.
    prologue: Option<Prologue>,
    kernels: Variants<Kernel<'static>>,
}

impl Ready {
    fn load(&self, grouped: bool, bias: bool) -> Result<Kernel<'static>, Error> {
        let rows = rows::Variant { grouped, bias, ..self.variant.rows.clone() };
        Ok(Kernel::new(self.gpu, self.config, &Variant { rows, ..self.variant.clone() })?)
    }
}

impl Kernels for Ready {
    fn warm(&self, weights: Weights<'_>) -> Result<(), Error> {
        self.kernels.get(weights, |grouped, bias| self.load(grouped, bias)).map(drop)
    }

    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let &DualGemmDesc { n, k, op, epilogue, .. } = &self.desc;
        let kernel = self.kernels.get(weights, |grouped, bias| self.load(grouped, bias))?;
        let mut specs = Vec::new();
        let (a, a_pitch, a_scales, a_scale) = match (&self.prologue, call.a) {
            (Some(prologue), a) => {
                let a = prologue.specs(call.m, &a, None, &mut specs)?;
                (a.values, a.pitch, DevicePtr::NULL, a.scale)
            }
            (None, DeviceA::Nvfp4 { codes, scales, global_scale }) => (codes, 0, scales, global_scale),
            (None, found) => {
                let (found, expected) = (found.kind().into(), self.desc.a.to_string());
                return Err(Error::Operand { tensor: "A", found, expected });
            }
        };
        let to = Destination::of(call, &self.desc)?;
        let output = weights.output(&to, &epilogue, a_scale, DevicePtr::NULL)?;
        let settled = matches!(weights, Weights::Groups(_, _, true));
        let (weights, groups) = (weights.packed(op)?, weights.group_args());
        let args = FusedArgs { size: (call.m, n, k), a, a_pitch, a_scales, weights, groups, settled, output };
        specs.push(kernel.spec(&args)?);
        Ok(specs)
    }
}
