//! The host side of the fused sm_100 kernel.

use dualgemm_device::LaunchSpec;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;

use super::config::Config;
use super::fused;
use crate::Error;
use crate::fused::{Fused, FusedArgs, Tile};
use crate::limits::{Rules, Valid};
use crate::parts::format::{Format, Formats};
use crate::parts::operand::gate_features;
use crate::parts::variant::Variant;

impl Tile for Config {
    fn rules(&self) -> Rules {
        Rules("sm100a fused")
    }

    fn generate(&self, variant: &Variant, target: Target) -> Result<Module, Error> {
        fused::generate(self, variant, target)
    }

    fn shared(&self, _: &Variant) -> Result<u32, Error> {
        Ok(self.layout()?.smem.bytes())
    }

    fn formats(&self, _: &Variant) -> (Format, Option<Format>) {
        (self.formats.a(), Some(Format::Block(self.formats.weights())))
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let ((m, n, k), rules) = (args.size, self.rules());
        let stages = (k as u32).div_ceil(self.stage_k());
        let (splitters, scaled) = match self.formats {
            Formats::Scaled(_) => ("CTAs that split K, each at least 256 of it", true),
            Formats::Wide(_) => ("CTAs that split K, each at least 128 of it", false),
        };
        rules.check(splitters, self.split_k, Valid::range(1, stages))?;
        // The scales of a tile start on a multiple of 32 rows of an atom.
        let tokens = self.tile_tokens();
        if scaled && !tokens.is_multiple_of(32) {
            if args.groups.is_some() {
                return rules.refuse("groups take tiles of 32 or 64 tokens");
            }
            rules.check("tokens of a problem of one tile", m as u64, Valid::range(1, tokens))?;
        }
        let cluster = self.cluster();
        let tiles = args.tiles(tokens, self.feature_tiles(gate_features(&kernel.variant, n)));
        let resident = (kernel.device.info().sm_count / cluster).max(1) as usize;
        let clusters = if self.exchanges() { tiles } else { tiles.min(resident) };
        args.launch_clusters(kernel, self.parts(), (clusters, cluster, self.threads()), rules)
    }
}
