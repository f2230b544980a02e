//! The host side of the fused sm_100 kernel, the same on a simulated and on a real device.
//!
//! Flow: matrices → [`Operand`](crate::parts::operand::Operand)s on the device; [`Config`] → [`Fused`] → launch →
//! C.

use dualgemm_device::{Device, LaunchSpec};
use dualgemm_ptx::Target;

use super::config::{Config, KERNEL};
use super::fused;
use crate::Error;
use crate::limits::{Rules, Valid};
use crate::parts::format::Formats;
use crate::parts::loaded::Loaded;
use crate::parts::operand::FusedArgs;
use crate::parts::rows::Variant;

/// The fused kernel, loaded on a device for one N.
#[derive(Clone)]
pub struct Fused<'d> {
    loaded: Loaded<'d>,
    config: Config,
    n: usize,
}

impl<'d> Fused<'d> {
    /// Generates and loads the kernel for `n` features.
    pub fn new(device: &'d dyn Device, config: Config, variant: &Variant, n: usize) -> Result<Self, Error> {
        let target = match device.info().arch.minor {
            3 => Target::Sm103a,
            _ => Target::Sm100a,
        };
        let memory = (fused::ENTRY, config.layout()?.smem.bytes());
        let variant = variant.clone().for_features(n);
        variant.check(n)?;
        let module = fused::generate(&config, &variant, target)?;
        Ok(Self { loaded: Loaded::new(device, &module, memory, &variant)?, config, n })
    }

    /// The launch on these operands; it can be repeated and recorded.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        args.check(self.n, self.config.formats, &self.loaded.rows)?;
        let (m, k) = args.shape();
        let rules = Rules(KERNEL);
        let stages = (k as u32).div_ceil(self.config.stage_k());
        let splitters = match self.config.formats {
            Formats::Scaled(_) => "CTAs that split K, each at least 256 of it",
            Formats::Wide(_) => "CTAs that split K, each at least 128 of it",
        };
        rules.check(splitters, self.config.split_k, Valid::range(1, stages))?;
        // The scales of a tile start on a multiple of 32 rows of an atom.
        let (tokens, scaled) = (self.config.tile_tokens(), matches!(self.config.formats, Formats::Scaled(_)));
        if scaled && !tokens.is_multiple_of(32) {
            if args.groups.is_some() {
                return Err(Error::Combination {
                    kernel: KERNEL,
                    rule: "groups take tiles of 32 or 64 tokens",
                });
            }
            rules.check("tokens of a problem of one tile", m as u64, Valid::range(1, tokens))?;
        }
        let cluster = self.config.cluster();
        let tiles = args.tiles(tokens, self.config.feature_tiles(self.loaded.rows.gate_features(self.n)));
        let resident = (self.loaded.device.info().sm_count / cluster).max(1) as usize;
        let clusters = if self.config.exchanges() { tiles } else { tiles.min(resident) };
        let size = (clusters, cluster, self.config.threads());
        self.loaded.launch_clusters((args, self.n), self.config.parts(), size, rules)
    }
}
