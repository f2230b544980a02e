//! How far a launch has come, for those who wait for it on other threads.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// The progress of a [`Gpu`](crate::Gpu)'s launch. Nothing a kernel does depends on it.
#[derive(Debug, Default)]
pub struct Progress {
    ctas: AtomicU32,
    finished: AtomicU32,
    tensor_operations: AtomicU64,
    stopped: AtomicBool,
}

impl Progress {
    /// CTAs that have finished, and those of the grid.
    pub fn ctas(&self) -> (u32, u32) {
        (self.finished.load(Relaxed), self.ctas.load(Relaxed))
    }

    /// Operations that the launch has issued to tensor cores; a multiply-add is two.
    pub fn tensor_operations(&self) -> u64 {
        self.tensor_operations.load(Relaxed)
    }

    /// Stops the launch, and those after it: what has finished is checked, then it fails with
    /// [`Check::Stopped`](crate::Check::Stopped).
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    /// Whether it has been stopped.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    pub(crate) fn begin(&self, ctas: u32) {
        self.ctas.store(ctas, Relaxed);
        self.finished.store(0, Relaxed);
        self.tensor_operations.store(0, Relaxed);
    }

    pub(crate) fn cta_finishes(&self) {
        self.finished.fetch_add(1, Relaxed);
    }

    pub(crate) fn add_tensor_operations(&self, n: u64) {
        self.tensor_operations.fetch_add(n, Relaxed);
    }
}
