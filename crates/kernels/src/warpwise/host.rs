//! The host side of the kernel for few tokens.

use dualgemm_device::{Args, LaunchSpec};
use dualgemm_formats::BlockFormat;
use dualgemm_ptx::Target;
use dualgemm_ptx::ast::Module;

use super::config::{Config, RULES, SHARED};
use super::fused;
use crate::Error;
use crate::fused::{Fused, FusedArgs, Tile};
use crate::limits::{GRID_X, GRID_YZ, Rules, check_address, fits};
use crate::parts::format::Format;
use crate::parts::variant::Variant;
use crate::sm90a::pack::CHUNK_K;

impl Tile for Config {
    fn rules(&self) -> Rules {
        RULES
    }

    fn generate(&self, variant: &Variant, _: Target) -> Result<Module, Error> {
        fused::generate(self, variant)
    }

    fn shared(&self, variant: &Variant) -> Result<u32, Error> {
        Ok(self.layout(variant)?.smem.bytes())
    }

    fn formats(&self, variant: &Variant) -> (Format, Option<Format>) {
        match variant.codes {
            None => (Format::Half(variant.compute), None),
            Some(_) => (Format::Block(BlockFormat::Nvfp4), None),
        }
    }

    fn launch(&self, kernel: &Fused<'_>, args: &FusedArgs) -> Result<LaunchSpec, Error> {
        let ((m, n, k), variant) = (args.size, &kernel.variant);
        let groups = if variant.choices { Some(m) } else { args.count() };
        let grid = self.grid((m, n), groups, variant.is_linear());
        RULES.check("CTAs along the features", grid[0], GRID_X)?;
        RULES.check("tiles of tokens", grid[1], GRID_YZ)?;
        let list = match variant.codes {
            None => args.a_rows(Args::new()),
            Some(_) => {
                check_address("A's scales", args.a.scales, 1)?;
                Args::new().ptr(args.a.codes).ptr(args.a.scales)
            }
        };
        if variant.whole_blocks {
            fits("A", "elements of a row", k, 1, CHUNK_K)?;
        }
        let list = args.group_rows(args.pack(list))?;
        // Where each CTA can have a multiprocessor to itself, two must not come to lie on one, which would take twice as long:
        // they do behind a kernel that leaves some multiprocessors before others (measured: 41 instead of 34 µs for an MLP).
        let alone = grid[0].saturating_mul(grid[1]) <= kernel.device.info().sm_count;
        // The second product on choices has an A when the first has ended: what there is room for is there by then.
        let late = args.choices.is_some() && args.settled;
        let first = if late { self.chunks } else { self.chunks_before_a(alone, variant.codes.is_some()) };
        let list = args.sizes(list, k).u32(first);
        let list = if args.groups.is_some() { list.u32(args.settled.into()) } else { list };
        let list = args.choices.map_or(list.clone(), |per_row| list.u32(per_row as u32));
        let spec = kernel.launch(grid, self.threads()).args(args.outputs(list, variant)?);
        let more_than_half = spec.dynamic_shared.max(SHARED + 1);
        Ok(if alone { spec.dynamic_shared(more_than_half) } else { spec })
    }
}
