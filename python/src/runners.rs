//! Plans with their buffers, kept for further calls and shared by all weights: the layers of a model have few shapes, so
//! the buffers are few and warm. Two calls never share one, and threads do not wait for each other.

use std::sync::{Mutex, PoisonError};

use dualgemm::cpu::CpuOptions;
use dualgemm::gemm::DualGemmDesc;
use dualgemm::{AnyDesc, AnyPlan, AnyRunner, Error, Target};
use pyo3::prelude::*;

use crate::error::facade;
use crate::pool;

/// Most runners that wait for their next call, and what their buffers may take together.
const MOST: usize = 32;
const MOST_BYTES: usize = 256 << 20;

/// So many multiplications take a thread less time than it takes to wake the pool and wait for it (20 to 60 µs).
const SMALL: usize = 1 << 20;

/// A runner that waits for its next call.
struct Waiting {
    desc: AnyDesc,
    target: Target,
    runner: AnyRunner,
}

static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());

/// The products that a run computes.
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

/// What the buffers of a runner take, roughly: they hold A or C in up to 32 bits.
fn bytes(desc: &AnyDesc) -> usize {
    products(desc).iter().map(|desc| 4 * desc.m.saturating_mul(desc.n + desc.k)).sum()
}

/// Whether the caller's thread does it alone, without the pool. A mixture gathers and sums rows on the pool's threads.
fn alone(desc: &AnyDesc) -> bool {
    let multiplications = |d: &DualGemmDesc| d.op.matrices().saturating_mul(d.m).saturating_mul(d.n * d.k);
    !matches!(desc, AnyDesc::Mixture(_)) && products(desc).iter().map(multiplications).sum::<usize>() <= SMALL
}

/// Locked only with the GIL held and never across Python code, so no fork can happen while it is locked.
fn take(_py: Python<'_>, desc: &AnyDesc, target: &Target) -> Option<AnyRunner> {
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    let at = waiting.iter().rposition(|w| w.desc == *desc && w.target == *target)?;
    Some(waiting.remove(at).runner)
}

fn leave(_py: Python<'_>, desc: AnyDesc, target: Target, runner: AnyRunner) {
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    waiting.push(Waiting { desc, target, runner });
    let mut all: usize = waiting.iter().map(|w| bytes(&w.desc)).sum();
    while waiting.len() > 1 && (waiting.len() > MOST || all > MOST_BYTES) {
        all -= bytes(&waiting.remove(0).desc);
    }
}

/// Runs `work` with a runner for the problem: one that an earlier call has left, or a new one. The GIL is released.
pub fn run<R: Send>(
    py: Python<'_>,
    desc: AnyDesc,
    target: &Target,
    work: impl FnOnce(&mut AnyRunner) -> Result<R, Error> + Send,
) -> PyResult<R> {
    let pool = pool::current(py)?;
    let alone = matches!(target, Target::Cpu(_)) && alone(&desc);
    let threads = Some(if alone { 1 } else { pool.current_num_threads() });
    let target = match target {
        Target::Cpu(options) => Target::Cpu(CpuOptions { threads, ..*options }),
        gpu => gpu.clone(),
    };
    let known = take(py, &desc, &target);
    let work = || {
        let mut runner = known.map_or_else(|| AnyPlan::new(&desc, &target)?.runner(), Ok)?;
        let result = work(&mut runner)?;
        Ok((runner, result))
    };
    let done = py.detach(|| if alone { work() } else { pool.install(work) });
    let (runner, result) = done.map_err(|error: Error| facade(error))?;
    leave(py, desc, target, runner);
    Ok(result)
}
