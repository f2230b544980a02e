//! How fast ordinary code is simulated, with the default checks: arithmetic in a loop, and a fill of 1056 CTAs.
//!
//! `cargo run --release -p dualgemm-sim --example speed [NUMBERS THAT A THREAD STORES, 0 FOR NO FILL]`

use dualgemm_device::{Args, Device, LaunchSpec};
use dualgemm_sim::{Config, Gpu};
use std::time::Instant;

const SPIN: &str = include_str!("../tests/ptx/spin.ptx");
const FILL: &str = include_str!("../tests/ptx/fill.ptx");

fn launch(gpu: &Gpu, ptx: &str, ctas: u32, args: Args) -> Result<f64, dualgemm_device::Error> {
    let kernel = gpu.function(gpu.load(ptx)?, if ctas == 1 { "spin" } else { "fill" })?;
    let start = Instant::now();
    gpu.launch(&LaunchSpec::new(kernel, [ctas, 1, 1], [128, 1, 1]).args(args))?;
    Ok(start.elapsed().as_secs_f64())
}

fn main() -> Result<(), dualgemm_device::Error> {
    let gpu = Gpu::new(Config::default());
    let iterations = 200_000u32;
    let out = gpu.alloc(4096)?;
    let seconds = launch(&gpu, SPIN, 1, Args::new().u32(iterations).ptr(out))?;
    let operations = f64::from(iterations) * 10.0 * 128.0;
    println!("spin: {:.0} million lane operations/s on one core", operations / seconds / 1e6);

    let each = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(500);
    if each == 0 {
        return Ok(());
    }
    let numbers = 1056 * 128 * each;
    let (out, matrix) = (gpu.alloc(2 * numbers as usize)?, gpu.alloc(640)?);
    gpu.copy_to(matrix, &[0x5a; 640])?;
    let seconds = launch(&gpu, FILL, 1056, Args::new().ptr(out).ptr(matrix).u32(numbers))?;
    println!("fill: {seconds:.1} s for 1056 CTAs of 128 threads that store {each} numbers each");
    Ok(())
}
