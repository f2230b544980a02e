//! A kernel from Rust to a checked result, and the same kernel with a fence forgotten.
//! `cargo run -p dualgemm-sim --example first_kernel`

use dualgemm_device::{Args, Device, Error, LaunchSpec};
use dualgemm_ptx::ast::Version;
use dualgemm_ptx::builder::*;
use dualgemm_ptx::{Target, layout::SmemLayout};
use dualgemm_sim::{Config, Gpu};

/// Every thread writes its number to shared memory; one bulk copy stores them all.
pub fn iota(fence: bool) -> Result<String, dualgemm_ptx::Error> {
    let mut smem = SmemLayout::new();
    let tile = smem.alloc("tile", 512, 128);
    let mut module = Builder::new(Target::Sm90a, Version::new(8, 0));
    module.kernel("iota", |k| {
        k.required_threads(128);
        let out = k.pointer("out");
        let tile = k.shared(&smem).at(tile.offset);
        let thread = k.special(Special::TidX);
        let place = k.offset(tile, thread << 2);
        k.st(place, thread);
        if fence {
            k.comment("Ordinary stores become visible to the bulk copy.");
            k.fence_proxy_async_shared();
        }
        k.cta_sync();
        let first = k.compare(Cmp::Eq, thread, 0u32);
        k.if_(first, "store", |k| {
            let out = k.ld_pointer(&out);
            k.bulk_store(out, tile, 512u32);
            k.bulk_commit();
            k.bulk_wait(0);
        });
    });
    Ok(module.finish()?.to_string())
}

/// Runs it. This function does not know whether the device is a simulator or a card.
pub fn run(device: &dyn Device, ptx: &str) -> Result<Vec<u8>, Error> {
    let kernel = device.function(device.load(ptx)?, "iota")?;
    let out = device.alloc(512)?;
    let spec = LaunchSpec::new(kernel, [1, 1, 1], [128, 1, 1]).dynamic_shared(512);
    // SAFETY: the kernel writes the 512 bytes at its argument, no others.
    unsafe { device.launch(&spec.args(Args::new().ptr(out))) }?;
    let mut bytes = vec![0; 512];
    device.copy_from(&mut bytes, out)?;
    Ok(bytes)
}

/// Builds, prints and checks it, then shows what the simulator says without the fence.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::new(Config::default());
    let ptx = iota(true)?;
    println!("{ptx}");
    let expected: Vec<u8> = (0..128u32).flat_map(u32::to_le_bytes).collect();
    assert_eq!(run(&gpu, &ptx)?, expected);

    let trap = run(&gpu, &iota(false)?).unwrap_err().to_string();
    println!("{trap}");
    assert!(trap.starts_with("missing proxy fence"));
    Ok(())
}
