//! `Mlp`: gate, up and down of one MLP in kernel order, and what mixtures of them share with it.

use dualgemm::formats::ScaleLayout;
use dualgemm::gemm::{
    AFormat, Activation, DualGemmDesc, Epilogue, GateUp, GatedMlp, Linear, MlpDesc, OutFormat, OutScale,
    QuantizeA,
};
use dualgemm::{DualGemm, PackedMlp, Target};
use dualgemm_cli::layer::Layer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::destination::Destination;
use crate::error::{Kind, facade};
use crate::facts::{Facts, checked_input_scale, linear_of, pack_linear, packed_bytes, values};
use crate::operand::{Quantized, Source};
use crate::options::{self, LayerOptions, device_name, device_target};
use crate::{number, pool, runners};

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
pub fn pack_layer(layer: &Layer<'_>, options: &LayerOptions) -> anyhow::Result<(PackedMlp, MlpFacts)> {
    let activation = layer.activation()?.activation;
    let features = layer.shard(options.rank, options.world)?;
    let (gate_up, gate_up_facts) = options::pack_layer(layer, features, &options.target)?;
    let (down, input_scale) = linear_of(layer.down()?);
    let weight = down.weight.shard_k(options.rank, options.world)?;
    let down = Linear { weight, bias: down.bias.filter(|_| options.rank == 0) };
    check_chained(&gate_up_facts, &down)?;
    let facts =
        MlpFacts { gate_up: gate_up_facts, down: Facts::of(&[&down.weight], input_scale), activation };
    Ok((PackedMlp { gate_up, down: pack_linear(&down, &options.target)? }, facts))
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

    /// Checks and packs them.
    pub fn pack(
        self,
        py: Python<'_>,
        of: &str,
        activation: Activation,
        target: &Target,
    ) -> PyResult<(PackedMlp, MlpFacts)> {
        let [gate_bias, up_bias, down_bias] = self.biases.map(|bias| bias.map(Into::into));
        let named = |name: &str| format!("{of}{name}");
        let (gate, up) = (self.gate.matrix(&named("gate"))?, self.up.matrix(&named("up"))?);
        let down = Linear { weight: self.down.matrix(&named("down"))?, bias: down_bias };
        let mlp = GatedMlp { gate_up: GateUp { gate, up, gate_bias, up_bias }, down };
        let facts = MlpFacts::of(&mlp, activation, self.input_scales);
        let packed = pool::run(py, || -> Result<_, dualgemm::Error> {
            mlp.gate_up.check()?;
            check_chained(&facts.gate_up, &mlp.down)?;
            let Facts { n, k, format, .. } = facts.gate_up;
            let gate_up = DualGemm::plan_for_packing((n, k), format, target)?.prepack(&mlp.gate_up)?;
            Ok(PackedMlp { gate_up, down: pack_linear(&mlp.down, target)? })
        })?;
        Ok((packed.map_err(facade)?, facts))
    }
}

/// Gate, up and down of one gated MLP in the order of the kernels.
#[pyclass(module = "dualgemm", frozen, weakref)]
pub struct Mlp {
    packed: PackedMlp,
    target: Target,
    facts: MlpFacts,
    number: i64,
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
    ) -> PyResult<Self> {
        let options = LayerOptions::of(layer, keywords)?;
        let (packed, facts) = options.with_layer(py, path, |layer, _| pack_layer(layer, &options))?;
        Ok(Self { packed, facts, target: options.target, number: number::next() })
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
    ) -> PyResult<Self> {
        let (activation, target) = (options::activation(activation)?, device_target(device)?);
        let none = PyDict::new(py);
        let tensors = Tensors::of("", tensors.unwrap_or(&none))?;
        let (packed, facts) = tensors.pack(py, "", activation, &target)?;
        Ok(Self { packed, facts, target, number: number::next() })
    }

    /// `(H, K)`: features out and in; alike in most models.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.facts.down.n, self.facts.gate_up.k)
    }

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

    /// Names of the gate, the up and the down tensor.
    #[getter]
    fn names(&self) -> Vec<String> {
        [&self.facts.gate_up, &self.facts.down].iter().flat_map(|facts| facts.names.clone()).collect()
    }

    /// Scales by which A, and what is between the products, are quantized with `"static"`; `None` where there is none.
    #[getter]
    fn input_scales(&self) -> (Option<f32>, Option<f32>) {
        (self.facts.gate_up.input_scale, self.facts.down.input_scale)
    }

    /// Where the weights are and the product is computed.
    #[getter]
    fn device(&self) -> String {
        device_name(&self.target)
    }

    /// Bytes that the packed weights take.
    #[getter]
    fn nbytes(&self) -> usize {
        mlp_bytes(&self.packed)
    }

    #[getter]
    fn _number(this: &Bound<'_, Self>) -> PyResult<i64> {
        number::enter(this.as_any(), this.get().number)
    }

    /// Weights never change: a copy is the same.
    fn __copy__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __deepcopy__(this: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        this
    }

    fn __repr__(&self) -> String {
        let MlpFacts { gate_up: Facts { n, k, format, names, .. }, down, activation } = &self.facts;
        let (h, down_format, last) = (down.n, down.format, &down.names[0]);
        format!(
            "<dualgemm.Mlp {}, {} and {last}: 2 x [{n}, {k}] {format}, {activation}, [{h}, {n}] {down_format}>",
            names[0], names[1]
        )
    }

    /// Checks what says how C is computed, as every run does.
    fn _check(&self, quantize_a: &Bound<'_, PyAny>, quantize_hidden: &Bound<'_, PyAny>) -> PyResult<()> {
        self.facts.quantize(quantize_a, quantize_hidden).map(drop)
    }

    /// Computes Y of a 2-D A into an array.
    fn _run(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        quantize_a: &Bound<'_, PyAny>,
        quantize_hidden: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (source, mut destination) = (Source::of("a", a)?, Destination::of(out)?);
        if let Destination::Nvfp4 { .. } = destination {
            return Err(Kind::Operand.raise("out: is a tuple; an array of floats is needed"));
        }
        let quantize = self.facts.quantize(quantize_a, quantize_hidden)?;
        runners::compute(
            py,
            &self.target,
            &source,
            (&mut destination, self.facts.down.n),
            |m, a, out| self.facts.desc(m, a, out, quantize),
            |runner, a, c| runner.run(a, &self.packed, c).map(drop),
        )
    }
}

/// Bytes that a packed MLP takes.
pub fn mlp_bytes(packed: &PackedMlp) -> usize {
    packed_bytes(&packed.gate_up) + packed_bytes(&packed.down)
}
