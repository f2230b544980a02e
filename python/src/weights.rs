//! `Weights`: gate and up of one MLP in kernel order, made once and shared by every call and thread.

use dualgemm::checkpoint::{GateUpOrder, Half};
use dualgemm::device::Stream;
use dualgemm::formats::QuantizedMatrix;
use dualgemm::gemm::{Activation, Epilogue, GateUp};
use dualgemm::{AnyWeights, LayerCall, PackedLayer, Target};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::Place;
use crate::destination::Destination;
use crate::device::device_pair;
use crate::error::{Kind, facade, refuse};
use crate::facts::{Facts, checked_input_scale, values};
use crate::operand::{Quantized, Source};
use crate::options::{self, LayerOptions, device_target};
use crate::packed::{Call, Packed, of_keywords};
use crate::pool;

/// Gate and up of one gated MLP in the order of the kernels.
#[pyclass(module = "dualgemm", frozen, extends = Packed)]
pub struct Weights {
    facts: Facts,
    activation: Activation,
    /// Scale by which the down projection expects C, a multiplier; `None` if there is none.
    #[pyo3(get)]
    output_scale: Option<f32>,
}

/// One half of a fused matrix, copied.
fn half_of(
    name: &str,
    fused: &QuantizedMatrix<'_>,
    order: GateUpOrder,
    half: Half,
) -> Result<QuantizedMatrix<'static>, dualgemm::Error> {
    let n = fused.rows() / 2;
    let rows: Vec<usize> = (0..n).map(|row| order.fused_row(half, row, n)).collect();
    Ok(fused.pick(name, &rows)?)
}

impl Weights {
    pub fn make(
        py: Python<'_>,
        layer: PackedLayer,
        facts: Facts,
        activation: Activation,
        output_scale: Option<f32>,
    ) -> PyResult<Py<Self>> {
        let base = Packed::new(layer);
        let this = Self { facts, activation, output_scale };
        Py::new(py, PyClassInitializer::from(base).add_subclass(this))
    }

    fn of_pair(
        py: Python<'_>,
        weights: GateUp<'_>,
        target: Target,
        activation: Activation,
        input_scale: Option<f32>,
    ) -> PyResult<Py<Self>> {
        let layer = pool::run(py, || PackedLayer::product(&weights, target))?.map_err(facade)?;
        let facts = Facts::of(&weights, input_scale);
        Self::make(py, layer, facts, activation, None)
    }
}

#[pymethods]
impl Weights {
    /// Gate and up of a layer of a checkpoint, read a run of features at a time.
    #[staticmethod]
    #[pyo3(signature = (path, layer = None, **keywords))]
    fn from_checkpoint(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        layer: Option<&Bound<'_, PyAny>>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<Self>> {
        let options = LayerOptions::of(layer, keywords)?;
        let (packed, facts, activation, output_scale) = options.with_layer(py, path, |layer, features| {
            let activation = layer.activation()?.activation;
            let facts = options::facts_of(layer, features.len());
            let packed = PackedLayer::gate_up(layer.source(), features, options.target.clone())?;
            Ok((packed, facts, activation, layer.output_scale().ok().flatten()))
        })?;
        let this = Self::make(py, packed, facts, activation, output_scale)?;
        Packed::came_from(this.bind(py), path, layer, of_keywords(py, keywords)?)?;
        Ok(this)
    }

