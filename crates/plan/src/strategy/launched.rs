//! What a strategy of a fused kernel launches: A's way into its form, the kernel, and what a dynamic scale of C needs.

use std::sync::Arc;

use dualgemm_device::{Device, DevicePtr, LaunchSpec, Stream};
use dualgemm_gemm::{AFormat, DualGemmDesc};
use dualgemm_kernels::fused::{Config, Fused, FusedArgs};
use dualgemm_kernels::parts::groups::MOST_CHOICES;
use dualgemm_kernels::parts::variant::{Products, Variant};
use dualgemm_kernels::sm90a::decode::WEIGHT_FACTOR;

use super::Prepared;
use super::kernel::Configs;
use super::operands::{Destination, Kind, OfGroups, Variants, Weights};
use super::requantize::Requantize;
use crate::launches::Launches;
use crate::prologue::{Order, Prologue};
use crate::{
    Buffer, DeviceCall, DeviceExperts, DeviceWeights, Error, Gpu, GpuPlan, GroupedCall, WeightForm, model,
};

/// The kernel with everything around it, and the launches that were made of them.
#[derive(Debug)]
pub(super) struct Ready {
    gpu: &'static Gpu,
    desc: DualGemmDesc,
    form: WeightForm,
    prologue: Prologue,
    configs: Configs,
    variant: Variant,
    /// One, or those of [`WAVES`](super::kernel::WAVES), or gate and up of [`FUSED_EPILOGUE`](super::kernel::FUSED_EPILOGUE).
    kernels: Variants<Vec<Fused<'static>>>,
    workspace: Option<Buffer>,
    gate_sums: Option<Buffer>,
    requantize: Option<Requantize>,
    launches: Launches,
}

impl Ready {
    /// Loads the kernel that the plan is for, with what goes before and behind it; `configs` is what its name says.
    pub(super) fn new(
        gpu: &'static Gpu,
        plan: &GpuPlan,
        (form, order): (WeightForm, Order),
        configs: Configs,
        mut variant: Variant,
    ) -> Result<Self, Error> {
        let desc = plan.desc;
        let tiles_of_64 = |config: &Config| matches!(config, Config::Sm90a(config) if config.tokens == 64);
        let order = match (order, configs[0]) {
            // Of more tokens than the kernel expands codes of, a kernel before does.
            (Order::Codes, Config::Warpwise(config)) if !config.expands_codes() => Order::Rows,
            // Measured: 3 % less at 64x14336x4096, none at 64x4096x7168; 1 % more in tiles of 128 tokens.
            (Order::Rows, _)
                if plan.groups == 1 && desc.k.is_multiple_of(64) && configs.iter().all(tiles_of_64) =>
            {
                Order::Blocks
            }
            (order, _) => order,
        };
        if order == Order::Codes && desc.a == AFormat::Nvfp4 {
            variant.codes = Some(plan.a_scale_layout);
        }
        let prologue = Prologue::new(gpu, plan, order)?;
        variant.a_scale = prologue.has_device_scale();
        let mut ready = Ready {
            gpu,
            desc,
            form,
            prologue,
            configs,
            variant,
            kernels: Variants::new(plan.groups > 1),
            workspace: None,
            gate_sums: None,
            requantize: Requantize::of(gpu, &desc)?,
            launches: Launches::default(),
        };
        let kernel = &ready.kernels.first(|kind, bias| ready.load(kind, bias))?[0];
        let (workspace, sums) = (kernel.workspace_bytes(), kernel.gate_sums_bytes(desc.m, desc.n));
        ready.workspace = (workspace > 0).then(|| Buffer::zeroed(gpu, workspace)).transpose()?;
        ready.gate_sums = (sums > 0).then(|| Buffer::new(gpu, sums)).transpose()?;
        Ok(ready)
    }

