//! As [`cached_scales`](super::cached_scales), with two products side by side on two streams: the second starts when A
//! is ready, and the activation waits for both.

use std::sync::Arc;

use dualgemm_cuda::{Event, OwnedStream};
use dualgemm_device::{DeviceInfo, Error as DeviceError, Stream};
use dualgemm_gemm::DualGemmDesc;

use super::cached_scales::Cached;
use super::library::{Shape, supports};
use super::{Launches, Prepared, Strategy};
use crate::{DeviceCall, DeviceWeights, Error, Gpu, GpuPlan, WeightForm};

/// See the [module](self).
#[derive(Debug)]
pub struct ParallelStreams;

#[derive(Debug)]
struct Ready {
    cached: Cached,
    beside: OwnedStream,
    /// A is ready; the product beside is done.
    events: [Event; 2],
}

impl Strategy for ParallelStreams {
    fn name(&self) -> &'static str {
        "parallel-streams"
    }

    fn doc(&self) -> &'static str {
        "cached-scales with the gate and the up product on two streams"
    }

    fn weight_form(&self) -> WeightForm {
        WeightForm::Plain
    }

    fn launches(&self) -> Launches {
        Launches::Eager
    }

    fn kernels(&self, desc: &DualGemmDesc, _: &DeviceInfo) -> Result<Vec<String>, Error> {
        supports(self.name(), desc)?;
        Ok(vec!["cublaslt".into()])
    }

    fn estimate_us(&self, _: &DualGemmDesc, _: &DeviceInfo, _: &str) -> Option<f64> {
        None
    }

    fn prepare(&self, gpu: &'static Gpu, plan: &GpuPlan) -> Result<Box<dyn Prepared>, Error> {
        let card = gpu.card().ok_or_else(|| DeviceError::Driver {
            call: "opening a second stream",
            reason: "a simulated GPU has one stream".into(),
        })?;
        let (beside, events) = (card.new_stream()?, [card.event()?, card.event()?]);
        Ok(Box::new(Ready { cached: Cached::new(gpu, plan, Shape::Two)?, beside, events }))
    }
}

impl Prepared for Ready {
    fn warm(&self, weights: &Arc<DeviceWeights>) -> Result<(), Error> {
        self.cached.warm(weights)
    }

    fn run(&self, call: &DeviceCall, weights: &Arc<DeviceWeights>, stream: Stream) -> Result<(), Error> {
        let (dequantized, library) = (self.cached.dequantized(weights)?, &self.cached.library);
        let ([ready, done], beside) = (&self.events, self.beside.id());
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
