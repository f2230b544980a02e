//! Products whose operands are in a GPU's memory already, on a stream of the caller's.
//!
//! With [`GpuOptions::groups`](crate::GpuOptions::groups), one launch takes the rows of all experts of a mixture, and reads on
//! the GPU how many rows each expert has:
//!
#![cfg_attr(feature = "sim", doc = "```")]
#![cfg_attr(not(feature = "sim"), doc = "```ignore")]
//! use dualgemm::device::Stream;
//! use dualgemm::formats::{FloatMatrix, Matrix, Producer, Search, quantize};
//! use dualgemm::gemm::{AFormat, DualGemmDesc, GateUp, OutFormat};
//! use dualgemm::strategies::Buffer;
//! use dualgemm::{DeviceA, DeviceC, DeviceCall, DualGemm, GpuId, GpuOptions, GroupedCall, SimArch, Target};
//!
//! let (m, n, k) = (6, 32, 64);
//! let id = GpuId::Sim(SimArch::Sm90a); // GpuId::Cuda(0) for a card
//! let desc = DualGemmDesc::new(m, n, k, AFormat::F16, dualgemm::formats::BlockFormat::Nvfp4);
//! let desc = DualGemmDesc { out: OutFormat::F16, ..desc };
//! let plan = DualGemm::plan(&desc, &Target::Gpu(id.clone(), GpuOptions { groups: 2, ..Default::default() }))?;
//!
//! let half = |name| quantize(name, &FloatMatrix::F32(Matrix::new(name, n, k, vec![0.5; n * k])?),
//!                            Producer::ModelOpt, Search::Plain);
//! let experts = [GateUp::new(half("gate 0")?, half("up 0")?), GateUp::new(half("gate 1")?, half("up 1")?)];
//! let experts = plan.prepack_experts(&experts)?;
//! let runner = plan.runner(experts.len())?;
//! runner.warm_experts(&experts)?;
//!
//! // What an engine has on the GPU already: rows sorted by expert, and where each expert's begin.
//! let gpu = id.open()?;
//! let (a, c) = (Buffer::zeroed(gpu, m * k * 2)?, Buffer::zeroed(gpu, m * n * 2)?);
//! let rows = Buffer::of(gpu, &[0u32, 4, 6].map(u32::to_le_bytes).concat())?;
//! let call = DeviceCall { m, a: DeviceA::Float { values: a.ptr(), pitch: 2 * k }, c: DeviceC::Float(c.ptr()) };
//! // SAFETY: the buffers have the sizes of the call, and live until it has ended: freeing them waits.
//! let call = GroupedCall { call, rows: rows.ptr(), settled: false, choices: None };
//! unsafe { runner.run_device_grouped(&call, &experts, Stream::Own) }?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::sync::Arc;

use dualgemm_bench::Timing;
use dualgemm_device::Stream;
use dualgemm_gemm::AOperand;
use dualgemm_plan::{DeviceCall, DeviceExperts, DeviceGateUp, DeviceWeights, GroupedCall};

use crate::gpu::GpuRunner;
use crate::{Error, PackedExperts, PackedWeights, Plan, Runner};

impl Plan {
    /// Packs weights that are in the memory of the plan's GPU already, on it, after what `stream` was given before. Waits for
    /// it.
    ///
    /// # Safety
    /// Codes and scales are live memory of that GPU, as large as shape and layout make them; nobody writes them meanwhile.
    ///
    /// # Errors
    /// If the plan is not for a GPU or reads weights in an order that is made on the host, as the pack of mxfp4 is, or an
    /// address is misaligned.
    pub unsafe fn prepack_device(
        &self,
        weights: &DeviceGateUp<'_>,
        stream: Stream,
    ) -> Result<PackedWeights, Error> {
        self.check_shape("the weights", (weights.format, weights.n, weights.k))?;
        let (gpu, plan) = self.on_gpu()?;
        // SAFETY: the caller's promise.
        let packed = unsafe { DeviceWeights::on_device(gpu, weights, plan.weight_form()?, stream) }?;
        Ok(PackedWeights::Gpu(Arc::new(packed)))
    }

