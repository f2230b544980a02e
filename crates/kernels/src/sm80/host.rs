//! The host side of the fused kernel for sm_80.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};

use super::config::Config;
use super::fused::{self, Variant};
use crate::Error;
use crate::generic::quantize::{block_rule, fits};
use crate::generic::target_for;
use crate::parts::loaded::Loaded;
use crate::parts::rows::Output;

/// Operands in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedArgs {
    /// Tokens, features, K (a multiple of 16).
    pub size: (usize, usize, usize),
    /// A, `[m, k]` in the kernel's 16-bit type.
    pub a: DevicePtr,
    /// Bytes from row to row of A, a multiple of 16.
    pub a_pitch: usize,
    /// The weight pack, [`sm90a::pack`](crate::sm90a::pack).
    pub weights: DevicePtr,
    /// C.
    pub output: Output,
}

/// The kernel, loaded on a device for one variant.
#[derive(Debug, Clone)]
pub struct Fused<'d> {
    loaded: Loaded<'d>,
    config: Config,
}

impl<'d> Fused<'d> {
    /// Generates and loads the kernel.
    pub fn new(device: &'d dyn Device, config: Config, variant: &Variant) -> Result<Self, Error> {
        let module = fused::generate(&config, variant, target_for(device.info().arch))?;
        let memory = (fused::ENTRY, config.layout(variant.rows.out)?.smem.bytes());
        Ok(Self { loaded: Loaded::new(device, &module, memory, &variant.rows)?, config })
    }

    /// The launch on these operands; it can be repeated and recorded.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        block_rule("A", m, k)?;
        self.loaded.rows.check(n)?;
        fits("A", "address", args.a.0 as usize, 1, 16)?;
        fits("A", "bytes from row to row", args.a_pitch, 2 * k, 16)?;
        fits("weights", "address", args.weights.0 as usize, 1, 16)?;
        let list = Args::new()
            .ptr(args.a)
            .u32(args.a_pitch as u32)
            .ptr(args.weights)
            .u32(m as u32)
            .u32(n as u32)
            .u32(k as u32);
        let list = args.output.args(list, &self.loaded.rows, None)?;
        Ok(self.loaded.launch(self.config.grid(m, n), self.config.threads()).args(list))
    }
}
