//! Whole kernels through the public interface: what a first-time user would try.

use dualgemm_device::{Args, Device, LaunchSpec};
use dualgemm_sim::{Config, Gpu};

const SAXPY: &str = include_str!("ptx/saxpy.ptx");

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn saxpy_on_a_grid_with_a_tail_exact() {
    let gpu = Gpu::new(Config::default());
    let n = 1000u32;
    let x: Vec<u8> = (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let y: Vec<u8> = (0..n).flat_map(|i| (0.5 * i as f32).to_le_bytes()).collect();
    let (dx, dy) = (gpu.alloc(x.len()).unwrap(), gpu.alloc(y.len()).unwrap());
    gpu.copy_to(dx, &x).unwrap();
    gpu.copy_to(dy, &y).unwrap();
    let module = gpu.load(SAXPY).unwrap();
    let f = gpu.function(module, "saxpy").unwrap();
    let args = Args::new().u32(n).f32(2.0).ptr(dx).ptr(dy);
    gpu.launch(&LaunchSpec::new(f, [8, 1, 1], [128, 1, 1]).args(args)).unwrap();
    let mut out = vec![0; y.len()];
    gpu.copy_from(&mut out, dy).unwrap();
    for (i, v) in floats(&out).into_iter().enumerate() {
        assert_eq!(v, 2.5 * i as f32);
    }
}

#[test]
fn a_wrong_argument_is_named_exact() {
    let gpu = Gpu::new(Config::default());
    let module = gpu.load(SAXPY).unwrap();
    let f = gpu.function(module, "saxpy").unwrap();
    let spec = LaunchSpec::new(f, [1, 1, 1], [32, 1, 1]).args(Args::new().u32(1).f64(2.0).u64(0).u64(0));
    assert_eq!(
        gpu.launch(&spec).unwrap_err().to_string(),
        "cannot launch `saxpy`: argument 1 is a f64 of 8 bytes, parameter `a` has 4"
    );
}

#[test]
fn a_module_that_is_not_loaded_keeps_no_memory() {
    let gpu = Gpu::new(Config::default());
    // More than fit together on a card of 80 GB.
    let text = ".version 8.0 .target sm_80 .address_size 64 .global .b8 x[1000000000];
        .visible .entry k() { .reg .b32 r<300000>; ret; }";
    for _ in 0..100 {
        let message = gpu.load(text).unwrap_err().to_string();
        assert!(message.contains("262144 registers"), "{message}");
    }
}
