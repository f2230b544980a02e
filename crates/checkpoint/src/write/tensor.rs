//! A tensor to be written: its name, type, shape, and where its bytes come from.

use std::borrow::Cow;
use std::io::Write;
use std::path::Path;

use super::{WeightOut, WeightPart, rotated_rows};
use crate::{Dtype, Error, TensorView};

/// A tensor to be written.
#[derive(Debug, Clone)]
pub struct TensorOut<'a> {
    /// Name in the file.
    pub name: String,
    /// Storage type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// What is written.
    pub data: TensorData<'a>,
}

/// The bytes of a tensor to be written.
#[derive(Debug, Clone)]
pub enum TensorData<'a> {
    /// In memory.
    Bytes(Cow<'a, [u8]>),
    /// In memory, row by row, to be written in the order in which llama.cpp rotates the rows of a head.
    Heads {
        /// The rows.
        bytes: Cow<'a, [u8]>,
        /// Number of rows, a multiple of twice that of heads.
        rows: usize,
        /// Number of heads.
        heads: usize,
    },
    /// Made of weights, one after the other, as they are written.
    Weights(WeightPart, Vec<&'a WeightOut<'a>>),
}

impl From<Vec<u8>> for TensorData<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl<'a> TensorOut<'a> {
    /// A tensor of bytes.
    pub fn new(
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<usize>>,
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Self {
        Self { name: name.into(), dtype, shape: shape.into(), data: TensorData::Bytes(bytes.into()) }
    }

    /// A tensor of the same part of some weights.
    pub fn of_weights(
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<usize>>,
        part: WeightPart,
        weights: Vec<&'a WeightOut<'a>>,
    ) -> Self {
        Self { name: name.into(), dtype, shape: shape.into(), data: TensorData::Weights(part, weights) }
    }

    /// A tensor of f32.
    pub fn floats(name: impl Into<String>, shape: impl Into<Vec<usize>>, values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self::new(name, Dtype::F32, shape, bytes)
    }

    /// One f32, with the given shape (`[]` or `[1]`).
    pub fn scalar(name: impl Into<String>, shape: &[usize], value: f32) -> Self {
        Self::floats(name, shape, &[value])
    }

    /// Number of bytes of the data, whatever the shape says.
    pub(crate) fn byte_len(&self) -> usize {
        match &self.data {
            TensorData::Bytes(bytes) | TensorData::Heads { bytes, .. } => bytes.len(),
            TensorData::Weights(part, weights) => weights.iter().map(|w| part.len(w)).sum(),
        }
    }

    /// Writes the data to `out`, which is to become `file`.
    pub(crate) fn write_data(&self, file: &Path, out: &mut dyn Write) -> Result<(), Error> {
        let mut write = |bytes: &[u8]| out.write_all(bytes).map_err(|e| Error::io(file, "write", e));
        match &self.data {
            TensorData::Bytes(bytes) => write(bytes),
            TensorData::Heads { bytes, rows, heads } => {
                let row = bytes.len() / rows;
                rotated_rows(*rows, *heads).try_for_each(|r| write(&bytes[r * row..(r + 1) * row]))
            }
            TensorData::Weights(part, weights) => {
                weights.iter().try_for_each(|weight| part.write(weight, file, &mut write))
            }
        }
    }
}

impl<'a> From<&TensorView<'a>> for TensorOut<'a> {
    fn from(view: &TensorView<'a>) -> Self {
        Self::new(view.name, view.dtype, view.shape, view.bytes)
    }
}
