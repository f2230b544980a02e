//! The host side of the e4m3 kernel.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_ptx::layout::{TensorDataType, TensorMap, TensorSwizzle};

use super::config::{Config, STAGE_K};
use super::fused;
use crate::Error;
use crate::generic::quantize::{block_rule, fits};
use crate::parts::loaded::Loaded;
use crate::parts::rows::{Output, Variant};

/// Operands in device memory, e4m3 matrices with dense rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedArgs {
    /// Tokens, features, K (a multiple of 16).
    pub size: (usize, usize, usize),
    /// A, `[m, k]` bytes.
    pub a: DevicePtr,
    /// Gate weights, `[n, k]` bytes.
    pub gate: DevicePtr,
    /// Up weights, `[n, k]` bytes.
    pub up: DevicePtr,
    /// C; alpha holds the tensor scales.
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
        let module = fused::generate(&config, variant)?;
        let memory = (fused::ENTRY, config.layout(variant.out)?.smem.bytes());
        Ok(Self { loaded: Loaded::new(device, &module, memory, variant)?, config })
    }

    /// The launch on these operands; it can be repeated and recorded.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        block_rule("A", m, k)?;
        self.loaded.rows.check(n)?;
        let mut list = Args::new();
        for (tensor, ptr, rows, tile) in [
            ("A", args.a, m, self.config.tokens),
            ("gate", args.gate, n, self.config.features()),
            ("up", args.up, n, self.config.features()),
        ] {
            fits(tensor, "address", ptr.0 as usize, 1, 16)?;
            let map = TensorMap::matrix(
                TensorDataType::U8,
                ptr.0,
                (rows as u64, k as u64),
                k as u64,
                (tile, STAGE_K),
                TensorSwizzle::B128,
            );
            list = list.tensor_map(self.loaded.device.tensor_map(&map)?);
        }
        let list = list.u32(m as u32).u32(n as u32).u32(k.div_ceil(STAGE_K as usize) as u32);
        let list = args.output.args(list, &self.loaded.rows, None)?;
        let shape = self.config.shape();
        Ok(self.loaded.launch(shape.grid(m, n), shape.threads()).args(list))
    }
}
