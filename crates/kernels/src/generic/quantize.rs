//! Floats to nvfp4 by Transformer Engine's rule, bit for bit as `dualgemm_formats::Producer::Te` and the CPU kernels do
//! it, or straight to the f16 or bf16 image of those values, which the fused Hopper kernel multiplies: no codes in
//! between.
//!
//! The tensor scale is the caller's (static), or comes from the largest magnitude: [`Amax`] first,
//! then this kernel, which takes the maximum of its parts and also writes the scale, a multiplier, as one f32.
//!
//! To e4m3 there is one scale for the tensor and none for blocks. A dynamic one maps the largest magnitude to 448; what is
//! written is nvfp4's, by which e4m3 has to be multiplied [`E4M3_FACTOR`] times.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{FloatType, GlobalScale, GlobalScaleSource, ScaleLayout};

use super::amax::Amax;
use super::rowwise::{Config, Loaded, Sink, Source};
use crate::Error;
use crate::error::refused;
use crate::limits::{block_rule, fits};
use crate::parts::groups::Groups;
use crate::plain::order::SPAN;

/// Largest nvfp4 magnitude over largest e4m3 magnitude: what e4m3 under a dynamic scale, and e4m3 of nvfp4 that fills
/// e4m3's range, have to be multiplied by besides the tensor scale.
pub const E4M3_FACTOR: f32 = 6.0;

/// A float matrix in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Floats {
    /// Rows.
    pub m: usize,
    /// Elements per row, a multiple of 16.
    pub k: usize,
    /// The first element, at a multiple of 16 bytes.
    pub values: DevicePtr,
    /// Bytes from row to row, a multiple of 16.
    pub pitch: usize,
}

impl Floats {
    pub(super) fn check(&self, tensor: &str, ty: FloatType) -> Result<(), Error> {
        block_rule(tensor, self.m, self.k)?;
        fits(tensor, "address", self.values.0 as usize, 1, 16)?;
        fits(tensor, "row stride in bytes", self.pitch, self.k * ty.bytes(), 16)
    }
}

/// Where quantized values go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Out {
    /// Dense codes, `[m, k / 2]`, and scales in the kernel's layout, padding included (it is zeroed).
    Codes {
        /// Two per byte, the even element in the low nibble; the address is a multiple of 4.
        codes: DevicePtr,
        /// `ScaleLayout::len(m, k / 16)` bytes.
        scales: DevicePtr,
    },
    /// The same for rows in groups, scales in 128x4 atoms, each group's by themselves.
    Grouped {
        /// As of [`Out::Codes`].
        codes: DevicePtr,
        /// [`ScaleAtoms::grouped_bytes`](super::atoms::ScaleAtoms::grouped_bytes) bytes; those of rows that no
        /// group has are not written.
        scales: DevicePtr,
        /// The groups.
        groups: Groups,
    },
    /// `code · scale` as floats.
    Image {
        /// The first value, at a multiple of 16 bytes.
        values: DevicePtr,
        /// Bytes from row to row, a multiple of 16.
        pitch: usize,
    },
}

/// The tensor scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// Known beforehand.
    Static(GlobalScale),
    /// From the largest magnitude.
    Dynamic {
        /// What [`Amax`] wrote.
        parts: DevicePtr,
        /// One f32: where the tensor scale (a multiplier) is written.
        scale: DevicePtr,
    },
}

/// `divisor / 6` and `1 / divisor` as Transformer Engine's rule rounds them.
pub(super) fn static_factors(scale: GlobalScale) -> [f32; 2] {
    let divisor = match scale.source() {
        GlobalScaleSource::Divisor(divisor) => divisor,
        GlobalScaleSource::Multiplier | GlobalScaleSource::Absent => 1.0 / scale.value(),
    };
    [divisor * (1.0 / 6.0), 1.0 / divisor]
}

/// The kernel, loaded on a device.
#[derive(Debug, Clone, Copy)]
pub struct Quantize {
    kernel: Loaded,
    ty: FloatType,
}

