//! A plan with the buffers of its runs, and the runs on operands in the host's memory.

use dualgemm_cpu::{CpuGemm, FloatLinear, Group, Input};
use dualgemm_gemm::{AFormat, AOperand, OutputMut};

#[cfg(feature = "cuda")]
use crate::gpu::GpuRunner;
use crate::{Error, PackedWeights};

/// Rows of A that share weights: an expert of a mixture, or an entry of a batch.
#[derive(Debug)]
pub struct Rows<'a, W = PackedWeights> {
    /// First row of A, at or after the end of the rows before.
    pub first: usize,
    /// How many; none is fine.
    pub count: usize,
    /// Their weights.
    pub weights: &'a W,
}

impl<W> Clone for Rows<'_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for Rows<'_, W> {}

impl<'a, W> Rows<'a, W> {
    /// The same rows with a part of their weights.
    pub(crate) fn with<P>(self, part: fn(&W) -> &P) -> Rows<'a, P> {
        Rows { first: self.first, count: self.count, weights: part(self.weights) }
    }
}

/// A plan with the buffers of its runs, which allocate nothing on a processor's heap or a GPU's memory.
#[non_exhaustive]
#[derive(Debug)]
pub enum Runner {
    /// On the processor.
    Cpu(Box<CpuGemm>),
    /// On the processor, by weights in floats.
    Floats(FloatLinear),
    /// On a GPU.
    #[cfg(feature = "cuda")]
    Gpu(Box<GpuRunner>),
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
            runner => runner.run_grouped(a, &[Rows { first: 0, count: a.rows(), weights }], c),
        }
    }

    /// Multiplies runs of rows, each with weights of its own: the experts of a mixture (rows sorted by expert), or
    /// the entries of a batch. Rows that belong to no group are left alone in C.
    ///
    /// A GPU plan with `GpuOptions::groups` takes all of them in one launch, if their weights are some of one
    /// [`prepack_experts`](crate::Plan::prepack_experts), in that order, and C is of floats; otherwise they take turns.
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
            Self::Cpu(gemm) => on_cpu(gemm, a.into(), groups.iter().copied(), c),
            Self::Floats(linear) => by_floats(linear, a, groups.iter().copied(), c),
            #[cfg(feature = "cuda")]
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
            Self::Floats(_) => weights.in_floats().map(drop),
            #[cfg(feature = "cuda")]
            Self::Gpu(runner) => runner.warm(weights),
        }
    }
}

/// [`Runner::run_grouped`] on a processor.
pub(crate) fn on_cpu<'g>(
    gemm: &mut CpuGemm,
    input: Input<'_>,
    groups: impl Iterator<Item = Rows<'g>>,
    c: OutputMut<'_>,
) -> Result<Option<f32>, Error> {
    let group = |rows: Rows<'g>| {
        Ok::<_, Error>(Group { first_row: rows.first, rows: rows.count, weights: rows.weights.on_cpu()? })
    };
    Ok(gemm.run_each(input, groups.map(group), c)?.map(|scale| scale.value()))
}

/// [`Runner::run_grouped`] by weights in floats, one group after the other.
pub(crate) fn by_floats<'g>(
    linear: &mut FloatLinear,
    a: &AOperand<'_>,
    groups: impl Iterator<Item = Rows<'g>>,
    mut c: OutputMut<'_>,
) -> Result<Option<f32>, Error> {
    let AOperand::Float(a) = a else {
        return Err(Error::operand("A", AFormat::of(a).to_string(), "f32, f16 or bf16"));
    };
    let mut end = 0;
    for Rows { first, count, weights } in groups.filter(|group| group.count > 0) {
        let (w, bias) = weights.in_floats()?;
        let c = c.rows(first..first + count, (a.rows(), w.rows()));
        let Some(c) = c.filter(|_| first >= end) else {
            let found = format!("of rows {first} to {}, after row {end}", first + count);
            return Err(Error::operand("a group, or C,", found, format!("[{}, {}]", a.rows(), w.rows())));
        };
        end = first + count;
        linear.run(&a.part(first..end, 0..a.cols()), w, bias, c)?;
    }
    Ok(None)
}
