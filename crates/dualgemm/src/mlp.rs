//! The whole gated MLP: gate, up and down in one call.

#[cfg(feature = "cuda")]
mod on_device;

use dualgemm_cpu::{Input, team};
use dualgemm_gemm::{AOperand, GatedMlp, MlpDesc, OutFormat, OutputMut};

use crate::runner::{by_floats, on_cpu};
use crate::{DualGemm, Error, OwnedMatrix, PackedWeights, Plan, Rows, Runner, Target};

/// What messages call the rows between the products.
const BETWEEN: &str = "C of gate and up";

/// How an MLP is computed: two plans. The second reads what the first writes.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MlpPlan {
    /// Gate and up.
    pub gate_up: Plan,
    /// The down projection.
    pub down: Plan,
}

impl MlpPlan {
    /// Chooses how to compute an MLP.
    ///
    /// # Errors
    /// If the description breaks a rule, or the target is not there or lacks what is asked of it.
    pub fn new(desc: &MlpDesc, target: &Target) -> Result<Self, Error> {
        desc.check()?;
        #[cfg(feature = "cuda")]
        let target = &on_device::target(desc, target)?;
        Ok(Self {
            gate_up: DualGemm::plan(&desc.gate_up, target)?,
            down: DualGemm::plan(&desc.down, target)?,
        })
    }

    /// The problem.
    pub fn desc(&self) -> MlpDesc {
        MlpDesc { gate_up: *self.gate_up.desc(), down: *self.down.desc() }
    }

    /// Brings the weights into the order of the kernels.
    ///
    /// # Errors
    /// If they do not belong together, are not what the plan is for, or a block scale is NaN or negative.
    pub fn prepack(&self, mlp: &GatedMlp<'_>) -> Result<PackedMlp, Error> {
        Ok(PackedMlp { gate_up: self.gate_up.prepack(&mlp.gate_up)?, down: self.down.prepack(&mlp.down)? })
    }

    /// The plan with buffers for calls with up to `max_groups` groups of rows; 1 for a plain MLP.
    ///
    /// # Errors
    /// If this machine lacks what the plan asks for, or the memory for what is kept between the products.
    pub fn runner(&self, max_groups: usize) -> Result<MlpRunner, Error> {
        let desc = self.desc();
        desc.check()?;
        let runner = MlpRunner {
            gate_up: self.gate_up.runner(max_groups)?,
            down: self.down.runner(max_groups)?,
            between: None,
            #[cfg(feature = "cuda")]
            on_device: None,
            desc,
        };
        Ok(match (&self.gate_up, &self.down) {
            #[cfg(feature = "cuda")]
            (Plan::Gpu { gpu, plan }, Plan::Gpu { gpu: down, .. }) if gpu == down => {
                let between = on_device::Between::new(gpu.open()?, &desc.gate_up, plan.a_scale_layout)?;
                MlpRunner { on_device: Some(between), ..runner }
            }
            _ => MlpRunner { between: Some(OwnedMatrix::of_c(BETWEEN, &desc.gate_up)?), ..runner },
        })
    }
}

impl std::fmt::Display for MlpPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\n{}", self.gate_up, self.down)
    }
}

/// The weights of an MLP in the order that a target's kernels read them.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedMlp {
    /// Gate and up.
    pub gate_up: PackedWeights,
    /// The down projection.
    pub down: PackedWeights,
}

impl PackedMlp {
    /// Bytes that the weights take.
    pub fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }
}

/// An [`MlpPlan`] with the buffers of its runs.
#[derive(Debug)]
pub struct MlpRunner {
    pub(crate) desc: MlpDesc,
    pub(crate) gate_up: Runner,
    pub(crate) down: Runner,
    /// Made at the first call, where operands on a GPU are the rule.
    between: Option<OwnedMatrix>,
    #[cfg(feature = "cuda")]
    on_device: Option<on_device::Between>,
}

impl MlpRunner {
    /// Computes all rows of A with one MLP, into C of the down projection.
    ///
    /// Returns the tensor scale of a re-quantized C. On a GPU it copies A there, waits for both products, and copies C back.
    ///
    /// # Errors
    /// If an operand does not fit the plan, or a block scale of A is NaN or negative.
    pub fn run(&mut self, a: &AOperand<'_>, mlp: &PackedMlp, c: OutputMut<'_>) -> Result<Option<f32>, Error> {
        #[cfg(feature = "cuda")]
        if self.on_device.is_some() {
            return self.run_with_copies(a, mlp, c);
        }
        self.run_grouped(a, &[Rows { first: 0, count: a.rows(), weights: mlp }], c)
    }

