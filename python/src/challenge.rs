//! Operands of the GPU MODE task, the same bytes as `dualgemm_bench::challenge`, its six-dimensional scales, and the
//! reference in f64.

use dualgemm::check::{Reference, RowSample};
use dualgemm::formats::ScaleLayout;
use dualgemm::formats::gpumode::GpuModeScales;
use dualgemm::gemm::{Epilogue, GateUp};
use dualgemm_bench::Shape;
use dualgemm_bench::challenge::generate;
use dualgemm_bench::inputs::CodeSet;
use dualgemm_cli::machine;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::array::{Array, Dtype};
use crate::error::{facade, refuse};
use crate::operand::{Quantized, Source};
use crate::options::activation as activation_named;
use crate::pool;

/// Codes and linear scales of A, B1 and B2: six byte strings. `full` draws from all sixteen codes.
#[pyfunction]
pub fn challenge_operands(
    py: Python<'_>,
    m: usize,
    n: usize,
    k: usize,
    seed: u64,
    full: bool,
) -> PyResult<Vec<(Bound<'_, PyBytes>, Bound<'_, PyBytes>)>> {
    let bytes = (m as f64 + 2.0 * n as f64) * k as f64 * 9.0 / 16.0;
    if !machine::has_room(bytes) {
        refuse!(Operand, "operands of {m}x{n}x{k} do not fit the memory; a smaller shape is needed");
    }
    let codes = if full { CodeSet::Full } else { CodeSet::Masked };
    let case = pool::run(py, || generate(Shape::new(m, n, k), seed, codes))?.map_err(facade)?;
    let bytes = |x: &dualgemm::formats::QuantizedMatrix<'_>| {
        (PyBytes::new(py, x.codes()), PyBytes::new(py, x.scales()))
    };
    Ok([&case.a, &case.b1, &case.b2].map(bytes).into())
}

/// C in f64, the definition that every kernel is tested against, into a float64 array `[m, n]`.
#[pyfunction]
#[pyo3(signature = (a, gate, up, out, activation))]
pub fn reference(
    py: Python<'_>,
    a: &Bound<'_, PyAny>,
    gate: &Bound<'_, PyTuple>,
    up: &Bound<'_, PyTuple>,
    out: &Bound<'_, PyAny>,
    activation: &str,
) -> PyResult<()> {
    let epilogue = Epilogue { activation: activation_named(activation)?, ..Epilogue::default() };
    let (a, gate, up) = (Source::of("a", a)?, Quantized::of("gate", gate)?, Quantized::of("up", up)?);
    let operand = a.operand("a")?;
    let weights = GateUp::new(gate.matrix("gate")?, up.matrix("up")?);
    let (m, n) = (operand.rows(), weights.n());
    let c = pool::run(py, || Reference::new(&operand, &RowSample::all(m)).values(&epilogue, &weights))?
        .map_err(facade)?;
    let mut out = Array::on_cpu("out", out)?;
    if out.dtype != Dtype::F64 || out.shape != [m, n] {
        refuse!(Operand, "out: {} {:?}; float64 {:?} is needed", out.dtype, out.shape, [m, n]);
    }
    out.as_mut_slice::<f64>("out")?.copy_from_slice(&c);
    Ok(())
}

/// Linear scales `[batch, rows, blocks]` in the order `[batch, ⌈rows/128⌉, ⌈blocks/4⌉, 32, 4, 4]`, padded with zeros.
#[pyfunction]
pub fn challenge_scales<'py>(py: Python<'py>, scales: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let array = Array::on_cpu("scales", scales)?;
    let &[batch, rows, blocks] = array.shape.as_slice() else {
        refuse!(Operand, "scales: shape {:?}; [batch, rows, blocks] is needed", array.shape);
    };
    let view = GpuModeScales::new("scales", rows, blocks, batch).map_err(facade)?;
    let bytes = view.gather("scales", &array.gather::<u8>("scales")?, ScaleLayout::Linear).map_err(facade)?;
    Ok(PyBytes::new(py, &bytes))
}
