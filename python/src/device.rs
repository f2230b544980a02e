//! Operations on arrays in a GPU's memory: addresses in, a launch on the caller's stream, nothing waited for.

use dualgemm::device::{DevicePtr, Stream};
use dualgemm::formats::ScaleLayout;
use dualgemm::gemm::{AFormat, Activation, OutFormat};
use dualgemm::{
    AnyDesc, DeviceA, DeviceC, DeviceCall, DeviceGateUp, DeviceRouting, GpuId, PackedLayer, Target,
};
use pyo3::prelude::*;

use crate::array::{Array, Dtype, Place};
use crate::destination::Destination;
use crate::error::{Kind, facade, refuse};
use crate::facts::Facts;
use crate::operand::{Quantized, Source};
use crate::packed::{Call, Choices, Packed};
use crate::weights::Weights;

fn pointer(array: &Array<'_>) -> DevicePtr {
    DevicePtr(array.pointer.addr() as u64)
}

/// As [`Packed::compute`], for arrays on a GPU.
pub fn run(
    py: Python<'_>,
    packed: &Packed,
    call: &Call<'_, '_>,
    describe: &(impl Fn(usize, AFormat, OutFormat) -> AnyDesc + Sync),
) -> PyResult<()> {
    let (source, place, own) = (call.source, call.source.place(), &packed.layer.target);
    if !is_on(own, place) {
        return Err(Kind::Operand.raise(format!(
            "a: is on {place} and the weights are on {own}; make them with device=\"cuda:N\" or move a"
        )));
    }
    let (a, format, m, k, layout) = on_device(source)?;
    let (n, own_k) = packed.layer.shape.ends();
    if k != own_k {
        refuse!(Operand, "a: is [{m}, {k}]; [..., {own_k}] is needed");
    }
    call.out.check(source, m, n)?;
    if call.out.arrays().iter().any(|array| !array.is_dense() || !array.writable) {
        refuse!(Operand, "out: is not contiguous row by row, or read-only");
    }
    let c = match &*call.out {
        Destination::Float(array) => array.float_type("out").map(|_| DeviceC::Float(pointer(array)))?,
        Destination::Nvfp4 { codes, scales, scale_out, .. } => DeviceC::Nvfp4 {
            codes: pointer(codes),
            scales: pointer(scales),
            global_scale: scale_out.as_ref().map_or(DevicePtr(0), pointer),
        },
    };
    let routing = match &call.choices {
        Some((Choices::OnDevice(routing), _)) => Some(*routing),
        _ => None,
    };
    let (device_call, stream, out) = (DeviceCall { m, a, c }, call.stream, call.out.format());
    py.detach(|| {
        let describe = (|m| describe(m, format, out), layout);
        let calls = (&device_call, routing);
        // SAFETY: the arrays say what they are and live as long as their owner, who keeps them until the stream, which is the
        // library's own, has done the call.
        unsafe { packed.launchers.run(describe, own, &packed.layer.weights, calls, stream) }
    })
    .map_err(facade)
}

/// Whether an array's place is a target's.
fn is_on(target: &Target, place: Place) -> bool {
    match (target, place) {
        (Target::Gpu(GpuId::Cuda(own), _), Place::Cuda(found)) => found.is_none_or(|n| n == i64::from(*own)),
        _ => false,
    }
}

/// A router's choices in a GPU's memory: where A is, of types that kernels read.
pub fn choices(
    (ids, weights): (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
    (place, tokens): (Place, usize),
    add: bool,
) -> PyResult<(DeviceRouting, usize)> {
    let of = |name: &str, object: &Bound<'_, PyAny>, dtype: Dtype| -> PyResult<(DevicePtr, usize)> {
        let array = Array::of(name, object)?;
        let (rows, top_k) = array.matrix(name)?;
        if array.place != place || array.dtype != dtype || !array.is_dense() {
            let (found, at) = (array.dtype, array.place);
            refuse!(Operand, "{name}: is {found} on {at}; contiguous {dtype} on {place} is needed");
        }
        if rows != tokens || top_k == 0 {
            let found = &array.shape;
            refuse!(Operand, "{name}: shape {found:?}; [{tokens}, experts per token] is needed");
        }
        Ok((pointer(&array), top_k))
    };
    let (ids, top_k) = of("topk_ids", ids, Dtype::I32)?;
    let (weights, others) = of("topk_weights", weights, Dtype::F32)?;
    if others != top_k {
        refuse!(Operand, "topk_weights: {others} for each token; {top_k}, as topk_ids has, are needed");
    }
    Ok((DeviceRouting { ids, weights, add }, top_k))
}

