//! The activation as a kernel of its own: `C = act(alpha_g · gate + bias_g, alpha_u · up + bias_u)` of two products that
//! another GEMM left in memory.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{FloatType, GlobalScale, ScaleLayout};
use dualgemm_gemm::Program;

use super::quantize::{Out, Scale, out_args};
use super::rowwise::{Config, Loaded, Sink, Source};
use crate::Error;
use crate::limits::fits;

/// Gate and up in device memory, and what multiplies and is added to them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Products {
    /// Rows.
    pub m: usize,
    /// Features.
    pub n: usize,
    /// `[m, n]` gate products.
    pub gate: DevicePtr,
    /// `[m, n]` up products.
    pub up: DevicePtr,
    /// Bytes from row to row, the same for both.
    pub pitch: usize,
    /// Multiplies gate and up.
    pub alpha: [f32; 2],
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
    /// Configurations: from every float type to the same type and to nvfp4 with 128x4 scales.
    pub fn configs() -> Vec<Config> {
        let sinks = |ty| [Sink::Float(ty), Sink::Codes(ScaleLayout::Sf128x4)];
        let config = |ty, sink| Config { source: Source::Gated { ty, round: false }, sink, dynamic: false };
        FloatType::ALL.into_iter().flat_map(|ty| sinks(ty).map(|sink| config(ty, sink))).collect()
    }

    /// Loads the kernel; `round` rounds both products to bf16 before the activation.
    pub fn new(
        device: &dyn Device,
        (ty, round): (FloatType, bool),
        sink: Sink,
        program: &Program,
    ) -> Result<Self, Error> {
        let config = Config { source: Source::Gated { ty, round }, sink, dynamic: false };
        Ok(Self { kernel: Loaded::new(device, config, Some(program))?, ty })
    }

    /// The launch on these operands; `scale` is the tensor scale of nvfp4 output.
    ///
    /// # Errors
    /// If `out` is not what the kernel was made for, or a stride or an address breaks a rule: n is a multiple of 8, and all
    /// addresses and distances of rows are multiples of 16 bytes.
    pub fn spec(&self, products: &Products, out: &Out, scale: GlobalScale) -> Result<LaunchSpec, Error> {
        let &Products { m, n, gate, up, pitch, alpha, bias } = products;
        fits("gate", "row stride in bytes", pitch, n * self.ty.bytes(), 16)?;
        for (tensor, address) in [("gate", gate), ("up", up), ("gate bias", bias[0]), ("up bias", bias[1])] {
            fits(tensor, "address", address.0 as usize, 0, 16)?;
        }
        fits("gate", "features", n, 0, 8)?;
        let args = Args::new()
            .u32(m as u32)
            .u32(n as u32)
            .ptr(gate)
            .ptr(up)
            .u32(pitch as u32)
            .f32(alpha[0])
            .f32(alpha[1])
            .ptr(bias[0])
            .ptr(bias[1]);
        let args = out_args(&self.kernel.config, m, n, out, &Scale::Static(scale), args)?;
        Ok(self.kernel.launch((m, n), args))
    }
}
