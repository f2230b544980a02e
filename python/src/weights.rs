//! `Weights`: gate and up of one MLP in kernel order, made once and shared by every call and thread.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dualgemm::checkpoint::{GateUpOrder, Half};
use dualgemm::cpu::CpuOptions;
use dualgemm::formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout};
use dualgemm::gemm::{
    AFormat, Activation, DualGemmDesc, Epilogue, GateUp, OutFormat, OutScale, OutputMut, QuantizeA,
};
use dualgemm::{DualGemm, PackedWeights, Runner, Target};
use dualgemm_cli::args::{self, EpilogueArgs, LayerArgs, NibbleOrderArg, ReadArgs};
use dualgemm_cli::layer::{self, Layer};
use half::{bf16, f16};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::array::{Array, Dtype};
use crate::error::{self, Kind, facade};
use crate::operand::{Quantized, Source, layout};
use crate::pool;

/// Runners that are kept for further calls: the problems that one layer meets while decoding and prefilling.
const RUNNERS: usize = 8;

/// Gate and up of one gated MLP in the order of the kernels.
#[pyclass(module = "dualgemm", frozen, weakref)]
pub struct Weights {
    packed: PackedWeights,
    n: usize,
    k: usize,
    format: BlockFormat,
    activation: Activation,
    input_scale: Option<f32>,
    output_scale: Option<f32>,
    names: (String, String),
    global_scales: (f32, f32),
    bytes: usize,
    runners: Mutex<Vec<(DualGemmDesc, usize, Runner)>>,
}

/// What the checkpoint says beside the weights.
struct Found {
    activation: Activation,
    input_scale: Option<f32>,
    output_scale: Option<f32>,
}

fn plan_for_packing(n: usize, k: usize, format: BlockFormat) -> Result<dualgemm::Plan, dualgemm::Error> {
    DualGemm::plan(&DualGemmDesc::new(1, n, k, AFormat::F32, format), &Target::default())
}

/// Where in a checkpoint a layer is and how the checkpoint is to be read: the keywords of `Weights.from_checkpoint`.
pub struct LayerOptions {
    layer: LayerArgs,
    epilogue: EpilogueArgs,
    rank: usize,
    world: usize,
}

impl LayerOptions {
    /// From keywords; an unknown one is a `TypeError`.
    pub fn of(layer: Option<usize>, keywords: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let read = ReadArgs {
            convention: None,
            gate_up_order: None,
            nibble_order: NibbleOrderArg::LoHi,
            scale_layout: None,
            within: None,
            unusable_input_scale_is_one: false,
        };
        let mut this = Self {
            layer: LayerArgs { layer, expert: None, shared_expert: false, read },
            epilogue: EpilogueArgs { activation: None, round_gate_up_to_bf16: false },
            rank: 0,
            world: 1,
        };
        for (key, value) in keywords.into_iter().flatten() {
            this.set(&key.extract::<String>()?, &value)?;
        }
        Ok(this)
    }

    fn set(&mut self, key: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let text = || value.extract::<String>();
        let read = &mut self.layer.read;
        match key {
            "rank" => self.rank = value.extract()?,
            "world" => self.world = value.extract()?,
            "shared_expert" => self.layer.shared_expert = value.extract()?,
            "unusable_input_scale_is_one" => read.unusable_input_scale_is_one = value.extract()?,
            "expert" => self.layer.expert = value.extract()?,
            "convention" => read.convention = value.extract()?,
            "within" => read.within = value.extract()?,
            // The rest are names, for which None is the default.
            "activation" | "gate_up_order" | "nibble_order" | "scale_layout" if value.is_none() => {}
            "activation" => self.epilogue.activation = Some(activation(&text()?)?),
            "gate_up_order" => read.gate_up_order = Some(order(&text()?)?),
            "nibble_order" => {
                read.nibble_order = match text()?.as_str() {
                    "lo-hi" => NibbleOrderArg::LoHi,
                    "hi-lo" => NibbleOrderArg::HiLo,
                    other => {
                        let message = format!("nibble_order `{other}` is unknown; valid are lo-hi, hi-lo");
                        return Err(Kind::Argument.raise(message));
                    }
                }
            }
            "scale_layout" => {
                read.scale_layout = Some(match layout(&text()?)? {
                    ScaleLayout::Linear => args::ScaleLayoutArg::Linear,
                    ScaleLayout::Sf128x4 => args::ScaleLayoutArg::Sf128x4,
                    ScaleLayout::Sf8x4 => args::ScaleLayoutArg::Sf8x4,
                });
            }
            _ => return Err(PyTypeError::new_err(format!("unexpected keyword argument '{key}'"))),
        }
        Ok(())
    }

