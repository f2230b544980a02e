//! Kernels of CUTLASS and others that nvcc and Triton compiled, and one tile written by hand, against results computed here.

mod blackwell_tile;
mod cutlass;
mod hopper_gemm;
mod library;
mod nvcc;
mod triton;

use dualgemm_device::{Args, Device, DevicePtr, Error, LaunchSpec, ModuleId};
use dualgemm_sim::{Config, Gpu};
use std::borrow::Borrow;

/// A simulated card with one module.
struct Host {
    gpu: Gpu,
    module: ModuleId,
}

impl Host {
    fn new(ptx: &str, config: Config) -> Host {
        let gpu = Gpu::new(config);
        let module = gpu.load(ptx).unwrap_or_else(|e| panic!("{e}"));
        Host { gpu, module }
    }

    fn upload<const N: usize>(&self, values: impl IntoIterator<Item = [u8; N]>) -> DevicePtr {
        upload(&self.gpu, &values.into_iter().flatten().collect::<Vec<u8>>())
    }

    fn ints(&self, values: impl IntoIterator<Item = impl Borrow<i32>>) -> DevicePtr {
        self.upload(values.into_iter().map(|v| v.borrow().to_le_bytes()))
    }

    fn try_run(
        &self,
        kernel: &str,
        grid: [u32; 2],
        block: u32,
        shared: u32,
        args: Args,
    ) -> Result<(), Error> {
        let f = self.gpu.function(self.module, kernel)?;
        let spec = LaunchSpec::new(f, [grid[0], grid[1], 1], [block, 1, 1]).dynamic_shared(shared).args(args);
        self.gpu.launch(&spec)
    }

    fn run(&self, kernel: &str, grid: [u32; 2], block: u32, shared: u32, args: Args) {
        self.try_run(kernel, grid, block, shared, args).unwrap_or_else(|e| panic!("{e}"));
    }

    fn download<const N: usize, T>(&self, at: DevicePtr, n: usize, f: fn([u8; N]) -> T) -> Vec<T> {
        let mut bytes = vec![0; n * N];
        self.gpu.copy_from(&mut bytes, at).unwrap();
        bytes.chunks_exact(N).map(|b| f(b.try_into().unwrap())).collect()
    }
}

fn upload(gpu: &Gpu, bytes: &[u8]) -> DevicePtr {
    let at = gpu.alloc(bytes.len()).unwrap();
    gpu.copy_to(at, bytes).unwrap();
    at
}

/// Integers from -3 to 4, exact in every type, with sums that stay exact.
fn small(n: usize, seed: u32) -> Vec<i32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 977) >> 29) as i32 - 3).collect()
}

/// The code of one of these: 1 = 2^0, 2 = 2^1, 3 = 1.5 * 2^1, 4 = 2^2; bias 7, three bits of mantissa.
fn e4m3_code(v: i32) -> [u8; 1] {
    let magnitude = [0x00, 0x38, 0x40, 0x44, 0x48][v.unsigned_abs() as usize];
    [magnitude | if v < 0 { 0x80 } else { 0 }]
}

fn e2m1(code: u8) -> f64 {
    let t = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code as usize & 7];
    if code & 8 != 0 { -t } else { t }
}

fn e4m3(b: u8) -> f64 {
    let (e, m) = (b >> 3 & 15, f64::from(b & 7));
    if e == 0 { m * 2f64.powi(-9) } else { (1.0 + m / 8.0) * 2f64.powi(i32::from(e) - 7) }
}
