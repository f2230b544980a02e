//! `Mlp`: gate, up and down of one MLP in kernel order, and what mixtures of them share with it.

use dualgemm::formats::ScaleLayout;
use dualgemm::gemm::{
    AFormat, Activation, Epilogue, GateUp, GatedMlp, Linear, OutFormat, OutScale, QuantizeA,
};
use dualgemm::layer::check_chained;
use dualgemm::{AnyWeights, LayerCall, LayerShape, PackedLayer, PackedMlp, Target};
use dualgemm_cli::layer::Layer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::destination::Destination;
use crate::error::{facade, refuse};
use crate::facts::{Facts, checked_input_scale, linear_input_scale, values};
use crate::operand::{Quantized, Source};
use crate::options::{self, LayerOptions, device_target};
use crate::packed::{Call, Packed, of_keywords};
use crate::pool;

/// What is known of an MLP beside its packed weights.
#[derive(Debug, Clone)]
pub struct MlpFacts {
    pub gate_up: Facts,
    pub down: Facts,
    pub activation: Activation,
}

impl MlpFacts {
    /// A call with `m` rows. What is between the products has the type of A. Where A is quantized it is f32 on a processor,
    /// and on a GPU, which multiplies none, the type of C or bf16.
    pub fn call(
        &self,
        m: usize,
        a: AFormat,
        out: OutFormat,
        [quantize_a, hidden]: [QuantizeA; 2],
        target: &Target,
    ) -> LayerCall {
        let scaled = |global_scale| OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale };
        let between = match (hidden, a) {
            (QuantizeA::Static(scale), _) => scaled(OutScale::Static(scale)),
            (QuantizeA::Dynamic, _) => scaled(OutScale::Dynamic),
            (QuantizeA::No, a) => match (a.float_type(), target, out) {
                (Some(float), ..) => float.into(),
                (None, Target::Cpu(_), _) => OutFormat::F32,
                (None, _, OutFormat::F16) => OutFormat::F16,
                (None, ..) => OutFormat::Bf16,
            },
        };
        let epilogue = Epilogue { activation: self.activation, ..Epilogue::default() };
        LayerCall { quantize_a, epilogue, between, ..LayerCall::new(m, a, out) }
    }

    /// What one of these MLPs computes.
    pub fn shape(&self) -> LayerShape {
        let Facts { n, k, format, .. } = self.gate_up;
        LayerShape { down: Some((self.down.n, self.down.format)), ..LayerShape::gate_up(n, k, format) }
    }

    /// Both arguments that say what is quantized on the way.
    pub fn quantize(&self, a: &Bound<'_, PyAny>, hidden: &Bound<'_, PyAny>) -> PyResult<[QuantizeA; 2]> {
        Ok([self.gate_up.quantize("quantize_a", a)?, self.down.quantize("quantize_hidden", hidden)?])
    }

    fn of(mlp: &GatedMlp<'_>, activation: Activation, scales: [Option<f32>; 2]) -> Self {
        let GatedMlp { gate_up, down } = mlp;
        Self { gate_up: Facts::of(gate_up, scales[0]), down: Facts::of(down, scales[1]), activation }
    }
}

/// An MLP of a checkpoint, this rank's part of it: features of gate and up, columns of down, whose bias rank 0 adds.
pub fn read_layer<'c>(layer: &Layer<'c>, options: &LayerOptions) -> anyhow::Result<(GatedMlp<'c>, MlpFacts)> {
    let activation = layer.activation()?.activation;
    let gate_up = layer.features(layer.shard(options.rank, options.world)?)?;
    let source = layer.down()?;
    let (down, down_scale) = (source.read()?, linear_input_scale(&source));
    let weight = match options.world {
        1 => down.weight,
        world => down.weight.shard_k(options.rank, world)?.into_owned(),
    };
    let down = Linear { weight, bias: down.bias.filter(|_| options.rank == 0) };
    let mlp = GatedMlp { gate_up, down };
    let facts = MlpFacts::of(&mlp, activation, [options::input_scale_of(layer), down_scale]);
    check_chained(facts.gate_up.n, &facts.gate_up.names[0], &mlp.down)?;
    Ok((mlp, facts))
}

