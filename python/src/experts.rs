//! `Experts`: the routed experts of one layer in kernel order, all or some of them.

use std::collections::BTreeSet;

use dualgemm::checkpoint::{MlpInfo, MlpKind};
use dualgemm::gemm::{RouterWeights, Routing};
use dualgemm::{LayerCall, PackedLayer};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::{Array, Dtype, Place};
use crate::destination::Destination;
use crate::error::{Kind, facade, refuse};
use crate::facts::{Facts, float_values};
use crate::mlp::{Gated, MlpFacts, Tensors, read_layer};
use crate::operand::{Source, named};
use crate::options::{self, LayerOptions, device_target};
use crate::packed::{Call, Choices, Packed, of_keywords};
use crate::{device, pool};

/// The routed experts of one layer in the order of the kernels.
#[pyclass(module = "dualgemm", frozen, extends = Gated)]
pub struct Experts {
    /// Where a checkpoint has them.
    #[pyo3(get)]
    name: Option<String>,
    /// By number, the place of an expert among those that are here; -1 of one that is elsewhere.
    #[pyo3(get, name = "_places")]
    places: Vec<i32>,
    /// Numbers of the experts that are here.
    #[pyo3(get)]
    here: Vec<usize>,
}

impl Experts {
    fn make(
        py: Python<'_>,
        layer: PackedLayer,
        facts: MlpFacts,
        name: Option<String>,
        (here, count): (Vec<usize>, usize),
    ) -> PyResult<Py<Self>> {
        let mut places = vec![-1; count];
        here.iter().enumerate().for_each(|(place, &expert)| places[expert] = place as i32);
        Py::new(py, Gated::base(layer, facts).add_subclass(Self { name, places, here }))
    }

    /// A router's choices in this machine's memory, by places.
    fn choices(
        &self,
        ids: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
        tokens: usize,
    ) -> PyResult<(Choices, usize)> {
        let (mut ids, top_k) = self::ids(ids, tokens)?;
        let weights = self::weights(weights, [tokens, top_k])?;
        let routing = Routing { ids: &ids, weights: &weights };
        routing
            .check(tokens, top_k, self.places.len())
            .map_err(|error| facade(dualgemm::Error::from(error)))?;
        for id in &mut ids {
            *id = usize::try_from(*id).map_or(-1, |id| self.places[id]);
        }
        Ok((Choices::Here(ids, weights), top_k))
    }

    /// The error of a call, with the name of the layer.
    fn named(&self, py: Python<'_>, error: PyErr) -> PyErr {
        match &self.name {
            Some(name) => PyErr::from_type(error.get_type(py), format!("{name}: {}", error.value(py))),
            None => error,
        }
    }
}

fn router_named(name: &str) -> PyResult<RouterWeights> {
    named("router_weights", name, &RouterWeights::ALL)
}

/// What all experts have in common. One tensor scale serves the activations of all: the largest, under which none
/// saturates.
pub fn common(all: Vec<MlpFacts>) -> Result<MlpFacts, dualgemm::Error> {
    let shape = |mlp: &MlpFacts| {
        let of = |facts: &Facts| format!("{} [{}, {}]", facts.format, facts.n, facts.k);
        format!("{} and {}, {}", of(&mlp.gate_up), of(&mlp.down), mlp.activation)
    };
    let mut all = all.into_iter();
    let Some(mut common) = all.next() else {
        return Err(dualgemm::Error::operand("the list of experts", "empty", "at least one"));
    };
    for mlp in all {
        if shape(&mlp) != shape(&common) {
            let expected = format!("{}, as of {}", shape(&common), common.gate_up.names[0]);
            return Err(dualgemm::Error::operand(&mlp.gate_up.names[0], shape(&mlp), expected));
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
        refuse!(Operand, "topk_ids: shape {found:?}; [{tokens}, experts per token] is needed");
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
            refuse!(Operand, "topk_ids: is {other}; int32 or int64 is needed");
        }
    };
    Ok((ids, top_k))
}

fn weights(object: &Bound<'_, PyAny>, shape: [usize; 2]) -> PyResult<Vec<f32>> {
    let array = Array::on_cpu("topk_weights", object)?;
    if array.shape != shape {
        let found = &array.shape;
        refuse!(Operand, "topk_weights: shape {found:?}; {shape:?} is needed");
    }
    float_values("topk_weights", &array)
}

