//! The operators on CUDA tensors: candle's memory and stream, our kernels. Both sides use the device's primary context, so
//! addresses and streams of one are good for the other.

use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::{DevicePtr as _, DevicePtrMut as _, DeviceRepr};
use candle_core::cuda::{CudaDType, CudaDevice, CudaStorage, CudaStorageSlice};
use candle_core::{Layout, Result, Shape};
use half::{bf16, f16};

use super::{Float, Packed, span};
use crate::device::{DevicePtr, Stream};
use crate::{DeviceA, DeviceC, DeviceCall, Target};

/// The card of a candle device.
pub(super) fn target(device: &CudaDevice) -> Target {
    // The driver counts cards in an i32.
    Target::cuda(i32::try_from(device.cuda_stream().context().ordinal()).unwrap_or(i32::MAX))
}

impl Packed {
    /// C of a CUDA tensor, launched on the stream of its device and not waited for.
    pub(super) fn cuda(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (rows, shape) = self.shapes(layout)?;
        let c = match &storage.slice {
            CudaStorageSlice::F32(_) => self.launch::<f32>(storage, layout, rows),
            CudaStorageSlice::F16(_) => self.launch::<f16>(storage, layout, rows),
            CudaStorageSlice::BF16(_) => self.launch::<bf16>(storage, layout, rows),
            _ => candle_core::bail!("x is {:?}; F32, F16 or BF16 is needed", storage.dtype()),
        };
        Ok((c?, shape))
    }

    fn launch<T: Float + CudaDType + DeviceRepr>(
        &self,
        storage: &CudaStorage,
        layout: &Layout,
        rows: usize,
    ) -> Result<CudaStorage> {
        let device = &storage.device;
        let (start, end) = span(layout)?;
        let x = storage.as_cuda_slice::<T>()?.slice(start..end);
        // SAFETY: the kernel writes all of it before anything on this stream can read it.
        let mut c = unsafe { device.alloc::<T>(rows * self.layer.shape.ends().0) }?;
        if rows > 0 {
            let stream = device.cuda_stream();
            // While these guards live, candle's memory is in use by this stream.
            let (values, _reading) = x.device_ptr(&stream);
            let (result, _writing) = c.device_ptr_mut(&stream);
            let call = DeviceCall {
                m: rows,
                a: DeviceA::Float { values: DevicePtr(values), pitch: self.layer.shape.k * size_of::<T>() },
                c: DeviceC::Float(DevicePtr(result)),
            };
            let handle = stream.cu_stream().addr() as u64;
            self.with_runner(self.desc::<T>(rows, 1), handle, |runner| {
                // SAFETY: x and C are candle's, of this shape, and in use by its stream, which is of the primary context and
                // there as long as `stream`; a runner is for calls on one stream.
                unsafe { runner.run_device(&call, None, &self.layer.weights, Stream::raw(handle)) }
            })?;
        }
        Ok(CudaStorage::wrap_cuda_slice(c, device.clone()))
    }
}
