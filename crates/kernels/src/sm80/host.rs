//! The host side of the fused kernel for sm_80.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_gemm::Program;

use super::config::Config;
use super::fused::{self, Variant};
use crate::Error;
use crate::generic::finish::{Loaded, Output};
use crate::generic::quantize::{block_rule, fits};
use crate::generic::target_for;

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

/// The kernel, loaded on a device for one activation.
#[derive(Debug, Clone, Copy)]
pub struct Fused {
    loaded: Loaded,
    config: Config,
}

impl Fused {
    /// Generates and loads the kernel. [`Variant::aligned`] must hold for every N it is launched with.
    pub fn new(
        device: &dyn Device,
        config: Config,
        variant: &Variant,
        program: &Program,
    ) -> Result<Self, Error> {
        let module = fused::generate(&config, variant, program, target_for(device.info().arch))?;
        let memory = (fused::ENTRY, config.layout(variant.out)?.smem.bytes());
        Ok(Self { loaded: Loaded::new(device, &module, memory, (variant.out, variant.aligned))?, config })
    }

    /// The launch on these operands; it can be repeated and recorded.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        block_rule("A", m, k)?;
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
        self.loaded.spec((self.config.grid(m, n), self.config.threads()), list, &args.output)
    }
}
