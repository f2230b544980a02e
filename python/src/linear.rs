//! `Linear`: a linear layer in kernel order.

use dualgemm::gemm::{DualGemmDesc, Linear as Operand};
use dualgemm::{PackedWeights, Target};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::destination::Destination;
use crate::error::facade;
use crate::facts::{Facts, checked_input_scale, linear_of, pack_linear, packed_bytes, values};
use crate::operand::{Quantized, Source};
use crate::options::{LayerOptions, device_name, device_target};
use crate::{number, pool, runners};

/// A linear layer in the order of the kernels.
#[pyclass(module = "dualgemm", frozen, weakref)]
pub struct Linear {
    packed: PackedWeights,
    target: Target,
    facts: Facts,
    has_bias: bool,
    number: i64,
}

impl Linear {
    fn of(linear: &Operand<'_>, input_scale: Option<f32>, target: Target) -> Result<Self, dualgemm::Error> {
        Ok(Self {
            packed: pack_linear(linear, &target)?,
            facts: Facts::of(&[&linear.weight], input_scale),
            has_bias: linear.bias.is_some(),
            number: number::next(),
            target,
        })
    }
}

#[pymethods]
impl Linear {
    /// A module of a checkpoint by its name.
    #[staticmethod]
    #[pyo3(signature = (path, module, **keywords))]
    fn from_checkpoint(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        module: &str,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let options = LayerOptions::of_module(keywords)?;
        options.with_checkpoint(py, path, |checkpoint| {
            let (linear, input_scale) = linear_of(checkpoint.linear(module)?);
            let packed = Self::of(&linear, input_scale, options.target.clone())?;
            checkpoint.files().release_pages();
            Ok(packed)
        })
    }

    /// From a quantized matrix.
    #[staticmethod]
    #[pyo3(signature = (weight, *, bias = None, input_scale = None, device = None))]
    fn from_tensors(
        py: Python<'_>,
        weight: &Bound<'_, PyTuple>,
        bias: Option<&Bound<'_, PyAny>>,
        input_scale: Option<f32>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        checked_input_scale("input_scale", input_scale)?;
        let (source, target) = (Quantized::of("weight", weight)?, device_target(device)?);
        let bias = values("bias", bias)?.map(Into::into);
        let linear = Operand { weight: source.matrix("weight")?, bias };
        pool::run(py, || Self::of(&linear, input_scale, target))?.map_err(facade)
    }

    /// `(N, K)`: features out and in.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.facts.n, self.facts.k)
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

    /// Whether a bias is added.
    #[getter]
    fn has_bias(&self) -> bool {
        self.has_bias
    }

    /// Scale by which A is quantized with `quantize_a="static"`, a multiplier; `None` if there is none.
    #[getter]
    fn input_scale(&self) -> Option<f32> {
        self.facts.input_scale
    }

    /// Where the weights are and the product is computed.
    #[getter]
    fn device(&self) -> String {
        device_name(&self.target)
    }

    /// Bytes that the packed weights take.
    #[getter]
    fn nbytes(&self) -> usize {
        packed_bytes(&self.packed)
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
        let Facts { n, k, format, .. } = &self.facts;
        format!("<dualgemm.Linear {}: [{n}, {k}] {format}>", self.name())
    }

    /// Checks what says how C is computed, as every run does.
    fn _check(&self, quantize_a: &Bound<'_, PyAny>) -> PyResult<()> {
        self.facts.quantize("quantize_a", quantize_a).map(drop)
    }

    /// Computes C of a 2-D A into an array.
    fn _run(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        quantize_a: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (source, mut destination) = (Source::of("a", a)?, Destination::of(out)?);
        let quantize_a = self.facts.quantize("quantize_a", quantize_a)?;
        let Facts { n, k, format, .. } = self.facts;
        runners::compute(
            py,
            &self.target,
            &source,
            (&mut destination, n),
            |m, a, out| DualGemmDesc { quantize_a, out, ..DualGemmDesc::linear(m, n, k, a, format) },
            |runner, a, c| runner.run(a, &self.packed, c).map(drop),
        )
    }
}
