//! The host side of the fused sm_120 kernel.

use dualgemm_device::LaunchSpec;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;

use super::config::Config;
use super::fused;
use crate::Error;
use crate::fused::{Fused, FusedArgs, Tile};
use crate::limits::Rules;
use crate::parts::format::Format;
use crate::parts::operand::gate_features;
use crate::parts::variant::Variant;

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm120a fused")
    }

    fn generate(&self, variant: &Variant, target: Target) -> Result<Module, Error> {
        fused::generate(self, variant, target)
    }

    fn shared(&self, _: &Variant) -> Result<u32, Error> {
        Ok(self.layout()?.smem.bytes())
    }

    fn formats(&self, _: &Variant) -> (Format, Option<Format>) {
        (Format::Block(self.format), Some(Format::Block(self.format)))
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let features = gate_features(&kernel.variant, args.size.1).div_ceil(self.features as usize);
        let size = (args.tiles(self.tokens, features), 1, self.threads());
        args.launch_clusters(kernel, self.parts(), size, self.rules())
    }
}
