//! Time on the GPU's own clock, and launches recorded once and replayed without the host.

use cudarc::driver::{result, sys};
use dualgemm_device::Error;

use crate::Cuda;
use crate::driver::{check, explain};

/// Launches recorded once; see [`Cuda::record`].
#[derive(Debug)]
pub struct Graph<'a> {
    cuda: &'a Cuda,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

impl Graph<'_> {
    /// Replays the launches, in order, after everything launched before.
    ///
    /// # Errors
    /// [`Error::Driver`]; a kernel's failure comes with a later call.
    pub fn replay(&self) -> Result<(), Error> {
        self.cuda.enter()?;
        // SAFETY: both live as long as `self`.
        unsafe { result::graph::launch(self.executable, self.cuda.stream()) }
            .map_err(|e| explain("cuGraphLaunch", e))
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        if self.cuda.enter().is_ok() {
            // SAFETY: made in `record`, destroyed once. A failure means a dead context, which frees everything.
            let _ = unsafe { result::graph::exec_destroy(self.executable) };
            // SAFETY: as above.
            let _ = unsafe { result::graph::destroy(self.graph) };
        }
    }
}

impl Cuda {
    /// Records the launches that `work` makes, without running them.
    ///
    /// # Errors
    /// What `work` reports; [`Error::Driver`] if it does what cannot be recorded (allocation, copies, waiting).
    pub fn record(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<Graph<'_>, Error> {
        self.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is ours and not being recorded: recording ends below, on every path.
        unsafe { result::stream::begin_capture(self.stream(), mode) }
            .map_err(|e| explain("cuStreamBeginCapture", e))?;
        let done = work();
        // SAFETY: begun above.
        let graph = unsafe { result::stream::end_capture(self.stream()) };
        done?;
        let graph = graph.map_err(|e| explain("cuStreamEndCapture", e))?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph came from the driver; the result outlives the call.
        let instantiated = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
        if let Err(error) = check("cuGraphInstantiate", instantiated) {
            // SAFETY: not used any more.
            let _ = unsafe { result::graph::destroy(graph) };
            return Err(error);
        }
        Ok(Graph { cuda: self, graph, executable })
    }

    /// Microseconds from the start to the end of what `work` launches, measured by the GPU. Waits for it.
    ///
    /// # Errors
    /// What `work` reports; [`Error::Kernel`] if a kernel failed.
    pub fn time_us(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
        self.enter()?;
        let [start, end] = [Event::new()?, Event::new()?];
        start.record(self)?;
        work()?;
        end.record(self)?;
        // SAFETY: recorded above.
        unsafe { result::event::synchronize(end.0) }.map_err(|e| explain("cuEventSynchronize", e))?;
        // SAFETY: both are complete.
        let ms = unsafe { result::event::elapsed(start.0, end.0) };
        ms.map(|ms| f64::from(ms) * 1e3).map_err(|e| explain("cuEventElapsedTime", e))
    }
}

/// A point in the stream.
struct Event(sys::CUevent);

impl Event {
    fn new() -> Result<Self, Error> {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        event.map(Self).map_err(|e| explain("cuEventCreate", e))
    }

    fn record(&self, cuda: &Cuda) -> Result<(), Error> {
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(self.0, cuda.stream()) }.map_err(|e| explain("cuEventRecord", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once. A failure means a dead context, which frees everything.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