    fn load(&self, kind: Kind, bias: bool) -> Result<Vec<Fused<'static>>, Error> {
        let (grouped, choices) = (kind != Kind::One, kind == Kind::Choices);
        let variant = Variant { grouped, choices, bias, ..self.variant.clone() };
        let kernels = match variant.products {
            Products::Up => vec![(self.configs[0], variant.gate_before()), (self.configs[0], variant)],
            _ => self.configs.iter().map(|config| (*config, variant.clone())).collect(),
        };
        Ok(kernels
            .into_iter()
            .map(|(config, variant)| Fused::new(self.gpu, config, &variant))
            .collect::<Result<_, _>>()?)
    }

    fn kernels(&self, weights: Weights<'_>) -> Result<&Vec<Fused<'static>>, Error> {
        self.kernels.get(weights, |kind, bias| self.load(kind, bias))
    }

    /// The weights in the form that the kernel reads: on Blackwell the one for every card packs rows of codes once.
    fn weights<'w>(&self, weights: Weights<'w>) -> Result<Weights<'w>, Error> {
        match (weights, self.configs[0]) {
            (Weights::One(one), Config::Sm80(_)) => Ok(Weights::One(one.packed_too(self.gpu)?)),
            (weights, _) => Ok(weights),
        }
    }

    fn ready_for(&self, weights: Weights<'_>) -> Result<(), Error> {
        self.kernels(self.weights(weights)?)?;
        self.prologue.reserve(weights.groups().map(|groups| groups.count)).map(drop)
    }

    /// Lists the launches of a call, in order.
    fn specs(&self, call: &DeviceCall, weights: Weights<'_>) -> Result<Vec<LaunchSpec>, Error> {
        let &DualGemmDesc { n, k, op, epilogue, .. } = &self.desc;
        let weights = self.weights(weights)?;
        let (kernels, operands) = (self.kernels(weights)?, weights.operands(self.form, op)?);
        let mut specs = Vec::new();
        let of_groups = weights.of_groups();
        let choices = of_groups.and_then(|of| of.choices);
        let rows_of_a = call.m / choices.unwrap_or(1).max(1);
        let a = self.prologue.specs(rows_of_a, &call.a, weights.groups().as_ref(), &mut specs)?;
        let c = Destination::of(call, &self.desc)?;
        let to = self.requantize.as_ref().map_or(c, Requantize::product);
        let factor = if self.form == WeightForm::Plain { WEIGHT_FACTOR } else { 1.0 };
        let output = weights.output(&to, &epilogue, a.scale * factor, a.device_scale)?;
        let memory = |buffer: &Option<Buffer>| buffer.as_ref().map_or(DevicePtr::NULL, Buffer::ptr);
        let args = FusedArgs {
            groups: weights.group_args(),
            choices,
            settled: of_groups.is_some_and(|of| of.settled),
            gate_sums: memory(&self.gate_sums),
            workspace: memory(&self.workspace),
            ..FusedArgs::new((call.m, n, k), a.operand, operands[0], output)
        };
        match kernels.as_slice() {
            [gate, up] if operands.len() == 2 => {
                specs.push(gate.spec(&args)?);
                specs.push(up.spec(&FusedArgs { weights: operands[1], ..args })?);
            }
            [main, rest] => {
                let (sms, of) = (self.gpu.info().sm_count, &self.configs);
                match model::full_waves((call.m, n), sms, &of[0], &of[1]) {
                    // A call of fewer rows than planned may fill no wave.
                    None => specs.push(main.spec(&args)?),
                    Some(features) => {
                        specs.push(main.spec_of(&args, 0..features)?);
                        specs.push(rest.spec_of(&args, features..n)?);
                    }
                }
            }
            one => one.iter().try_for_each(|kernel| kernel.spec(&args).map(|spec| specs.push(spec)))?,
        }
        if let Some(requantize) = &self.requantize {
            requantize.specs(call.m, &c, &mut specs)?;
        }
        Ok(specs)
    }
}

impl Prepared for Ready {
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error> {
        self.ready_for(Weights::One(weights))
    }

    unsafe fn run(
        &self,
        call: &DeviceCall,
        weights: &Arc<DeviceWeights>,
        stream: Stream,
    ) -> Result<(), Error> {
        let key = (weights.id(), call.key());
        let specs = || self.specs(call, Weights::One(weights));
        // SAFETY: kernels stay within the operands, for which the caller vouches, and the memory that is theirs.
        unsafe { self.launches.run(self.gpu, key, stream, specs) }
    }

    fn warm_grouped(&self, experts: &Arc<DeviceExperts>, choices: bool) -> Result<(), Error> {
        let of = OfGroups { rows: DevicePtr::NULL, settled: false, choices: choices.then_some(1) };
        self.ready_for(Weights::Groups(experts, of))
    }

    fn takes_choices(&self) -> bool {
        self.desc.m <= MOST_CHOICES && matches!(self.configs[0], Config::Warpwise(_))
    }

    unsafe fn run_grouped(
        &self,
        call: &GroupedCall,
        experts: &Arc<DeviceExperts>,
        stream: Stream,
    ) -> Result<(), Error> {
        let key = (experts.id(), call.key());
        let weights = Weights::Groups(experts, call.into());
        let specs = || self.specs(&call.call, weights);
        // SAFETY: as in `run`.
        unsafe { self.launches.run(self.gpu, key, stream, specs) }
    }
}
