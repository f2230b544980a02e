//! Plans with their buffers, kept for further calls and shared by all weights: the layers of a model have few shapes, so
//! the buffers are few and warm. Two calls never share one, and threads do not wait for each other.

use std::sync::{Mutex, PoisonError};

use dualgemm::cpu::{CpuOptions, FloatLinear};
use dualgemm::formats::FloatMatrix;
use dualgemm::gemm::{AOperand, DualGemmDesc, OutputMut, Routing};
use dualgemm::{AnyDesc, AnyPlan, AnyRunner, AnyWeights, Error, Target};
use pyo3::prelude::*;

use crate::error::facade;
use crate::pool::Threads;

/// Most runners that wait for their next call, and what their buffers may take together.
const MOST: usize = 32;
const MOST_BYTES: usize = 256 << 20;

/// So many multiplications take a thread less time than it takes to wake the pool and wait for it (20 to 60 µs).
const SMALL: usize = 1 << 20;

/// A description from which a runner is made.
pub trait Problem: Copy + PartialEq + Send + Sync + 'static {
    type Runner: Send;

    /// Makes one.
    fn runner(&self, target: &Target) -> Result<Self::Runner, Error>;

    /// Those that wait.
    fn waiting() -> &'static Mutex<Vec<Waiting<Self>>>;

    /// What its buffers take, roughly.
    fn bytes(&self) -> usize;

    /// Multiplications, of a problem that one thread can do.
    fn multiplications(&self) -> Option<usize>;
}

/// A runner that waits for its next call.
pub struct Waiting<P: Problem> {
    problem: P,
    target: Target,
    runner: P::Runner,
}

/// A product by weights in 4 bits or in floats.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "few wait, and they are compared at each call")]
pub enum Product {
    /// Gate and up, a linear layer, a whole MLP or a mixture.
    Packed(AnyDesc),
    /// A linear layer of `n` × `k` floats, on the processor.
    Floats { m: usize, n: usize, k: usize },
}

/// What computes it.
pub enum ProductRunner {
    Packed(AnyRunner),
    Floats(FloatLinear),
}

/// What A is multiplied by.
pub enum Weights<'a> {
    /// And the router's choices of a mixture.
    Packed(&'a AnyWeights, Option<Routing<'a>>),
    /// And the bias.
    Floats(FloatMatrix<'a>, Option<&'a [f32]>),
}

impl ProductRunner {
    /// As [`AnyRunner::run`].
    pub fn run(
        &mut self,
        a: &AOperand<'_>,
        by: &Weights<'_>,
        (c, add): (OutputMut<'_>, bool),
    ) -> Result<Option<f32>, Error> {
        match (self, by, a) {
            (Self::Packed(runner), Weights::Packed(weights, routing), a) => {
                runner.run(a, weights, *routing, (c, add))
            }
            (Self::Floats(runner), Weights::Floats(w, bias), AOperand::Float(a)) => {
                Ok(runner.run(a, w, *bias, c).map(|()| None)?)
            }
            _ => Err(Error::operand("a product", "weights of another kind", "those it was planned for")),
        }
    }
}

/// What a target says of the processor.
pub fn cpu_options(target: &Target) -> CpuOptions {
    match target {
        Target::Cpu(options) => *options,
        _ => CpuOptions::default(),
    }
}

/// The products of a run in 4 bits.
fn products(desc: &AnyDesc) -> Vec<DualGemmDesc> {
    match desc {
        AnyDesc::Product(desc) => vec![*desc],
        AnyDesc::Mlp(desc) => vec![desc.gate_up, desc.down],
        AnyDesc::Mixture(desc) => {
            let rows =
                |product: DualGemmDesc| DualGemmDesc { m: product.m.saturating_mul(desc.top_k), ..product };
            vec![rows(desc.mlp.gate_up), rows(desc.mlp.down)]
        }
    }
}

impl Problem for Product {
    type Runner = ProductRunner;

