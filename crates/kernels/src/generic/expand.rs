//! nvfp4 as f16 or bf16: what the fused Hopper kernel and the library multiply.
//!
//! The value is `code · scale`, which both types hold exactly; the tensor scale joins the epilogue's alpha. K needs no
//! padding: rows of a multiple of 16 elements are what the TMA unit takes, and it fills what lies beyond with zeros.
//!
//! To e4m3, which has fewer bits than a code and a scale together, the value over a scale is rounded: what the e4m3 GEMM
//! multiplies, weights too.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{FloatType, ScaleLayout};

use super::rowwise::{Config, Loaded, Sink, Source};
use crate::Error;
use crate::error::refused;
use crate::limits::{block_rule, fits};
use crate::plain::order::SPAN;

/// An nvfp4 matrix in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Codes {
    /// Rows.
    pub m: usize,
    /// Elements per row, a multiple of the block length.
    pub k: usize,
    /// Two per byte, the even element in the low nibble.
    pub codes: DevicePtr,
    /// Bytes from row to row of codes, a multiple of 4; `k / 2` if dense.
    pub pitch: usize,
    /// Scale bytes in the kernel's layout.
    pub scales: DevicePtr,
}

impl Codes {
    pub(super) fn check(&self, tensor: &str) -> Result<(), Error> {
        block_rule(tensor, self.m, self.k)?;
        fits(tensor, "row stride of codes in bytes", self.pitch, self.k / 2, 4)?;
        fits(tensor, "address of codes", self.codes.0 as usize, 1, 4)
    }
}

/// The kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct Expand {
    kernel: Loaded,
    /// What multiplies e4m3 values.
    scale: f32,
}

impl Expand {
    /// Configurations: every scale layout, to f16, to bf16, to f16 in blocks and in the order of [`plain`](crate::plain), and
    /// to e4m3.
    pub fn configs() -> Vec<Config> {
        let [f16, bf16] = [FloatType::F16, FloatType::Bf16].map(Sink::Float);
        let sinks = [f16, bf16, Sink::Blocks, Sink::Permuted, Sink::E4m3];
        let layouts = ScaleLayout::ALL.into_iter();
        layouts.flat_map(|layout| sinks.map(|sink| Self::config(layout, sink))).collect()
    }

    fn config(layout: ScaleLayout, sink: Sink) -> Config {
        Config { source: Source::Codes(layout), sink, dynamic: false }
    }

    /// Loads the kernel for scales in this layout and values of this type.
    pub fn new(device: &dyn Device, layout: ScaleLayout, ty: FloatType) -> Result<Self, Error> {
        Self::load(device, Self::config(layout, Sink::Float(ty)), 1.0)
    }

    /// Loads the kernel for scales in this layout and f16 in [blocks of 64 columns](crate::parts::operand::Operand::blocked).
    pub fn blocks(device: &dyn Device, layout: ScaleLayout) -> Result<Self, Error> {
        Self::load(device, Self::config(layout, Sink::Blocks), 1.0)
    }

    /// Loads the kernel for scales in this layout and f16 in the order that [`plain`](crate::plain) multiplies: rows
    /// are padded by zeros to [`SPAN`] elements.
    pub fn permuted(device: &dyn Device, layout: ScaleLayout) -> Result<Self, Error> {
        Self::load(device, Self::config(layout, Sink::Permuted), 1.0)
    }

    /// Loads the kernel for scales in this layout and e4m3 of `code · scale` over `over`, beyond 448 saturated.
    ///
    /// # Errors
    /// If `over` is not positive and finite, its reciprocal too, or the device refuses the text.
    pub fn e4m3(device: &dyn Device, layout: ScaleLayout, over: f32) -> Result<Self, Error> {
        if !(over > 0.0 && over.is_finite() && (1.0 / over).is_finite()) {
            return refused("scale of e4m3", over.to_string(), "positive with a finite reciprocal");
        }
        Self::load(device, Self::config(layout, Sink::E4m3), over)
    }

    fn load(device: &dyn Device, config: Config, scale: f32) -> Result<Self, Error> {
        Ok(Self { kernel: Loaded::new(device, config, None)?, scale })
    }

    /// The launch that writes `[m, k]` values to `out`, rows, or blocks of columns, `pitch` bytes apart (a multiple of 16).
    pub fn spec(&self, a: &Codes, out: DevicePtr, pitch: usize) -> Result<LaunchSpec, Error> {
        a.check("A")?;
        if self.kernel.config.sink == Sink::Blocks && !a.k.is_multiple_of(64) {
            return refused("A", format!("K = {}", a.k), "a multiple of 64, for blocks of columns");
        }
        fits("A", "address of the expanded values", out.0 as usize, 1, 16)?;
        let least = match self.kernel.config.sink {
            Sink::Permuted => a.k.next_multiple_of(SPAN) * 2,
            Sink::Blocks => a.m * 64 * 2,
            Sink::Float(ty) => a.k * ty.bytes(),
            Sink::E4m3 | Sink::Image | Sink::Codes(_) | Sink::Grouped => a.k,
        };
        fits("A", "row stride of the expanded values in bytes", pitch, least, 16)?;
        let args = Args::new()
            .u32(a.m as u32)
            .u32(a.k as u32)
            .ptr(a.codes)
            .u32(a.pitch as u32)
            .ptr(a.scales)
            .ptr(out)
            .u32(pitch as u32);
        let args = if self.kernel.config.sink == Sink::E4m3 { args.f32(1.0 / self.scale) } else { args };
        Ok(self.kernel.launch((a.m, a.k), args))
    }
}
