//! Mixtures of experts on a GPU: the host never learns how many rows an expert has.
//!
//! ```text
//! ids ─► route ─► gather rows of A ─► gate and up, all experts ─► down, all experts ─► weighted sums in C
//! ```
//!
//! Of few choices, kernels for few tokens find each expert's tokens themselves, and nothing is launched before gate and up.

use dualgemm_bench::Timing;
use dualgemm_device::Stream;
use dualgemm_formats::{Float, FloatType, ScaleLayout, match_floats};
use dualgemm_gemm::{
    AFormat, AOperand, DualGemmDesc, GateUp, GatedMlp, Linear, OutFormat, OutputMut, RouterWeights, Routing,
};
use dualgemm_plan::mixture::{AroundExperts, MixtureCall, Sizes};
use dualgemm_plan::{Buffer, DeviceExperts, Gpu, GpuOptions, Launches, Operands, measure};

use super::{Experts, MixtureDesc, MixturePlan, MixtureRunner, PackedMixture, Place};
use crate::{Error, MlpRunner, PackedExperts, PackedMlp, Target};

/// Plans for groups; refuses what the kernels around the products do not do.
pub(super) fn target(desc: &MixtureDesc, target: &Target) -> Result<Target, Error> {
    let Target::Gpu(id, options) = target else { return Ok(target.clone()) };
    let refuse = |tensor, found, expected| Err(Error::NotForGpu { tensor, found, expected });
    let (a, n) = (desc.mlp.gate_up.a, desc.mlp.down.n);
    if !matches!(a, AFormat::F16 | AFormat::Bf16) {
        return refuse("A of a mixture", a.to_string(), "f16 or bf16");
    }
    if !n.is_multiple_of(8) {
        return refuse("C of a mixture", format!("of {n} features"), "a multiple of 8");
    }
    Ok(Target::Gpu(id.clone(), GpuOptions { groups: desc.experts, ..options.clone() }))
}

/// Experts one behind the other, so that one launch takes the rows of all.
#[derive(Debug, Clone)]
pub(super) struct Together {
    gate_up: PackedExperts,
    down: PackedExperts,
}

impl Together {
    pub(super) fn bytes(&self) -> usize {
        [&self.gate_up, &self.down].iter().flat_map(|experts| experts.iter()).map(|e| e.bytes()).sum()
    }

    fn duplicate(&self) -> Result<Self, Error> {
        Ok(Self { gate_up: self.gate_up.duplicate()?, down: self.down.duplicate()? })
    }
}

impl PackedMixture {
    fn together(&self) -> Result<&Together, Error> {
        match &self.experts {
            Experts::Together(experts) => Ok(experts),
            Experts::Apart(_) => Err(Error::OtherTarget { weights: "the processor", plan: "a GPU" }),
        }
    }

    fn duplicate(&self) -> Result<Self, Error> {
        let shared = self.shared.as_ref().map(PackedMlp::duplicate).transpose()?;
        Ok(Self { experts: Experts::Together(self.together()?.duplicate()?), shared })
    }
}

impl MixturePlan {
    pub(super) fn upload(&self, experts: Vec<Option<GatedMlp<'_>>>) -> Result<Experts, Error> {
        self.desc.check_count(experts.len())?;
        let (mut gate_up, mut down): (Vec<GateUp<'_>>, Vec<Linear<'_>>) = (Vec::new(), Vec::new());
        for (number, mlp) in experts.into_iter().enumerate() {
            let Some(mlp) = mlp else {
                let (found, expected) =
                    (format!("without number {number}"), "a mixture of those that are here");
                return Err(Error::NotForGpu { tensor: "the list of experts", found, expected });
            };
            self.mlp.down.desc().check_weights((&mlp.down).into())?;
            gate_up.push(mlp.gate_up);
            down.push(mlp.down);
        }
        let (gpu, plan) = self.mlp.down.on_gpu()?;
        let down = DeviceExperts::upload_linear(gpu, &down, plan.weight_form()?)?;
        let down = PackedExperts::of(gpu, down)?;
        Ok(Experts::Together(Together { gate_up: self.mlp.gate_up.prepack_experts(&gate_up)?, down }))
    }
}

/// Kernels and memory of a mixture on a GPU.
#[derive(Debug)]
pub(super) struct OnGpu {
    gpu: &'static Gpu,
    desc: MixtureDesc,
    mlp: MlpRunner,
    around: AroundExperts,
    /// Writes what the experts' results are added to.
    shared: Option<MlpRunner>,
    /// Room for operands of the host, and for the router's lists; made when the first come.
    operands: Option<(Operands, [Buffer; 2])>,
}