#[pymethods]
impl Experts {
    /// The routed experts of a layer of a checkpoint; those in `experts` alone, if it is given. `count` is how many the router
    /// knows, by default one more than the last one in the checkpoint. `router_weights` is by default where the model's family
    /// has them. What an expert does beyond gate, up and down refuses the layer.
    #[staticmethod]
    #[pyo3(signature = (path, layer = None, *, experts = None, count = None, router_weights = None, **keywords))]
    fn from_checkpoint(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        layer: Option<&Bound<'_, PyAny>>,
        experts: Option<Vec<Bound<'_, PyAny>>>,
        count: Option<usize>,
        router_weights: Option<&str>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<Self>> {
        let options = LayerOptions::of(layer, keywords)?;
        let numbers = |list: Vec<_>| list.iter().map(|expert| options::count("experts", expert)).collect();
        let experts: Option<Vec<usize>> = experts.map(numbers).transpose()?;
        let origin = of_keywords(py, keywords)?;
        origin.set_item("experts", experts.clone())?;
        origin.set_item("count", count)?;
        origin.set_item("router_weights", router_weights)?;
        let router = router_weights.map(router_named).transpose()?;
        let (packed, facts, name, experts) = options.with_checkpoint(py, path, |checkpoint| {
            let first = experts.as_ref().and_then(|experts| experts.first()).copied().unwrap_or(0);
            let layer = options.layer_of(checkpoint, Some(first))?.number;
            checkpoint.check_whole(layer, MlpKind::Experts)?;
            let router = router.unwrap_or_else(|| checkpoint.router_weights());
            let held = checkpoint.experts(layer)?.last().map_or(0, |last| last + 1);
            let wanted = experts.unwrap_or_else(|| (0..count.unwrap_or(held)).collect());
            let count = count.unwrap_or(held).max(wanted.iter().max().map_or(0, |most| most + 1));
            let here: BTreeSet<usize> = wanted.into_iter().collect();
            let here: Vec<usize> = here.into_iter().collect();
            let read = |&expert: &usize| {
                // What was read before is packed, or was looked at.
                checkpoint.files().release_pages();
                read_layer(&options.layer_of(checkpoint, Some(expert))?, &options)
            };
            let all = here.iter().map(|expert| Ok(read(expert)?.1)).collect::<anyhow::Result<Vec<_>>>()?;
            let facts = common(all)?;
            let each = here.iter().map(|expert| Ok::<_, anyhow::Error>(read(expert)?.0));
            let packed = PackedLayer::mixture(facts.shape(), router, each, options.target.clone())?;
            let is_this = |mlp: &MlpInfo| (mlp.layer, mlp.kind) == (layer, MlpKind::Experts);
            let name = checkpoint.mlps().into_iter().find(is_this).map(|mlp| mlp.path);
            Ok((packed, facts, name, (here, count)))
        })?;
        let this = Self::make(py, packed, facts, name, experts)?;
        Packed::came_from(this.bind(py), path, layer, origin)?;
        Ok(this)
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
    ) -> PyResult<Py<Self>> {
        let (activation, target) = (options::activation(activation)?, device_target(device)?);
        let router = router_named(router_weights)?;
        let (mut here, mut tensors) = (Vec::new(), Vec::new());
        for (number, given) in experts.iter().enumerate() {
            let Some(given) = given else { continue };
            let of = format!("expert {number}: ");
            tensors.push((Tensors::of(&of, given)?, of));
            here.push(number);
        }
        let read = tensors.iter().map(|(tensors, of)| tensors.mlp(of, activation));
        let (mlps, facts): (Vec<_>, Vec<_>) = read.collect::<PyResult<Vec<_>>>()?.into_iter().unzip();
        let facts = common(facts).map_err(facade)?;
        let each = mlps.into_iter().map(Ok::<_, dualgemm::Error>);
        let packed = pool::run(py, || PackedLayer::mixture(facts.shape(), router, each, target))?;
        Self::make(py, packed.map_err(facade)?, facts, None, (here, experts.len()))
    }

    /// Experts that the router knows.
    #[getter]
    fn count(&self) -> usize {
        self.places.len()
    }

    fn __repr__(slf: &Bound<'_, Self>) -> String {
        let MlpFacts { gate_up: Facts { n, k, format, .. }, down, activation } = &slf.as_super().get().facts;
        let (here, all) = (slf.get().here.len(), slf.get().places.len());
        let of = if here == all { format!("{all}") } else { format!("{here} of {all}") };
        format!(
            "<dualgemm.Experts {of}: 2 x [{n}, {k}] {format}, {activation}, [{}, {n}] {}>",
            down.n, down.format
        )
    }

    /// Computes Y of a 2-D A into an array, or adds it to what the array holds. On a GPU, the choices are there as places, int32,
    /// and their weights are float32.
    #[expect(clippy::too_many_arguments, reason = "what the Python side has sorted out")]
    fn _run(
        slf: &Bound<'_, Self>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        topk_ids: &Bound<'_, PyAny>,
        topk_weights: &Bound<'_, PyAny>,
        quantize_a: &Bound<'_, PyAny>,
        quantize_hidden: &Bound<'_, PyAny>,
        add: bool,
        stream: u64,
    ) -> PyResult<()> {
        let (source, mut out, this) = (Source::of("a", a)?, Destination::of(out)?, slf.get());
        let gated = slf.as_super();
        let facts = &gated.get().facts;
        let quantize = facts.quantize(quantize_a, quantize_hidden)?;
        let tokens = source.rows()?;
        let (choices, top_k) = match source.place() {
            Place::Cpu => {
                let choices = this.choices(topk_ids, topk_weights, tokens);
                choices.map_err(|error| this.named(slf.py(), error))?
            }
            place => {
                let (routing, top_k) = device::choices((topk_ids, topk_weights), (place, tokens), add)?;
                (Choices::OnDevice(routing), top_k)
            }
        };
        let call = Call { source: &source, out: &mut out, stream, choices: Some((choices, add)) };
        let packed = gated.as_super().get();
        let target = &packed.layer.target;
        let settings = |m, a, out| LayerCall { top_k, ..facts.call(m, a, out, quantize, target) };
        packed.compute(slf.py(), call, settings).map(drop)
    }
}
