//! Operands on a device.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatMatrix, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_kernels::Error;
use dualgemm_kernels::generic::expand::Codes;
use dualgemm_kernels::generic::quantize::Floats;

/// A simulated H100 that checks everything; the first GPU of this machine if the variable DUALGEMM_TEST_DEVICE is
/// `cuda`.
pub fn gpu() -> &'static dyn Device {
    match std::env::var("DUALGEMM_TEST_DEVICE").as_deref() {
        Ok("cuda") => Box::leak(Box::new(dualgemm_cuda::Cuda::open(0).unwrap())),
        _ => Box::leak(Box::new(dualgemm_sim::Gpu::new(
            dualgemm_sim::Config::default().checks(dualgemm_sim::Checks::ALL),
        ))),
    }
}

/// Every code and every scale, in this layout.
pub fn quantized(name: &str, (rows, k): (usize, usize), layout: ScaleLayout) -> QuantizedMatrix<'static> {
    let sets = (CodeSet::Full, ScaleSet::Full);
    let matrix = Inputs::seeded(11).quantized(
        name,
        BlockFormat::Nvfp4,
        (rows, k),
        sets,
        GlobalScale::multiplier(0.37),
    );
    matrix.unwrap().with_scale_layout(layout)
}

/// A new allocation with these bytes.
pub fn upload(gpu: &dyn Device, bytes: &[u8]) -> DevicePtr {
    let ptr = gpu.alloc(bytes.len()).unwrap();
    gpu.copy_to(ptr, bytes).unwrap();
    ptr
}

/// A new allocation filled with a byte that no result has throughout.
pub fn poisoned(gpu: &dyn Device, bytes: usize) -> DevicePtr {
    let ptr = gpu.alloc(bytes).unwrap();
    gpu.memset(ptr, 0xA5, bytes).unwrap();
    ptr
}

pub fn upload_codes(gpu: &dyn Device, matrix: &QuantizedMatrix<'_>) -> Codes {
    let (m, k) = (matrix.rows(), matrix.k());
    let (codes, scales) = (upload(gpu, matrix.codes()), upload(gpu, matrix.scales()));
    Codes { m, k, codes, pitch: matrix.row_stride(), scales }
}

pub fn upload_floats(gpu: &dyn Device, matrix: &FloatMatrix<'_>) -> Floats {
    let bytes = matrix.to_le_bytes();
    let (m, k) = (matrix.rows(), matrix.cols());
    Floats { m, k, values: upload(gpu, &bytes), pitch: bytes.len() / m }
}

/// Runs a launch to its end.
pub fn run(gpu: &dyn Device, spec: &LaunchSpec) {
    // SAFETY: the operands were allocated here, as large as the launch says.
    unsafe { gpu.launch(spec) }.unwrap_or_else(|e| panic!("{e}"));
    gpu.synchronize().unwrap_or_else(|e| panic!("{e}"));
}

/// Bytes at a device address.
pub fn read(gpu: &dyn Device, from: DevicePtr, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    gpu.copy_from(&mut data, from).unwrap();
    data
}

/// What a launch writes to new memory of so many bytes.
pub fn made(
    gpu: &dyn Device,
    bytes: usize,
    spec: impl FnOnce(DevicePtr) -> Result<LaunchSpec, Error>,
) -> Vec<u8> {
    let to = poisoned(gpu, bytes);
    run(gpu, &spec(to).unwrap_or_else(|e| panic!("{e}")));
    read(gpu, to, bytes)
}
