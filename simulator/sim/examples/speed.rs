//! How fast ordinary code is simulated, with the default checks: arithmetic in a loop, and a fill of 1056 CTAs.
//!
//! `cargo run --release -p dualgemm-sim --example speed [NUMBERS THAT A THREAD STORES, 0 FOR NO FILL]`

use dualgemm_device::{Args, Device, LaunchSpec};
use dualgemm_sim::{Config, Gpu};
use std::time::Instant;

const SPIN: &str = r"
.version 8.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u32 n, .param .u64 out)
{
    .reg .pred p;
    .reg .b32 r<8>;
    .reg .f32 f<4>;
    .reg .b64 rd<4>;
    ld.param.u32 r0, [n];
    ld.param.u64 rd0, [out];
    mov.u32 r1, %tid.x;
    mov.u32 r2, 0;
    mov.u32 r4, 1;
    cvt.rn.f32.u32 f0, r1;
    mov.f32 f1, 0f3F800000;
LOOP:
    add.u32 r2, r2, 1;
    mad.lo.u32 r4, r4, r2, r1;
    xor.b32 r5, r4, r2;
    shl.b32 r6, r5, 3;
    lop3.b32 r4, r4, r6, r5, 0x96;
    fma.rn.f32 f1, f1, f0, f0;
    add.f32 f2, f1, f0;
    mul.f32 f1, f2, 0f3F000000;
    setp.lt.u32 p, r2, r0;
    @p bra LOOP;
    mul.wide.u32 rd1, r1, 4;
    add.s64 rd0, rd0, rd1;
    st.global.u32 [rd0], r4;
    ret;
}
";
const FILL: &str = include_str!("../tests/ptx/fill.ptx");

fn launch(gpu: &Gpu, ptx: &str, ctas: u32, args: Args) -> Result<f64, dualgemm_device::Error> {
    let kernel = gpu.function(gpu.load(ptx)?, if ctas == 1 { "spin" } else { "fill" })?;
    let start = Instant::now();
    // SAFETY: the device is simulated and fails a launch that leaves its memory.
    unsafe { gpu.launch(&LaunchSpec::new(kernel, [ctas, 1, 1], [128, 1, 1]).args(args)) }?;
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