    /// Computes runs of rows, each with an MLP of its own. Rows of no group are left alone in C.
    ///
    /// # Errors
    /// As [`run`](Self::run), and if groups overlap, are out of order, or are more than the runner was made for.
    pub fn run_grouped(
        &mut self,
        a: &AOperand<'_>,
        groups: &[Rows<'_, PackedMlp>],
        c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        self.run_listed(a, None, groups.iter().copied(), c)
    }

    /// The same of the rows of A that a list names, if there is one. Only processors take a list.
    pub(crate) fn run_listed<'g>(
        &mut self,
        a: &AOperand<'_>,
        list: Option<&[u32]>,
        groups: impl Iterator<Item = Rows<'g, PackedMlp>> + Clone + Send,
        c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        // From outside of the threads, every product would wake them and wait for them; so they enter together. One thread needs
        // no others.
        match &self.gate_up {
            Runner::Cpu(gemm) if gemm.plan().threads == 1 => self.run_inside(a, list, groups, c),
            _ => team::enter(|| self.run_inside(a, list, groups, c)),
        }
    }

    fn run_inside<'g>(
        &mut self,
        a: &AOperand<'_>,
        list: Option<&[u32]>,
        groups: impl Iterator<Item = Rows<'g, PackedMlp>> + Clone,
        c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        let (rows, desc) = (list.map_or(a.rows(), <[u32]>::len), &self.desc.gate_up);
        if rows > desc.m {
            return Err(Error::operand(
                "A",
                format!("[{rows}, {}]", a.k()),
                format!("up to {} rows", desc.m),
            ));
        }
        let mut each = groups.clone();
        if let (Runner::Cpu(first), Runner::Cpu(down), None) = (&mut self.gate_up, &mut self.down, list)
            && let (Some(Rows { first: 0, count, weights }), None) = (each.next(), each.next())
            && count == a.rows()
            && !matches!(down.plan().desc.out, OutFormat::Nvfp4 { .. })
            && first.run_before(a, weights.gate_up.on_cpu()?, down)?
        {
            down.run_ahead(rows, weights.down.on_cpu()?, c)?;
            return Ok(None);
        }
        let between = match &mut self.between {
            Some(between) => between,
            none => none.insert(OwnedMatrix::of_c(BETWEEN, desc)?),
        };
        let c_between = between.output(rows, desc.n);
        let of_gate_up = groups.clone().map(|rows| rows.with(|mlp| &mlp.gate_up));
        let scale = multiply(&mut self.gate_up, (a, list), of_gate_up, c_between)?;
        between.set_global_scale(scale);
        let hidden = between.operand(BETWEEN, rows, desc.n)?;
        multiply(&mut self.down, (&hidden, None), groups.map(|rows| rows.with(|mlp| &mlp.down)), c)
    }
}

/// One of the products.
fn multiply<'g>(
    runner: &mut Runner,
    (a, list): (&AOperand<'_>, Option<&[u32]>),
    groups: impl Iterator<Item = Rows<'g>>,
    c: OutputMut<'_>,
) -> Result<Option<f32>, Error> {
    match (runner, list) {
        (Runner::Cpu(gemm), None) => on_cpu(gemm, a.into(), groups, c),
        (Runner::Cpu(gemm), Some(list)) => on_cpu(gemm, Input::listed(a, list), groups, c),
        (Runner::Floats(linear), None) => by_floats(linear, a, groups, c),
        (Runner::Floats(_), Some(_)) => {
            Err(Error::operand("A", "rows of a list", "all rows, by weights in floats"))
        }
        #[cfg(feature = "cuda")]
        (Runner::Gpu(_), Some(_)) => Err(Error::OtherTarget { weights: "the processor", plan: "a GPU" }),
        #[cfg(feature = "cuda")]
        (Runner::Gpu(gpu), None) => gpu.run(a, &groups.collect::<Vec<_>>(), c),
    }
}
