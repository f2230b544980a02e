//! The host side of the kernel without prepack.

use dualgemm_device::{Args, LaunchSpec};
use dualgemm_formats::BlockFormat;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::builder::HalfFormat;
use dualgemm_ptx::layout::{TensorDataType, TensorMap, TensorSwizzle};

use super::config::{Config, ROW_BYTES};
use super::fused;
use super::order::SPAN;
use crate::Error;
use crate::error::refused;
use crate::fused::{Fused, FusedArgs, Tile, Weights};
use crate::limits::{Rules, check_address, fits};
use crate::parts::format::Format;
use crate::parts::variant::Variant;

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm90a plain")
    }

    fn generate(&self, variant: &Variant, _: Target) -> Result<Module, Error> {
        fused::generate(self, variant)
    }

    fn shared(&self, variant: &Variant) -> Result<u32, Error> {
        Ok(self.layout(variant.out)?.smem.bytes())
    }

    /// A is padded by zeros to a multiple of 128 of K and in the order of [`order`](super::order), what a kernel with the sink
    /// `Permuted` writes; alpha is the tensor scale of each half times [`WEIGHT_FACTOR`](crate::sm90a::decode::WEIGHT_FACTOR).
    fn formats(&self, _: &Variant) -> (Format, Option<Format>) {
        (Format::Half(HalfFormat::F16), Some(Format::Block(BlockFormat::Nvfp4)))
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        if !k.is_multiple_of(32) {
            let expected = "K a multiple of 32, which rows of codes need for the TMA unit";
            return refused("A", format!("[{m}, {k}]"), expected);
        }
        let padded = k.next_multiple_of(SPAN);
        fits("A", "row stride in bytes", args.a.pitch, 2 * padded, 16)?;
        let matrix = |ty, address, (rows, columns): (usize, usize), pitch, tile, swizzle| {
            let size = (rows as u64, columns as u64);
            kernel.device.tensor_map(&TensorMap::matrix(ty, address, size, pitch as u64, tile, swizzle))
        };
        let (a, tile) = (args.a, (self.tokens, 64));
        let map = matrix(TensorDataType::F16, a.codes.0, (m, padded), a.pitch, tile, TensorSwizzle::B128)?;
        let (mut list, mut scales) = (Args::new().tensor_map(map), Vec::new());
        if let Weights::Rows(halves) = args.weights {
            for (tensor, half) in ["the scales of gate", "the scales of up"].into_iter().zip(halves) {
                check_address(tensor, half.scales, 2)?;
                let (codes, tile) = (half.codes.0, (self.features(), ROW_BYTES));
                let swizzle = TensorSwizzle::None;
                let map = matrix(TensorDataType::U8, codes, (n, k / 2), half.pitch, tile, swizzle)?;
                list = list.tensor_map(map);
                scales.push(half.scales);
            }
        }
        let list = args.sizes(scales.into_iter().fold(list, Args::ptr), k / 16);
        let list = args.outputs(list, &kernel.variant)?;
        let shape = self.shape();
        Ok(kernel.launch(shape.grid(m, n), shape.threads()).args(list))
    }
}
