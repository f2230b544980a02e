//! `Experts`: the routed experts of one layer in kernel order, all or some of them.

use dualgemm::gemm::{RouterWeights, Routing};
use dualgemm::{MixtureDesc, PackedMlp, Target};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::{Array, Dtype};
use crate::destination::Destination;
use crate::error::Kind;
use crate::facts::{Facts, float_values};
use crate::mlp::{MlpFacts, Tensors, mlp_bytes, pack_layer};
use crate::operand::Source;
use crate::options::{self, LayerOptions, device_name, device_target};
use crate::{number, runners};

/// The routed experts of one layer in the order of the kernels.
#[pyclass(module = "dualgemm", frozen, weakref)]
pub struct Experts {
    packed: Vec<Option<PackedMlp>>,
    target: Target,
    /// Of all: they have one shape.
    facts: MlpFacts,
    router: RouterWeights,
    number: i64,
}

fn router_weights(name: &str) -> PyResult<RouterWeights> {
    match name {
        "output" => Ok(RouterWeights::Output),
        "input" => Ok(RouterWeights::Input),
        other => {
            let message = format!("router_weights `{other}` is unknown; valid are output, input");
            Err(Kind::Argument.raise(message))
        }
    }
}

/// What all experts have in common. One tensor scale serves the activations of all: the largest, under which none
/// saturates.
fn common(all: Vec<MlpFacts>) -> Result<MlpFacts, dualgemm::Error> {
    let shape = |mlp: &MlpFacts| {
        let of = |facts: &Facts| format!("{} [{}, {}]", facts.format, facts.n, facts.k);
        format!("{} and {}, {}", of(&mlp.gate_up), of(&mlp.down), mlp.activation)
    };
    let mut all = all.into_iter();
    let none = || dualgemm::gemm::Error::Operand {
        tensor: "experts".into(),
        found: "none".into(),
        expected: "at least 1".into(),
    };
    let mut common = all.next().ok_or_else(none)?;
    for mlp in all {
        if shape(&mlp) != shape(&common) {
            return Err(dualgemm::gemm::Error::Operand {
                tensor: mlp.gate_up.names[0].clone(),
                found: shape(&mlp),
                expected: format!("{}, as of {}", shape(&common), common.gate_up.names[0]),
            }
            .into());
        }
        for (common, own) in [(&mut common.gate_up, mlp.gate_up), (&mut common.down, mlp.down)] {
            common.input_scale = common.input_scale.zip(own.input_scale).map(|(a, b)| a.max(b));
        }
    }
    Ok(common)
}

/// Numbers of experts, `[tokens, top_k]`.
fn ids(object: &Bound<'_, PyAny>, tokens: usize) -> PyResult<(Vec<i32>, usize)> {
    let array = Array::on_cpu("topk_ids", object)?;
    let (rows, top_k) = array.matrix("topk_ids")?;
    if rows != tokens || top_k == 0 {
        let found = &array.shape;
        return Err(Kind::Operand
            .raise(format!("topk_ids: shape {found:?}; [{tokens}, experts per token] is needed")));
    }
    let ids = match array.dtype {
        Dtype::I32 => array.gather("topk_ids")?,
        Dtype::I64 => array
            .gather::<i64>("topk_ids")?
            .into_iter()
            .map(|id| {
                i32::try_from(id).map_err(|_| {
                    Kind::Operand.raise(format!("topk_ids: {id} is no number of an expert, nor -1 for none"))
                })
            })
            .collect::<PyResult<_>>()?,
        other => {
            return Err(Kind::Operand.raise(format!("topk_ids: is {other}; int32 or int64 is needed")));
        }
    };
    Ok((ids, top_k))
}

fn weights(object: &Bound<'_, PyAny>, shape: [usize; 2]) -> PyResult<Vec<f32>> {
    let array = Array::on_cpu("topk_weights", object)?;
    if array.shape != shape {
        let found = &array.shape;
        return Err(Kind::Operand.raise(format!("topk_weights: shape {found:?}; {shape:?} is needed")));
    }
    float_values("topk_weights", &array)
}

