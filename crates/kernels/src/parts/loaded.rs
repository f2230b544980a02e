//! A fused kernel, loaded on a device: what the hosts of all architectures do alike.

use dualgemm_device::{Device, FunctionId, LaunchSpec};
use dualgemm_ptx::ast::Module;

use super::operand::{FusedArgs, StagedOperand};
use super::rows::Variant;
use crate::Error;
use crate::generic::load;
use crate::limits::{GRID_X, Rules};

/// The kernel and what a launch of it needs to know.
#[derive(Clone)]
pub(crate) struct Loaded<'d> {
    pub device: &'d dyn Device,
    /// What it makes of the sums.
    pub rows: Variant,
    function: FunctionId,
    /// Bytes of shared memory of a CTA.
    shared: u32,
}

impl std::fmt::Debug for Loaded<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.rows)
    }
}

impl<'d> Loaded<'d> {
    /// Loads the kernel called `entry`, whose CTAs take `shared` bytes.
    pub fn new(
        device: &'d dyn Device,
        module: &Module,
        (entry, shared): (&str, u32),
        rows: &Variant,
    ) -> Result<Self, Error> {
        Ok(Self { device, rows: rows.clone(), function: load(device, module, entry)?, shared })
    }

    /// A launch of CTAs of `threads`, its arguments yet to come.
    pub fn launch(&self, grid: [u32; 3], threads: u32) -> LaunchSpec {
        LaunchSpec::new(self.function, grid, [threads, 1, 1]).dynamic_shared(self.shared)
    }

    /// A launch of `clusters` clusters of `cluster` CTAs on Blackwell's operands, which were checked.
    pub fn launch_clusters(
        &self,
        (args, n): (&FusedArgs, usize),
        parts: [StagedOperand; 3],
        (clusters, cluster, threads): (usize, u32, u32),
        rules: Rules,
    ) -> Result<LaunchSpec, Error> {
        let grid = clusters as u64 * u64::from(cluster);
        rules.check("CTAs", grid, GRID_X)?;
        let args = args.args(self.device, parts, n, &self.rows)?;
        Ok(self.launch([grid as u32, 1, 1], threads).cluster([cluster, 1, 1]).args(args))
    }
}
