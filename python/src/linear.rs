//! `Linear`: a linear layer in kernel order.

use dualgemm::gemm::Linear as Operand;
use dualgemm::{LayerCall, PackedLayer, Target};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::destination::Destination;
use crate::error::{Kind, facade};
use crate::facts::{Facts, checked_input_scale, linear_input_scale, values};
use crate::operand::{Quantized, Source};
use crate::options::{LayerOptions, device_target};
use crate::packed::{Call, Packed, of_keywords};
use crate::pool;

/// A linear layer in the order of the kernels.
#[pyclass(module = "dualgemm", frozen, extends = Packed)]
pub struct Linear {
    facts: Facts,
    /// Whether a bias is added.
    #[pyo3(get)]
    has_bias: bool,
}

type Parts = (PackedLayer, Linear);

fn pack(linear: &Operand<'_>, input_scale: Option<f32>, target: Target) -> Result<Parts, dualgemm::Error> {
    let facts = Facts::of(linear, input_scale);
    let this = Linear { facts, has_bias: linear.bias.is_some() };
    Ok((PackedLayer::product(linear, target)?, this))
}

impl Linear {
    fn make(py: Python<'_>, (layer, this): Parts) -> PyResult<Py<Self>> {
        Py::new(py, PyClassInitializer::from(Packed::new(layer)).add_subclass(this))
    }
}

#[pymethods]
impl Linear {
    /// A module of a checkpoint by its name; of `world` ranks, `rank`'s part of the features that go `"out"` or `"in"`.
    #[staticmethod]
    #[pyo3(signature = (path, module, *, split = None, **keywords))]
    fn from_checkpoint(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        module: &Bound<'_, PyAny>,
        split: Option<&str>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<Self>> {
        let (options, name) = (LayerOptions::of_module(keywords)?, module.extract::<String>()?);
        if !matches!((split, options.world), (Some("out" | "in"), _) | (None, 1)) {
            let found = split.map_or("missing".into(), |split| format!("`{split}`"));
            let message = format!("split is {found}; of {} ranks it says \"out\" or \"in\"", options.world);
            return Err(Kind::Argument.raise(message));
        }
        let parts = options.with_checkpoint(py, path, |checkpoint| {
            let source = checkpoint.linear_source(&name)?;
            let (whole, input_scale) = (source.read()?, linear_input_scale(&source));
            let (rank, world) = (options.rank, options.world);
            let linear = match split {
                _ if world == 1 => whole,
                Some("out") => {
                    let weight = whole.weight.blocks()?.shard_rows(rank, world)?;
                    let n = weight.rows();
                    let bias = whole.bias.as_ref().map(|bias| bias[rank * n..][..n].to_vec().into());
                    Operand { bias, weight: weight.into_owned().into() }
                }
                _ => {
                    let weight = whole.weight.shard_k(rank, world)?.into_owned();
                    Operand { weight, bias: whole.bias.filter(|_| rank == 0) }
                }
            };
            let parts = pack(&linear, input_scale, options.target.clone())?;
            checkpoint.files().release_pages();
            Ok(parts)
        })?;
        let this = Self::make(py, parts)?;
        let origin = of_keywords(py, keywords)?;
        origin.set_item("split", split)?;
        Packed::came_from(this.bind(py), path, Some(module), origin)?;
        Ok(this)
    }

    /// From a quantized matrix.
    #[staticmethod]
    #[pyo3(signature = (weight, *, bias = None, input_scale = None, device = None))]
    fn from_tensors(
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        input_scale: Option<f32>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<Self>> {
        checked_input_scale("input_scale", input_scale)?;
        let (source, target) = (Quantized::of("weight", weight)?, device_target(device)?);
        let bias = values("bias", bias)?.map(Into::into);
        let linear = Operand { weight: source.matrix("weight")?.into(), bias };
        Self::make(py, pool::run(py, || pack(&linear, input_scale, target))?.map_err(facade)?)
    }

    /// nvfp4 or mxfp4.
    #[getter]
    fn format(&self) -> String {
        self.facts.format.to_string()
    }

    /// Name of the tensor.
    #[getter]
    fn name(&self) -> &str {
        &self.facts.names[0]
    }

    /// Scale by which A is quantized with `quantize_a="static"`, a multiplier; `None` if there is none.
    #[getter]
    fn input_scale(&self) -> Option<f32> {
        self.facts.input_scale
    }

    fn __repr__(&self) -> String {
        let Facts { n, k, format, .. } = &self.facts;
        format!("<dualgemm.Linear {}: [{n}, {k}] {format}>", self.name())
    }

    /// Checks what says how C is computed, as every run does.
    fn _check(&self, quantize_a: &Bound<'_, PyAny>) -> PyResult<()> {
        self.facts.quantize("quantize_a", quantize_a).map(drop)
    }

    /// Computes C of a 2-D A into an array.
    fn _run(
        slf: &Bound<'_, Self>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        quantize_a: &Bound<'_, PyAny>,
        stream: u64,
    ) -> PyResult<()> {
        let (source, mut out, this) = (Source::of("a", a)?, Destination::of(out)?, slf.get());
        let quantize_a = this.facts.quantize("quantize_a", quantize_a)?;
        let call = Call { source: &source, out: &mut out, stream, choices: None };
        let settings = |m, a, out| LayerCall { quantize_a, ..LayerCall::new(m, a, out) };
        slf.as_super().get().compute(slf.py(), call, settings).map(drop)
    }
}
