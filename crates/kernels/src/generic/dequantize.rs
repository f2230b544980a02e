//! nvfp4 or mxfp4 weights as floats, tensor scale included: what a library GEMM multiplies. One launch per matrix; the halves of
//! a `[2N, K]` matrix are two launches on one buffer.
//!
//! The value is `code · scale` (exact) times the tensor scale in f32, rounded once more to the output's type.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatType, ScaleLayout};

use super::expand::Codes;
use super::rowwise::{Config, Loaded, Sink, Source};
use crate::Error;
use crate::limits::fits;

/// The kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct Dequantize {
    kernel: Loaded,
    ty: FloatType,
}

impl Dequantize {
    /// Configurations: nvfp4 in every scale layout and mxfp4 with linear scales, to every float type.
    pub fn configs() -> Vec<Config> {
        let layouts = ScaleLayout::ALL.into_iter();
        let nvfp4 =
            layouts.flat_map(|layout| FloatType::ALL.map(|ty| Self::config(BlockFormat::Nvfp4, layout, ty)));
        let mxfp4 = FloatType::ALL.map(|ty| Self::config(BlockFormat::Mxfp4, ScaleLayout::Linear, ty));
        nvfp4.chain(mxfp4).collect()
    }

    fn config(format: BlockFormat, layout: ScaleLayout, ty: FloatType) -> Config {
        let source = Source::Codes { format, layout, scaled: true };
        Config { source, sink: Sink::Float(ty), dynamic: false, aligned: true }
    }

    /// Loads the kernel for nvfp4 with scales in this layout and values of this type.
    pub fn new(device: &dyn Device, layout: ScaleLayout, ty: FloatType) -> Result<Self, Error> {
        Self::of(device, BlockFormat::Nvfp4, layout, ty)
    }

    /// Loads the kernel for a matrix in this format.
    pub fn of(
        device: &dyn Device,
        format: BlockFormat,
        layout: ScaleLayout,
        ty: FloatType,
    ) -> Result<Self, Error> {
        Ok(Self { kernel: Loaded::new(device, Self::config(format, layout, ty), None)?, ty })
    }

    /// The launch that writes the values of `weights`, times `tensor_scale`, to `out`, rows `pitch` bytes apart (a
    /// multiple of 16).
    pub fn spec(
        &self,
        weights: &Codes,
        tensor_scale: f32,
        out: DevicePtr,
        pitch: usize,
    ) -> Result<LaunchSpec, Error> {
        weights.check("B")?;
        self.kernel.config.check_blocks("B", weights.k)?;
        fits("B", "address of the values", out.0 as usize, 1, 16)?;
        let least = weights.k * self.ty.bytes();
        fits("B", "row stride of the values in bytes", pitch, least, 16)?;
        let args = Args::new()
            .u32(weights.m as u32)
            .u32(weights.k as u32)
            .ptr(weights.codes)
            .u32(weights.pitch as u32)
            .ptr(weights.scales)
            .f32(tensor_scale)
            .ptr(out)
            .u32(pitch as u32);
        Ok(self.kernel.launch((weights.m, weights.k), args))
    }
}