    /// From two quantized matrices.
    #[staticmethod]
    #[pyo3(signature = (*, gate, up, gate_bias = None, up_bias = None, activation = "silu", input_scale = None, device = None, stream = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn from_tensors(
        py: Python<'_>,
        gate: &Bound<'_, PyAny>,
        up: &Bound<'_, PyAny>,
        gate_bias: Option<&Bound<'_, PyAny>>,
        up_bias: Option<&Bound<'_, PyAny>>,
        activation: &str,
        input_scale: Option<f32>,
        device: Option<&Bound<'_, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Py<Self>> {
        let activation = options::activation(activation)?;
        checked_input_scale("input_scale", input_scale)?;
        let (gate, up) = (Quantized::of("gate", gate)?, Quantized::of("up", up)?);
        let (gate_bias, up_bias) = (values("gate_bias", gate_bias)?, values("up_bias", up_bias)?);
        if gate.place() != Place::Cpu {
            let bias = [gate_bias, up_bias];
            return Self::of_device_pair(py, (&gate, &up), bias, activation, input_scale, stream);
        }
        if stream.is_some() {
            refuse!(Operand, "stream is for matrices on a GPU; gate is on the processor");
        }
        let target = device_target(device)?;
        let weights = GateUp {
            gate: gate.matrix("gate")?,
            up: up.matrix("up")?,
            gate_bias: gate_bias.map(Into::into),
            up_bias: up_bias.map(Into::into),
        };
        Self::of_pair(py, weights, target, activation, input_scale)
    }

    /// From one matrix that holds both halves in a named order.
    #[staticmethod]
    #[pyo3(signature = (gate_up, *, order, activation = "silu", input_scale = None, device = None))]
    fn from_fused(
        py: Python<'_>,
        gate_up: &Bound<'_, PyAny>,
        order: &str,
        activation: &str,
        input_scale: Option<f32>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<Self>> {
        let target = device_target(device)?;
        let (order, activation) = (options::order(order)?, options::activation(activation)?);
        checked_input_scale("input_scale", input_scale)?;
        let source = Quantized::of("gate_up", gate_up)?;
        let fused = source.matrix("gate_up")?;
        if !fused.rows().is_multiple_of(order.row_multiple()) {
            let rule = dualgemm::checkpoint::Error::FusedRows {
                tensor: fused.name().into(),
                order: order.name(),
                rows: fused.rows(),
                multiple: order.row_multiple(),
            };
            // The rule of a file, of an array here.
            return Err(Kind::Operand.raise(rule.to_string()));
        }
        let half = |name, half| half_of(name, &fused, order, half).map_err(facade);
        let pair = GateUp::new(half("gate_up (gate)", Half::Gate)?, half("gate_up (up)", Half::Up)?);
        Self::of_pair(py, pair, target, activation, input_scale)
    }

    /// nvfp4 or mxfp4.
    #[getter]
    fn format(&self) -> String {
        self.facts.format.to_string()
    }

    /// The function of both products that `swiglu` computes unless told otherwise.
    #[getter]
    fn activation(&self) -> String {
        self.activation.to_string()
    }

    /// Scale by which A is quantized with `quantize_a="static"`, a multiplier; `None` if there is none.
    #[getter]
    fn input_scale(&self) -> Option<f32> {
        self.facts.input_scale
    }

    /// Names of the gate and the up tensor.
    #[getter]
    fn names(&self) -> (String, String) {
        (self.facts.names[0].clone(), self.facts.names[1].clone())
    }

    /// Tensor scales of gate and up, multipliers.
    #[getter]
    fn global_scales(&self) -> (f32, f32) {
        (self.facts.global_scales[0], self.facts.global_scales[1])
    }

    fn __repr__(&self) -> String {
        let Self { activation, facts: Facts { n, k, format, names, .. }, .. } = self;
        format!("<dualgemm.Weights {} and {}: 2 x [{n}, {k}] {format}, {activation}>", names[0], names[1])
    }

    /// Overwrites weights of a GPU with others of the same shape, format and tensor scales in its memory, on a stream, for
    /// which nothing waits: for tasks whose weights change with every call.
    fn _refill(
        slf: &Bound<'_, Self>,
        gate: &Bound<'_, PyAny>,
        up: &Bound<'_, PyAny>,
        stream: u64,
    ) -> PyResult<()> {
        let (gate, up) = (Quantized::of("gate", gate)?, Quantized::of("up", up)?);
        let (pair, target) = device_pair((&gate, &up), [None; 2])?;
        match &slf.as_super().get().layer {
            PackedLayer { weights: AnyWeights::Product(weights), target: own, .. } if target == *own => {
                // SAFETY: the arrays say what they are; torch keeps memory that its stream, which this is, still reads.
                unsafe { weights.refill_device(&pair, Stream::raw(stream)) }.map_err(facade)
            }
            own => {
                let own = &own.target;
                Err(Kind::Operand.raise(format!("gate: is on {target} and the weights are on {own}")))
            }
        }
    }

    /// Checks what says how C is computed, as every run does.
    #[pyo3(signature = (quantize_a, activation_name))]
    fn _check(&self, quantize_a: &Bound<'_, PyAny>, activation_name: Option<&str>) -> PyResult<()> {
        activation_name.map(options::activation).transpose()?;
        self.facts.quantize("quantize_a", quantize_a).map(drop)
    }

    /// Computes C of a 2-D A into `out`: an array, or the codes and scales of a re-quantized C with their layout, its
    /// tensor scale (`None`: from C) and, on a GPU, an array for the latter. Returns the tensor scale of a re-quantized
    /// C where it is known. `stream` is a CUDA stream, for arrays on a GPU.
    fn _run(
        slf: &Bound<'_, Self>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        quantize_a: &Bound<'_, PyAny>,
        activation_name: Option<&str>,
        round_gate_up_to_bf16: bool,
        stream: u64,
    ) -> PyResult<Option<f32>> {
        let (source, mut out, this) = (Source::of("a", a)?, Destination::of(out)?, slf.get());
        let activation = activation_name.map_or(Ok(this.activation), options::activation)?;
        let epilogue = Epilogue { activation, round_gate_up_to_bf16, ..Epilogue::default() };
        let quantize_a = this.facts.quantize("quantize_a", quantize_a)?;
        let call = Call { source: &source, out: &mut out, stream, choices: None };
        let settings = |m, a, out| LayerCall { quantize_a, epilogue, ..LayerCall::new(m, a, out) };
        slf.as_super().get().compute(slf.py(), call, settings)
    }
}
