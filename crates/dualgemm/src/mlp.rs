//! The whole gated MLP: gate, up and down in one call.

#[cfg(feature = "cuda")]
mod on_device;

use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::{AOperand, DualGemmDesc, GatedMlp, MlpDesc, OutFormat, OutputMut};
use half::{bf16, f16};

use crate::{DualGemm, Error, PackedWeights, Plan, Rows, Runner, Target};

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
            (Plan::Gpu { gpu, .. }, Plan::Gpu { gpu: down, .. }) if gpu == down => {
                MlpRunner { on_device: Some(on_device::Between::new(gpu.open()?, &desc.gate_up)?), ..runner }
            }
            _ => MlpRunner { between: Some(Between::new(&desc.gate_up)?), ..runner },
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

/// An [`MlpPlan`] with the buffers of its runs.
#[derive(Debug)]
pub struct MlpRunner {
    pub(crate) desc: MlpDesc,
    pub(crate) gate_up: Runner,
    pub(crate) down: Runner,
    /// Made at the first call, where operands on a GPU are the rule.
    between: Option<Between>,
    #[cfg(feature = "cuda")]
    on_device: Option<on_device::Between>,
}

impl MlpRunner {
    /// Computes all rows of A with one MLP, into C of the down projection.
    ///
    /// Returns the tensor scale of a re-quantized C.
    ///
    /// # Errors
    /// If an operand does not fit the plan, or a block scale of A is NaN or negative.
    pub fn run(&mut self, a: &AOperand<'_>, mlp: &PackedMlp, c: OutputMut<'_>) -> Result<Option<f32>, Error> {
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
        // From outside its pool, every product would wake the pool and wait for it; so they enter it together. One thread
        // needs none.
        match &self.down {
            Runner::Cpu(gemm) if gemm.plan().threads == 1 => self.run_inside(a, groups, c),
            _ => rayon::scope(|_| self.run_inside(a, groups, c)),
        }
    }

    fn run_inside(
        &mut self,
        a: &AOperand<'_>,
        groups: &[Rows<'_, PackedMlp>],
        c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        let (rows, desc) = (a.rows(), &self.desc.gate_up);
        if rows > desc.m {
            return Err(Error::Gemm(dualgemm_gemm::Error::Operand {
                tensor: "A".into(),
                found: format!("[{rows}, {}]", a.k()),
                expected: format!("up to {} rows", desc.m),
            }));
        }
        let of = |part: fn(&PackedMlp) -> &PackedWeights| {
            let group = move |&Rows { first, count, weights }| Rows { first, count, weights: part(weights) };
            groups.iter().map(group).collect::<Vec<_>>()
        };
        let between = match &mut self.between {
            Some(between) => between,
            none => none.insert(Between::new(desc)?),
        };
        let scale = self.gate_up.run_grouped(a, &of(|mlp| &mlp.gate_up), between.output(rows, desc))?;
        let hidden = between.operand(rows, desc, scale)?;
        self.down.run_grouped(&hidden, &of(|mlp| &mlp.down), c)
    }
}

/// What the first product leaves for the second.
#[derive(Debug)]
enum Between {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Nvfp4 { codes: Vec<u8>, scales: Vec<u8>, layout: ScaleLayout },
}

/// `len` of an element, or none if the memory does not hold them.
pub(crate) fn try_vec<T: Clone>(len: Option<usize>, element: T) -> Option<Vec<T>> {
    let (len, mut vec) = (len?, Vec::new());
    vec.try_reserve_exact(len).ok()?;
    vec.resize(len, element);
    Some(vec)
}

impl Between {
    fn new(desc: &DualGemmDesc) -> Result<Self, Error> {
        let &DualGemmDesc { m, n, .. } = desc;
        let values = m.checked_mul(n);
        let made = match desc.out {
            OutFormat::F32 => try_vec(values, 0.0).map(Self::F32),
            OutFormat::F16 => try_vec(values, f16::ZERO).map(Self::F16),
            OutFormat::Bf16 => try_vec(values, bf16::ZERO).map(Self::Bf16),
            OutFormat::Nvfp4 { scale_layout: layout, .. } => {
                let codes = try_vec(values.map(|values| values / 2), 0);
                let scales = try_vec(layout.checked_len(m, n / BlockFormat::Nvfp4.block_len()), 0);
                codes.zip(scales).map(|(codes, scales)| Self::Nvfp4 { codes, scales, layout })
            }
        };
        let too_large =
            dualgemm_gemm::Error::TooLarge { tensor: "C of gate and up", batch: 1, rows: m, cols: n };
        Ok(made.ok_or(too_large)?)
    }

    /// The first rows, to be written.
    fn output(&mut self, rows: usize, desc: &DualGemmDesc) -> OutputMut<'_> {
        let values = rows * desc.n;
        match self {
            Self::F32(c) => OutputMut::F32(&mut c[..values]),
            Self::F16(c) => OutputMut::F16(&mut c[..values]),
            Self::Bf16(c) => OutputMut::Bf16(&mut c[..values]),
            Self::Nvfp4 { codes, scales, layout } => {
                let scale_bytes = layout.len(rows, desc.n / BlockFormat::Nvfp4.block_len());
                OutputMut::Nvfp4 { codes: &mut codes[..values / 2], scales: &mut scales[..scale_bytes] }
            }
        }
    }

    /// The same rows, to be read.
    fn operand(&self, rows: usize, desc: &DualGemmDesc, scale: Option<f32>) -> Result<AOperand<'_>, Error> {
        let (n, values) = (desc.n, rows * desc.n);
        let name = "C of gate and up";
        Ok(match self {
            Self::F32(c) => AOperand::Float(FloatMatrix::F32(Matrix::new(name, rows, n, &c[..values])?)),
            Self::F16(c) => AOperand::Float(FloatMatrix::F16(Matrix::new(name, rows, n, &c[..values])?)),
            Self::Bf16(c) => AOperand::Float(FloatMatrix::Bf16(Matrix::new(name, rows, n, &c[..values])?)),
            &Self::Nvfp4 { ref codes, ref scales, layout } => {
                let (codes, format) = (&codes[..values / 2], BlockFormat::Nvfp4);
                let scales = &scales[..layout.len(rows, n / format.block_len())];
                let global = scale.map_or(GlobalScale::ONE, GlobalScale::multiplier);
                AOperand::Quantized(QuantizedMatrix::new(
                    name, format, rows, n, codes, scales, layout, global,
                )?)
            }
        })
    }
}