#[pymethods]
impl Experts {
    /// The routed experts of a layer of a checkpoint; those in `experts` alone, if it is given. `count` is how many the router
    /// knows, by default one more than the last one in the checkpoint.
    #[staticmethod]
    #[pyo3(signature = (path, layer = None, *, experts = None, count = None, router_weights = "output", **keywords))]
    fn from_checkpoint(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        layer: Option<&Bound<'_, PyAny>>,
        experts: Option<Vec<usize>>,
        count: Option<usize>,
        router_weights: &str,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let options = LayerOptions::of(layer, keywords)?;
        let router = self::router_weights(router_weights)?;
        let (packed, facts) = options.with_checkpoint(py, path, |checkpoint| {
            let first = experts.as_ref().and_then(|experts| experts.first()).copied().unwrap_or(0);
            let layer = options.layer_of(checkpoint, Some(first))?.number;
            let held = checkpoint.experts(layer)?.ids().last().map_or(0, |last| last + 1);
            let wanted = experts.unwrap_or_else(|| (0..count.unwrap_or(held)).collect());
            let count = count.unwrap_or(held).max(wanted.iter().max().map_or(0, |most| most + 1));
            let mut packed: Vec<Option<PackedMlp>> = (0..count).map(|_| None).collect();
            let mut facts = Vec::with_capacity(wanted.len());
            for expert in wanted {
                let (mlp, of_one) = pack_layer(&options.layer_of(checkpoint, Some(expert))?, &options)?;
                packed[expert] = Some(mlp);
                facts.push(of_one);
                checkpoint.files().release_pages();
            }
            Ok((packed, common(facts)?))
        })?;
        Ok(Self { packed, facts, target: options.target, router, number: number::next() })
    }

    /// From a dictionary for each expert, of what `Mlp.from_tensors` takes; None for experts that are elsewhere.
    #[staticmethod]
    #[pyo3(signature = (experts, *, activation = "silu", router_weights = "output", device = None))]
    fn from_tensors(
        py: Python<'_>,
        experts: Vec<Option<Bound<'_, PyDict>>>,
        activation: &str,
        router_weights: &str,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (activation, target) = (options::activation(activation)?, device_target(device)?);
        let router = self::router_weights(router_weights)?;
        let (mut packed, mut facts) = (Vec::with_capacity(experts.len()), Vec::new());
        for (number, tensors) in experts.iter().enumerate() {
            let Some(tensors) = tensors else {
                packed.push(None);
                continue;
            };
            let of = format!("expert {number}: ");
            let (mlp, of_one) = Tensors::of(&of, tensors)?.pack(py, &of, activation, &target)?;
            packed.push(Some(mlp));
            facts.push(of_one);
        }
        let facts = common(facts).map_err(crate::error::facade)?;
        Ok(Self { packed, facts, target, router, number: number::next() })
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

    /// Experts that the router knows.
    #[getter]
    fn count(&self) -> usize {
        self.packed.len()
    }

    /// Numbers of the experts that are here.
    #[getter]
    fn here(&self) -> Vec<usize> {
        (0..self.packed.len()).filter(|&expert| self.packed[expert].is_some()).collect()
    }

    /// Scales by which A, and what is between the products, are quantized with `"static"`: the largest of all experts;
    /// `None` where one has none.
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
        self.packed.iter().flatten().map(mlp_bytes).sum()
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
        let MlpFacts { gate_up: Facts { n, k, format, .. }, down, activation } = &self.facts;
        let (here, all) = (self.packed.iter().flatten().count(), self.packed.len());
        let of = if here == all { format!("{all}") } else { format!("{here} of {all}") };
        format!(
            "<dualgemm.Experts {of}: 2 x [{n}, {k}] {format}, {activation}, [{}, {n}] {}>",
            down.n, down.format
        )
    }

    /// Checks what says how C is computed, as every run does.
    fn _check(&self, quantize_a: &Bound<'_, PyAny>, quantize_hidden: &Bound<'_, PyAny>) -> PyResult<()> {
        self.facts.quantize(quantize_a, quantize_hidden).map(drop)
    }

    /// Computes Y of a 2-D A into an array, or adds it to what the array holds.
    #[expect(clippy::too_many_arguments, reason = "what the Python side has sorted out")]
    fn _run(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        topk_ids: &Bound<'_, PyAny>,
        topk_weights: &Bound<'_, PyAny>,
        quantize_a: &Bound<'_, PyAny>,
        quantize_hidden: &Bound<'_, PyAny>,
        add: bool,
    ) -> PyResult<()> {
        let (source, mut destination) = (Source::of("a", a)?, Destination::of(out)?);
        let quantize = self.facts.quantize(quantize_a, quantize_hidden)?;
        let tokens = source.rows()?;
        let (ids, top_k) = ids(topk_ids, tokens)?;
        let weights = weights(topk_weights, [tokens, top_k])?;
        let routing = Routing { ids: &ids, weights: &weights };
        let (experts, router) = (self.packed.len(), self.router);
        runners::compute(
            py,
            &self.target,
            &source,
            (&mut destination, self.facts.down.n),
            |m, a, out| MixtureDesc { mlp: self.facts.desc(m, a, out, quantize), experts, top_k, router },
            |runner, a, c| runner.run(a, routing, &self.packed, c, add),
        )
    }
}
