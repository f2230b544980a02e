//! GPUs as the commands see them: opened, or a reason with what would work instead.

use anyhow::bail;
use dualgemm::strategies::{Error as GpuError, Gpu};
use dualgemm::{Error, GpuId};

use crate::failure::Unsupported;

/// What works without a GPU.
pub const PROCESSOR: &str = "--device cpu computes on the processor";

/// Opens a GPU.
pub fn open(id: &GpuId) -> anyhow::Result<&'static Gpu> {
    supported(id.open())
}

/// Opens a GPU whose kernels can be timed; `instead` says what would work without it.
pub fn open_timed(id: &GpuId, instead: &str) -> anyhow::Result<&'static Gpu> {
    let gpu = or_instead(id.open(), instead)?;
    if gpu.card().is_none() {
        bail!("--device {id}: a simulated GPU has no clock; `dualgemm sim` says the least time a card needs");
    }
    Ok(gpu)
}

/// Tells what this machine or build cannot do from what is wrong with the input.
pub fn supported<T>(result: Result<T, Error>) -> anyhow::Result<T> {
    or_instead(result, PROCESSOR)
}

fn or_instead<T>(result: Result<T, Error>, instead: &str) -> anyhow::Result<T> {
    result.map_err(|error| match &error {
        Error::NotForGpu { .. }
        | Error::Gpu(
            GpuError::Device(_)
            | GpuError::NothingFits { .. }
            | GpuError::Unsupported { .. }
            | GpuError::Activations { .. },
        ) => Unsupported { what: error.to_string(), instead: instead.into() }.into(),
        _ => error.into(),
    })
}
