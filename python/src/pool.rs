//! The threads that share the work.
//!
//! A pool of our own instead of rayon's global one: its size can be changed, and a process that was forked (as
//! multiprocessing and data loaders do) gets a new one of that size, because threads do not survive a fork.
//!
//! Products run on torch's threads where it has told us of its OpenMP runtime: they are awake between torch's operators, and two
//! pools of as many threads as processors take time from each other. After a fork they do not: GNU's runtime waits for the threads
//! that the parent had, forever.

use std::ffi::{c_uint, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use dualgemm::cpu::team::{self, LentThreads};
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::Kind;

#[derive(Clone)]
struct Current {
    process: u32,
    /// Whether a parent of the process had threads, too.
    is_forked: bool,
    pool: Arc<ThreadPool>,
    openmp: Option<OpenMp>,
}

/// `GOMP_parallel` of GNU's OpenMP runtime, which LLVM's and Intel's have, too: calls the function on so many threads.
type Parallel =
    unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, threads: c_uint, flags: c_uint);

/// Threads of an OpenMP runtime. Always all of them: GNU's ends those that a call leaves out, and starts them again.
#[derive(Clone, Copy)]
struct OpenMp {
    parallel: Parallel,
    threads: usize,
}

impl LentThreads for OpenMp {
    fn count(&self) -> usize {
        self.threads
    }

    fn run(&self, work: &(dyn Fn() + Sync)) {
        /// # Safety
        /// `work` points to a `&(dyn Fn() + Sync)`.
        unsafe extern "C" fn call(work: *mut c_void) {
            // SAFETY: that is the contract.
            unsafe { (*work.cast::<&(dyn Fn() + Sync)>())() }
        }
        let work = &raw const work;
        // SAFETY: whoever named the address promised this function. It returns when all calls have, so `work` outlives them, and
        // that it may be called on several threads is in its type.
        unsafe { (self.parallel)(call, work.cast_mut().cast(), self.threads as c_uint, 0) }
    }
}

/// The threads of a product.
pub struct Threads(Current);

impl Threads {
    /// Those of this process.
    pub fn current(py: Python<'_>) -> PyResult<Self> {
        current(py).map(Self)
    }

    /// How many they are.
    pub fn count(&self) -> usize {
        self.0.pool.current_num_threads()
    }

    /// Calls `work` with products on them.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.0.openmp {
            Some(openmp) => team::lend(openmp, work),
            None => self.0.pool.install(work),
        }
    }
}

/// Locked only with the GIL held and never across Python code, so no fork can happen while it is locked.
static CURRENT: Mutex<Option<Current>> = Mutex::new(None);

/// As many as the command takes; a system asked for far more is busy for minutes before it refuses.
pub const MOST_THREADS: usize = 4096;

fn start(threads: usize) -> PyResult<Arc<ThreadPool>> {
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("dualgemm-{index}"))
        .build()
        .map_err(|error| Kind::Unsupported.raise(format!("cannot start the threads: {error}")))?;
    Ok(Arc::new(pool))
}

fn current(_py: Python<'_>) -> PyResult<Current> {
    let known = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match known {
        Some(known) if known.process == std::process::id() => Ok(known),
        known => {
            // As many as the parent had.
            let threads = known.as_ref().map_or(0, |known| known.pool.current_num_threads());
            Ok(replace(start(threads)?, None))
        }
    }
}

/// Makes a pool, and the threads of an OpenMP runtime, those of the next calls.
fn replace(pool: Arc<ThreadPool>, parallel: Option<Parallel>) -> Current {
    let (process, threads) = (std::process::id(), pool.current_num_threads());
    let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    let is_forked = current.as_ref().is_some_and(|old| old.is_forked || old.process != process);
    let openmp = parallel.filter(|_| !is_forked).map(|parallel| OpenMp { parallel, threads });
    let new = Current { process, is_forked, pool, openmp };
    let old = current.replace(new.clone());
    if old.as_ref().is_some_and(|old| old.process != process) {
        // The parent's pool has no threads here that could be told to stop.
        std::mem::forget(old);
    }
    new
}

/// Runs `work` on the pool with the GIL released.
pub fn run<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    let pool = current(py)?.pool;
    Ok(py.detach(|| pool.install(work)))
}

/// Sets how many threads share the work from the next call on; 0 for as many as there are processors. `parallel` is the address of
/// `GOMP_parallel` in the runtime whose threads products run on; 0 for the pool's.
#[pyfunction]
#[pyo3(signature = (threads, parallel = 0))]
pub fn set_num_threads(threads: i64, parallel: usize) -> PyResult<()> {
    let wanted =
        usize::try_from(threads).ok().filter(|&threads| threads <= MOST_THREADS).ok_or_else(|| {
            Kind::Argument.raise(format!("threads is {threads}; valid are 0 to {MOST_THREADS}"))
        })?;
    let pool = start(wanted)?;
    // SAFETY: the caller promises such a function at any address but 0, and a pointer to one has the size of an address.
    let parallel = unsafe { std::mem::transmute::<usize, Option<Parallel>>(parallel) };
    replace(pool, parallel);
    Ok(())
}

/// How many threads share the work.
#[pyfunction]
pub fn get_num_threads(py: Python<'_>) -> PyResult<usize> {
    Ok(current(py)?.pool.current_num_threads())
}