    fn runner(&self, target: &Target) -> Result<ProductRunner, Error> {
        Ok(match *self {
            Self::Packed(desc) => ProductRunner::Packed(AnyPlan::new(&desc, target)?.runner()?),
            Self::Floats { m, k, .. } => ProductRunner::Floats(FloatLinear::new(m, k, cpu_options(target))?),
        })
    }

    fn waiting() -> &'static Mutex<Vec<Waiting<Self>>> {
        static WAITING: Mutex<Vec<Waiting<Product>>> = Mutex::new(Vec::new());
        &WAITING
    }

    /// They hold A or C in up to 32 bits.
    fn bytes(&self) -> usize {
        match self {
            Self::Packed(desc) => {
                products(desc).iter().map(|desc| 4 * desc.m.saturating_mul(desc.n + desc.k)).sum()
            }
            Self::Floats { m, k, .. } => 4 * m.saturating_mul(*k),
        }
    }

    /// A mixture gathers and sums rows on the pool's threads.
    fn multiplications(&self) -> Option<usize> {
        let of = |d: &DualGemmDesc| d.op.matrices().saturating_mul(d.m).saturating_mul(d.n * d.k);
        match self {
            Self::Packed(AnyDesc::Mixture(_)) => None,
            Self::Packed(desc) => Some(products(desc).iter().map(of).sum()),
            Self::Floats { m, n, k } => Some(m.saturating_mul(*n).saturating_mul(*k)),
        }
    }
}

/// Whether a thread does it in less time than others take to wake.
pub fn is_small(problem: &impl Problem) -> bool {
    problem.multiplications().is_some_and(|count| count <= SMALL)
}

/// Locked only with the GIL held and never across Python code, so no fork can happen while it is locked.
fn take<P: Problem>(_py: Python<'_>, problem: &P, target: &Target) -> Option<P::Runner> {
    let mut waiting = P::waiting().lock().unwrap_or_else(PoisonError::into_inner);
    let at = waiting.iter().rposition(|w| w.problem == *problem && w.target == *target)?;
    Some(waiting.remove(at).runner)
}

fn leave<P: Problem>(_py: Python<'_>, problem: P, target: Target, runner: P::Runner) {
    let mut waiting = P::waiting().lock().unwrap_or_else(PoisonError::into_inner);
    waiting.push(Waiting { problem, target, runner });
    let mut all: usize = waiting.iter().map(|w| w.problem.bytes()).sum();
    while waiting.len() > 1 && (waiting.len() > MOST || all > MOST_BYTES) {
        all -= waiting.remove(0).problem.bytes();
    }
}

/// Runs `work` with a runner for the problem: one that an earlier call has left, or a new one. The GIL is released.
pub fn run<P: Problem, R: Send>(
    py: Python<'_>,
    problem: P,
    target: &Target,
    work: impl FnOnce(&mut P::Runner) -> Result<R, Error> + Send,
) -> PyResult<R> {
    let all = Threads::current(py)?;
    // A thread of the pool does alone what the caller can do without waking it.
    let one_is_enough = is_small(&problem) || all.count() == 1 && problem.multiplications().is_some();
    let alone = matches!(target, Target::Cpu(_)) && one_is_enough;
    let threads = Some(if alone { 1 } else { all.count() });
    let target = match target {
        Target::Cpu(options) => Target::Cpu(CpuOptions { threads, ..*options }),
        gpu => gpu.clone(),
    };
    let known = take(py, &problem, &target);
    let work = || {
        let mut runner = known.map_or_else(|| problem.runner(&target), Ok)?;
        let result = work(&mut runner)?;
        Ok((runner, result))
    };
    let done = py.detach(|| if alone { work() } else { all.install(work) });
    let (runner, result) = done.map_err(|error: Error| facade(error))?;
    leave(py, problem, target, runner);
    Ok(result)
}
