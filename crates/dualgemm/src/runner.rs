//! A plan with the buffers of its runs, and the runs: on operands of the host, and on operands in a GPU's memory.

use dualgemm_bench::Timing;
use dualgemm_cpu::{CpuGemm, Group};
use dualgemm_device::Stream;
use dualgemm_gemm::{AOperand, OutputMut};
use dualgemm_plan::{DeviceCall, GroupedCall};

use crate::gpu::GpuRunner;
use crate::{Error, PackedExperts, PackedWeights};

/// Rows of A that share a pair of weights: an expert of a mixture, or an entry of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// First row of A, at or after the end of the rows before.
    pub first: usize,
    /// How many; none is fine.
    pub count: usize,
    /// Their weights.
    pub weights: &'a PackedWeights,
}

/// A plan with the buffers of its runs, which allocate nothing on a processor's heap or a GPU's memory, but for the list
/// of the groups of [`run_grouped`](Self::run_grouped).
#[non_exhaustive]
#[derive(Debug)]
pub enum Runner {
    /// On the processor.
    Cpu(CpuGemm),
    /// On a GPU.
    Gpu(GpuRunner),
}

impl Runner {
    /// Multiplies all rows of A with one pair of weights; see [`Plan::run`](crate::Plan::run). On a GPU it copies A there, waits, and
    /// copies C back.
    ///
    /// # Errors
    /// As there.
    pub fn run(
        &mut self,
        a: &AOperand<'_>,
        weights: &PackedWeights,
        c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        match self {
            Self::Cpu(gemm) => {
                let all = Group { first_row: 0, rows: a.rows(), weights: weights.on_cpu()? };
                Ok(gemm.run(a, &[all], c)?.map(|scale| scale.value()))
            }
            Self::Gpu(runner) => runner.run(a, &[Rows { first: 0, count: a.rows(), weights }], c),
        }
    }

    /// Multiplies runs of rows, each with weights of its own: the experts of a mixture (rows sorted by expert), or
    /// the entries of a batch. Rows that belong to no group are left alone in C.
    ///
    /// A GPU plan with [`GpuOptions::groups`](crate::GpuOptions::groups) takes all of them in one launch, if their weights
    /// are some of one [`prepack_experts`](crate::Plan::prepack_experts), in that order, and C is of floats; otherwise they take turns.
    ///
    /// Returns the tensor scale of a re-quantized C.
    ///
    /// # Errors
    /// As [`run`](Self::run), and if groups overlap, are out of order, or are more than the runner was made for.
    pub fn run_grouped(
        &mut self,
        a: &AOperand<'_>,
        groups: &[Rows<'_>],
        c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        match self {
            Self::Cpu(gemm) => {
                let mut cpu_groups = Vec::with_capacity(groups.len());
                for rows in groups {
                    let weights = rows.weights.on_cpu()?;
                    cpu_groups.push(Group { first_row: rows.first, rows: rows.count, weights });
                }
                Ok(gemm.run(a, &cpu_groups, c)?.map(|scale| scale.value()))
            }
            Self::Gpu(runner) => runner.run(a, groups, c),
        }
    }

    /// Prepares for calls with these weights, so that the first one allocates nothing either and can be recorded into
    /// a graph. On a processor there is nothing to do.
    ///
    /// # Errors
    /// If memory is lacking, or the weights are for another target.
    pub fn warm(&self, weights: &PackedWeights) -> Result<(), Error> {
        match self {
            Self::Cpu(_) => weights.on_cpu().map(drop),
            Self::Gpu(runner) => runner.warm(weights),
        }
    }

    /// As [`warm`](Self::warm), for [`run_device_grouped`](Self::run_device_grouped).
    ///
    /// # Errors
    /// As there, and if the plan takes one pair of weights a call.
    pub fn warm_experts(&self, experts: &PackedExperts) -> Result<(), Error> {
        match self {
            Self::Cpu(_) => Err(Error::NotOnGpu),
            Self::Gpu(runner) => runner.warm_experts(experts),
        }
    }

    /// How long a call takes on a GPU by its own clock, with the operands of the last [`run`](Self::run) and weights that
    /// come from memory. None on a processor, where the clock is the caller's, and on a simulated GPU.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn time(&self, a: &AOperand<'_>, weights: &PackedWeights) -> Result<Option<Timing>, Error> {
        match self {
            Self::Cpu(_) => Ok(None),
            Self::Gpu(runner) => runner.time(a, weights),
        }
    }

    /// Launches one product on operands in device memory, on a stream of the caller's. Allocates nothing, waits for
    /// nothing, and can be recorded into a graph.
    ///
    /// # Safety
    /// Until the call has ended, its operands are live memory of the plan's GPU, as large as the problem and the call make
    /// them; nobody writes A or uses C meanwhile. Calls of one runner share scratch memory: they are ordered, by being on one
    /// stream or by events.
    ///
    /// # Errors
    /// If the plan is not for a GPU, an operand does not fit it, or an address is misaligned.
    pub unsafe fn run_device(
        &self,
        call: &DeviceCall,
        weights: &PackedWeights,
        stream: Stream,
    ) -> Result<(), Error> {
        match self {
            Self::Cpu(_) => Err(Error::NotOnGpu),
            // SAFETY: the caller's promise.
            Self::Gpu(runner) => unsafe { runner.run_device(call, weights, stream) },
        }
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
        match self {
            Self::Cpu(_) => Err(Error::NotOnGpu),
            // SAFETY: the caller's promise.
            Self::Gpu(runner) => unsafe { runner.run_device_grouped(call, experts, stream) },
        }
    }
}