impl OnGpu {
    pub(super) fn new(
        gpu: &'static Gpu,
        mut desc: MixtureDesc,
        mlp: MlpRunner,
        shared: Option<MlpRunner>,
    ) -> Result<Self, Error> {
        if shared.is_some() {
            desc.mlp.down.out = OutFormat::F32;
        }
        let out = AFormat::from(desc.mlp.down.out).float_type().unwrap_or(FloatType::F32);
        let sizes = Sizes { tokens: desc.mlp.gate_up.m, top_k: desc.top_k, experts: desc.experts };
        let ends = [desc.mlp.gate_up.k, desc.mlp.down.n];
        let unsorted = mlp.gate_up.on_gpu()?.takes_choices() && mlp.down.on_gpu()?.takes_choices();
        let weighs = desc.mlp.gate_up.a.float_type().filter(|_| desc.router == RouterWeights::Input);
        let around = AroundExperts::new(gpu, sizes, ends, out, (unsorted, weighs))?;
        Ok(Self { gpu, desc, mlp, around, shared, operands: None })
    }

    fn warm(&self, experts: &PackedMixture) -> Result<(), Error> {
        let routed = experts.together()?;
        let choices = self.around.unsorted();
        self.mlp.gate_up.on_gpu()?.warm_experts(&routed.gate_up, choices)?;
        self.mlp.down.on_gpu()?.warm_experts(&routed.down, choices)?;
        self.shared.iter().zip(&experts.shared).try_for_each(|(runner, mlp)| runner.warm(mlp))
    }

    /// # Safety
    /// As [`MixtureRunner::run_device`]; C is of f32 where there is a shared expert.
    unsafe fn run(&self, call: &MixtureCall, experts: &PackedMixture, stream: Stream) -> Result<(), Error> {
        let (around, between, routed) = (&self.around, self.mlp.on_device()?, experts.together()?);
        let mut call = *call;
        // SAFETY: the operands of the call are the caller's promise; rows by expert, what is between the products and results are
        // memory of this runner, for as many rows as the plan has, and each launch follows the one before on the stream.
        unsafe {
            if let Some((runner, mlp)) = self.shared.as_ref().zip(experts.shared.as_ref()) {
                runner.run_device(&call.call, mlp, stream)?;
                call.add = true;
            }
            around.before(&call, stream)?;
            let gate_up = around.gate_up(&call, between.c());
            self.mlp.gate_up.run_device_grouped(&gate_up, &routed.gate_up, stream)?;
            let down = around.down(&call, between.a(&self.mlp.desc.gate_up));
            self.mlp.down.run_device_grouped(&down, &routed.down, stream)?;
            around.after(&call, stream)?;
        }
        Ok(())
    }

    /// Bytes of a list on the device.
    fn bytes<T: Copy, const N: usize>(list: &[T], bytes: fn(T) -> [u8; N]) -> Vec<u8> {
        list.iter().flat_map(|&x| bytes(x)).collect()
    }

    fn call(&self, m: usize, [ids, weights]: &[Buffer; 2]) -> Result<MixtureCall, Error> {
        let (operands, _) = self.operands.as_ref().ok_or(Error::NotOnGpu)?;
        Ok(MixtureCall { call: operands.call(m, 1.0), ids: ids.ptr(), weights: weights.ptr(), add: false })
    }

