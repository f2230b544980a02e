//! The numbers by which graphs of torch know weights: no other weights of this process ever have the same, as they may have
//! an address.

use std::sync::atomic::{AtomicI64, Ordering};

use pyo3::prelude::*;

static MADE: AtomicI64 = AtomicI64::new(0);

pub fn next() -> i64 {
    MADE.fetch_add(1, Ordering::Relaxed)
}

/// Enters weights under their number; whoever asks for the number can be found by it.
pub fn enter(weights: &Bound<'_, PyAny>, number: i64) -> PyResult<i64> {
    weights.py().import("dualgemm._torch")?.getattr("WEIGHTS")?.set_item(number, weights)?;
    Ok(number)
}
