//! The host side of the kernel for few tokens.

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec};

use super::config::{Config, RULES, SHARED};
use super::fused::{self, A, Variant};
use crate::Error;
use crate::generic::quantize::{block_rule, fits};
use crate::limits::{GRID_X, Valid};
use crate::parts::groups::Groups;
use crate::parts::loaded::Loaded;
use crate::parts::rows::Output;
use crate::parts::tiles::GroupArgs;
use crate::sm90a::pack::CHUNK_K;

/// Operands in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedArgs {
    /// Tokens, features, K (a multiple of 16).
    pub size: (usize, usize, usize),
    /// A, `[m, k]` in the kernel's 16-bit type, or codes, dense.
    pub a: DevicePtr,
    /// Bytes from row to row of an A of floats, a multiple of 16.
    pub a_pitch: usize,
    /// Scale bytes of an nvfp4 A.
    pub a_scales: DevicePtr,
    /// The weight pack, [`sm90a::pack`](crate::sm90a::pack); of groups, one behind the other.
    pub weights: DevicePtr,
    /// Groups of rows, if the variant has them.
    pub groups: Option<GroupArgs>,
    /// Whether the launch just before triggers the start of this one only after it has waited for what wrote the groups' rows,
    /// so that this one may read them at once.
    pub settled: bool,
    /// C; alpha holds the tensor scales.
    pub output: Output,
}

/// The kernel, loaded on a device for one variant.
#[derive(Clone)]
pub struct Fused<'d> {
    loaded: Loaded<'d>,
    config: Config,
    variant: Variant,
}

impl std::fmt::Debug for Fused<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {:?}", self.config.name(), self.variant)
    }
}

impl<'d> Fused<'d> {
    /// Generates and loads the kernel. What the variant says of C's rows must hold for every N it is launched with.
    ///
    /// # Errors
    /// If the configuration does not fit, or the device refuses the text.
    pub fn new(device: &'d dyn Device, config: Config, variant: &Variant) -> Result<Self, Error> {
        let memory = (fused::ENTRY, config.layout(variant)?.smem.bytes());
        let loaded = Loaded::new(device, &fused::generate(&config, variant)?, memory, &variant.rows)?;
        Ok(Self { loaded, config, variant: variant.clone() })
    }

    /// The launch on these operands; it can be repeated and recorded. With [`LaunchSpec::programmatic`] it may start
    /// before the launch ahead of it has ended: it reads weights at once, everything else after that end.
    ///
    /// # Errors
    /// If a size, a stride or an address breaks a rule.
    pub fn spec(&self, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let (m, n, k) = args.size;
        block_rule("A", m, k)?;
        self.variant.rows.check(n)?;
        fits("weights", "address", args.weights.0 as usize, 1, 16)?;
        fits("A", "address", args.a.0 as usize, 1, 16)?;
        let count = args.groups.map(|groups| groups.count);
        let grid = self.config.grid((m, n), count, self.variant.linear);
        RULES.check("CTAs along the features", grid[0], GRID_X)?;
        RULES.check("tiles of tokens", grid[1], Valid::range(1, 65535))?;
        let list = match self.variant.a {
            A::Half(_) => {
                fits("A", "bytes from row to row", args.a_pitch, 2 * k, 16)?;
                Args::new().ptr(args.a).u32(args.a_pitch as u32)
            }
            A::Nvfp4(_) => {
                fits("A", "address of scales", args.a_scales.0 as usize, 1, 1)?;
                Args::new().ptr(args.a).ptr(args.a_scales)
            }
        };
        if self.variant.whole_blocks {
            fits("A", "elements of a row", k, 1, CHUNK_K)?;
        }
        let list = list.ptr(args.weights);
        let rows = args.groups.map(|groups| Groups { count: groups.count, rows: groups.rows });
        let list = Groups::args_if(rows.as_ref(), self.variant.rows.grouped, "rows", list)?;
        // Where each CTA can have a multiprocessor to itself, two must not come to lie on one, which would take twice as long:
        // they do behind a kernel that leaves some multiprocessors before others (measured: 41 instead of 34 µs for an MLP).
        let alone = grid[0].saturating_mul(grid[1]) <= self.loaded.device.info().sm_count;
        let first = self.config.chunks_before_a(alone, self.variant.a.is_codes());
        let list = list.u32(m as u32).u32(n as u32).u32(k as u32).u32(first);
        let list = if args.groups.is_some() { list.u32(args.settled.into()) } else { list };
        let alphas = args.groups.map(|groups| groups.alphas);
        let list = args.output.args(list, &self.variant.rows, alphas)?;
        let spec = self.loaded.launch(grid, self.config.threads()).args(list);
        let more_than_half = spec.dynamic_shared.max(SHARED + 1);
        Ok(if alone { spec.dynamic_shared(more_than_half) } else { spec })
    }
}
