//! Activations and results as safetensors files.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use bytemuck::{NoUninit, cast_slice};
use dualgemm_formats::{BlockFormat, FloatMatrix, Matrix, QuantizedMatrix, ScaleLayout};
use dualgemm_gemm::AOperand;

use super::TensorOut;
use crate::activations::LAYOUT_KEY;
use crate::safetensors::write_to;
use crate::{Dtype, Error};

/// Writes a safetensors file with tensor `name`, or with `name_packed`, `name_scale` and `name_scale_2`.
///
/// # Errors
/// If an mxfp4 matrix is given, which has no such triple, or the system refuses; nothing is left behind.
pub fn write_activations(path: &Path, name: &str, activations: &AOperand<'_>) -> Result<(), Error> {
    let mut metadata = BTreeMap::new();
    let tensors = match activations {
        AOperand::Float(FloatMatrix::F32(m)) => vec![float_out(name, Dtype::F32, m)],
        AOperand::Float(FloatMatrix::F16(m)) => vec![float_out(name, Dtype::F16, m)],
        AOperand::Float(FloatMatrix::Bf16(m)) => vec![float_out(name, Dtype::Bf16, m)],
        AOperand::Quantized(m) if m.format() == BlockFormat::Nvfp4 => {
            let shape = match m.scale_layout() {
                ScaleLayout::Linear => vec![m.rows(), m.blocks()],
                layout => {
                    metadata.insert(LAYOUT_KEY.into(), layout.to_string());
                    vec![m.scales().len()]
                }
            };
            vec![
                TensorOut::new(format!("{name}_packed"), Dtype::U8, [m.rows(), m.k() / 2], dense_codes(m)),
                TensorOut::new(format!("{name}_scale"), Dtype::F8E4m3, shape, m.scales()),
                TensorOut::scalar(format!("{name}_scale_2"), &[1], m.global_scale().value()),
            ]
        }
        AOperand::Quantized(m) => {
            return Err(Error::Unsupported {
                module: m.name().into(),
                found: format!("writing {} activations", m.format()),
                supported: "nvfp4, f32, f16 and bf16 are",
            });
        }
    };
    write_to(path, &tensors, &metadata)
}

fn float_out<'m, T: Clone + NoUninit>(name: &str, dtype: Dtype, m: &'m Matrix<'_, T>) -> TensorOut<'m> {
    let bytes = match m.as_dense() {
        Some(all) => Cow::Borrowed(cast_slice(all)),
        None => (0..m.rows()).flat_map(|r| cast_slice::<T, u8>(m.row(r))).copied().collect(),
    };
    TensorOut::new(name, dtype, [m.rows(), m.cols()], bytes)
}

/// Code bytes without gaps between rows.
pub(crate) fn dense_codes<'m>(m: &'m QuantizedMatrix<'_>) -> Cow<'m, [u8]> {
    let row_bytes = m.k() / 2;
    if m.row_stride() == row_bytes {
        return Cow::Borrowed(&m.codes()[..m.rows() * row_bytes]);
    }
    (0..m.rows()).flat_map(|r| m.row_codes(r)).copied().collect()
}
