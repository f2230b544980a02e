//! A GPU's primary context, and what lives in it on its own: streams and events.

use std::sync::Arc;

use cudarc::driver::{result, sys};
use dualgemm_device::{Error, Stream};

use crate::driver::explain;

/// The primary context of a GPU, retained, with a stream of ours. Everything made in it keeps it alive.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: sys::CUdevice,
    handle: sys::CUcontext,
    /// A stream of our own, since the default one cannot be recorded; still ordered with plain copies.
    own: sys::CUstream,
}

// SAFETY: driver handles are plain pointers that the driver accepts from any thread.
unsafe impl Send for Context {}
// SAFETY: nothing here changes, and the driver is thread-safe.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn retain(device: sys::CUdevice) -> Result<Self, Error> {
        // SAFETY: the device exists; the context is released on drop.
        let handle = unsafe { result::primary_ctx::retain(device) };
        let handle = handle.map_err(|e| explain("cuDevicePrimaryCtxRetain", e))?;
        let mut this = Self { device, handle, own: std::ptr::null_mut() };
        this.enter()?;
        this.own = result::stream::create(result::stream::StreamKind::Default)
            .map_err(|e| explain("cuStreamCreate", e))?;
        Ok(this)
    }

    /// Makes the context this thread's own, which every other call wants. Asks first: that costs less than setting it, and
    /// remembering it here would miss what other libraries set.
    pub(crate) fn enter(&self) -> Result<(), Error> {
        if matches!(result::ctx::get_current(), Ok(Some(current)) if current == self.handle) {
            return Ok(());
        }
        // SAFETY: the context is retained as long as `self`.
        unsafe { result::ctx::set_current(self.handle) }.map_err(|e| explain("cuCtxSetCurrent", e))
    }

    /// The driver's handle of a stream.
    pub(crate) fn stream(&self, stream: Stream) -> sys::CUstream {
        match stream {
            Stream::Own => self.own,
            Stream::Raw(raw) => raw.handle() as usize as sys::CUstream,
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.own.is_null() && self.enter().is_ok() {
            // SAFETY: created in `retain`, destroyed once; a failure means a dead context, which frees it.
            let _ = unsafe { result::stream::destroy(self.own) };
        }
        // SAFETY: retained once in `retain`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A stream beside the device's own; see [`Cuda::new_stream`](crate::Cuda::new_stream).
#[derive(Debug)]
pub struct OwnedStream {
    context: Arc<Context>,
    handle: sys::CUstream,
}

// SAFETY: the driver accepts a stream's handle from any thread.
unsafe impl Send for OwnedStream {}
// SAFETY: the handle does not change; the driver orders what several threads enqueue.
unsafe impl Sync for OwnedStream {}

impl OwnedStream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, Error> {
        context.enter()?;
        let handle = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|e| explain("cuStreamCreate", e))?;
        Ok(Self { context: context.clone(), handle })
    }

    /// The stream for launches.
    ///
    /// # Safety
    /// It is not used after `self`.
    pub unsafe fn id(&self) -> Stream {
        // SAFETY: made in this context; the caller keeps it.
        unsafe { Stream::raw(self.handle as usize as u64) }
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created in `new`, destroyed once; a failure means a dead context, which frees it.
            let _ = unsafe { result::stream::destroy(self.handle) };
        }
    }
}

/// A point in a stream that other streams can wait for; see [`Cuda::event`](crate::Cuda::event).
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: the driver accepts an event's handle from any thread.
unsafe impl Send for Event {}
// SAFETY: the handle does not change; the driver orders what several threads record.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn new(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Self, Error> {
        context.enter()?;
        let handle = result::event::create(flags).map_err(|e| explain("cuEventCreate", e))?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Puts the event after what the stream has been given so far.
    pub fn record(&self, stream: Stream) -> Result<(), Error> {
        self.context.enter()?;
        // SAFETY: the event is alive; the stream is ours, or was promised to be there.
        unsafe { result::event::record(self.handle, self.context.stream(stream)) }
            .map_err(|e| explain("cuEventRecord", e))
    }

    /// Makes what the stream is given from now on wait for the event.
    pub fn hold(&self, stream: Stream) -> Result<(), Error> {
        self.context.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is alive; the stream is ours, or was promised to be there.
        unsafe { result::stream::wait_event(self.context.stream(stream), self.handle, flags) }
            .map_err(|e| explain("cuStreamWaitEvent", e))
    }

    pub(crate) fn wait(&self) -> Result<(), Error> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.handle) }.map_err(|e| explain("cuEventSynchronize", e))
    }

    /// Microseconds from this event to `end`; both are over.
    pub(crate) fn us_until(&self, end: &Event) -> Result<f64, Error> {
        // SAFETY: both events are alive.
        let ms = unsafe { result::event::elapsed(self.handle, end.handle) };
        ms.map(|ms| f64::from(ms) * 1e3).map_err(|e| explain("cuEventElapsedTime", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created in `new`, destroyed once. A failure means a dead context, which frees everything.
            let _ = unsafe { result::event::destroy(self.handle) };
        }
    }
}
