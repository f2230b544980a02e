//! Operands on a device.

use dualgemm_bench::inputs::{CodeSet, Inputs, ScaleSet};
use dualgemm_device::{Device, DevicePtr, LaunchSpec};
use dualgemm_formats::{BlockFormat, FloatMatrix, FloatType, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm_kernels::generic::expand::Codes;
use dualgemm_kernels::generic::quantize::Floats;
use half::{bf16, f16};

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

/// Little-endian bytes of a float matrix, dense.
pub fn bytes_of(matrix: &FloatMatrix<'_>) -> Vec<u8> {
    let rows = 0..matrix.rows();
    match matrix {
        FloatMatrix::F32(m) => rows.flat_map(|r| m.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
        FloatMatrix::F16(m) => rows.flat_map(|r| m.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
        FloatMatrix::Bf16(m) => rows.flat_map(|r| m.row(r)).flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// Bytes of an element.
pub fn size(ty: FloatType) -> usize {
    if ty == FloatType::F32 { 4 } else { 2 }
}

/// The elements of such bytes.
pub fn floats(bytes: &[u8], ty: FloatType) -> Vec<f32> {
    let half = |b: &[u8]| [b[0], b[1]];
    bytes
        .chunks_exact(size(ty))
        .map(|b| match ty {
            FloatType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            FloatType::F16 => f16::from_le_bytes(half(b)).to_f32(),
            FloatType::Bf16 => bf16::from_le_bytes(half(b)).to_f32(),
        })
        .collect()
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

/// A quantized matrix on the device.
pub fn upload_codes(gpu: &dyn Device, matrix: &QuantizedMatrix<'_>) -> Codes {
    let (m, k) = (matrix.rows(), matrix.k());
    let (codes, scales) = (upload(gpu, matrix.codes()), upload(gpu, matrix.scales()));
    Codes { m, k, codes, pitch: matrix.row_stride(), scales }
}

/// A float matrix on the device.
pub fn upload_floats(gpu: &dyn Device, matrix: &FloatMatrix<'_>) -> Floats {
    let bytes = bytes_of(matrix);
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
