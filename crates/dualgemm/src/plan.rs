//! Plan, prepack, run: one interface over every target. Today there is one, the CPU.

use dualgemm_cpu::{CpuOptions, CpuPlan, PackedGateUp};
use dualgemm_gemm::{DualGemmDesc, GateUp};

use crate::Error;

/// Where to compute.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// This machine's processor.
    Cpu(CpuOptions),
}

impl Default for Target {
    /// The processor, with its best instruction set and all threads of the current rayon pool.
    fn default() -> Self {
        Self::Cpu(CpuOptions::default())
    }
}

/// The operation: where [`plan`](Self::plan) starts.
#[derive(Debug, Clone, Copy)]
pub struct DualGemm;

impl DualGemm {
    /// Chooses how to compute a problem. Pure: it looks at the description and the target, not at operands, and
    /// keeps nothing.
    ///
    /// # Errors
    /// If the description breaks a rule, or the target lacks what is asked of it.
    pub fn plan(desc: &DualGemmDesc, target: &Target) -> Result<Plan, Error> {
        let Target::Cpu(options) = target;
        Ok(Plan::Cpu(CpuPlan::new(desc, *options)?))
    }
}

/// How a problem is computed: printable, serializable, free of operands and buffers, and so shared between threads
/// and calls at will.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "target", rename_all = "snake_case")]
pub enum Plan {
    /// On the processor.
    Cpu(CpuPlan),
}

/// Weights in the order that a target's kernels read them. Plans of any M, activation format and output share them.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq)]
pub enum PackedWeights {
    /// For the processor, every instruction set alike.
    Cpu(PackedGateUp),
}

/// Rows of A that share a pair of weights: an expert of a mixture, or an entry of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// First row of A.
    pub first_row: usize,
    /// How many; none is fine.
    pub rows: usize,
    /// Their weights.
    pub weights: &'a PackedWeights,
}

/// The buffers of a plan, for runs that allocate nothing.
#[non_exhaustive]
#[derive(Debug)]
pub enum Workspace {
    /// On the processor.
    Cpu(dualgemm_cpu::Workspace),
}

impl Plan {
    /// The problem.
    pub fn desc(&self) -> &DualGemmDesc {
        let Self::Cpu(plan) = self;
        &plan.desc
    }

    /// Name of the kernel.
    pub fn kernel(&self) -> &str {
        let Self::Cpu(plan) = self;
        &plan.kernel
    }

    /// Threads that share the work.
    pub fn threads(&self) -> usize {
        let Self::Cpu(plan) = self;
        plan.threads
    }

    /// Brings weights into the order of the kernels. Done once per pair of weights, not per call.
    ///
    /// # Errors
    /// If the halves do not belong together, are not what the plan is for, or a block scale is NaN or negative.
    pub fn prepack(&self, weights: &GateUp<'_>) -> Result<PackedWeights, Error> {
        let Self::Cpu(plan) = self;
        Ok(PackedWeights::Cpu(PackedGateUp::pack(weights)?))
    }

    /// Buffers for runs of this plan with up to `groups` groups of rows; 1 for a plain product.
    ///
    /// # Errors
    /// If this machine is not the one the plan was made for.
    pub fn workspace(&self, groups: usize) -> Result<Workspace, Error> {
        let Self::Cpu(plan) = self;
        Ok(Workspace::Cpu(dualgemm_cpu::Workspace::new(plan, groups)?))
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self::Cpu(plan) = self;
        plan.fmt(f)
    }
}
