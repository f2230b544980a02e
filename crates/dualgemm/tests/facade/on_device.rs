//! Operands of a call on rows in groups, in the memory of a device, and what its memory holds before.

use dualgemm::device::DevicePtr;
use dualgemm::formats::{BlockFormat, FloatMatrix, Matrix, ScaleLayout};
use dualgemm::gemm::{AFormat, AOperand, DualGemmDesc, GateUp, OutFormat};
use dualgemm::strategies::Buffer;
use dualgemm::{DeviceA, DeviceC, DeviceCall, DeviceGateUp, GpuId, GroupedCall};
use half::{bf16, f16};

use crate::gpu::operand;

/// What C holds before a call.
pub(crate) const POISON: u8 = 0xEE;

/// Rows of A as a device has them.
pub(crate) fn a_bytes(a: &AOperand<'_>) -> (Vec<u8>, Vec<u8>) {
    fn dense<T: Copy, const N: usize>(a: &Matrix<'_, T>, bytes: fn(T) -> [u8; N]) -> (Vec<u8>, Vec<u8>) {
        ((0..a.rows()).flat_map(|row| a.row(row)).flat_map(|&x| bytes(x)).collect(), Vec::new())
    }
    match a {
        AOperand::Float(FloatMatrix::F16(a)) => dense(a, f16::to_le_bytes),
        AOperand::Float(FloatMatrix::F32(a)) => dense(a, f32::to_le_bytes),
        AOperand::Float(FloatMatrix::Bf16(a)) => dense(a, bf16::to_le_bytes),
        AOperand::Quantized(a) => a.dense_rows(0..a.rows()),
    }
}

/// Gate and up in device memory, their block scales in this order, and what keeps them there.
pub(crate) fn pair_on<'w>(
    id: &GpuId,
    pair: &'w GateUp<'_>,
    layout: ScaleLayout,
) -> (DeviceGateUp<'w>, [[Buffer; 2]; 2]) {
    let halves = [&pair.gate, &pair.up];
    let buffers = halves.map(|half| {
        let half = half.clone().with_scale_layout(layout);
        [half.codes(), half.scales()].map(|bytes| Buffer::of(id.open().unwrap(), bytes).unwrap())
    });
    let on_device = DeviceGateUp {
        format: pair.gate.format(),
        n: pair.n(),
        k: pair.k(),
        codes: [buffers[0][0].ptr(), buffers[1][0].ptr()],
        scales: [buffers[0][1].ptr(), buffers[1][1].ptr()],
        layout,
        global_scales: halves.map(|half| half.global_scale().value()),
        bias: [pair.gate_bias.as_deref(), pair.up_bias.as_deref()],
    };
    (on_device, buffers)
}

/// A call on operands in device memory, and what keeps them there.
pub(crate) struct OnDevice {
    pub(crate) call: GroupedCall,
    pub(crate) a: AOperand<'static>,
    layout: ScaleLayout,
    values: Buffer,
    scales: Buffer,
    rows: Buffer,
    pub(crate) c: Buffer,
    pub(crate) c_scales: Buffer,
}

/// A product of nvfp4 weights.
pub(crate) fn desc(m: usize, n: usize, k: usize, a: AFormat, out: OutFormat) -> DualGemmDesc {
    DualGemmDesc { out, ..DualGemmDesc::new(m, n, k, a, BlockFormat::Nvfp4) }
}

/// A in device memory, its block scales row by row, and where the experts' rows begin.
pub(crate) fn on_device(id: &GpuId, desc: &DualGemmDesc, first_rows: &[u32]) -> OnDevice {
    on_device_as(id, desc, ScaleLayout::Linear, first_rows)
}

/// The same with block scales in another order.
pub(crate) fn on_device_as(
    id: &GpuId,
    desc: &DualGemmDesc,
    layout: ScaleLayout,
    first_rows: &[u32],
) -> OnDevice {
    let &DualGemmDesc { m, n, .. } = desc;
    let buffer = |bytes: usize| Buffer::new(id.open().unwrap(), bytes).unwrap();
    let a = operand(m, desc.k, desc.a);
    let (values, scales) = a_bytes(&a);
    let pitch = values.len() / m;
    let (values, scales) = (buffer(values.len()), buffer(layout.len(m, scales.len() / m)));
    let rows = buffer(4 * first_rows.len());
    let (c_bytes, c_scale_bytes) = match desc.out {
        OutFormat::Nvfp4 { scale_layout, .. } => (m * n / 2, scale_layout.len(m, n / 16)),
        float => (m * n * float.bits_per_element() as usize / 8, 0),
    };
    let (c, c_scales) = (buffer(c_bytes + 64), buffer(c_scale_bytes));
    let given = match &a {
        AOperand::Float(_) => DeviceA::Float { values: values.ptr(), pitch },
        AOperand::Quantized(a) => {
            let global_scale = a.global_scale().value();
            DeviceA::Blocks { format: a.format(), codes: values.ptr(), scales: scales.ptr(), global_scale }
        }
    };
    let to = match desc.out {
        OutFormat::Nvfp4 { .. } => {
            DeviceC::Nvfp4 { codes: c.ptr(), scales: c_scales.ptr(), global_scale: DevicePtr::NULL }
        }
        _ => DeviceC::Float(c.ptr()),
    };
    let call = GroupedCall {
        call: DeviceCall { m, a: given, c: to },
        rows: rows.ptr(),
        settled: false,
        choices: None,
    };
    let this = OnDevice { call, a, layout, values, scales, rows, c, c_scales };
    this.set(first_rows);
    this
}

impl OnDevice {
    /// Writes A and where rows begin; those that belong to nobody are poisoned, and so is C.
    pub(crate) fn set(&self, first_rows: &[u32]) {
        let (mut values, mut scales) = a_bytes(&self.a);
        let m = self.call.call.m;
        let (row, scale_row) = (values.len() / m, scales.len() / m);
        let [first, .., last] = *first_rows else { panic!("one expert at least") };
        for nobody in (0..first as usize).chain(last as usize..m) {
            // A NaN, or more than any row has that counts.
            values[nobody * row..][..row].fill(if nobody % 2 == 0 { 0x7B } else { 0xFF });
            scales[nobody * scale_row..][..scale_row].fill(0x7F);
        }
        self.values.write(&values).unwrap();
        if scale_row > 0 {
            scales = ScaleLayout::Linear.convert(&scales, self.layout, m, scale_row);
        }
        self.scales.write(&scales).unwrap();
        self.rows.write(&first_rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
        for c in [&self.c, &self.c_scales] {
            c.write(&vec![POISON; c.bytes()]).unwrap();
        }
    }
}

pub(crate) fn read(buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.read(&mut bytes).unwrap();
    bytes
}
