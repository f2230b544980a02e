//! Kernels that nvcc and Triton compiled, against results computed here.

mod library;
mod nvcc;
mod triton;

use dualgemm_device::{Args, Device, DevicePtr, LaunchSpec, ModuleId};
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
        let bytes: Vec<u8> = values.into_iter().flatten().collect();
        let at = self.gpu.alloc(bytes.len()).unwrap();
        self.gpu.copy_to(at, &bytes).unwrap();
        at
    }

    fn ints(&self, values: impl IntoIterator<Item = impl Borrow<i32>>) -> DevicePtr {
        self.upload(values.into_iter().map(|v| v.borrow().to_le_bytes()))
    }

    fn run(&self, kernel: &str, grid: [u32; 2], block: u32, shared: u32, args: Args) {
        let f = self.gpu.function(self.module, kernel).unwrap();
        let spec = LaunchSpec::new(f, [grid[0], grid[1], 1], [block, 1, 1]).dynamic_shared(shared).args(args);
        // SAFETY: the device is simulated and fails a launch that leaves its memory.
        if let Err(e) = unsafe { self.gpu.launch(&spec) }.and_then(|()| self.gpu.synchronize()) {
            panic!("{e}");
        }
    }

    fn download<const N: usize, T>(&self, at: DevicePtr, n: usize, f: fn([u8; N]) -> T) -> Vec<T> {
        let mut bytes = vec![0; n * N];
        self.gpu.copy_from(&mut bytes, at).unwrap();
        bytes.chunks_exact(N).map(|b| f(b.try_into().unwrap())).collect()
    }
}
