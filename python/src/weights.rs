//! `Weights`: gate and up of one MLP in kernel order, made once and shared by every call and thread.

use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};

use dualgemm::checkpoint::{GateUpOrder, Half};
use dualgemm::formats::{BlockFormat, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{AFormat, Activation, DualGemmDesc, Epilogue, GateUp, QuantizeA};
use dualgemm::{DualGemm, PackedWeights, Runner, Target};
use dualgemm_cli::layer::InputScales;
use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::array::{Array, Dtype, Place};
use crate::destination::Destination;
use crate::error::{Kind, facade};
use crate::operand::{Quantized, Source};
use crate::options::{self, LayerOptions, device_target};
use crate::{device, pool};

/// Runners that are kept for further calls: the problems that one layer meets while decoding and prefilling.
const RUNNERS: usize = 8;

/// How many weights this process has made.
static MADE: AtomicI64 = AtomicI64::new(0);

/// Gate and up of one gated MLP in the order of the kernels.
#[pyclass(module = "dualgemm", frozen, weakref)]
pub struct Weights {
    pub packed: PackedWeights,
    pub target: Target,
    pub n: usize,
    pub k: usize,
    pub format: BlockFormat,
    activation: Activation,
    input_scale: Option<f32>,
    output_scale: Option<f32>,
    names: (String, String),
    global_scales: (f32, f32),
    bytes: usize,
    number: i64,
    runners: Mutex<Vec<(DualGemmDesc, usize, Runner)>>,
    pub launchers: device::Launchers,
}

/// What is known beside the weights.
pub struct Found {
    pub activation: Activation,
    pub input_scale: Option<f32>,
    pub output_scale: Option<f32>,
}

fn packed_bytes(packed: &PackedWeights) -> usize {
    match packed {
        PackedWeights::Cpu(weights) => weights.bytes(),
        PackedWeights::Gpu(weights) => weights.bytes(),
        _ => 0,
    }
}

/// One half of a fused matrix, copied.
fn half_of(
    name: &str,
    fused: &QuantizedMatrix<'_>,
    order: GateUpOrder,
    half: Half,
) -> Result<QuantizedMatrix<'static>, dualgemm::Error> {
    let n = fused.rows() / 2;
    let rows = || (0..n).map(|row| order.fused_row(half, row, n));
    let codes: Vec<u8> = rows().flat_map(|row| fused.row_codes(row)).copied().collect();
    let scales: Vec<u8> =
        rows().flat_map(|row| (0..fused.blocks()).map(move |block| fused.scale_byte(row, block))).collect();
    let linear = ScaleLayout::Linear;
    Ok(QuantizedMatrix::new(name, fused.format(), n, fused.k(), codes, scales, linear, fused.global_scale())?)
}

/// An input scale as a caller gives it.
fn checked_input_scale(scale: Option<f32>) -> PyResult<()> {
    match scale {
        Some(scale) if !(scale > 0.0 && scale.is_finite()) => {
            Err(Kind::Operand.raise(format!("input_scale: is {scale}; a positive finite number is needed")))
        }
        _ => Ok(()),
    }
}

