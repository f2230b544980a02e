//! The host side of the e4m3 kernel.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_formats::FloatType;
use dualgemm_gemm::Program;
use dualgemm_ptx::layout::{TensorDataType, TensorMap, TensorSwizzle};

use super::config::{Config, STAGE_K};
use super::fused;
use crate::Error;
use crate::generic::finish::{Loaded, Output};
use crate::generic::quantize::{block_rule, fits};

/// Operands in device memory, e4m3 matrices with dense rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedArgs {
    /// Tokens, features, K (a multiple of 16).
    pub size: (usize, usize, usize),
    /// A, `[m, k]` bytes.
    pub a: DevicePtr,
    /// m f32 that multiply the rows of A, or null.
    pub row_scales: DevicePtr,
    /// Gate weights, `[n, k]` bytes.
    pub gate: DevicePtr,
    /// Up weights, `[n, k]` bytes.
    pub up: DevicePtr,
    /// C; alpha holds the tensor scales.
    pub output: Output,
}

/// The kernel, loaded on a device for one activation.
#[derive(Debug, Clone, Copy)]
pub struct Fused {
    loaded: Loaded,
    config: Config,
}

impl Fused {
    /// Generates and loads the kernel with C of type `out`; `aligned` promises that rows of C start at multiples of 16
    /// bytes.
    pub fn new(
        device: &dyn Device,
        config: Config,
        out: FloatType,
        program: &Program,
        aligned: bool,
    ) -> Result<Self, Error> {
        let module = fused::generate(&config, out, program, aligned)?;
        let memory = (fused::ENTRY, config.layout(out)?.smem.bytes());
        Ok(Self { loaded: Loaded::new(device, &module, memory, (out, aligned))?, config })
    }

    /// The launch on these operands; it can be repeated and recorded.
    pub fn spec(&self, device: &dyn Device, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        block_rule("A", m, k)?;
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
            list = list.tensor_map(device.tensor_map(&map)?);
        }
        fits("A", "address of row scales", args.row_scales.0 as usize, 0, 4)?;
        let list = list.u32(m as u32).u32(n as u32).u32(k.div_ceil(STAGE_K as usize) as u32);
        let shape = self.config.shape();
        self.loaded.spec((shape.grid(m, n), shape.threads()), list.ptr(args.row_scales), &args.output)
    }
}