    pub(super) fn run_with_copies(
        &mut self,
        a: &AOperand<'_>,
        routing: Routing<'_>,
        experts: &PackedMixture,
        (mut c, add): (OutputMut<'_>, bool),
    ) -> Result<(), Error> {
        if add {
            let (tensor, found) = ("C of a mixture", "added to in the host's memory".into());
            return Err(Error::NotForGpu {
                tensor,
                found,
                expected: "a C that is written, or one in its memory",
            });
        }
        if self.operands.is_none() {
            let MixtureDesc { mlp, top_k, .. } = &self.desc;
            let ends = DualGemmDesc { n: mlp.down.n, out: mlp.down.out, ..mlp.gate_up };
            let list =
                || Buffer::new(self.gpu, 4 * mlp.gate_up.m * top_k).map_err(dualgemm_plan::Error::from);
            let operands = Operands::new(self.gpu, &ends, ScaleLayout::Linear)?;
            self.operands = Some((operands, [list()?, list()?]));
        }
        let Some((operands, lists)) = &self.operands else { return Ok(()) };
        operands.write_a(a)?;
        lists[0].write(&Self::bytes(routing.ids, i32::to_le_bytes)).map_err(dualgemm_plan::Error::from)?;
        lists[1]
            .write(&Self::bytes(routing.weights, f32::to_le_bytes))
            .map_err(dualgemm_plan::Error::from)?;
        // SAFETY: the call is on this runner's operands, which are the plan's.
        unsafe { self.run(&self.call(a.rows(), lists)?, experts, Stream::Own) }?;
        let rows = a.rows();
        if self.shared.is_none() {
            operands.read_c(0, rows, &mut c)?;
            return Ok(());
        }
        let mut sums = vec![0.0; rows * self.desc.mlp.down.n];
        operands.read_c(0, rows, &mut OutputMut::F32(&mut sums))?;
        // `check` refused the other.
        match_floats!(c, OutputMut(c) => Float::narrow(&sums, c), OutputMut::Nvfp4 { .. } => {});
        Ok(())
    }

    fn time(
        &self,
        a: &AOperand<'_>,
        routings: &[Routing<'_>],
        experts: &PackedMixture,
    ) -> Result<Option<Timing>, Error> {
        let Some(card) = self.gpu.card() else { return Ok(None) };
        let list = |bytes: Vec<u8>| Buffer::of(self.gpu, &bytes).map_err(dualgemm_plan::Error::from);
        let mut lists = Vec::with_capacity(routings.len());
        let mut used: Vec<i32> = Vec::new();
        for routing in routings {
            let ids = list(Self::bytes(routing.ids, i32::to_le_bytes))?;
            lists.push([ids, list(Self::bytes(routing.weights, f32::to_le_bytes))?]);
            used.extend(routing.ids.iter().filter(|&&id| id >= 0));
        }
        used.sort_unstable();
        used.dedup();
        // Experts without a token are not read.
        let read = experts.bytes() / self.desc.experts * used.len();
        let copies = (1..measure::copies(read)).map(|_| experts.duplicate());
        let copies = std::iter::once(Ok(experts.clone())).chain(copies).collect::<Result<Vec<_>, Error>>()?;
        copies.iter().try_for_each(|experts| self.warm(experts))?;
        let calls =
            lists.iter().map(|lists| self.call(a.rows(), lists)).collect::<Result<Vec<_>, Error>>()?;
        let turns = calls.len() * copies.len();
        let run = |i: usize| {
            let (call, experts) = (&calls[i % calls.len()], &copies[i / calls.len() % copies.len()]);
            // SAFETY: the call is on this runner's operands and on lists that live until it has ended.
            unsafe { self.run(call, experts, Stream::Own) }
        };
        Ok(Some(measure::time(card, Launches::Recorded, turns, measure::Protocol::default(), run)?))
    }
}

impl MixtureRunner {
    fn on_gpu(&self) -> Result<&OnGpu, Error> {
        match &self.place {
            Place::Gpu(on_gpu) => Ok(on_gpu),
            Place::Cpu(_) => Err(Error::NotOnGpu),
        }
    }

    /// Prepares for calls with these experts, so that the first one allocates nothing either. On a processor none does.
    ///
    /// # Errors
    /// If memory is lacking, or the experts are for another plan.
    pub fn warm(&self, experts: &PackedMixture) -> Result<(), Error> {
        self.on_gpu().map_or(Ok(()), |on_gpu| on_gpu.warm(experts))
    }

    /// Launches a mixture on operands in device memory. Allocates nothing, waits for nothing, and can be recorded into a graph.
    /// A shared expert is a call of its own before, whose C this one adds to.
    ///
    /// # Safety
    /// Until the call has ended, its operands are live memory of the plan's GPU, as large as the problem and the call make them;
    /// nobody writes A or the lists or uses C meanwhile. Calls of one runner share memory: order them.
    ///
    /// # Errors
    /// If the plan is not for a GPU or has a shared expert, an operand does not fit the plan, or an address is misaligned.
    pub unsafe fn run_device(
        &self,
        call: &MixtureCall,
        experts: &PackedMixture,
        stream: Stream,
    ) -> Result<(), Error> {
        let on_gpu = self.on_gpu()?;
        if on_gpu.shared.is_some() {
            let (tensor, found) = ("a call in device memory", "of a mixture with a shared expert".into());
            return Err(Error::NotForGpu { tensor, found, expected: "a call for each" });
        }
        // SAFETY: the caller's promise.
        unsafe { on_gpu.run(call, experts, stream) }
    }

    /// How long a call takes on a card by its own clock, with A of the last [`run`](Self::run), these routings in turn, and
    /// weights that come from memory. None on a processor, where the clock is the caller's, and on a simulated GPU.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn time(
        &self,
        a: &AOperand<'_>,
        routings: &[Routing<'_>],
        experts: &PackedMixture,
    ) -> Result<Option<Timing>, Error> {
        match &self.place {
            Place::Gpu(on_gpu) => on_gpu.time(a, routings, experts),
            Place::Cpu(_) => Ok(None),
        }
    }
}
