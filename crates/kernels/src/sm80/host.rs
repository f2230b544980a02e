//! The host side of the fused kernel for sm_80.

use dualgemm_device::{Args, LaunchSpec};
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;

use super::config::Config;
use super::fused;
use crate::Error;
use crate::fused::{Fused, FusedArgs, Tile};
use crate::limits::{GRID_X, GRID_YZ, Rules};
use crate::parts::format::Format;
use crate::parts::groups::most_tiles;
use crate::parts::variant::Variant;

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm80 fused")
    }

    fn generate(&self, variant: &Variant, target: Target) -> Result<Module, Error> {
        fused::generate(self, variant, target)
    }

    fn shared(&self, variant: &Variant) -> Result<u32, Error> {
        Ok(self.layout(variant)?.smem.bytes())
    }

    fn formats(&self, variant: &Variant) -> (Format, Option<Format>) {
        (Format::Half(variant.compute), None)
    }

    /// Token tiles run fastest, so that CTAs that run together read the same weights.
    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        let list = args.group_rows(args.pack(args.a_rows(Args::new())))?;
        let list = args.outputs(args.sizes(list, k), &kernel.variant)?;
        let features = self.features(&kernel.variant) as usize;
        let (tokens, features) =
            (most_tiles(m, self.tokens, args.count()) as u32, n.div_ceil(features) as u32);
        self.rules().check("tiles of tokens", tokens, GRID_X)?;
        self.rules().check("tiles of features", features, GRID_YZ)?;
        Ok(kernel.launch([tokens, features, 1], self.threads()).args(list))
    }
}
