//! Launches recorded once and replayed without the host, and time on the GPU's own clock.

use std::sync::Arc;

use cudarc::driver::{result, sys};
use dualgemm_device::{Error, Stream};

use crate::context::{Context, Event};
use crate::driver::{check, explain};
use crate::{Cuda, ReadyLaunch};

/// Launches recorded once; see [`Cuda::record`].
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: driver handles are plain pointers that the driver accepts from any thread.
unsafe impl Send for Graph {}
// SAFETY: handles do not change; the driver orders replays of one graph.
unsafe impl Sync for Graph {}

impl Graph {
    /// Replays the launches, in order, after everything launched before on the device's own stream.
    ///
    /// # Safety
    /// As [`replay_on`](Self::replay_on).
    ///
    /// # Errors
    /// [`Error::Driver`]; a kernel's failure comes with a later call.
    pub unsafe fn replay(&self) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.replay_on(Stream::Own) }
    }

    /// Replays the launches on a stream.
    ///
    /// # Safety
    /// What was promised for each launch when it was recorded holds for this replay, too: the memory is still there.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub unsafe fn replay_on(&self, stream: Stream) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: the graph lives as long as `self`; the stream is ours, or was promised to be there; so was the memory.
        unsafe { result::graph::launch(self.executable, self.context.stream(stream)) }
            .map_err(|e| explain("cuGraphLaunch", e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made in `record`, destroyed once. A failure means a dead context, which frees everything.
            let _ = unsafe { result::graph::exec_destroy(self.executable) };
            // SAFETY: made in `record`, destroyed once, after what was made of it.
            let _ = unsafe { result::graph::destroy(self.graph) };
        }
    }
}

impl Cuda {
    /// Records what `work` launches on the device's own stream, without running it.
    ///
    /// # Errors
    /// What `work` reports; [`Error::Driver`] if it does what cannot be recorded (allocation, copies, waiting).
    pub fn record<E: From<Error>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.record_on(Stream::Own, work)
    }

    /// Records launches that were made ready, without running them and whatever else is being recorded or launched
    /// meanwhile, by this thread or by others.
    ///
    /// # Errors
    /// As [`start`](Cuda::start); [`Error::Driver`].
    pub fn record_ready(&self, launches: &[ReadyLaunch]) -> Result<Graph, Error> {
        let apart = self.new_stream()?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the result outlives the call; the mode from before comes back below.
        check("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut mode)
        })?;
        // SAFETY: `apart` is there to the end. The launches are recorded, not run: who replays them vouches for them.
        let graph = unsafe { self.record_on(apart.id(), || self.start(apart.id(), launches)) };
        // SAFETY: the result outlives the call; `mode` is what the driver gave above.
        check("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut mode)
        })?;
        graph
    }

    /// Whether a stream records what it is given, instead of running it.
    ///
    /// # Errors
    /// [`Error::Driver`], also for the default stream while another one records.
    pub fn is_recording(&self, stream: Stream) -> Result<bool, Error> {
        self.enter()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is ours, or was promised to be there; the result outlives the call.
        let result = unsafe { sys::cuStreamIsCapturing(self.context().stream(stream), &mut status) };
        check("cuStreamIsCapturing", result)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    fn record_on<E: From<Error>>(
        &self,
        stream: Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        let context = self.context();
        context.enter()?;
        let stream = context.stream(stream);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is ours and not being recorded: recording ends below, on every path.
        unsafe { result::stream::begin_capture(stream, mode) }
            .map_err(|e| explain("cuStreamBeginCapture", e))?;
        let done = work();
        // SAFETY: begun above.
        let graph = unsafe { result::stream::end_capture(stream) };
        let unused = |graph| {
            // SAFETY: the driver has just made it, and nothing was made of it.
            let _ = unsafe { result::graph::destroy(graph) };
        };
        if let Err(error) = done {
            let _ = graph.map(unused);
            return Err(error);
        }
        let graph = graph.map_err(|e| explain("cuStreamEndCapture", e))?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph came from the driver; the result outlives the call.
        let instantiated = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
        if let Err(error) = check("cuGraphInstantiate", instantiated) {
            unused(graph);
            return Err(error.into());
        }
        Ok(Graph { context: context.clone(), graph, executable })
    }

    /// Microseconds from the start to the end of what `work` launches on the device's own stream, measured by the
    /// GPU. Waits for it.
    ///
    /// # Errors
    /// What `work` reports; [`Error::Kernel`] if a kernel failed.
    pub fn time_us<E: From<Error>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
        let event = || Event::new(self.context(), sys::CUevent_flags::CU_EVENT_DEFAULT);
        let [start, end] = [event()?, event()?];
        start.record(Stream::Own)?;
        work()?;
        end.record(Stream::Own)?;
        end.wait()?;
        Ok(start.us_until(&end)?)
    }

    /// An event that streams can wait for, without a clock.
    pub fn event(&self) -> Result<Event, Error> {
        Event::new(self.context(), sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }
}
