//! The threads that share the work.
//!
//! A pool of our own instead of rayon's global one: its size can be changed, and a process that was forked (as
//! multiprocessing and data loaders do) gets a new one, because threads do not survive a fork.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Kind;

struct Current {
    process: u32,
    pool: Arc<ThreadPool>,
}

/// Locked only with the GIL held and never across Python code, so no fork can happen while it is locked.
static CURRENT: Mutex<Option<Current>> = Mutex::new(None);

/// As many as the command takes; a system asked for far more is busy for minutes before it refuses.
const MOST_THREADS: usize = 4096;

fn start(threads: usize) -> PyResult<Arc<ThreadPool>> {
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("dualgemm-{index}"))
        .build()
        .map_err(|error| Kind::Unsupported.raise(format!("cannot start the threads: {error}")))?;
    Ok(Arc::new(pool))
}

/// The pool of this process.
pub fn current(_py: Python<'_>) -> PyResult<Arc<ThreadPool>> {
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    match &*current {
        Some(known) if known.process == process => Ok(known.pool.clone()),
        _ => {
            let pool = start(0)?;
            // The parent's pool has no threads here that could be told to stop.
            std::mem::forget(current.replace(Current { process, pool: pool.clone() }));
            Ok(pool)
        }
    }
}

/// Runs `work` on the pool with the GIL released.
pub fn run<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    let pool = current(py)?;
    Ok(py.detach(|| pool.install(work)))
}

/// Sets how many threads share the work from the next call on; 0 for as many as there are processors.
#[pyfunction]
pub fn set_num_threads(threads: i64) -> PyResult<()> {
    let wanted =
        usize::try_from(threads).ok().filter(|&threads| threads <= MOST_THREADS).ok_or_else(|| {
            Kind::Argument.raise(format!("threads is {threads}; valid are 0 to {MOST_THREADS}"))
        })?;
    let pool = start(wanted)?;
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    let old = current.replace(Current { process, pool });
    if old.as_ref().is_some_and(|old| old.process != process) {
        std::mem::forget(old);
    }
    Ok(())
}

/// How many threads share the work.
#[pyfunction]
pub fn get_num_threads(py: Python<'_>) -> PyResult<usize> {
    Ok(current(py)?.current_num_threads())
}
