//! Any operation on operands in a GPU's memory, and the runners for that, kept and shared.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use dualgemm_bench::Timing;
use dualgemm_device::{DevicePtr, Stream};
use dualgemm_formats::ScaleLayout;
use dualgemm_gemm::{AOperand, Routing};
use dualgemm_plan::mixture::MixtureCall;
use dualgemm_plan::{DeviceCall, GpuOptions};

use super::{AnyDesc, AnyPlan, AnyRunner, AnyWeights};
use crate::{Error, Target};

/// The router's choices in a GPU's memory; see [`MixtureCall`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceRouting {
    /// Experts of each token, `[m, top_k]` i32.
    pub ids: DevicePtr,
    /// Their weights, `[m, top_k]` f32.
    pub weights: DevicePtr,
    /// Whether results are added to what C holds.
    pub add: bool,
}

impl AnyRunner {
    /// Prepares for calls with these weights, so that the first one allocates nothing either and can be recorded into a graph.
    ///
    /// # Errors
    /// If memory is lacking, or the weights are for another target or operation.
    pub fn warm(&self, weights: &AnyWeights) -> Result<(), Error> {
        match (self, weights) {
            (Self::Product(runner), AnyWeights::Product(weights)) => runner.warm(weights),
            (Self::Mlp(runner), AnyWeights::Mlp(mlp)) => runner.warm(mlp),
            (Self::Mixture(runner), AnyWeights::Mixture(experts)) => runner.warm(experts),
            _ => self.mismatch(weights),
        }
    }

    /// Launches the operation on operands in device memory. Allocates nothing, waits for nothing, and can be recorded into a
    /// graph.
    ///
    /// # Safety
    /// As [`Runner::run_device`](crate::Runner::run_device), for the router's lists too.
    ///
    /// # Errors
    /// As there, and if the weights are those of another operation.
    pub unsafe fn run_device(
        &self,
        call: &DeviceCall,
        routing: Option<DeviceRouting>,
        weights: &AnyWeights,
        stream: Stream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe {
            match (self, weights, routing) {
                (Self::Product(runner), AnyWeights::Product(weights), None) => {
                    runner.run_device(call, weights, stream)
                }
                (Self::Mlp(runner), AnyWeights::Mlp(mlp), None) => runner.run_device(call, mlp, stream),
                (Self::Mixture(runner), AnyWeights::Mixture(experts), Some(routing)) => {
                    let DeviceRouting { ids, weights, add } = routing;
                    runner.run_device(&MixtureCall { call: *call, ids, weights, add }, experts, stream)
                }
                _ => self.mismatch(weights),
            }
        }
    }

    /// How long a call takes on a card by its own clock, with the operands of the last [`run`](Self::run), these routings in
    /// turn, and weights that come from memory. None on a processor, where the clock is the caller's, and on a simulated GPU.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn time(
        &self,
        a: &AOperand<'_>,
        weights: &AnyWeights,
        routings: &[Routing<'_>],
    ) -> Result<Option<Timing>, Error> {
        match (self, weights) {
            (Self::Product(runner), AnyWeights::Product(weights)) => runner.time(a, weights),
            (Self::Mlp(runner), AnyWeights::Mlp(mlp)) => runner.time(a, mlp),
            (Self::Mixture(runner), AnyWeights::Mixture(experts)) => runner.time(a, routings, experts),
            _ => self.mismatch(weights),
        }
    }
}

/// What tells runners apart. Calls on one stream may share scratch memory, calls on two may not.
#[derive(Debug, Clone, PartialEq)]
struct Key {
    desc: AnyDesc,
    target: Target,
    stream: u64,
}

/// Launches of one call are not mixed with those of another.
type Shared = Mutex<AnyRunner>;

/// Every runner that some weights keep. Layers of one shape share them, so that what is between the products of an MLP is in
/// memory once and not in each layer.
static ALL: Mutex<Vec<(Key, Weak<Shared>)>> = Mutex::new(Vec::new());

/// The runners that weights were used with on a GPU, by problem, order of A's scales and stream. They stay for as long as the
/// weights: a recorded graph uses their memory. M is rounded up to a power of two, so that there are few.
#[derive(Debug, Default)]
pub struct Launchers(Mutex<Vec<(Key, Arc<Shared>)>>);

impl Launchers {
    /// Launches an operation on operands in device memory. The first call of a shape on a stream loads kernels and takes memory;
    /// later ones allocate nothing and can be recorded into a graph. `describe` makes the description for up to so many rows.
    ///
    /// # Safety
    /// As [`AnyRunner::run_device`]; these launchers are for these weights alone.
    ///
    /// # Errors
    /// As there, and if the target lacks what is asked of it, or the memory.
    pub unsafe fn run(
        &self,
        (describe, a_scale_layout): (impl FnOnce(usize) -> AnyDesc, ScaleLayout),
        target: &Target,
        weights: &AnyWeights,
        (call, routing): (&DeviceCall, Option<DeviceRouting>),
        stream: u64,
    ) -> Result<(), Error> {
        let target = match target {
            Target::Gpu(id, options) => {
                Target::Gpu(id.clone(), GpuOptions { a_scale_layout, ..options.clone() })
            }
            _ => return Err(Error::NotOnGpu),
        };
        let desc = describe(call.m.next_power_of_two());
        let runner = self.runner(Key { desc, target, stream }, weights)?;
        let runner = runner.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise; a runner is for one stream.
        unsafe { runner.run_device(call, routing, weights, Stream::raw(stream)) }
    }

    fn runner(&self, key: Key, weights: &AnyWeights) -> Result<Arc<Shared>, Error> {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, runner)) = own.iter().find(|(known, _)| *known == key) {
            return Ok(runner.clone());
        }
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(_, runner)| runner.strong_count() > 0);
        let found = all.iter().find(|(known, _)| *known == key).and_then(|(_, runner)| runner.upgrade());
        let runner = match found {
            Some(runner) => runner,
            None => {
                let runner = AnyPlan::new(&key.desc, &key.target)?.runner()?;
                let runner = Arc::new(Mutex::new(runner));
                all.push((key.clone(), Arc::downgrade(&runner)));
                runner
            }
        };
        drop(all);
        runner.lock().unwrap_or_else(PoisonError::into_inner).warm(weights)?;
        own.push((key, runner.clone()));
        Ok(runner)
    }
}
