//! Plan, prepack, run: one interface over every target. Today there is one, the CPU.

use dualgemm_cpu::{CpuGemm, CpuOptions, CpuPlan, Group, PackedGateUp};
use dualgemm_formats::BlockFormat;
use dualgemm_gemm::{AOperand, DualGemmDesc, GateUp, OutputMut};

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
    /// First row of A, at or after the end of the rows before.
    pub first: usize,
    /// How many; none is fine.
    pub count: usize,
    /// Their weights.
    pub weights: &'a PackedWeights,
}

/// A plan with the buffers of its runs, which allocate nothing.
#[non_exhaustive]
#[derive(Debug)]
pub enum Runner {
    /// On the processor.
    Cpu(CpuGemm),
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
        let Self::Cpu(_) = self;
        self.check_shape(weights.gate.name(), (weights.gate.format(), weights.n(), weights.k()))?;
        Ok(PackedWeights::Cpu(PackedGateUp::pack(weights)?))
    }

    /// As [`prepack`](Self::prepack), for weights that come as runs of features, in order, of which never more than
    /// one has to be in memory. All runs but the last have a multiple of 16 features.
    ///
    /// # Errors
    /// Hands on the errors of the runs, otherwise as [`prepack`](Self::prepack).
    pub fn prepack_runs<'w>(
        &self,
        runs: impl IntoIterator<Item = Result<GateUp<'w>, Error>>,
    ) -> Result<PackedWeights, Error> {
        let Self::Cpu(plan) = self;
        let packed = PackedGateUp::pack_runs(plan.desc.n, runs)?;
        self.check_shape("the weights", (packed.format(), packed.n(), packed.k()))?;
        Ok(PackedWeights::Cpu(packed))
    }

    /// Measures what this machine can do at most for this plan: multiplications and additions per second, and bytes
    /// per second from where its operands live when they are used again. Takes about half a second.
    ///
    /// # Errors
    /// If this machine lacks what the plan asks for.
    pub fn measure_limits(&self) -> Result<(f64, f64), Error> {
        let Self::Cpu(plan) = self;
        Ok(dualgemm_cpu::limits::of_plan(plan)?)
    }

    fn check_shape(&self, tensor: &str, found: (BlockFormat, usize, usize)) -> Result<(), Error> {
        let desc = self.desc();
        let text = |(format, n, k): (BlockFormat, usize, usize)| format!("{format} [{n}, {k}]");
        let expected = (desc.b, desc.n, desc.k);
        if found == expected {
            return Ok(());
        }
        let (found, expected) = (text(found), text(expected));
        Err(Error::Gemm(dualgemm_gemm::Error::Operand { tensor: tensor.into(), found, expected }))
    }

    /// The plan with buffers for products of up to `max_groups` groups of rows; 1 for a plain product.
    ///
    /// # Errors
    /// If this machine lacks what the plan asks for, as a plan from elsewhere may.
    pub fn runner(&self, max_groups: usize) -> Result<Runner, Error> {
        let Self::Cpu(plan) = self;
        Ok(Runner::Cpu(CpuGemm::new(plan, max_groups)?))
    }

    /// Multiplies all rows of A, up to the M of the plan, with one pair of weights. Allocates buffers; calls in a loop
    /// are better made on a [`runner`](Self::runner).
    ///
    /// Returns the tensor scale (a multiplier) of a re-quantized C.
    ///
    /// # Errors
    /// If an operand does not fit the plan, or a block scale of A is NaN or negative.
    pub fn run(
        &self,
        a: &AOperand<'_>,
        weights: &PackedWeights,
        c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        self.runner(1)?.run(a, weights, c)
    }

    /// [`run`](Self::run) into a new vector, `[rows of A, n]`.
    ///
    /// # Errors
    /// As [`run`](Self::run), and if the plan's output is not f32.
    pub fn run_to_vec(&self, a: &AOperand<'_>, weights: &PackedWeights) -> Result<Vec<f32>, Error> {
        let mut c = vec![0.0; a.rows() * self.desc().n];
        self.run(a, weights, OutputMut::F32(&mut c))?;
        Ok(c)
    }
}

impl Runner {
    /// Multiplies all rows of A with one pair of weights; see [`Plan::run`].
    ///
    /// # Errors
    /// As there.
    pub fn run(
        &mut self,
        a: &AOperand<'_>,
        weights: &PackedWeights,
        c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        let (Self::Cpu(gemm), PackedWeights::Cpu(weights)) = (self, weights);
        let all = Group { first_row: 0, rows: a.rows(), weights };
        Ok(gemm.run(a, &[all], c)?.map(|scale| scale.value()))
    }

    /// Multiplies runs of rows, each with weights of its own: the experts of a mixture (rows sorted by expert), or
    /// the entries of a batch. Rows that belong to no group are left alone in C.
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
        let Self::Cpu(gemm) = self;
        let mut cpu_groups = Vec::with_capacity(groups.len());
        for rows in groups {
            let PackedWeights::Cpu(weights) = rows.weights;
            cpu_groups.push(Group { first_row: rows.first, rows: rows.count, weights });
        }
        Ok(gemm.run(a, &cpu_groups, c)?.map(|scale| scale.value()))
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self::Cpu(plan) = self;
        plan.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_and_weights_are_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Plan>();
        shared::<PackedWeights>();
        shared::<Runner>();
    }
}
