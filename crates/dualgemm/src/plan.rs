//! Plan, prepack, run: one interface over every target: the processor, NVIDIA GPUs, simulated ones.

use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use dualgemm_checkpoint::GateUpSource;
use dualgemm_cpu::{CpuGemm, CpuOptions, CpuPlan, FloatLinear, PackedGateUp};
use dualgemm_gemm::{AFormat, AOperand, DualGemmDesc, GateUp, OutputMut, WeightRef};
#[cfg(feature = "cuda")]
use dualgemm_plan::{DeviceExperts, DeviceWeights, Gpu, GpuOptions, GpuPlan};

#[cfg(feature = "cuda")]
use crate::gpu::{GpuId, GpuRunner};
use crate::{Error, PackedExperts, PackedWeights, Runner};

/// Where to compute.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// This machine's processor.
    Cpu(CpuOptions),
    /// A GPU, real or simulated.
    #[cfg(feature = "cuda")]
    Gpu(GpuId, GpuOptions),
}

impl Default for Target {
    /// The processor, with its best instruction set and all threads of the current team or rayon pool.
    fn default() -> Self {
        Self::Cpu(CpuOptions::default())
    }
}

#[cfg(feature = "cuda")]
impl std::str::FromStr for Target {
    type Err = Error;

    /// The target of a name: `cpu`, or that of a GPU.
    fn from_str(name: &str) -> Result<Self, Error> {
        Ok(if name == "cpu" { Self::default() } else { Self::Gpu(name.parse()?, GpuOptions::default()) })
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu(_) => f.write_str("cpu"),
            #[cfg(feature = "cuda")]
            Self::Gpu(id, _) => id.fmt(f),
        }
    }
}

#[cfg(feature = "cuda")]
impl Target {
    /// The NVIDIA GPU of that number, with everything chosen for it.
    pub fn cuda(ordinal: i32) -> Self {
        Self::Gpu(GpuId::Cuda(ordinal), GpuOptions::default())
    }
}

/// The operation: where [`plan`](Self::plan) starts.
#[derive(Debug, Clone, Copy)]
pub struct DualGemm;

impl DualGemm {
    /// Chooses how to compute a problem: it looks at the description and the target, not at operands.
    ///
    /// # Errors
    /// If the description breaks a rule, or the target is not there or lacks what is asked of it.
    pub fn plan(desc: &DualGemmDesc, target: &Target) -> Result<Plan, Error> {
        Ok(match target {
            Target::Cpu(options) => Plan::Cpu(CpuPlan::new(desc, *options)?),
            #[cfg(feature = "cuda")]
            Target::Gpu(id, options) => {
                Plan::Gpu { gpu: id.clone(), plan: GpuPlan::new(desc, id.open()?, options)? }
            }
        })
    }
}

/// How many features of `k` elements are read before their pages are let go of: little beside the weights of a layer, much
/// beside the cost of letting go.
pub fn features_per_run(k: usize) -> usize {
    const BYTES: usize = 1 << 20;
    // Whole panels of the kernels, whole tiles of block scales and whole periods of alternating rows.
    const MULTIPLE: usize = 128;
    (BYTES / (k + k / 8)).max(1).next_multiple_of(MULTIPLE)
}

/// How a problem is computed: printable, serializable, free of operands and buffers, and so shared between threads
/// and calls at will.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "target", rename_all = "snake_case")]
pub enum Plan {
    /// On the processor.
    Cpu(CpuPlan),
    /// On a GPU.
    #[cfg(feature = "cuda")]
    Gpu {
        /// Which.
        gpu: GpuId,
        /// How.
        plan: GpuPlan,
    },
}

impl Plan {
    /// The problem.
    pub fn desc(&self) -> &DualGemmDesc {
        match self {
            Self::Cpu(plan) => &plan.desc,
            #[cfg(feature = "cuda")]
            Self::Gpu { plan, .. } => &plan.desc,
        }
    }

    /// Name of the kernel.
    pub fn kernel(&self) -> &str {
        match self {
            Self::Cpu(plan) => &plan.kernel,
            #[cfg(feature = "cuda")]
            Self::Gpu { plan, .. } => &plan.kernel,
        }
    }

    /// Threads of the processor that share the work, 0 if a GPU does it.
    pub fn threads(&self) -> usize {
        match self {
            Self::Cpu(plan) => plan.threads,
            #[cfg(feature = "cuda")]
            Self::Gpu { .. } => 0,
        }
    }

