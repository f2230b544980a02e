//! The host side of the e4m3 kernel.

use dualgemm_device::{Args, LaunchSpec};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;
use dualgemm_ptx::layout::{TensorDataType, TensorMap, TensorSwizzle};

use super::config::{Config, STAGE_K};
use super::fused;
use crate::Error;
use crate::fused::{Fused, FusedArgs, Tile, Weights};
use crate::limits::Rules;
use crate::parts::format::Format;
use crate::parts::variant::Variant;

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm90a fp8")
    }

    fn generate(&self, variant: &Variant, _: Target) -> Result<Module, Error> {
        fused::generate(self, variant)
    }

    fn shared(&self, variant: &Variant) -> Result<u32, Error> {
        Ok(self.layout(variant.out)?.smem.bytes())
    }

    fn formats(&self, _: &Variant) -> (Format, Option<Format>) {
        (Format::E4m3, Some(Format::E4m3))
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        let mut list = Args::new();
        if let Weights::Rows([gate, up]) = args.weights {
            let (tokens, features) = (self.tokens, self.features());
            for (operand, tile) in [(args.a, tokens), (gate, features), (up, features)] {
                let (size, pitch) = ((operand.rows as u64, k as u64), operand.pitch as u64);
                let (ty, tile, swizzle) = (TensorDataType::U8, (tile, STAGE_K), TensorSwizzle::B128);
                let map = TensorMap::matrix(ty, operand.codes.0, size, pitch, tile, swizzle);
                list = list.tensor_map(kernel.device.tensor_map(&map)?);
            }
        }
        let list = args.outputs(args.sizes(list, k.div_ceil(STAGE_K as usize)), &kernel.variant)?;
        let shape = self.shape();
        Ok(kernel.launch(shape.grid(m, n), shape.threads()).args(list))
    }
}
