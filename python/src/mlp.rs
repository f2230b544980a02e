//! `Mlp`: gate, up and down of one MLP in kernel order, and what mixtures of them share with it.

use dualgemm::formats::ScaleLayout;
use dualgemm::gemm::{
    AFormat, Activation, DualGemmDesc, Epilogue, GateUp, GatedMlp, Linear, MlpDesc, OutFormat, OutScale,
    QuantizeA,
};
use dualgemm::{AnyDesc, AnyWeights, DualGemm, PackedMlp, Target};
use dualgemm_cli::layer::Layer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::destination::Destination;
use crate::error::{Kind, facade};
use crate::facts::{Facts, checked_input_scale, linear_of, pack_linear, values};
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
    /// The problem of `m` rows. What is between the products has the type of A, f32 where A is quantized.
    pub fn desc(
        &self,
        m: usize,
        a: AFormat,
        out: OutFormat,
        [quantize_a, hidden]: [QuantizeA; 2],
    ) -> MlpDesc {
        let scaled = |global_scale| OutFormat::Nvfp4 { scale_layout: ScaleLayout::Linear, global_scale };
        let between = match (hidden, a) {
            (QuantizeA::Static(scale), _) => scaled(OutScale::Static(scale)),
            (QuantizeA::Dynamic, _) => scaled(OutScale::Dynamic),
            (QuantizeA::No, AFormat::F16) => OutFormat::F16,
            (QuantizeA::No, AFormat::Bf16) => OutFormat::Bf16,
            (QuantizeA::No, _) => OutFormat::F32,
        };
        let Self { gate_up, down, activation } = self;
        let epilogue = Epilogue { activation: *activation, ..Epilogue::default() };
        let desc = DualGemmDesc::new(m, gate_up.n, gate_up.k, a, gate_up.format);
        MlpDesc::new(DualGemmDesc { quantize_a, out: between, epilogue, ..desc }, down.n, down.format, out)
    }

    /// Both arguments that say what is quantized on the way.
    pub fn quantize(&self, a: &Bound<'_, PyAny>, hidden: &Bound<'_, PyAny>) -> PyResult<[QuantizeA; 2]> {
        Ok([self.gate_up.quantize("quantize_a", a)?, self.down.quantize("quantize_hidden", hidden)?])
    }

    fn of(mlp: &GatedMlp<'_>, activation: Activation, scales: [Option<f32>; 2]) -> Self {
        let GatedMlp { gate_up, down } = mlp;
        Self {
            gate_up: Facts::of(&[&gate_up.gate, &gate_up.up], scales[0]),
            down: Facts::of(&[&down.weight], scales[1]),
            activation,
        }
    }
}

/// An MLP of a checkpoint, this rank's part of it: features of gate and up, columns of down, whose bias rank 0 adds.
pub fn read_layer<'c>(layer: &Layer<'c>, options: &LayerOptions) -> anyhow::Result<(GatedMlp<'c>, MlpFacts)> {
    let activation = layer.activation()?.activation;
    let gate_up = layer.features(layer.shard(options.rank, options.world)?)?;
    let (down, down_scale) = linear_of(layer.down()?);
    let weight = match options.world {
        1 => down.weight,
        world => down.weight.shard_k(options.rank, world)?.into_owned(),
    };
    let down = Linear { weight, bias: down.bias.filter(|_| options.rank == 0) };
    let mlp = GatedMlp { gate_up, down };
    let facts = MlpFacts::of(&mlp, activation, [options::input_scale_of(layer), down_scale]);
    check_chained(&facts.gate_up, &mlp.down)?;
    Ok((mlp, facts))
}

/// Checks an MLP and brings it into the order of the kernels.
pub fn pack(mlp: &GatedMlp<'_>, facts: &MlpFacts, target: &Target) -> Result<PackedMlp, dualgemm::Error> {
    let Facts { n, k, format, .. } = facts.gate_up;
    let gate_up = DualGemm::plan_for_packing((n, k), format, target)?.prepack(&mlp.gate_up)?;
    Ok(PackedMlp { gate_up, down: pack_linear(&mlp.down, target)? })
}

fn check_chained(gate_up: &Facts, down: &Linear<'_>) -> Result<(), dualgemm::Error> {
    if gate_up.n == down.k() {
        return Ok(());
    }
    Err(dualgemm::Error::Gemm(dualgemm::gemm::Error::Operand {
        tensor: down.weight.name().into(),
        found: format!("[{}, {}]", down.n(), down.k()),
        expected: format!("K = {}, the features of {}", gate_up.n, gate_up.names[0]),
    }))
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
        let down = Linear { weight: self.down.matrix(&named("down"))?, bias: down_bias };
        let mlp = GatedMlp { gate_up: GateUp { gate, up, gate_bias, up_bias }, down };
        let facts = MlpFacts::of(&mlp, activation, self.input_scales);
        mlp.gate_up.check().map_err(|error| facade(dualgemm::Error::from(error)))?;
        check_chained(&facts.gate_up, &mlp.down).map_err(facade)?;
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
    pub fn base(weights: AnyWeights, target: Target, facts: MlpFacts) -> PyClassInitializer<Self> {
        let base = Packed::new(weights, target, (facts.down.n, facts.gate_up.k));
        PyClassInitializer::from(base).add_subclass(Self { facts })
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

impl Mlp {
    fn make(py: Python<'_>, packed: PackedMlp, target: Target, facts: MlpFacts) -> PyResult<Py<Self>> {
        Py::new(py, Gated::base(AnyWeights::Mlp(packed), target, facts).add_subclass(Self))
    }
}

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
            let (gate_up, _) = options::pack_layer(layer, features, &options.target)?;
            Ok((PackedMlp { gate_up, down: pack_linear(&mlp.down, &options.target)? }, facts))
        })?;
        let this = Self::make(py, packed, options.target, facts)?;
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
        let packed = pool::run(py, || pack(&mlp, &facts, &target))?.map_err(facade)?;
        Self::make(py, packed, target, facts)
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
            return Err(Kind::Operand.raise("out: is a tuple; an array of floats is needed"));
        }
        let gated = slf.as_super();
        let facts = &gated.get().facts;
        let quantize = facts.quantize(quantize_a, quantize_hidden)?;
        let call = Call { source: &source, out: &mut out, stream, choices: None };
        let describe = |m, a, out| AnyDesc::Mlp(facts.desc(m, a, out, quantize));
        gated.as_super().get().compute(slf.py(), call, describe).map(drop)
    }
}