    /// Brings weights, a pair or a linear layer, into the order of the kernels, on a GPU also to it. Done once, not per call.
    ///
    /// # Errors
    /// If the halves do not belong together, are not what the plan is for, or a block scale is NaN or negative.
    pub fn prepack<'w>(&self, weights: impl Into<WeightRef<'w>>) -> Result<PackedWeights, Error> {
        let weights = weights.into();
        self.desc().check_weights(weights)?;
        Ok(match (self, weights) {
            (Self::Cpu(_), WeightRef::Linear(layer)) if layer.weight.blocks().is_err() => {
                layer.check()?;
                PackedWeights::Floats(layer.clone().into_owned())
            }
            (Self::Cpu(_), weights) => PackedWeights::Cpu(PackedGateUp::pack(weights)?),
            #[cfg(feature = "cuda")]
            (Self::Gpu { gpu, plan }, WeightRef::GateUp(pair)) => {
                let form = plan.weight_form()?;
                PackedWeights::Gpu(Arc::new(DeviceWeights::upload(gpu.open()?, pair, form)?))
            }
            #[cfg(feature = "cuda")]
            (Self::Gpu { gpu, plan }, WeightRef::Linear(layer)) => {
                let form = plan.weight_form()?;
                PackedWeights::Gpu(Arc::new(DeviceWeights::upload_linear(gpu.open()?, layer, form)?))
            }
        })
    }

    /// As [`prepack`](Self::prepack), for weights that come as runs of features, in order; never more than
    /// one has to be in memory. All runs but the last have a multiple of 64 features.
    ///
    /// # Errors
    /// Hands on the errors of the runs, otherwise as [`prepack`](Self::prepack).
    pub fn prepack_runs<'w>(
        &self,
        runs: impl IntoIterator<Item = Result<GateUp<'w>, Error>>,
    ) -> Result<PackedWeights, Error> {
        match self {
            Self::Cpu(plan) => {
                let packed = PackedGateUp::pack_runs(plan.desc.n, runs)?;
                self.check_shape("the weights", (packed.format(), packed.n(), packed.k()))?;
                Ok(PackedWeights::Cpu(packed))
            }
            #[cfg(feature = "cuda")]
            Self::Gpu { gpu, plan } => {
                let &DualGemmDesc { n, k, b, .. } = &plan.desc;
                // Every run is checked for what a whole pair is, but for its number of features.
                let runs = runs.into_iter().map(|run| {
                    let run = run?;
                    self.check_shape(run.gate.name(), (run.gate.format(), n, run.k()))?;
                    Ok::<_, Error>(run)
                });
                let weights = DeviceWeights::upload_runs(gpu.open()?, n, runs, plan.weight_form()?)?;
                self.check_shape("the weights", (b, weights.n(), k))?;
                Ok(PackedWeights::Gpu(Arc::new(weights)))
            }
        }
    }

    /// The same for some features of a layer of a checkpoint, whose pages are let go of as they are read. `progress` is told
    /// how many are done.
    ///
    /// # Errors
    /// As there, and if a tensor breaks a rule of its format.
    ///
    /// # Panics
    /// If `features` reaches past the layer.
    pub fn prepack_source(
        &self,
        source: &GateUpSource<'_>,
        features: Range<usize>,
        progress: impl Fn(usize),
    ) -> Result<PackedWeights, Error> {
        let (run, end) = (features_per_run(source.k()), features.end);
        let packed = self.prepack_runs(features.clone().step_by(run).map(|first| {
            source.release();
            progress(first - features.start);
            Ok(source.features(first..end.min(first + run))?)
        }))?;
        source.release();
        Ok(packed)
    }

    /// The GPU that the plan is for, and how it computes there.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_gpu(&self) -> Result<(&'static Gpu, &GpuPlan), Error> {
        match self {
            Self::Gpu { gpu, plan } => Ok((gpu.open()?, plan)),
            Self::Cpu(_) => Err(Error::NotOnGpu),
        }
    }

    /// Packs the experts of a mixture, or the weights of the entries of a batch: pairs of one shape.
    ///
    /// For a GPU, plan with `GpuOptions::groups`; then one launch takes the rows of all experts.
    ///
    /// # Errors
    /// As [`prepack`](Self::prepack), and if there is no expert.
    pub fn prepack_experts(&self, experts: &[GateUp<'_>]) -> Result<PackedExperts, Error> {
        for weights in experts {
            self.check_shape(weights.gate.name(), (weights.gate.format(), weights.n(), weights.k()))?;
        }
        match self {
            #[cfg(feature = "cuda")]
            Self::Gpu { gpu, plan } => {
                let gpu = gpu.open()?;
                PackedExperts::of(gpu, DeviceExperts::upload(gpu, experts, plan.weight_form()?)?)
            }
            Self::Cpu(_) => {
                let each = experts.iter().map(|weights| self.prepack(weights));
                Ok(PackedExperts::apart(each.collect::<Result<_, _>>()?))
            }
        }
    }

    /// Measures what this machine can do at most for this plan: multiplications and additions per second, and bytes
    /// per second from where its operands live when they are used again. Takes about half a second.
    ///
    /// # Errors
    /// If this machine lacks what the plan asks for, or is simulated.
    pub fn measure_limits(&self) -> Result<(f64, f64), Error> {
        match self {
            Self::Cpu(plan) => Ok(dualgemm_cpu::limits::of_plan(plan)?),
            #[cfg(feature = "cuda")]
            Self::Gpu { gpu, .. } => {
                let limits = dualgemm_plan::measure::limits(gpu.open()?, Default::default())?;
                Ok((limits.flops_per_s, limits.bytes_per_s))
            }
        }
    }

    pub(crate) fn check_shape(
        &self,
        tensor: &str,
        (format, n, k): (impl Into<AFormat>, usize, usize),
    ) -> Result<(), Error> {
        let (desc, found) = (self.desc(), (format.into(), n, k));
        let text = |(format, n, k): (AFormat, usize, usize)| format!("{format} [{n}, {k}]");
        let expected = (desc.b, desc.n, desc.k);
        if found == expected {
            return Ok(());
        }
        Err(Error::operand(tensor, text(found), text(expected)))
    }

    /// The plan with buffers for products of up to `max_groups` groups of rows; 1 for a plain product.
    ///
    /// # Errors
    /// If this machine lacks what the plan asks for, as a plan from elsewhere may.
    pub fn runner(&self, max_groups: usize) -> Result<Runner, Error> {
        Ok(match self {
            Self::Cpu(plan) if plan.desc.b.block_format().is_none() => {
                let CpuPlan { desc, isa, threads, .. } = *plan;
                let options = CpuOptions { isa: Some(isa), threads: Some(threads), ..CpuOptions::default() };
                Runner::Floats(FloatLinear::new(desc.m, desc.k, options)?)
            }
            Self::Cpu(plan) => Runner::Cpu(Box::new(CpuGemm::new(plan, max_groups)?)),
            #[cfg(feature = "cuda")]
            Self::Gpu { gpu, plan } => Runner::Gpu(Box::new(GpuRunner::new(gpu.open()?, plan)?)),
        })
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
    /// As [`run`](Self::run), and if the plan's output is not f32 or larger than the memory.
    pub fn run_to_vec(&self, a: &AOperand<'_>, weights: &PackedWeights) -> Result<Vec<f32>, Error> {
        let (rows, cols) = (a.rows(), self.desc().n);
        let too_large = || dualgemm_gemm::Error::TooLarge { tensor: "C", batch: 1, rows, cols };
        let len = rows.checked_mul(cols).ok_or_else(too_large)?;
        let mut c = Vec::new();
        c.try_reserve_exact(len).map_err(|_| too_large())?;
        c.resize(len, 0.0);
        self.run(a, weights, OutputMut::F32(&mut c))?;
        Ok(c)
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu(plan) => plan.fmt(f),
            #[cfg(feature = "cuda")]
            Self::Gpu { plan, .. } => plan.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use dualgemm_formats::{BlockFormat, FloatMatrix, Matrix, Producer, Search, quantize};

    use super::*;

    #[test]
    fn plans_and_weights_are_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Plan>();
        shared::<PackedWeights>();
        shared::<PackedExperts>();
        shared::<Runner>();
    }

    #[test]
    fn results_that_no_memory_holds_are_refused() {
        let plan = |n| {
            let desc = DualGemmDesc::new(1, n, 32, AFormat::F32, BlockFormat::Nvfp4);
            DualGemm::plan(&desc, &Target::default()).unwrap()
        };
        let x = |name| FloatMatrix::F32(Matrix::new(name, 1, 32, vec![1.0; 32]).unwrap());
        let half = |name| quantize(name, &x(name), Producer::ModelOpt, Search::Plain).unwrap();
        let packed = plan(1).prepack(&GateUp::new(half("gate"), half("up"))).unwrap();
        let error = plan(1 << 46).run_to_vec(&AOperand::Float(x("a")), &packed).unwrap_err();
        assert!(error.to_string().starts_with("C [1, 70368744177664] does not fit the memory"), "{error}");
    }
}
