//! Plans with their buffers, kept for further calls and shared by all weights: the layers of a model have few shapes, so
//! the buffers are few and warm. Two calls never share one, and threads do not wait for each other.

use std::sync::{Mutex, PoisonError};

use dualgemm::cpu::CpuOptions;
use dualgemm::gemm::{AFormat, AOperand, DualGemmDesc, MlpDesc, OutFormat, OutputMut};
use dualgemm::{
    DualGemm, Error, MixtureDesc, MixturePlan, MixtureRunner, MlpPlan, MlpRunner, Runner, Target,
};
use pyo3::prelude::*;

use crate::destination::Destination;
use crate::error::facade;
use crate::operand::Source;
use crate::pool;

/// Most runners of a kind that wait for their next call, and what their buffers may take together.
const MOST: usize = 32;
const MOST_BYTES: usize = 256 << 20;

/// So many multiplications take a thread less time than it takes to wake the pool and wait for it (20 to 60 µs).
const SMALL: usize = 1 << 20;

/// A description from which a runner is made.
pub trait Problem: Copy + PartialEq + Send + Sync + Sized + 'static {
    type Runner: Send;

    /// Whether the caller's thread can do it alone, without the pool.
    const ALONE: bool = true;

    fn runner(&self, target: &Target) -> Result<Self::Runner, Error>;

    /// The products that a run computes.
    fn products(&self) -> impl Iterator<Item = DualGemmDesc>;

    fn waiting() -> &'static Mutex<Vec<Waiting<Self>>>;

    /// What its buffers take, roughly: they hold A or C in up to 32 bits.
    fn bytes(&self) -> usize {
        self.products().map(|desc| 4 * desc.m.saturating_mul(desc.n + desc.k)).sum()
    }

    fn multiplications(&self) -> usize {
        self.products().map(|d| d.op.matrices().saturating_mul(d.m).saturating_mul(d.n * d.k)).sum()
    }
}

/// A runner that waits for its next call.
pub struct Waiting<P: Problem> {
    problem: P,
    target: Target,
    runner: P::Runner,
}

impl Problem for DualGemmDesc {
    type Runner = Runner;

    fn runner(&self, target: &Target) -> Result<Runner, Error> {
        DualGemm::plan(self, target)?.runner(1)
    }

    fn products(&self) -> impl Iterator<Item = DualGemmDesc> {
        [*self].into_iter()
    }

    fn waiting() -> &'static Mutex<Vec<Waiting<Self>>> {
        static WAITING: Mutex<Vec<Waiting<DualGemmDesc>>> = Mutex::new(Vec::new());
        &WAITING
    }
}

impl Problem for MlpDesc {
    type Runner = MlpRunner;

    fn runner(&self, target: &Target) -> Result<MlpRunner, Error> {
        MlpPlan::new(self, target)?.runner(1)
    }

    fn products(&self) -> impl Iterator<Item = DualGemmDesc> {
        [self.gate_up, self.down].into_iter()
    }

    fn waiting() -> &'static Mutex<Vec<Waiting<Self>>> {
        static WAITING: Mutex<Vec<Waiting<MlpDesc>>> = Mutex::new(Vec::new());
        &WAITING
    }
}

impl Problem for MixtureDesc {
    type Runner = MixtureRunner;

    // It gathers and sums rows on the pool's threads.
    const ALONE: bool = false;

    fn runner(&self, target: &Target) -> Result<MixtureRunner, Error> {
        MixturePlan::new(self, target)?.runner()
    }

    fn products(&self) -> impl Iterator<Item = DualGemmDesc> {
        let rows = |desc: DualGemmDesc| DualGemmDesc { m: desc.m.saturating_mul(self.top_k), ..desc };
        [rows(self.mlp.gate_up), rows(self.mlp.down)].into_iter()
    }

    fn waiting() -> &'static Mutex<Vec<Waiting<Self>>> {
        static WAITING: Mutex<Vec<Waiting<MixtureDesc>>> = Mutex::new(Vec::new());
        &WAITING
    }
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
    let mut bytes: usize = waiting.iter().map(|w| w.problem.bytes()).sum();
    while waiting.len() > 1 && (waiting.len() > MOST || bytes > MOST_BYTES) {
        bytes -= waiting.remove(0).problem.bytes();
    }
}

/// Runs `work` with a runner for the problem: one that an earlier call has left, or a new one. The GIL is released.
fn run<P: Problem, R: Send>(
    py: Python<'_>,
    problem: P,
    target: &Target,
    work: impl FnOnce(&mut P::Runner) -> Result<R, Error> + Send,
) -> PyResult<R> {
    let pool = pool::current(py)?;
    let alone = P::ALONE && matches!(target, Target::Cpu(_)) && problem.multiplications() <= SMALL;
    let threads = Some(if alone { 1 } else { pool.current_num_threads() });
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
    let done = py.detach(|| if alone { work() } else { pool.install(work) });
    let (runner, result) = done.map_err(|error: Error| facade(error))?;
    leave(py, problem, target, runner);
    Ok(result)
}

/// Computes C `[rows of A, n]` of A in this machine's memory.
pub fn compute<P: Problem, R: Send>(
    py: Python<'_>,
    target: &Target,
    source: &Source<'_>,
    (destination, n): (&mut Destination<'_>, usize),
    problem: impl FnOnce(usize, AFormat, OutFormat) -> P,
    work: impl FnOnce(&mut P::Runner, &AOperand<'_>, OutputMut<'_>) -> Result<R, Error> + Send,
) -> PyResult<R> {
    let operand = source.operand("a")?;
    destination.check(source, operand.rows(), n)?;
    let problem = problem(operand.rows(), AFormat::of(&operand), destination.format());
    let c = destination.output()?;
    run(py, problem, target, |runner| work(runner, &operand, c))
}
