//! The host side of the fused kernel for sm_80.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};

use super::config::Config;
use super::fused::{self, Variant};
use crate::Error;
use crate::generic::quantize::{block_rule, fits};
use crate::generic::target_for;
use crate::limits::{GRID_X, Rules, Valid};
use crate::parts::groups::Groups;
use crate::parts::loaded::Loaded;
use crate::parts::rows::Output;
use crate::parts::tiles::GroupArgs;

const RULES: Rules = Rules("sm80 fused");

/// Operands in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedArgs {
    /// Tokens, features, K (a multiple of 16).
    pub size: (usize, usize, usize),
    /// A, `[m, k]` in the kernel's 16-bit type.
    pub a: DevicePtr,
    /// Bytes from row to row of A, a multiple of 16.
    pub a_pitch: usize,
    /// The weight pack, [`sm90a::pack`](crate::sm90a::pack); of groups, one behind the other.
    pub weights: DevicePtr,
    /// The groups, if rows come in such.
    pub groups: Option<GroupArgs>,
    /// C.
    pub output: Output,
}

/// The kernel, loaded on a device for one variant.
#[derive(Debug, Clone)]
pub struct Fused<'d> {
    loaded: Loaded<'d>,
    config: Config,
    linear: bool,
}

impl<'d> Fused<'d> {
    /// Generates and loads the kernel.
    pub fn new(device: &'d dyn Device, config: Config, variant: &Variant) -> Result<Self, Error> {
        let module = fused::generate(&config, variant, target_for(device.info().arch))?;
        let memory = (fused::ENTRY, config.layout(variant)?.smem.bytes());
        Ok(Self {
            loaded: Loaded::new(device, &module, memory, &variant.rows)?,
            config,
            linear: variant.linear,
        })
    }

    /// The launch on these operands; it can be repeated and recorded.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        block_rule("A", m, k)?;
        self.loaded.rows.check(n)?;
        fits("A", "address", args.a.0 as usize, 1, 16)?;
        fits("A", "bytes from row to row", args.a_pitch, 2 * k, 16)?;
        fits("weights", "address", args.weights.0 as usize, 1, 16)?;
        let list = Args::new().ptr(args.a).u32(args.a_pitch as u32).ptr(args.weights);
        let rows = args.groups.map(|groups| Groups { count: groups.count, rows: groups.rows });
        let list = Groups::args_if(rows.as_ref(), self.loaded.rows.grouped, "rows", list)?;
        let list = list.u32(m as u32).u32(n as u32).u32(k as u32);
        let list = args.output.args(list, &self.loaded.rows, args.groups.map(|groups| groups.alphas))?;
        let grid = self.config.grid((m, n), args.groups.map(|groups| groups.count), self.linear);
        RULES.check("tiles of tokens", grid[0], GRID_X)?;
        RULES.check("tiles of features", grid[1], Valid::range(1, 65535))?;
        Ok(self.loaded.launch(grid, self.config.threads()).args(list))
    }
}
