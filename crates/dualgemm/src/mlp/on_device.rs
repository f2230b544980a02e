//! Whole MLPs on operands that are in a GPU's memory already.

use dualgemm_bench::Timing;
use dualgemm_device::{DevicePtr, Stream};
use dualgemm_gemm::{DualGemmDesc, Error as GemmError, MlpDesc, OutFormat, OutScale};
use dualgemm_plan::{Buffer, DeviceA, DeviceC, DeviceCall, Gpu, GpuOptions, Launches, measure};

use super::{MlpRunner, PackedMlp};
use crate::{Error, Target};

/// On a GPU the down projection reads the scales as gate and up write them, under a scale that the host knows, and rows that
/// start at multiples of 16 bytes.
pub(super) fn target(desc: &MlpDesc, target: &Target) -> Result<Target, Error> {
    let Target::Gpu(id, options) = target else { return Ok(target.clone()) };
    let &DualGemmDesc { n, out, .. } = &desc.gate_up;
    let refuse = |found: String, expected: &str| {
        let tensor = "C of gate and up on a GPU".into();
        Err(Error::Gemm(GemmError::Operand { tensor, found, expected: expected.into() }))
    };
    match out {
        OutFormat::Nvfp4 { global_scale: OutScale::Dynamic, .. } => {
            refuse(format!("{out} with a dynamic scale"), "a static scale, or f16 or bf16")
        }
        OutFormat::F16 | OutFormat::Bf16 if !n.is_multiple_of(8) => {
            refuse(format!("{n} features of {out}"), "a multiple of 8")
        }
        OutFormat::Nvfp4 { scale_layout: a_scale_layout, .. } => {
            Ok(Target::Gpu(id.clone(), GpuOptions { a_scale_layout, ..options.clone() }))
        }
        _ => Ok(target.clone()),
    }
}

impl MlpRunner {
    pub(crate) fn on_device(&self) -> Result<&Between, Error> {
        self.on_device.as_ref().ok_or(Error::NotOnGpu)
    }

    /// Prepares for calls with this MLP; see [`Runner::warm`](crate::Runner::warm).
    ///
    /// # Errors
    /// If memory is lacking, or the weights are for another target.
    pub fn warm(&self, mlp: &PackedMlp) -> Result<(), Error> {
        self.gate_up.warm(&mlp.gate_up)?;
        self.down.warm(&mlp.down)
    }

    /// Launches both products; what is between them stays on the GPU. Allocates nothing, waits for nothing, and can be recorded
    /// into a graph.
    ///
    /// # Safety
    /// As [`Runner::run_device`](crate::Runner::run_device).
    ///
    /// # Errors
    /// As there.
    pub unsafe fn run_device(&self, call: &DeviceCall, mlp: &PackedMlp, stream: Stream) -> Result<(), Error> {
        let between = self.on_device()?;
        // SAFETY: A is the caller's promise; what is between has room for the plan's M, and C of the first call is written
        // before the second, which follows it on the stream, reads it.
        unsafe {
            self.gate_up.run_device(&DeviceCall { c: between.c(), ..*call }, &mlp.gate_up, stream)?;
            self.down.run_device(&DeviceCall { a: between.a(&self.desc.gate_up), ..*call }, &mlp.down, stream)
        }
    }

    /// How long a call takes on a card by its own clock, weights from memory; none on a simulated GPU. `mlps` are as many copies
    /// of the weights as keep them out of the cache.
    ///
    /// # Safety
    /// As [`run_device`](Self::run_device).
    ///
    /// # Errors
    /// As there, and if the runner is not for a GPU.
    pub unsafe fn time(&self, call: &DeviceCall, mlps: &[PackedMlp]) -> Result<Option<Timing>, Error> {
        let Some(card) = self.on_device()?.gpu.card() else { return Ok(None) };
        mlps.iter().try_for_each(|mlp| self.warm(mlp))?;
        // SAFETY: the caller's promise.
        let run = |i: usize| unsafe { self.run_device(call, &mlps[i % mlps.len()], Stream::Own) };
        Ok(Some(measure::time(card, Launches::Recorded, mlps.len(), measure::Protocol::default(), run)?))
    }
}

/// What the first product leaves for the second, in a GPU's memory.
#[derive(Debug)]
pub(crate) struct Between {
    gpu: &'static Gpu,
    /// Floats or codes.
    values: Buffer,
    scales: Option<Buffer>,
}

impl Between {
    pub(super) fn new(gpu: &'static Gpu, desc: &DualGemmDesc) -> Result<Self, Error> {
        let &DualGemmDesc { m, n, out, .. } = desc;
        let scale_bytes = match out {
            OutFormat::Nvfp4 { scale_layout, .. } => Some(scale_layout.len(m, n / 16)),
            _ => None,
        };
        let bytes = match out {
            OutFormat::Nvfp4 { .. } => m * n / 2,
            _ => m * n * out.bits_per_element() as usize / 8,
        };
        let buffer = |bytes| Buffer::zeroed(gpu, bytes).map_err(dualgemm_plan::Error::from);
        Ok(Self { gpu, values: buffer(bytes)?, scales: scale_bytes.map(buffer).transpose()? })
    }

    /// The GPU.
    pub(crate) fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// Where the first product writes.
    pub(crate) fn c(&self) -> DeviceC {
        match &self.scales {
            None => DeviceC::Float(self.values.ptr()),
            Some(scales) => DeviceC::Nvfp4 {
                codes: self.values.ptr(),
                scales: scales.ptr(),
                global_scale: DevicePtr::NULL,
            },
        }
    }

    /// The same for the second to read.
    pub(crate) fn a(&self, desc: &DualGemmDesc) -> DeviceA {
        match (&self.scales, desc.out) {
            (Some(scales), OutFormat::Nvfp4 { global_scale: OutScale::Static(global_scale), .. }) => {
                DeviceA::Nvfp4 { codes: self.values.ptr(), scales: scales.ptr(), global_scale }
            }
            _ => DeviceA::Float {
                values: self.values.ptr(),
                pitch: desc.n * desc.out.bits_per_element() as usize / 8,
            },
        }
    }
}