/// The arrays of an MLP, by keyword.
pub struct Tensors<'py> {
    gate: Quantized<'py>,
    up: Quantized<'py>,
    down: Quantized<'py>,
    biases: [Option<Vec<f32>>; 3],
    input_scales: [Option<f32>; 2],
}

impl<'py> Tensors<'py> {
    /// `of` stands before the names in messages.
    pub fn of(of: &str, keywords: &Bound<'py, PyDict>) -> PyResult<Self> {
        const KNOWN: [&str; 8] =
            ["gate", "up", "down", "gate_bias", "up_bias", "down_bias", "input_scale", "down_input_scale"];
        for key in keywords.keys() {
            let key: String = key.extract()?;
            if !KNOWN.contains(&key.as_str()) {
                let message =
                    format!("{of}unexpected keyword argument '{key}'; valid are {}", KNOWN.join(", "));
                return Err(PyTypeError::new_err(message));
            }
        }
        let get = |name: &str| keywords.get_item(name).map(|value| value.filter(|value| !value.is_none()));
        let matrix = |name: &str| match get(name)? {
            Some(value) if value.is_instance_of::<PyTuple>() => Quantized::of(&format!("{of}{name}"), &value),
            Some(other) => {
                let found = other.get_type().name()?;
                Err(PyTypeError::new_err(format!("{of}{name} is a {found}; a dualgemm.Quantized is needed")))
            }
            None => {
                Err(PyTypeError::new_err(format!("{of}{name} is missing; a dualgemm.Quantized is needed")))
            }
        };
        let bias = |name: &str| values(&format!("{of}{name}"), get(name)?.as_ref());
        let scale = |name: &str| {
            let scale = get(name)?.map(|value| value.extract::<f32>()).transpose()?;
            checked_input_scale(&format!("{of}{name}"), scale)?;
            PyResult::Ok(scale)
        };
        Ok(Self {
            gate: matrix("gate")?,
            up: matrix("up")?,
            down: matrix("down")?,
            biases: [bias("gate_bias")?, bias("up_bias")?, bias("down_bias")?],
            input_scales: [scale("input_scale")?, scale("down_input_scale")?],
        })
    }

    /// The MLP, checked.
    pub fn mlp(&self, of: &str, activation: Activation) -> PyResult<(GatedMlp<'_>, MlpFacts)> {
        let [gate_bias, up_bias, down_bias] = self.biases.clone().map(|bias| bias.map(Into::into));
        let named = |name: &str| format!("{of}{name}");
        let (gate, up) = (self.gate.matrix(&named("gate"))?, self.up.matrix(&named("up"))?);
        let down = Linear { weight: self.down.matrix(&named("down"))?.into(), bias: down_bias };
        let mlp = GatedMlp { gate_up: GateUp { gate, up, gate_bias, up_bias }, down };
        let facts = MlpFacts::of(&mlp, activation, self.input_scales);
        mlp.gate_up.check().map_err(|error| facade(dualgemm::Error::from(error)))?;
        check_chained(facts.gate_up.n, &facts.gate_up.names[0], &mlp.down).map_err(facade)?;
        Ok((mlp, facts))
    }
}

/// What MLPs and mixtures of them have in common.
#[pyclass(module = "dualgemm", frozen, subclass, extends = Packed)]
pub struct Gated {
    pub facts: MlpFacts,
}

impl Gated {
    /// What an `Mlp` or `Experts` is made on.
    pub fn base(layer: PackedLayer, facts: MlpFacts) -> PyClassInitializer<Self> {
        PyClassInitializer::from(Packed::new(layer)).add_subclass(Self { facts })
    }
}

#[pymethods]
impl Gated {
    /// Features between the products.
    #[getter]
    fn hidden(&self) -> usize {
        self.facts.gate_up.n
    }

    /// Formats of gate and up, and of down.
    #[getter]
    fn formats(&self) -> (String, String) {
        (self.facts.gate_up.format.to_string(), self.facts.down.format.to_string())
    }

    /// The function of gate and up.
    #[getter]
    fn activation(&self) -> String {
        self.facts.activation.to_string()
    }

    /// Scales by which A, and what is between the products, are quantized with `"static"`: of experts the largest of all;
    /// `None` where there is none.
    #[getter]
    fn input_scales(&self) -> (Option<f32>, Option<f32>) {
        (self.facts.gate_up.input_scale, self.facts.down.input_scale)
    }

