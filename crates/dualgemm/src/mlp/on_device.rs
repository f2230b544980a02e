//! Whole MLPs on operands that are in a GPU's memory already.

use dualgemm_bench::Timing;
use dualgemm_device::{DevicePtr, Stream};
use dualgemm_formats::{BlockFormat, ScaleLayout};
use dualgemm_gemm::{AOperand, DualGemmDesc, MlpDesc, OutFormat, OutScale, OutputMut};
use dualgemm_plan::{Buffer, DeviceA, DeviceC, DeviceCall, Gpu, GpuOptions, Launches, Operands, measure};

use super::{MlpRunner, PackedMlp};
use crate::{Error, Target};

/// On a GPU the down projection reads the scales as gate and up write them, under a scale that the host knows, and rows that
/// start at multiples of 16 bytes.
pub(super) fn target(desc: &MlpDesc, target: &Target) -> Result<Target, Error> {
    let Target::Gpu(id, options) = target else { return Ok(target.clone()) };
    let &DualGemmDesc { n, out, .. } = &desc.gate_up;
    let refuse = |found, expected| Err(Error::NotForGpu { tensor: super::BETWEEN, found, expected });
    if desc.down.b.block_format().is_none() {
        let (tensor, found) = ("the down projection", desc.down.b.to_string());
        return Err(Error::NotForGpu { tensor, found, expected: "nvfp4 or mxfp4" });
    }
    match out {
        OutFormat::F32 => refuse(out.to_string(), "f16, bf16 or nvfp4 (on the command line: --between)"),
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

    pub(super) fn run_with_copies(
        &mut self,
        a: &AOperand<'_>,
        mlp: &PackedMlp,
        mut c: OutputMut<'_>,
    ) -> Result<Option<f32>, Error> {
        let MlpDesc { gate_up, down } = self.desc;
        let Some(on_device) = &mut self.on_device else { return Err(Error::NotOnGpu) };
        if on_device.operands.is_none() {
            let ends = DualGemmDesc { n: down.n, out: down.out, ..gate_up };
            on_device.operands = Some(Operands::new(on_device.gpu, &ends, on_device.a_scale_layout)?);
        }
        let operands = self.operands()?;
        operands.write_a(a)?;
        // SAFETY: the call is on this runner's operands, which are the plan's.
        unsafe { self.run_device(&operands.call(a.rows(), Operands::a_scale(a)), mlp, Stream::Own) }?;
        Ok(operands.read_c(0, a.rows(), &mut c)?)
    }

    fn operands(&self) -> Result<&Operands, Error> {
        self.on_device()?.operands.as_ref().ok_or(Error::NotOnGpu)
    }

    /// How long a call takes on a card by its own clock, with the operands of the last [`run`](Self::run) and weights that come
    /// from memory. None on a processor, where the clock is the caller's, and on a simulated GPU.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn time(&self, a: &AOperand<'_>, mlp: &PackedMlp) -> Result<Option<Timing>, Error> {
        let Some(card) = self.on_device.as_ref().and_then(|on| on.gpu.card()) else { return Ok(None) };
        let copies = (1..measure::copies(mlp.bytes())).map(|_| mlp.duplicate());
        let mlps = std::iter::once(Ok(mlp.clone())).chain(copies).collect::<Result<Vec<_>, Error>>()?;
        mlps.iter().try_for_each(|mlp| self.warm(mlp))?;
        let call = self.operands()?.call(a.rows(), Operands::a_scale(a));
        // SAFETY: the call is on this runner's operands, which are the plan's.
        let run = |i: usize| unsafe { self.run_device(&call, &mlps[i % mlps.len()], Stream::Own) };
        Ok(Some(measure::time(card, Launches::Recorded, mlps.len(), measure::Protocol::default(), run)?))
    }
}

impl PackedMlp {
    /// The same weights once more, in memory of a GPU of their own.
    pub(crate) fn duplicate(&self) -> Result<Self, Error> {
        Ok(Self { gate_up: self.gate_up.duplicate()?, down: self.down.duplicate()? })
    }
}

/// What the first product leaves for the second, in a GPU's memory; and room there for operands of the host.
#[derive(Debug)]
pub(crate) struct Between {
    gpu: &'static Gpu,
    /// Floats or codes.
    values: Buffer,
    scales: Option<Buffer>,
    /// Order of A's block scales.
    a_scale_layout: ScaleLayout,
    /// Made at the first run on operands of the host.
    operands: Option<Operands>,
}

impl Between {
    pub(super) fn new(
        gpu: &'static Gpu,
        desc: &DualGemmDesc,
        a_scale_layout: ScaleLayout,
    ) -> Result<Self, Error> {
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
        let (values, scales) = (buffer(bytes)?, scale_bytes.map(buffer).transpose()?);
        Ok(Self { gpu, values, scales, a_scale_layout, operands: None })
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
                DeviceA::Blocks {
                    format: BlockFormat::Nvfp4,
                    codes: self.values.ptr(),
                    scales: scales.ptr(),
                    global_scale,
                }
            }
            _ => DeviceA::Float {
                values: self.values.ptr(),
                pitch: desc.n * desc.out.bits_per_element() as usize / 8,
            },
        }
    }
}