fn values(name: &str, bias: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<f32>>> {
    let Some(bias) = bias else { return Ok(None) };
    let array = Array::on_cpu(name, bias)?;
    if array.shape.len() != 1 {
        return Err(Kind::Operand.raise(format!("{name}: shape {:?}; [N] is needed", array.shape)));
    }
    match array.dtype {
        Dtype::F32 => Ok(Some(array.gather(name)?)),
        Dtype::F16 => Ok(Some(array.gather::<f16>(name)?.into_iter().map(f16::to_f32).collect())),
        Dtype::Bf16 => Ok(Some(array.gather::<bf16>(name)?.into_iter().map(bf16::to_f32).collect())),
        other => {
            Err(Kind::Operand.raise(format!("{name}: is {other}; float32, float16 or bfloat16 is needed")))
        }
    }
}

impl Weights {
    fn new(packed: PackedWeights, target: Target, first: &GateUp<'_>, n: usize, found: Found) -> Self {
        let (gate, up) = (&first.gate, &first.up);
        let scales = (gate.global_scale().value(), up.global_scale().value());
        Self {
            names: (gate.name().into(), up.name().into()),
            ..Self::on_device(packed, target, (gate.format(), n, gate.k()), scales, found)
        }
    }

    /// Weights without names, as a GPU packs them.
    pub fn on_device(
        packed: PackedWeights,
        target: Target,
        (format, n, k): (BlockFormat, usize, usize),
        global_scales: (f32, f32),
        found: Found,
    ) -> Self {
        let bytes = packed_bytes(&packed);
        let Found { activation, input_scale, output_scale } = found;
        Self {
            n,
            k,
            format,
            bytes,
            activation,
            input_scale,
            output_scale,
            names: ("gate".into(), "up".into()),
            global_scales,
            packed,
            target,
            number: MADE.fetch_add(1, Ordering::Relaxed),
            runners: Mutex::default(),
            launchers: device::Launchers::default(),
        }
    }

    /// The name of the target.
    pub fn device_name(&self) -> String {
        match &self.target {
            Target::Gpu(id, _) => id.to_string(),
            _ => "cpu".into(),
        }
    }

    fn of_pair(
        py: Python<'_>,
        weights: GateUp<'_>,
        target: Target,
        activation: Activation,
        input_scale: Option<f32>,
    ) -> PyResult<Self> {
        let packed = pool::run(py, || -> Result<_, dualgemm::Error> {
            weights.check()?;
            let shape = (weights.n(), weights.k());
            DualGemm::plan_for_packing(shape, weights.gate.format(), &target)?.prepack(&weights)
        })?
        .map_err(facade)?;
        let found = Found { activation, input_scale, output_scale: None };
        Ok(Self::new(packed, target, &weights, weights.n(), found))
    }

    fn quantize_a(&self, how: &Bound<'_, PyAny>) -> PyResult<QuantizeA> {
        if how.is_none() {
            return Ok(QuantizeA::No);
        }
        // True is a number to Python, and numpy's too; as a tensor scale nobody means it.
        let is_bool = how.get_type().name()?.to_string().starts_with("bool");
        if let (false, Ok(scale)) = (is_bool, how.extract::<f64>()) {
            return Ok(QuantizeA::Static(scale as f32));
        }
        match how.str()?.extract::<String>()?.as_str() {
            "dynamic" => Ok(QuantizeA::Dynamic),
            "static" => self.input_scale.map(QuantizeA::Static).ok_or_else(|| {
                let name = &self.names.0;
                Kind::Operand.raise(format!(
                    "{name}: has no input scale; quantize_a=\"dynamic\" or a number is needed"
                ))
            }),
            other => {
                let message = format!(
                    "quantize_a `{other}` is unknown; valid are None, \"static\", \"dynamic\" or a number"
                );
                Err(Kind::Argument.raise(message))
            }
        }
    }

    /// A runner for the problem: one that an earlier call has left, or a new one. Two calls never share one, so
    /// threads do not wait for each other.
    fn take_runner(&self, desc: &DualGemmDesc) -> Result<Runner, dualgemm::Error> {
        let threads = rayon::current_num_threads();
        let mut kept = self.runners.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = kept.iter().position(|(known, t, _)| known == desc && *t == threads) {
            return Ok(kept.swap_remove(at).2);
        }
        drop(kept);
        DualGemm::plan(desc, &self.target)?.runner(1)
    }

    fn leave_runner(&self, desc: DualGemmDesc, runner: Runner) {
        let mut kept = self.runners.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == RUNNERS {
            kept.remove(0);
        }
        kept.push((desc, rayon::current_num_threads(), runner));
    }
}

#[pymethods]
impl Weights {
    /// Gate and up of a layer of a checkpoint, read a run of features at a time.
    #[staticmethod]
    #[pyo3(signature = (path, layer = None, **keywords))]
    fn from_checkpoint(
        py: Python<'_>,
        path: PathBuf,
        layer: Option<&Bound<'_, PyAny>>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let options = LayerOptions::of(layer, keywords)?;
        let target = options.target.clone();
        options.with_layer(py, &path, |layer, features| {
            let activation = layer.activation()?.activation;
            let shape = (features.len(), layer.k());
            let plan = DualGemm::plan_for_packing(shape, layer.format(), &target)?;
            let packed = layer.prepack(&plan, features.clone(), |_| ())?;
            let first = layer.features(features.start..features.start + 1)?;
            let found = Found {
                activation,
                // Scales of activations are optional: weights can be used without, and `static` says so then.
                input_scale: layer.input_scales().ok().flatten().map(InputScales::used),
                output_scale: layer.output_scale().ok().flatten(),
            };
            Ok(Self::new(packed, target, &first, features.len(), found))
        })
    }

    /// From two quantized matrices.
    #[staticmethod]
    #[pyo3(signature = (*, gate, up, gate_bias = None, up_bias = None, activation = "silu", input_scale = None, device = None, stream = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn from_tensors(
        py: Python<'_>,
        gate: &Bound<'_, PyTuple>,
        up: &Bound<'_, PyTuple>,
        gate_bias: Option<&Bound<'_, PyAny>>,
        up_bias: Option<&Bound<'_, PyAny>>,
        activation: &str,
        input_scale: Option<f32>,
        device: Option<&Bound<'_, PyAny>>,
        stream: Option<u64>,
    ) -> PyResult<Self> {
        let activation = options::activation(activation)?;
        checked_input_scale(input_scale)?;
        let (gate, up) = (Quantized::of("gate", gate)?, Quantized::of("up", up)?);
        let (gate_bias, up_bias) = (values("gate_bias", gate_bias)?, values("up_bias", up_bias)?);
        if gate.place() != Place::Cpu {
            let found = Found { activation, input_scale, output_scale: None };
            return Self::of_device_pair(py, (&gate, &up), [gate_bias, up_bias], found, stream);
        }
        if stream.is_some() {
            return Err(Kind::Operand.raise("stream is for matrices on a GPU; gate is on the processor"));
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
        gate_up: &Bound<'_, PyTuple>,
        order: &str,
        activation: &str,
        input_scale: Option<f32>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let target = device_target(device)?;
        let (order, activation) = (options::order(order)?, options::activation(activation)?);
        checked_input_scale(input_scale)?;
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

    /// `(N, K)`: features of each half and elements per feature.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// nvfp4 or mxfp4.
    #[getter]
    fn format(&self) -> String {
        self.format.to_string()
    }

    /// The function of both products that `swiglu` computes unless told otherwise.
    #[getter]
    fn activation(&self) -> String {
        self.activation.to_string()
    }

    /// Scale by which A is quantized with `quantize_a="static"`, a multiplier; `None` if there is none.
    #[getter]
    fn input_scale(&self) -> Option<f32> {
        self.input_scale
    }

    /// Scale by which the down projection expects C, a multiplier; `None` if there is none.
    #[getter]
    fn output_scale(&self) -> Option<f32> {
        self.output_scale
    }

    /// Names of the gate and the up tensor.
    #[getter]
    fn names(&self) -> (String, String) {
        self.names.clone()
    }

    /// Tensor scales of gate and up, multipliers.
    #[getter]
    fn global_scales(&self) -> (f32, f32) {
        self.global_scales
    }

    /// Where the weights are and the product is computed: cpu, cuda:N or sim:ARCH.
    #[getter]
    fn device(&self) -> String {
        self.device_name()
    }

    /// Bytes that the packed weights take.
    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes
    }

    /// The number by which graphs of torch know these weights. No other weights of this process ever have it, as they
    /// may have the address; whoever asks for it can be found by it.
    #[getter]
    fn _number(this: &Bound<'_, Self>) -> PyResult<i64> {
        let number = this.get().number;
        this.py().import("dualgemm._torch")?.getattr("WEIGHTS")?.set_item(number, this)?;
        Ok(number)
    }

    /// Weights never change: a copy is the same.
    fn __copy__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __deepcopy__(this: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        this
    }

    fn __repr__(&self) -> String {
        let Self { n, k, format, activation, names, .. } = self;
        format!("<dualgemm.Weights {} and {}: 2 x [{n}, {k}] {format}, {activation}>", names.0, names.1)
    }

    /// Checks what says how C is computed, as every run does.
    #[pyo3(signature = (quantize_a, activation_name))]
    fn _check(&self, quantize_a: &Bound<'_, PyAny>, activation_name: Option<&str>) -> PyResult<()> {
        activation_name.map(options::activation).transpose()?;
        self.quantize_a(quantize_a).map(drop)
    }

    /// Computes C of a 2-D A into `out`: an array, or the codes and scales of a re-quantized C with their layout, its
    /// tensor scale (`None`: from C) and, on a GPU, an array for the latter. Returns the tensor scale of a re-quantized
    /// C where it is known. `stream` is a CUDA stream, for arrays on a GPU.
    #[expect(clippy::too_many_arguments, reason = "what the Python side has sorted out")]
    fn _run(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        quantize_a: &Bound<'_, PyAny>,
        activation_name: Option<&str>,
        round_gate_up_to_bf16: bool,
        stream: u64,
    ) -> PyResult<Option<f32>> {
        let source = Source::of("a", a)?;
        let activation = activation_name.map_or(Ok(self.activation), options::activation)?;
        let epilogue = Epilogue { activation, round_gate_up_to_bf16, ..Epilogue::default() };
        let mut destination = Destination::of(out)?;
        let quantize_a = self.quantize_a(quantize_a)?;
        if source.place() != Place::Cpu {
            return self.run_device(py, &source, &destination, quantize_a, epilogue, stream);
        }
        let operand = source.operand("a")?;
        destination.check(&source, operand.rows(), self.n)?;
        let desc = DualGemmDesc {
            quantize_a,
            out: destination.format(),
            epilogue,
            ..DualGemmDesc::new(operand.rows(), self.n, self.k, AFormat::of(&operand), self.format)
        };
        let c = destination.output()?;
        pool::run(py, || {
            let mut runner = self.take_runner(&desc)?;
            let scale = runner.run(&operand, &self.packed, c)?;
            self.leave_runner(desc, runner);
            Ok(scale)
        })?
        .map_err(|error: dualgemm::Error| facade(error))
    }
}
