//! As [`cached_scales`](super::cached_scales), recorded once for each set of operands and then replayed as one call to
//! the driver.
//!
//! A recording holds addresses, so it is found by all addresses of the call and the identity of the weights; contents
//! are read anew by every replay.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use dualgemm_cuda::{Cuda, Graph};
use dualgemm_device::{Error as DeviceError, Stream};

use super::Prepared;
use super::cached_scales::Cached;
use super::library::{OfLibrary, Shape};
use crate::{DeviceCall, DeviceWeights, Error};

/// Recordings that are kept; one more, and all are dropped.
const MOST_GRAPHS: usize = 1024;

/// See the [module](self). The replay of its own recording is what is measured.
pub const CUDA_GRAPH: OfLibrary = OfLibrary {
    name: "cuda-graph",
    doc: "cached-scales, recorded and replayed as one launch",
    prepare: |gpu, plan| {
        let card = gpu.card().cloned().ok_or_else(|| DeviceError::Driver {
            call: "recording a graph",
            reason: "a simulated GPU records none".into(),
        })?;
        Ok(Box::new(Ready { card, cached: Cached::new(gpu, plan, Shape::One)?, graphs: Mutex::default() }))
    },
};

type Key = (u64, [u64; 9]);

#[derive(Debug)]
struct Ready {
    card: Arc<Cuda>,
    cached: Cached,
    graphs: Mutex<HashMap<Key, Graph>>,
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
        let key = (weights.id(), call.key());
        let mut graphs = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(graph) = graphs.get(&key) {
            // SAFETY: it was recorded of the same operands, for which the caller vouches.
            return Ok(unsafe { graph.replay_on(stream) }?);
        }
        self.cached.warm(weights)?;
        // SAFETY: the caller vouches for the operands.
        let graph = self.card.record(|| unsafe { self.cached.run(call, weights, Stream::Own) })?;
        // SAFETY: the same.
        unsafe { graph.replay_on(stream) }?;
        if graphs.len() >= MOST_GRAPHS {
            graphs.clear();
        }
        graphs.insert(key, graph);
        Ok(())
    }
}
