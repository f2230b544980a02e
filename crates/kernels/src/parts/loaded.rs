//! A fused kernel of Blackwell, loaded on a device for one N: what the hosts of both architectures do alike.

use dualgemm_device::{Device, FunctionId, LaunchSpec};
use dualgemm_ptx::ast::Module;

use super::operand::{Boxed, FusedArgs};
use super::rows::Variant;
use crate::Error;
use crate::limits::{GRID_X, Rules};

/// The kernel and what a launch of it needs to know.
#[derive(Clone)]
pub(crate) struct Loaded<'d> {
    pub device: &'d dyn Device,
    pub variant: Variant,
    pub n: usize,
    function: FunctionId,
    shared: u32,
}

impl<'d> Loaded<'d> {
    /// Generates the kernel called `entry` for `n` features and loads it; it takes `shared` bytes of shared memory.
    pub fn new(
        device: &'d dyn Device,
        variant: &Variant,
        n: usize,
        (entry, shared): (&str, u32),
        generate: impl FnOnce(&Variant) -> Result<Module, Error>,
    ) -> Result<Self, Error> {
        let variant = variant.clone().for_features(n);
        variant.check(n)?;
        let ptx = generate(&variant)?.to_string();
        let function = device.function(device.load(&ptx)?, entry)?;
        Ok(Self { device, variant, n, function, shared })
    }

    /// Tiles of `tokens` at most, with so many along the features: each group's last one may be a part of one.
    pub fn tiles(&self, args: &FusedArgs, tokens: u32, feature_tiles: usize) -> usize {
        let (m, _) = args.shape();
        (m / tokens as usize + args.group_count()) * feature_tiles
    }

    /// A launch of `clusters` clusters of `cluster` CTAs. Operands were checked.
    pub fn launch(
        &self,
        args: &FusedArgs,
        parts: [Boxed; 3],
        (clusters, cluster, threads): (usize, u32, u32),
        rules: Rules,
    ) -> Result<LaunchSpec, Error> {
        let grid = clusters as u64 * u64::from(cluster);
        rules.check("CTAs", grid, GRID_X)?;
        Ok(LaunchSpec::new(self.function, [grid as u32, 1, 1], [threads, 1, 1])
            .cluster([cluster, 1, 1])
            .dynamic_shared(self.shared)
            .args(args.args(self.device, parts, self.n, &self.variant)?))
    }
}