impl Quantize {
    /// Configurations: from every float type to codes with linear scales, to those of groups, to their image, to e4m3 and to the order of
    /// [`plain`](crate::plain); from f16 to the other scale layouts too; with a static and with a dynamic scale but for the
    /// order, which has none.
    pub fn configs() -> Vec<Config> {
        let scaled = FloatType::ALL.into_iter().flat_map(|ty| {
            let layouts = ScaleLayout::ALL.into_iter();
            let layouts =
                layouts.filter(move |&layout| ty == FloatType::F16 || layout == ScaleLayout::Linear);
            let sinks = layouts.map(Sink::Codes).chain([Sink::Grouped, Sink::Image, Sink::E4m3]);
            sinks.flat_map(move |sink| [false, true].map(|dynamic| Self::config(ty, sink, dynamic)))
        });
        let permuted = FloatType::ALL.map(|ty| Self::config(ty, Sink::Permuted, false));
        scaled.chain(permuted).collect()
    }

    fn config(ty: FloatType, sink: Sink, dynamic: bool) -> Config {
        Config { source: Source::Float(ty), sink, dynamic }
    }

    /// Loads the kernel for floats of type `ty`, a sink ([`Sink::Codes`], [`Sink::Grouped`], [`Sink::Image`] or
    /// [`Sink::E4m3`]; to [`Sink::Permuted`] it converts) and a static or a dynamic scale.
    pub fn new(device: &dyn Device, ty: FloatType, sink: Sink, dynamic: bool) -> Result<Self, Error> {
        Ok(Self { kernel: Loaded::new(device, Self::config(ty, sink, dynamic), None)?, ty })
    }

    /// The launch on these operands.
    ///
    /// # Errors
    /// If `out` or `scale` is not what the kernel was made for, or a stride or an address breaks a rule.
    pub fn spec(&self, a: &Floats, out: &Out, scale: &Scale) -> Result<LaunchSpec, Error> {
        a.check("A", self.ty)?;
        let args = Args::new().u32(a.m as u32).u32(a.k as u32).ptr(a.values).u32(a.pitch as u32);
        let args = out_args(&self.kernel.config, a.m, a.k, out, scale, args)?;
        Ok(self.kernel.launch((a.m, a.k), args))
    }
}

/// The sink's arguments for an `[m, n]` matrix.
pub(super) fn out_args(
    config: &Config,
    m: usize,
    n: usize,
    out: &Out,
    scale: &Scale,
    args: Args,
) -> Result<Args, Error> {
    let wrong = |found: &str| refused("output", found, format!("as the kernel {}", config.name()));
    let args = match (config.sink, *out) {
        (Sink::Codes(_), Out::Codes { codes, scales }) => {
            block_rule("output", m, n)?;
            fits("output", "address of codes", codes.0 as usize, 1, 4)?;
            args.ptr(codes).u32(n as u32 / 2).ptr(scales)
        }
        (Sink::Grouped, Out::Grouped { codes, scales, groups }) => {
            block_rule("output", m, n)?;
            fits("output", "address of codes", codes.0 as usize, 1, 4)?;
            groups.args(args.ptr(codes).u32(n as u32 / 2).ptr(scales))?
        }
        (sink, Out::Image { values, pitch }) if !matches!(sink, Sink::Codes(_) | Sink::Grouped) => {
            let (least, step) = match sink {
                Sink::Float(ty) => (n * ty.bytes(), 16),
                Sink::Permuted => (n.next_multiple_of(SPAN) * 2, 16),
                Sink::E4m3 => (n, 8),
                _ => (n * 2, 16),
            };
            fits("output", "address", values.0 as usize, 1, step)?;
            fits("output", "row stride in bytes", pitch, least, step)?;
            args.ptr(values).u32(pitch as u32)
        }
        (_, Out::Codes { .. } | Out::Grouped { .. }) => return wrong("codes"),
        (_, Out::Image { .. }) => return wrong("floats"),
    };
    Ok(match (config.sink, scale, config.dynamic) {
        (Sink::Float(_) | Sink::Permuted, _, _) => args,
        (Sink::E4m3, Scale::Static(scale), false) => args.f32(1.0 / scale.value()),
        (_, Scale::Static(scale), false) => {
            let [sixth, inverse] = static_factors(*scale);
            args.f32(sixth).f32(inverse)
        }
        (_, &Scale::Dynamic { parts, scale }, true) => args.ptr(parts).u32(Amax::parts(m, n)).ptr(scale),
        (_, Scale::Static(_), true) => return wrong("with a static scale"),
        (_, Scale::Dynamic { .. }, false) => return wrong("with a dynamic scale"),
    })
}
