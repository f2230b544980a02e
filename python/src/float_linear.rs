//! `FloatLinear`: the matrix of a linear layer in floats, read where it lies at each call.

use dualgemm::Target;
use dualgemm::gemm::{AFormat, AOperand};
use pyo3::prelude::*;

use crate::array::Array;
use crate::destination::Destination;
use crate::error::refuse;
use crate::facts::values;
use crate::operand::{Source, floats};
use crate::runners::{self, Product, Weights};

/// Weights `[N, K]` in floats and a bias. They stay in the arrays that they come from.
#[pyclass(module = "dualgemm", frozen)]
pub struct FloatLinear {
    weight: Py<PyAny>,
    bias: Option<Py<PyAny>>,
    pub shape: (usize, usize),
}

impl FloatLinear {
    /// The product of `m` rows.
    pub fn of_rows(&self, m: usize) -> Product {
        let (n, k) = self.shape;
        Product::Floats { m, n, k }
    }

    /// The weights, and the bias as it is now.
    pub fn operands<'py>(&self, py: Python<'py>) -> PyResult<(Array<'py>, Option<Vec<f32>>)> {
        let (weight, bias) = (self.weight.bind(py), self.bias.as_ref().map(|bias| bias.bind(py)));
        let (weight, bias) = (Array::on_cpu("w", weight)?, values("bias", bias)?);
        if let Some(bias) = bias.as_ref().filter(|bias| bias.len() != self.shape.0) {
            refuse!(Operand, "bias: has {} values; w is [{}, {}]", bias.len(), self.shape.0, self.shape.1);
        }
        Ok((weight, bias))
    }
}

#[pymethods]
impl FloatLinear {
    #[new]
    fn new(weight: Bound<'_, PyAny>, bias: Option<Py<PyAny>>) -> PyResult<Self> {
        let shape = Array::on_cpu("w", &weight)?.matrix("w")?;
        Ok(Self { bias, shape, weight: weight.unbind() })
    }

    /// `(N, K)`: features out and in.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// Checks what a call without rows would not read.
    fn _check(&self, py: Python<'_>) -> PyResult<()> {
        self.operands(py).map(drop)
    }

    /// Computes C of a 2-D A into an array, on the processor.
    fn _run(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        _stream: u64,
    ) -> PyResult<()> {
        let (source, mut out) = (Source::of("a", a)?, Destination::of(out)?);
        let (array, bias) = self.operands(py)?;
        if out.overlaps(&[array.extent()]) {
            refuse!(Operand, "out: shares memory with w");
        }
        let (w, operand) = (floats("w", &array)?, source.operand("a")?);
        let AOperand::Float(a) = &operand else {
            refuse!(Operand, "a: is {}; floats are needed", AFormat::of(&operand));
        };
        if a.cols() != w.cols() {
            refuse!(Operand, "a: shape [{}, {}]; [..., {}] is needed", a.rows(), a.cols(), w.cols());
        }
        out.check(&source, a.rows(), w.rows())?;
        let (product, by) = (self.of_rows(a.rows()), Weights::Floats(w, bias.as_deref()));
        let c = out.output()?;
        runners::run(py, product, &Target::default(), |runner| {
            runner.run(&operand, &by, (c, false)).map(drop)
        })
    }
}
