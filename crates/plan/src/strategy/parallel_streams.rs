//! As [`cached_scales`](super::cached_scales), with two products side by side on two streams: the second starts when A
//! is ready, and the activation waits for both.

use std::sync::Arc;

use dualgemm_cuda::{Event, OwnedStream};
use dualgemm_device::{Error as DeviceError, Stream};

use super::Prepared;
use super::cached_scales::Cached;
use super::library::{OfLibrary, Shape};
use crate::{DeviceCall, DeviceWeights, Error};

/// See the [module](self).
pub const PARALLEL_STREAMS: OfLibrary = OfLibrary {
    name: "parallel-streams",
    doc: "cached-scales with the gate and the up product on two streams",
    prepare: |gpu, plan| {
        let card = gpu.card().ok_or_else(|| DeviceError::Driver {
            call: "opening a second stream",
            reason: "a simulated GPU has one stream".into(),
        })?;
        let (beside, events) = (card.new_stream()?, [card.event()?, card.event()?]);
        Ok(Box::new(Ready { cached: Cached::new(gpu, plan, Shape::Two)?, beside, events }))
    },
};

#[derive(Debug)]
struct Ready {
    cached: Cached,
    beside: OwnedStream,
    /// A is ready; the product beside is done.
    events: [Event; 2],
}

impl Prepared for Ready {
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error> {
        self.cached.warm(weights)
    }

    unsafe fn run(
        &self,
        call: &DeviceCall,
        weights: &Arc<DeviceWeights>,
        stream: Stream,
    ) -> Result<(), Error> {
        let (dequantized, library) = (self.cached.dequantized(weights)?, &self.cached.library);
        let [ready, done] = &self.events;
        // SAFETY: the caller vouches for the call, and the rest is this plan's.
        unsafe {
            let beside = self.beside.id();
            let a = library.image(call, stream)?;
            ready.record(stream)?;
            ready.hold(beside)?;
            library.product(0, &a, weights, dequantized, stream)?;
            library.product(1, &a, weights, dequantized, beside)?;
            done.record(beside)?;
            done.hold(stream)?;
            library.activate(call, weights, stream)
        }
    }
}
