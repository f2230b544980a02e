//! Dequantized weights kept: four times the memory, and only products and activation per call.
//!
//! What is kept is found by the identity of the weights ([`DeviceWeights::id`]), which is never given out twice, and not
//! by their address, which another tensor may have next. It is dropped when the weights are.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dualgemm_device::{Device, DevicePtr, Stream};

use super::Prepared;
use super::library::{Library, OfLibrary, Shape};
use crate::{Buffer, DeviceCall, DeviceWeights, Error, Gpu, GpuPlan};

/// See the [module](self).
pub const CACHED_SCALES: OfLibrary = OfLibrary {
    name: "cached-scales",
    doc: "weights dequantized once and kept as 16 bits, one cuBLASLt product with both, an activation kernel",
    prepare: |gpu, plan| Ok(Box::new(Cached::new(gpu, plan, Shape::One)?)),
};

/// The library with dequantized weights.
#[derive(Debug)]
pub(super) struct Cached {
    pub(super) library: Library,
    kept: Mutex<HashMap<u64, Kept>>,
}

#[derive(Debug)]
struct Kept {
    of: Weak<DeviceWeights>,
    dequantized: Buffer,
}

impl Cached {
    pub(super) fn new(gpu: &'static Gpu, plan: &GpuPlan, shape: Shape) -> Result<Self, Error> {
        Ok(Self { library: Library::new(gpu, plan, shape)?, kept: Mutex::default() })
    }

    /// Both matrices, dequantized now if they have not been. They live as long as the weights.
    pub(super) fn dequantized(&self, weights: &Arc<DeviceWeights>) -> Result<DevicePtr, Error> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kept.get(&weights.id()) {
            return Ok(known.dequantized.ptr());
        }
        kept.retain(|_, kept| kept.of.strong_count() > 0);
        let dequantized = self.library.room()?;
        let at = dequantized.ptr();
        // SAFETY: `at` has the room of both matrices, and the weights are this GPU's.
        unsafe { self.library.dequantize(weights, at, Stream::Own) }?;
        // Other streams do not wait for ours.
        self.library.gpu.synchronize()?;
        kept.insert(weights.id(), Kept { of: Arc::downgrade(weights), dequantized });
        Ok(at)
    }
}

impl Prepared for Cached {
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error> {
        self.dequantized(weights).map(drop)
    }

    unsafe fn run(
        &self,
        call: &DeviceCall,
        weights: &Arc<DeviceWeights>,
        stream: Stream,
    ) -> Result<(), Error> {
        let dequantized = self.dequantized(weights)?;
        // SAFETY: the caller vouches for the call, and the rest is this plan's.
        unsafe {
            let a = self.library.image(call, stream)?;
            self.library.products(&a, weights, dequantized, stream)?;
            self.library.activate(call, weights, stream)
        }
    }
}
