//! Mixtures of experts on operands that are in a GPU's memory already: the host never learns how many rows an expert has.
//!
//! ```text
//! ids ─► route ─► gather rows of A ─► gate and up, all experts ─► down, all experts ─► weighted sums in C
//! ```

use dualgemm_bench::Timing;
use dualgemm_device::Stream;
use dualgemm_formats::FloatType;
use dualgemm_gemm::{AFormat, Error as GemmError, GateUp, GatedMlp, Linear, OutFormat, RouterWeights};
use dualgemm_plan::mixture::{AroundExperts, MixtureCall, Sizes};
use dualgemm_plan::{DeviceExperts, GpuOptions, Launches, measure};

use super::{MixtureDesc, MixturePlan};
use crate::{Error, MlpRunner, PackedExperts, Plan, Target};

/// The experts of a mixture in a GPU's memory. Copies share them.
#[derive(Debug, Clone)]
pub struct PackedMixture {
    gate_up: PackedExperts,
    down: PackedExperts,
}

/// A [`MixturePlan`] for a GPU with its kernels and memory.
#[derive(Debug)]
pub struct DeviceMixture {
    mlp: MlpRunner,
    around: AroundExperts,
}

/// Plans for groups; refuses what the kernels around the products do not do.
pub(super) fn target(desc: &MixtureDesc, target: &Target) -> Result<Target, Error> {
    let Target::Gpu(id, options) = target else { return Ok(target.clone()) };
    let refuse = |tensor: &str, found: String, expected: &str| {
        let (tensor, expected) = (tensor.into(), expected.into());
        Err(Error::Gemm(GemmError::Operand { tensor, found, expected }))
    };
    let (a, n) = (desc.mlp.gate_up.a, desc.mlp.down.n);
    if !matches!(a, AFormat::F16 | AFormat::Bf16) {
        return refuse("A of a mixture on a GPU", a.to_string(), "f16 or bf16");
    }
    if desc.router == RouterWeights::Input {
        return refuse("the router's weights on a GPU", "for the input".into(), "those of the output");
    }
    if !n.is_multiple_of(8) {
        return refuse("C of a mixture on a GPU", format!("{n} features"), "a multiple of 8");
    }
    Ok(Target::Gpu(id.clone(), GpuOptions { groups: desc.experts, ..options.clone() }))
}

impl MixturePlan {
    /// Packs all experts into the memory of the plan's GPU.
    ///
    /// # Errors
    /// If the plan is not for a GPU, there are more or fewer experts than it says, weights do not fit it, a block scale is NaN or
    /// negative, or memory is lacking.
    pub fn prepack_on_device(&self, experts: &[GatedMlp<'_>]) -> Result<PackedMixture, Error> {
        let Plan::Gpu { gpu, .. } = &self.mlp.down else { return Err(Error::NotOnGpu) };
        self.desc.check_count(experts.len())?;
        let gate_up: Vec<GateUp<'_>> = experts.iter().map(|mlp| mlp.gate_up.clone()).collect();
        let down: Vec<Linear<'_>> = experts.iter().map(|mlp| mlp.down.clone()).collect();
        down.iter().try_for_each(|layer| self.mlp.down.desc().check_weights(layer.into()))?;
        let gpu = gpu.open()?;
        let down = PackedExperts::of(gpu, DeviceExperts::upload_linear(gpu, &down)?)?;
        Ok(PackedMixture { gate_up: self.mlp.gate_up.prepack_experts(&gate_up)?, down })
    }

    /// The plan with kernels and memory for calls on operands in a GPU's memory. With `add`, results are added to what C holds.
    ///
    /// # Errors
    /// If the plan is not for a GPU, or memory is lacking.
    pub fn device_runner(&self, add: bool) -> Result<DeviceMixture, Error> {
        let Plan::Gpu { gpu, .. } = &self.mlp.down else { return Err(Error::NotOnGpu) };
        let MixtureDesc { mlp, experts, top_k, .. } = self.desc;
        let out = match mlp.down.out {
            OutFormat::F16 => FloatType::F16,
            OutFormat::Bf16 => FloatType::Bf16,
            _ => FloatType::F32,
        };
        let sizes = Sizes { tokens: mlp.gate_up.m, top_k, experts };
        let around = AroundExperts::new(gpu.open()?, sizes, [mlp.gate_up.k, mlp.down.n], (out, add))?;
        Ok(DeviceMixture { mlp: self.mlp.runner(experts)?, around })
    }
}

impl DeviceMixture {
    /// Prepares for calls with these experts, so that the first one allocates nothing either.
    ///
    /// # Errors
    /// If memory is lacking, or the experts are for another plan.
    pub fn warm(&self, experts: &PackedMixture) -> Result<(), Error> {
        self.mlp.gate_up.warm_experts(&experts.gate_up)?;
        self.mlp.down.warm_experts(&experts.down)
    }

    /// Launches a mixture on operands in device memory. Allocates nothing, waits for nothing, and can be recorded into a graph.
    ///
    /// # Safety
    /// Until the call has ended, its operands are live memory of the plan's GPU, as large as the problem and the call make them;
    /// nobody writes A or the lists or uses C meanwhile. Calls of one runner share memory: order them.
    ///
    /// # Errors
    /// If an operand does not fit the plan, or an address is misaligned.
    pub unsafe fn run(
        &self,
        call: &MixtureCall,
        experts: &PackedMixture,
        stream: Stream,
    ) -> Result<(), Error> {
        let (around, between) = (&self.around, self.mlp.on_device()?);
        // SAFETY: the operands of the call are the caller's promise; rows by expert, what is between the products and results are
        // memory of this runner, for as many rows as the plan has, and each launch follows the one before on the stream.
        unsafe {
            around.before(call, stream)?;
            let gate_up = around.gate_up(call, between.c());
            self.mlp.gate_up.run_device_grouped(&gate_up, &experts.gate_up, stream)?;
            let down = around.down(call, between.a(&self.mlp.desc.gate_up));
            self.mlp.down.run_device_grouped(&down, &experts.down, stream)?;
            around.after(call, stream)?;
        }
        Ok(())
    }

    /// How long a call takes on a card by its own clock; none on a simulated GPU. `turns` are calls and experts to take in turn, of
    /// as much memory as keeps weights out of the cache.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// As there.
    pub unsafe fn time(&self, turns: &[(MixtureCall, &PackedMixture)]) -> Result<Option<Timing>, Error> {
        let Some(card) = self.mlp.on_device()?.gpu().card() else { return Ok(None) };
        turns.iter().try_for_each(|(_, experts)| self.warm(experts))?;
        let run = |i: usize| {
            let (call, experts) = &turns[i % turns.len()];
            // SAFETY: the caller's promise.
            unsafe { self.run(call, experts, Stream::Own) }
        };
        Ok(Some(measure::time(card, Launches::Recorded, turns.len(), measure::Protocol::default(), run)?))
    }
}
