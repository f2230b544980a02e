//! The activation as a kernel of its own: `C = act(alpha_g · gate + bias_g, alpha_u · up + bias_u)` of two products that
//! another GEMM left in memory.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::Program;

use super::quantize::{Out, Scale, out_args};
use super::rowwise::{Config, Loaded, Sink, Source};
use crate::Error;
use crate::error::refused;
use crate::limits::fits;

/// Gate and up in device memory, and what multiplies and is added to them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Products {
    /// Rows.
    pub m: usize,
    /// Features.
    pub n: usize,
    /// `[m, n]` gate products; gate and up alternating, `[m, 2n]`, if interleaved.
    pub gate: DevicePtr,
    /// `[m, n]` up products; not read if interleaved.
    pub up: DevicePtr,
    /// Bytes from row to row, the same for both.
    pub pitch: usize,
    /// Multiplies gate and up.
    pub alpha: [f32; 2],
    /// One f32 that multiplies both as well (a dynamic scale of A), or null.
    pub a_scale: DevicePtr,
    /// n f32 that are added to gate and to up after alpha, or null.
    pub bias: [DevicePtr; 2],
}

/// The kernel, loaded on a device for one activation.
#[derive(Debug, Clone, Copy)]
pub struct SiluMul {
    kernel: Loaded,
    ty: FloatType,
}

impl SiluMul {
    /// Configurations: from every float type, separate and interleaved, to the same type and to nvfp4 with 128x4 scales.
    pub fn configs() -> Vec<Config> {
        FloatType::ALL
            .into_iter()
            .flat_map(|ty| [false, true].map(|interleaved| (ty, interleaved)))
            .flat_map(|(ty, interleaved)| {
                let source = Source::Gated { ty, interleaved, round: false };
                let sinks = [Sink::Float(ty), Sink::Codes(ScaleLayout::Sf128x4)];
                sinks.map(|sink| Config { source, sink, dynamic: false, aligned: true })
            })
            .collect()
    }

    /// Loads the kernel.
    ///
    /// `aligned` promises that n is a multiple of 8 and that all addresses and distances of rows are multiples of 16
    /// bytes (`round` rounds both products to bf16 before the activation). nvfp4 is always aligned.
    ///
    /// # Errors
    /// If the device refuses the text, or nvfp4 is asked for without the promise.
    pub fn new(
        device: &dyn Device,
        (ty, interleaved, round): (FloatType, bool, bool),
        sink: Sink,
        program: &Program,
        aligned: bool,
    ) -> Result<Self, Error> {
        if !aligned && !matches!(sink, Sink::Float(_)) {
            return refused("output", "nvfp4 with unaligned rows", "aligned rows for nvfp4");
        }
        let source = Source::Gated { ty, interleaved, round };
        let config = Config { source, sink, dynamic: false, aligned };
        Ok(Self { kernel: Loaded::new(device, config, Some(program))?, ty })
    }

    /// The launch on these operands; `scale` is the tensor scale of nvfp4 output.
    ///
    /// # Errors
    /// If `out` is not what the kernel was made for, or a stride or an address breaks a rule.
    pub fn spec(&self, products: &Products, out: &Out, scale: GlobalScale) -> Result<LaunchSpec, Error> {
        let &Products { m, n, gate, up, pitch, alpha, a_scale, bias } = products;
        let size = self.ty.bytes();
        let wide =
            if matches!(self.kernel.config.source, Source::Gated { interleaved: true, .. }) { 2 } else { 1 };
        let step = if self.kernel.config.aligned { 16 } else { size };
        fits("gate", "row stride in bytes", pitch, n * size * wide, step)?;
        for (tensor, address, step) in [
            ("gate", gate, step),
            ("up", up, step),
            ("gate bias", bias[0], step.max(4)),
            ("up bias", bias[1], step.max(4)),
            ("scale of A", a_scale, 4),
        ] {
            fits(tensor, "address", address.0 as usize, 0, step)?;
        }
        if self.kernel.config.aligned && !n.is_multiple_of(8) {
            fits("gate", "features", n, 2, 8)?;
        }
        let args = Args::new()
            .u32(m as u32)
            .u32(n as u32)
            .ptr(gate)
            .ptr(up)
            .u32(pitch as u32)
            .f32(alpha[0])
            .f32(alpha[1])
            .ptr(a_scale)
            .ptr(bias[0])
            .ptr(bias[1]);
        let args = out_args(&self.kernel.config, m, n, out, &Scale::Static(scale), args)?;
        Ok(self.kernel.launch((m, n), args))
    }
}
