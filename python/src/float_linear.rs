//! `FloatLinear`: the matrix of a linear layer in floats, read where it lies at each call.

use std::sync::Mutex;

use dualgemm::cpu::{CpuOptions, FloatLinear as Runner};
use dualgemm::gemm::{AFormat, AOperand};
use dualgemm::{Error, Target};
use pyo3::prelude::*;

use crate::array::Array;
use crate::destination::Destination;
use crate::error::refuse;
use crate::facts::values;
use crate::operand::{Source, floats};
use crate::runners::{self, Problem, Waiting};

/// Rows of A that a run has room for, and N and K of the weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    m: usize,
    n: usize,
    k: usize,
}

impl Problem for Shape {
    type Runner = Runner;

    fn runner(&self, target: &Target) -> Result<Runner, Error> {
        let options = match target {
            Target::Cpu(options) => *options,
            _ => CpuOptions::default(),
        };
        Ok(Runner::new(self.m, self.k, options)?)
    }

    fn waiting() -> &'static Mutex<Vec<Waiting<Self>>> {
        static WAITING: Mutex<Vec<Waiting<Shape>>> = Mutex::new(Vec::new());
        &WAITING
    }

    fn bytes(&self) -> usize {
        4 * self.m.saturating_mul(self.k)
    }

    fn multiplications(&self) -> Option<usize> {
        Some(self.m.saturating_mul(self.n).saturating_mul(self.k))
    }
}

/// Weights `[N, K]` in floats and a bias. They stay in the array that they come from.
#[pyclass(module = "dualgemm", frozen)]
pub struct FloatLinear {
    pub weight: Py<PyAny>,
    pub bias: Option<Vec<f32>>,
    pub shape: (usize, usize),
}

impl FloatLinear {
    /// The problem of `m` rows.
    pub fn of_rows(&self, m: usize) -> Shape {
        let (n, k) = self.shape;
        Shape { m, n, k }
    }
}

#[pymethods]
impl FloatLinear {
    #[new]
    fn new(weight: Bound<'_, PyAny>, bias: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let (array, bias) = (Array::on_cpu("w", &weight)?, values("bias", bias)?);
        let shape = array.matrix("w")?;
        if let Some(bias) = bias.as_ref().filter(|bias| bias.len() != shape.0) {
            refuse!(Operand, "bias: has {} values; w is [{}, {}]", bias.len(), shape.0, shape.1);
        }
        Ok(Self { bias, shape, weight: weight.unbind() })
    }

    /// `(N, K)`: features out and in.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// There is nothing to check beside the operands.
    fn _check(&self) {}

    /// Computes C of a 2-D A into an array, on the processor.
    fn _run(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        _stream: u64,
    ) -> PyResult<()> {
        let (source, mut out) = (Source::of("a", a)?, Destination::of(out)?);
        let array = Array::on_cpu("w", self.weight.bind(py))?;
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
        let shape = self.of_rows(a.rows());
        let c = out.output()?;
        let target = Target::Cpu(CpuOptions::default());
        runners::run(py, shape, &target, |runner| Ok(runner.run(a, &w, self.bias.as_deref(), c)?))
    }
}
