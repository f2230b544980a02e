//! A kernel as a Rust program: each CTA loads a tile with one bulk copy, doubles it and stores it back.
//! `cargo run -p dualgemm-ptx --example copy_scale` prints the PTX.

use dualgemm_ptx::ast::{Module, Version};
use dualgemm_ptx::builder::*;
use dualgemm_ptx::layout::SmemLayout;
use dualgemm_ptx::{Error, Target};

/// Elements of a tile: one per thread.
pub const TILE: u32 = 128;

/// `out[i] = factor * input[i]`, one CTA per tile.
pub fn copy_scale(target: Target) -> Result<Module, Error> {
    let mut smem = SmemLayout::new();
    let tile = smem.alloc("tile", TILE * 4, 128);
    let full = smem.mbarriers("full", 1);

    let mut module = Builder::new(target, Version::new(8, 8));
    module.comment("out[i] = factor * input[i]: one CTA per tile, filled by one bulk copy.");
    module.kernel("copy_scale", |k| {
        k.required_threads(TILE);
        let (input, out) = (k.pointer("input"), k.pointer("out"));
        let factor = k.param::<F32>("factor");
        let base = k.shared(&smem);
        let (tile, full) = (base.at(tile.offset), base.at(full.offset));
        let thread = k.special(Special::TidX);
        let cta = k.special(Special::CtaidX);
        let first = k.eval(cta.mul_wide(TILE * 4));

        k.comment("One thread sets up the barrier and starts the copy.");
        let leader = k.compare(Cmp::Eq, thread, 0u32);
        k.if_(leader, "load", |k| {
            k.mbarrier_init(full, 1u32);
            k.fence_mbarrier_init();
            let input = k.ld_pointer(&input);
            let from = k.offset(input, first);
            k.mbarrier_arrive_expect_tx(full, TILE * 4);
            k.bulk_load(tile, from, TILE * 4, full, &TmaOptions::default());
        });
        k.cta_sync();
        k.mbarrier_wait(full, 0u32, "tile");

        k.comment("Every thread scales one element.");
        let place = k.offset(tile, thread << 2);
        let x = k.ld::<F32, _>(place);
        let factor = k.ld_param(&factor);
        let y = k.mul(x, factor);
        let out = k.ld_pointer(&out);
        let place = k.offset(out, thread.mul_wide(4) + first);
        k.st(place, y);
    });
    module.finish()
}

/// Prints it for an H100.
pub fn main() -> Result<(), Error> {
    print!("{}", copy_scale(Target::Sm90a)?);
    Ok(())
}
