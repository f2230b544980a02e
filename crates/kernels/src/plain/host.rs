//! The host side of the kernel without prepack.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};
use dualgemm_gemm::Error as OperandError;
use dualgemm_ptx::layout::{TensorDataType, TensorMap, TensorSwizzle};

use super::config::{Config, ROW_BYTES};
use super::fused;
use super::order::SPAN;
use crate::Error;
use crate::generic::expand::Codes;
use crate::generic::quantize::{block_rule, fits};
use crate::parts::loaded::Loaded;
use crate::parts::rows::{Output, Variant};

/// Operands in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedArgs {
    /// Tokens, features, K (a multiple of 32).
    pub size: (usize, usize, usize),
    /// A in f16, `[m, k]` with K padded by zeros to a multiple of 128 and in the order of [`order`](super::order): what a
    /// kernel with the sink `Permuted` writes.
    pub a: DevicePtr,
    /// Bytes from row to row of A, a multiple of 16.
    pub a_pitch: usize,
    /// Gate and up weights as a checkpoint has them, rows of codes a multiple of 16 bytes apart.
    pub weights: [Codes; 2],
    /// C; alpha is the tensor scale of each half times
    /// [`WEIGHT_FACTOR`](crate::sm90a::decode::WEIGHT_FACTOR).
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
        if !k.is_multiple_of(32) {
            let (found, expected) = (
                format!("[{m}, {k}]"),
                "K a multiple of 32, which rows of codes need for the TMA unit".into(),
            );
            return Err(OperandError::Operand { tensor: "A".into(), found, expected }.into());
        }
        let padded = k.next_multiple_of(SPAN);
        fits("A", "address", args.a.0 as usize, 1, 16)?;
        fits("A", "bytes from row to row", args.a_pitch, 2 * padded, 16)?;
        let map = TensorMap::matrix(
            TensorDataType::F16,
            args.a.0,
            (m as u64, padded as u64),
            args.a_pitch as u64,
            (self.config.tokens, 64),
            TensorSwizzle::B128,
        );
        let mut list = Args::new().tensor_map(self.loaded.device.tensor_map(&map)?);
        for (tensor, half) in ["gate", "up"].into_iter().zip(&args.weights) {
            if (half.m, half.k) != (n, k) {
                let (found, expected) = (format!("[{}, {}]", half.m, half.k), format!("[{n}, {k}]"));
                return Err(OperandError::Operand { tensor: tensor.into(), found, expected }.into());
            }
            fits(tensor, "address of codes", half.codes.0 as usize, 1, 16)?;
            fits(tensor, "bytes from row to row of codes", half.pitch, k / 2, 16)?;
            fits(tensor, "address of scales", half.scales.0 as usize, 1, 2)?;
            let map = TensorMap::matrix(
                TensorDataType::U8,
                half.codes.0,
                (n as u64, k as u64 / 2),
                half.pitch as u64,
                (self.config.features(), ROW_BYTES),
                TensorSwizzle::None,
            );
            list = list.tensor_map(self.loaded.device.tensor_map(&map)?);
        }
        let [gate, up] = args.weights;
        let list = list.ptr(gate.scales).ptr(up.scales);
        let list = list.u32(m as u32).u32(n as u32).u32(k as u32 / 16);
        let list = args.output.args(list, &self.loaded.rows, None)?;
        let shape = self.config.shape();
        Ok(self.loaded.launch(shape.grid(m, n), shape.threads()).args(list))
    }
}
