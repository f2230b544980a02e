//! Floats to codes and back, and the down projection of a checkpoint as floats.

use dualgemm::formats::quantize::mxfp4::quantize_mxfp4;
use dualgemm::formats::quantize::quantize_with;
use dualgemm::formats::{self, BlockFormat, FloatType, GlobalScale, Producer, Search};
use dualgemm::gemm::Weight;
use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use rayon::prelude::*;

use crate::array::Array;
use crate::destination::bytes_mut;
use crate::error::{Kind, facade, refuse};
use crate::operand::{Quantized, floats, format, layout, named};
use crate::options::LayerOptions;
use crate::pool;

/// Quantizes a matrix into arrays of codes and scales and returns the tensor scale, a multiplier.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "what a quantizer can be told")]
pub fn quantize(
    py: Python<'_>,
    x: &Bound<'_, PyAny>,
    codes: &Bound<'_, PyAny>,
    scales: &Bound<'_, PyAny>,
    format_name: &str,
    producer: &str,
    search: &str,
    global_scale: Option<f32>,
    scale_layout: &str,
) -> PyResult<f32> {
    let (format, layout) = (format(format_name)?, layout(scale_layout)?);
    let producer = named("producer", producer, &Producer::ALL)?;
    let search = named("search", search, &Search::ALL)?;
    if format == BlockFormat::Mxfp4 && (global_scale.is_some() || search != Search::Plain) {
        return Err(
            Kind::Argument.raise("global_scale and search are for nvfp4; mxfp4 has one rule, that of OCP")
        );
    }
    let source = Array::on_cpu("x", x)?;
    let matrix = floats("x", &source)?;
    let quantized = pool::run(py, || -> Result<formats::QuantizedMatrix<'static>, formats::Error> {
        let quantized = match (format, global_scale.map(GlobalScale::multiplier)) {
            (BlockFormat::Mxfp4, _) => quantize_mxfp4("x", &matrix),
            (BlockFormat::Nvfp4, None) => formats::quantize("x", &matrix, producer, search),
            (BlockFormat::Nvfp4, Some(scale)) => quantize_with("x", &matrix, producer, search, scale),
        };
        Ok(quantized?.with_scale_layout(layout))
    })?
    .map_err(facade)?;
    for (name, to, from) in [("codes", codes, quantized.codes()), ("scales", scales, quantized.scales())] {
        let mut to = Array::on_cpu(name, to)?;
        let to = bytes_mut(name, &mut to)?;
        if to.len() != from.len() {
            return Err(Kind::Operand.raise(format!(
                "{name}: holds {} bytes; {} are needed",
                to.len(),
                from.len()
            )));
        }
        to.copy_from_slice(from);
    }
    Ok(quantized.global_scale().value())
}

/// Bytes of the scales of a matrix.
#[pyfunction]
pub fn scales_len(rows: usize, k: usize, format_name: &str, scale_layout: &str) -> PyResult<usize> {
    let blocks = k / format(format_name)?.block_len();
    layout(scale_layout)?
        .checked_len(rows, blocks)
        .ok_or_else(|| Kind::Operand.raise(format!("scales of [{rows}, {k}] do not fit the address space")))
}

/// Decodes a quantized matrix into an array of floats.
#[pyfunction]
pub fn dequantize(py: Python<'_>, q: &Bound<'_, PyTuple>, out: &Bound<'_, PyAny>) -> PyResult<()> {
    let source = Quantized::of("q", q)?;
    let matrix = source.matrix("q")?;
    matrix.check_scales().map_err(facade)?;
    let own = Array::of("out", out)?.extent();
    if source.extents().iter().any(|range| own.start < range.end && range.start < own.end) {
        refuse!(Operand, "out: shares memory with q, which is read while out is written");
    }
    decode(py, &matrix.into(), out)
}

/// Decodes the columns of the down projection that belong to a rank into an array `[K, N / world]` of floats.
#[pyfunction]
#[pyo3(signature = (out, path, layer = None, **keywords))]
pub fn down(
    py: Python<'_>,
    out: &Bound<'_, PyAny>,
    path: &Bound<'_, PyAny>,
    layer: Option<&Bound<'_, PyAny>>,
    keywords: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let options = LayerOptions::of(layer, keywords)?;
    let matrix = options.with_layer(py, path, |layer, _| {
        let linear = layer.down()?.read()?;
        Ok(linear.weight.shard_k(options.rank, options.world)?.into_owned())
    })?;
    decode(py, &matrix, out)
}

pub fn decode(py: Python<'_>, matrix: &Weight<'_>, out: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut to = Array::on_cpu("out", out)?;
    let (rows, k) = (matrix.rows(), matrix.k());
    if to.shape != [rows, k] {
        refuse!(Operand, "out: shape {:?}; {:?} is needed", to.shape, [rows, k]);
    }
    match to.float_type("out")? {
        FloatType::F32 => rows_into(py, matrix, to.as_mut_slice::<f32>("out")?, |x| x as f32),
        FloatType::F16 => rows_into(py, matrix, to.as_mut_slice("out")?, f16::from_f64),
        FloatType::Bf16 => rows_into(py, matrix, to.as_mut_slice("out")?, bf16::from_f64),
    }
}

fn rows_into<T: Send>(
    py: Python<'_>,
    matrix: &Weight<'_>,
    out: &mut [T],
    round: impl Fn(f64) -> T + Sync,
) -> PyResult<()> {
    pool::run(py, || {
        out.par_chunks_mut(matrix.k()).enumerate().for_each(|(row, out)| {
            out.iter_mut().enumerate().for_each(|(k, x)| *x = round(matrix.value(row, k)));
        });
    })
}