    /// As [`prepack_experts`](Self::prepack_experts), for weights that are in the memory of the plan's GPU already; see
    /// [`prepack_device`](Self::prepack_device).
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there, and if there is no expert.
    pub unsafe fn prepack_experts_device(
        &self,
        experts: &[DeviceGateUp<'_>],
        stream: Stream,
    ) -> Result<PackedExperts, Error> {
        for weights in experts {
            self.check_shape("the weights", (weights.format, weights.n, weights.k))?;
        }
        let (gpu, plan) = self.on_gpu()?;
        // SAFETY: the caller's promise.
        let experts = unsafe { DeviceExperts::on_device(gpu, experts, plan.weight_form()?, stream) }?;
        PackedExperts::of(gpu, experts)
    }
}

impl PackedWeights {
    /// Overwrites weights of a GPU with others of the same shape, format and tensor scales that are in its memory already, after
    /// what `stream` was given before. Allocates nothing and waits for nothing.
    ///
    /// # Safety
    /// As [`Plan::prepack_device`], until `stream` has done it; calls that use these weights are ordered with it.
    ///
    /// # Errors
    /// As there, and if what has to be the same differs or there are biases.
    pub unsafe fn refill_device(&self, weights: &DeviceGateUp<'_>, stream: Stream) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        Ok(unsafe { self.on_gpu()?.refill(weights, stream) }?)
    }
}

impl Runner {
    pub(crate) fn on_gpu(&self) -> Result<&GpuRunner, Error> {
        match self {
            Self::Gpu(runner) => Ok(runner),
            Self::Cpu(_) | Self::Floats(_) => Err(Error::NotOnGpu),
        }
    }

    /// As [`warm`](Self::warm), for [`run_device_grouped`](Self::run_device_grouped).
    ///
    /// # Errors
    /// As there, and if the plan takes one pair of weights a call.
    pub fn warm_experts(&self, experts: &PackedExperts) -> Result<(), Error> {
        self.on_gpu()?.warm_experts(experts, false)
    }

    /// How long a call takes on a GPU by its own clock, with the operands of the last [`run`](Self::run) and weights that
    /// come from memory. None on a processor, where the clock is the caller's, and on a simulated GPU.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn time(&self, a: &AOperand<'_>, weights: &PackedWeights) -> Result<Option<Timing>, Error> {
        self.on_gpu().map_or(Ok(None), |runner| runner.time(a, weights))
    }

    /// Launches one product on operands in device memory, on a stream of the caller's. Allocates nothing, waits for
    /// nothing, and can be recorded into a graph.
    ///
    /// # Safety
    /// Until the call has ended, its operands are live memory of the plan's GPU, as large as the problem and the call make
    /// them; nobody writes A or uses C meanwhile. Calls of one runner share scratch memory: order them, by one stream or by
    /// events.
    ///
    /// # Errors
    /// If the plan is not for a GPU, an operand does not fit it, or an address is misaligned.
    pub unsafe fn run_device(
        &self,
        call: &DeviceCall,
        weights: &PackedWeights,
        stream: Stream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.on_gpu()?.run_device(call, weights, stream) }
    }

    /// As [`run_device`](Self::run_device), for rows in groups, each with weights of its own. How many rows a group has,
    /// maybe none, is read on the device; the host need not know it.
    ///
    /// # Safety
    /// As there; the first rows are ascending, one more than there are experts, and end with M at most.
    ///
    /// # Errors
    /// As there, and if the plan takes one pair of weights a call: plan with [`GpuOptions::groups`](crate::GpuOptions::groups).
    pub unsafe fn run_device_grouped(
        &self,
        call: &GroupedCall,
        experts: &PackedExperts,
        stream: Stream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.on_gpu()?.run_device_grouped(call, experts, stream) }
    }
}
