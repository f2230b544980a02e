//! The host side of the fused sm_120 kernel, the same on a simulated and on a real device.
//!
//! Flow: matrices → [`Operand`](crate::parts::operand::Operand)s on the device; [`Config`] → [`Fused`] → launch → C.

use dualgemm_device::{Device, LaunchSpec};
use dualgemm_ptx::Target;

use super::config::Config;
use super::fused;
use crate::Error;
use crate::limits::Rules;
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
            1 => Target::Sm121a,
            _ => Target::Sm120a,
        };
        let memory = (fused::ENTRY, config.layout()?.smem.bytes());
        let variant = variant.clone().for_features(n);
        variant.check(n)?;
        let module = fused::generate(&config, &variant, target)?;
        Ok(Self { loaded: Loaded::new(device, &module, memory, &variant)?, config, n })
    }

    /// The launch on these operands; it can be repeated and recorded.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let Config { format, tokens, features, .. } = self.config;
        args.check(self.n, Formats::Scaled(format), &self.loaded.rows)?;
        let tiles = args.tiles(tokens, self.loaded.rows.gate_features(self.n).div_ceil(features as usize));
        let size = (tiles, 1, self.config.threads());
        self.loaded.launch_clusters((args, self.n), self.config.parts(), size, Rules("sm120a fused"))
    }
}