impl Weights {
    /// Packs weights that are in a GPU's memory on that GPU.
    pub fn of_device_pair(
        py: Python<'_>,
        (gate, up): (&Quantized<'_>, &Quantized<'_>),
        bias: [Option<Vec<f32>>; 2],
        activation: Activation,
        input_scale: Option<f32>,
        stream: Option<u64>,
    ) -> PyResult<Py<Self>> {
        let bias = [bias[0].as_deref(), bias[1].as_deref()];
        let (pair, target) = device_pair((gate, up), bias)?;
        let stream = stream.unwrap_or(0);
        // SAFETY: the arrays say what they are and live to the end of this call, which waits; the stream is the library's own.
        let pack = || unsafe { PackedLayer::gate_up_on_device(&pair, target, Stream::raw(stream)) };
        let layer = py.detach(pack).map_err(facade)?;
        let facts = Facts {
            names: vec!["gate".into(), "up".into()],
            n: pair.n,
            k: pair.k,
            format: pair.format.into(),
            global_scales: pair.global_scales.into(),
            input_scale,
        };
        Self::make(py, layer, facts, activation, None)
    }
}

/// Gate and up in a GPU's memory, and that GPU.
pub fn device_pair<'a>(
    (gate, up): (&Quantized<'_>, &Quantized<'_>),
    bias: [Option<&'a [f32]>; 2],
) -> PyResult<(DeviceGateUp<'a>, Target)> {
    let Place::Cuda(ordinal) = gate.place() else {
        refuse!(Operand, "gate: is not on a CUDA device");
    };
    if up.place() != gate.place() {
        let (gate, up) = (gate.place(), up.place());
        refuse!(Operand, "gate is on {gate} and up on {up}; one device is needed");
    }
    let (g, u) = (gate.on_device("gate")?, up.on_device("up")?);
    if (g.format, g.rows, g.k, g.layout) != (u.format, u.rows, u.k, u.layout) {
        return Err(facade(dualgemm::gemm::Error::HalvesDiffer {
            gate: format!("gate is {} [{}, {}], scales {}", g.format, g.rows, g.k, g.layout),
            up: format!("up is {} [{}, {}], scales {}", u.format, u.rows, u.k, u.layout),
        }));
    }
    let target = Target::cuda(i32::try_from(ordinal.unwrap_or(0)).unwrap_or(0));
    let pair = DeviceGateUp {
        format: g.format,
        n: g.rows,
        k: g.k,
        codes: [g.codes, u.codes],
        scales: [g.scales, u.scales],
        layout: g.layout,
        global_scales: [g.global_scale, u.global_scale],
        bias,
    };
    Ok((pair, target))
}

/// A as a call takes it, its format, M, K and the order of its block scales.
fn on_device(source: &Source<'_>) -> PyResult<(DeviceA, AFormat, usize, usize, ScaleLayout)> {
    let array = match source {
        Source::Quantized(quantized) => {
            let q = quantized.on_device("a")?;
            let (format, codes, scales, global_scale) = (q.format, q.codes, q.scales, q.global_scale);
            let a = DeviceA::Blocks { format, codes, scales, global_scale };
            return Ok((a, q.format.into(), q.rows, q.k, q.layout));
        }
        Source::Float(array) => array,
    };
    let format = array.float_type("a")?.into();
    let (m, k) = array.matrix("a")?;
    let row = match array.strides[0] {
        _ if m == 1 => k,
        stride => usize::try_from(stride).unwrap_or(0),
    };
    if row < k || (k > 1 && array.strides[1] != 1) {
        refuse!(Operand, "a: on a GPU, its elements have to lie side by side, row after row");
    }
    let a = DeviceA::Float { values: pointer(array), pitch: row * array.dtype.size() };
    Ok((a, format, m, k, ScaleLayout::Linear))
}