    /// Opens the checkpoint and hands the layer, what the checkpoint says about it and this rank's features to
    /// `use_it`, with the GIL released.
    pub fn with_layer<R: Send>(
        &self,
        py: Python<'_>,
        path: &Path,
        use_it: impl FnOnce(&Layer<'_>, Epilogue, Range<usize>) -> anyhow::Result<R> + Send,
    ) -> PyResult<R> {
        let result = pool::run(py, || {
            let checkpoint = layer::open(path, &self.layer.read)?;
            let layer = Layer::of(&checkpoint, &self.layer)?;
            let (epilogue, _) = layer::epilogue(&checkpoint, &self.epilogue)?;
            let features = layer.shard(self.rank, self.world)?;
            use_it(&layer, epilogue, features)
        })?;
        result.map_err(|error| error::command(&error))
    }

    /// The rank and how many there are.
    pub fn rank(&self) -> (usize, usize) {
        (self.rank, self.world)
    }
}

fn order(name: &str) -> PyResult<GateUpOrder> {
    name.parse().map_err(|error: dualgemm::checkpoint::Error| Kind::Argument.raise(error.to_string()))
}

/// An activation by name, with its numbers after a colon.
pub fn activation(name: &str) -> PyResult<Activation> {
    args::parse_activation(name)
        .map_err(|valid| Kind::Argument.raise(format!("activation `{name}` is unknown; {valid}")))
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

fn values(name: &str, bias: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<f32>>> {
    let Some(bias) = bias else { return Ok(None) };
    let array = Array::on_cpu(name, bias)?;
    match array.dtype {
        Dtype::F32 => Ok(Some(array.gather())),
        Dtype::F16 => Ok(Some(array.gather::<f16>().into_iter().map(f16::to_f32).collect())),
        Dtype::Bf16 => Ok(Some(array.gather::<bf16>().into_iter().map(bf16::to_f32).collect())),
        other => {
            Err(Kind::Operand.raise(format!("{name}: is {other}; float32, float16 or bfloat16 is needed")))
        }
    }
}

impl Weights {
    fn new(
        packed: PackedWeights,
        (gate, up): (&QuantizedMatrix<'_>, &QuantizedMatrix<'_>),
        found: Found,
    ) -> Self {
        let PackedWeights::Cpu(cpu) = &packed else { unreachable!("packed for the processor") };
        Self {
            n: cpu.n(),
            k: cpu.k(),
            format: cpu.format(),
            bytes: cpu.bytes(),
            activation: found.activation,
            input_scale: found.input_scale,
            output_scale: found.output_scale,
            names: (gate.name().into(), up.name().into()),
            global_scales: (gate.global_scale().value(), up.global_scale().value()),
            packed,
            runners: Mutex::default(),
        }
    }

    fn of_pair(
        py: Python<'_>,
        weights: GateUp<'_>,
        activation: Activation,
        input_scale: Option<f32>,
    ) -> PyResult<Self> {
        let packed = pool::run(py, || -> Result<_, dualgemm::Error> {
            weights.check()?;
            plan_for_packing(weights.n(), weights.k(), weights.gate.format())?.prepack(&weights)
        })?
        .map_err(facade)?;
        let found = Found { activation, input_scale, output_scale: None };
        Ok(Self::new(packed, (&weights.gate, &weights.up), found))
    }

    fn quantize_a(&self, how: &Bound<'_, PyAny>) -> PyResult<QuantizeA> {
        if how.is_none() {
            return Ok(QuantizeA::No);
        }
        if let Ok(scale) = how.extract::<f64>() {
            return Ok(QuantizeA::Static(scale as f32));
        }
        match how.extract::<String>()?.as_str() {
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
        DualGemm::plan(desc, &Target::Cpu(CpuOptions::default()))?.runner(1)
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
        layer: Option<usize>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        LayerOptions::of(layer, keywords)?.with_layer(py, &path, |layer, epilogue, features| {
            let plan = plan_for_packing(features.len(), layer.k(), layer.format())?;
            let packed = layer.prepack(&plan, features.clone(), |_| ())?;
            let first = layer.features(features.start..features.start + 1)?;
            let found = Found {
                activation: epilogue.activation,
                // Scales of activations are optional: weights can be used without, and `static` says so then.
                input_scale: layer.input_scale().ok().flatten(),
                output_scale: layer.output_scale().ok().flatten(),
            };
            Ok(Self::new(packed, (&first.gate, &first.up), found))
        })
    }

    /// From two quantized matrices.
    #[staticmethod]
    #[pyo3(signature = (*, gate, up, gate_bias = None, up_bias = None, activation = "silu", input_scale = None))]
    fn from_tensors(
        py: Python<'_>,
        gate: &Bound<'_, PyTuple>,
        up: &Bound<'_, PyTuple>,
        gate_bias: Option<&Bound<'_, PyAny>>,
        up_bias: Option<&Bound<'_, PyAny>>,
        activation: &str,
        input_scale: Option<f32>,
    ) -> PyResult<Self> {
        let activation = self::activation(activation)?;
        let (gate, up) = (Quantized::of("gate", gate)?, Quantized::of("up", up)?);
        let weights = GateUp {
            gate: gate.matrix("gate")?,
            up: up.matrix("up")?,
            gate_bias: values("gate_bias", gate_bias)?.map(Into::into),
            up_bias: values("up_bias", up_bias)?.map(Into::into),
        };
        Self::of_pair(py, weights, activation, input_scale)
    }

    /// From one matrix that holds both halves in a named order.
    #[staticmethod]
    #[pyo3(signature = (gate_up, *, order, activation = "silu", input_scale = None))]
    fn from_fused(
        py: Python<'_>,
        gate_up: &Bound<'_, PyTuple>,
        order: &str,
        activation: &str,
        input_scale: Option<f32>,
    ) -> PyResult<Self> {
        let (order, activation) = (self::order(order)?, self::activation(activation)?);
        let source = Quantized::of("gate_up", gate_up)?;
        let fused = source.matrix("gate_up")?;
        if !fused.rows().is_multiple_of(order.row_multiple()) {
            return Err(facade(dualgemm::checkpoint::Error::FusedRows {
                tensor: fused.name().into(),
                order: order.name(),
                rows: fused.rows(),
                multiple: order.row_multiple(),
            }));
        }
        let half = |name, half| half_of(name, &fused, order, half).map_err(facade);
        let pair = GateUp::new(half("gate_up (gate)", Half::Gate)?, half("gate_up (up)", Half::Up)?);
        Self::of_pair(py, pair, activation, input_scale)
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

    /// Bytes that the packed weights take.
    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes
    }

    fn __repr__(&self) -> String {
        let Self { n, k, format, activation, names, .. } = self;
        format!("<dualgemm.Weights {} and {}: 2 x [{n}, {k}] {format}, {activation}>", names.0, names.1)
    }

    /// Computes C of a 2-D A into `out`: an array, or the codes and scales of a re-quantized C with their layout and
    /// tensor scale (`None`: from C). Returns the tensor scale of a re-quantized C.
    fn _run(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        quantize_a: &Bound<'_, PyAny>,
        activation_name: Option<&str>,
        round_gate_up_to_bf16: bool,
    ) -> PyResult<Option<f32>> {
        let source = Source::of("a", a)?;
        let operand = source.operand("a")?;
        let activation = activation_name.map_or(Ok(self.activation), activation)?;
        let epilogue = Epilogue { activation, round_gate_up_to_bf16, ..Epilogue::default() };
        let mut destination = Destination::of(out)?;
        destination.check(&source, operand.rows(), self.n)?;
        let desc = DualGemmDesc {
            quantize_a: self.quantize_a(quantize_a)?,
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

/// Where C goes.
enum Destination<'py> {
    Float(Array<'py>),
    Nvfp4 { codes: Array<'py>, scales: Array<'py>, layout: ScaleLayout, scale: OutScale },
}

impl<'py> Destination<'py> {
    fn of(out: &Bound<'py, PyAny>) -> PyResult<Self> {
        if !out.is_instance_of::<PyTuple>() {
            return Ok(Self::Float(Array::on_cpu("out", out)?));
        }
        let (codes, scales, layout_name, scale): (Bound<'py, PyAny>, Bound<'py, PyAny>, String, Option<f32>) =
            out.extract()?;
        Ok(Self::Nvfp4 {
            codes: Array::on_cpu("out codes", &codes)?,
            scales: Array::on_cpu("out scales", &scales)?,
            layout: layout(&layout_name)?,
            scale: scale.map_or(OutScale::Dynamic, OutScale::Static),
        })
    }

    fn arrays(&self) -> Vec<&Array<'py>> {
        match self {
            Self::Float(array) => vec![array],
            Self::Nvfp4 { codes, scales, .. } => vec![codes, scales],
        }
    }

    fn check(&self, source: &Source<'_>, rows: usize, n: usize) -> PyResult<()> {
        let shape = match self {
            Self::Float(array) => (array, vec![rows, n]),
            Self::Nvfp4 { codes, .. } => (codes, vec![rows, n / 2]),
        };
        if shape.0.shape != shape.1 {
            let message = format!("out: shape {:?}; {:?} is needed", shape.0.shape, shape.1);
            return Err(Kind::Operand.raise(message));
        }
        let overlap = |range: &Range<usize>| {
            self.arrays().iter().any(|array| {
                let own = array.extent();
                own.start < range.end && range.start < own.end
            })
        };
        if source.extents().iter().any(overlap) {
            return Err(Kind::Operand.raise("out: shares memory with a; C cannot be computed in place"));
        }
        Ok(())
    }

    fn format(&self) -> OutFormat {
        match self {
            Self::Float(array) => match array.dtype {
                Dtype::F16 => OutFormat::F16,
                Dtype::Bf16 => OutFormat::Bf16,
                _ => OutFormat::F32,
            },
            Self::Nvfp4 { layout, scale, .. } => {
                OutFormat::Nvfp4 { scale_layout: *layout, global_scale: *scale }
            }
        }
    }

    fn output(&mut self) -> PyResult<OutputMut<'_>> {
        Ok(match self {
            Self::Float(array) => match array.dtype {
                Dtype::F32 => OutputMut::F32(array.as_mut_slice("out")?),
                Dtype::F16 => OutputMut::F16(array.as_mut_slice("out")?),
                Dtype::Bf16 => OutputMut::Bf16(array.as_mut_slice("out")?),
                other => {
                    let message = format!("out: is {other}; float32, float16 or bfloat16 is needed");
                    return Err(Kind::Operand.raise(message));
                }
            },
            Self::Nvfp4 { codes, scales, .. } => OutputMut::Nvfp4 {
                codes: bytes_mut("out codes", codes)?,
                scales: bytes_mut("out scales", scales)?,
            },
        })
    }
}

/// An array of one-byte elements that can be written.
pub fn bytes_mut<'a>(name: &str, array: &'a mut Array<'_>) -> PyResult<&'a mut [u8]> {
    match array.dtype.size() {
        1 => array.as_mut_slice(name),
        _ => Err(Kind::Operand.raise(format!("{name}: is {}; a type of one byte is needed", array.dtype))),
    }
}

/// The tensor scale that the caller names, a multiplier.
pub fn multiplier(scale: Option<f32>) -> Option<GlobalScale> {
    scale.map(GlobalScale::multiplier)
}