    /// Checks what says how C is computed, as every run does.
    fn _check(&self, quantize_a: &Bound<'_, PyAny>, quantize_hidden: &Bound<'_, PyAny>) -> PyResult<()> {
        self.facts.quantize(quantize_a, quantize_hidden).map(drop)
    }
}

/// Gate, up and down of one gated MLP in the order of the kernels.
#[pyclass(module = "dualgemm", frozen, extends = Gated)]
pub struct Mlp;

#[pymethods]
impl Mlp {
    /// The MLP of a layer of a checkpoint.
    #[staticmethod]
    #[pyo3(signature = (path, layer = None, **keywords))]
    fn from_checkpoint(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        layer: Option<&Bound<'_, PyAny>>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<Self>> {
        let options = LayerOptions::of(layer, keywords)?;
        let (packed, facts) = options.with_layer(py, path, |layer, features| {
            layer.check_whole()?;
            let (mlp, facts) = read_layer(layer, &options)?;
            let plan = facts.shape().plan_for_packing(&options.target)?;
            let gate_up = plan.prepack_source(layer.source(), features, |_| ())?;
            let down = dualgemm::layer::pack((&mlp.down).into(), &options.target)?;
            Ok((PackedMlp { gate_up, down }, facts))
        })?;
        let (weights, shape) = (AnyWeights::Mlp(packed), facts.shape());
        let layer_of = PackedLayer { weights, target: options.target, shape };
        let this = Py::new(py, Gated::base(layer_of, facts).add_subclass(Self))?;
        Packed::came_from(this.bind(py), path, layer, of_keywords(py, keywords)?)?;
        Ok(this)
    }

    /// From three quantized matrices, `gate`, `up` and `down`, with `gate_bias`, `up_bias` and `down_bias`, and the scales of
    /// what goes in, `input_scale` and `down_input_scale`.
    #[staticmethod]
    #[pyo3(signature = (*, activation = "silu", device = None, **tensors))]
    fn from_tensors(
        py: Python<'_>,
        activation: &str,
        device: Option<&Bound<'_, PyAny>>,
        tensors: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<Self>> {
        let (activation, target) = (options::activation(activation)?, device_target(device)?);
        let none = PyDict::new(py);
        let tensors = Tensors::of("", tensors.unwrap_or(&none))?;
        let (mlp, facts) = tensors.mlp("", activation)?;
        let layer = pool::run(py, || PackedLayer::mlp(&mlp, target))?.map_err(facade)?;
        Py::new(py, Gated::base(layer, facts).add_subclass(Self))
    }

    /// Names of the gate, the up and the down tensor.
    #[getter]
    fn names(slf: &Bound<'_, Self>) -> Vec<String> {
        let MlpFacts { gate_up, down, .. } = &slf.as_super().get().facts;
        [gate_up, down].iter().flat_map(|facts| facts.names.clone()).collect()
    }

    fn __repr__(slf: &Bound<'_, Self>) -> String {
        let MlpFacts { gate_up: Facts { n, k, format, names, .. }, down, activation } =
            &slf.as_super().get().facts;
        let (h, down_format, last) = (down.n, down.format, &down.names[0]);
        format!(
            "<dualgemm.Mlp {}, {} and {last}: 2 x [{n}, {k}] {format}, {activation}, [{h}, {n}] {down_format}>",
            names[0], names[1]
        )
    }

    /// Computes Y of a 2-D A into an array.
    fn _run(
        slf: &Bound<'_, Self>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        quantize_a: &Bound<'_, PyAny>,
        quantize_hidden: &Bound<'_, PyAny>,
        stream: u64,
    ) -> PyResult<()> {
        let (source, mut out) = (Source::of("a", a)?, Destination::of(out)?);
        if let Destination::Nvfp4 { .. } = out {
            refuse!(Operand, "out: is a tuple; an array of floats is needed");
        }
        let gated = slf.as_super();
        let facts = &gated.get().facts;
        let quantize = facts.quantize(quantize_a, quantize_hidden)?;
        let call = Call { source: &source, out: &mut out, stream, choices: None };
        let packed = gated.as_super().get();
        let settings = |m, a, out| facts.call(m, a, out, quantize, &packed.layer.target);
        packed.compute(slf.py(), call, settings).map(drop)
    }
}
