//! Weights to write, and the bytes that files make of them, a run of rows at a time.

use std::borrow::Cow;
use std::path::Path;

use dualgemm_formats::{BlockFormat, GlobalScale, QuantizedMatrix, ScaleLayout, gguf};

use super::activations::dense_codes;
use crate::gguf::mxfp4;
use crate::{Error, LinearSource};

/// Bytes of codes that are read at a time.
const RUN_BYTES: usize = 1 << 20;
/// Runs are whole tiles of block scales and whole periods of alternating rows.
const RUN_ROWS: usize = 128;

/// A quantized weight to write, `[out, in]`.
#[derive(Debug, Clone)]
pub enum WeightOut<'a> {
    /// In memory.
    Matrix(QuantizedMatrix<'a>),
    /// In a checkpoint, from which it is read as it is written.
    Stored(Box<LinearSource<'a>>, BlockFormat),
}

impl<'a> From<QuantizedMatrix<'a>> for WeightOut<'a> {
    fn from(matrix: QuantizedMatrix<'a>) -> Self {
        Self::Matrix(matrix)
    }
}

impl<'a> WeightOut<'a> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Self::Matrix(m) => m.rows(),
            Self::Stored(source, _) => source.rows(),
        }
    }

    /// Elements per row.
    pub fn k(&self) -> usize {
        match self {
            Self::Matrix(m) => m.k(),
            Self::Stored(source, _) => source.k(),
        }
    }

    /// Blocks per row.
    pub fn blocks(&self) -> usize {
        self.k() / self.format().block_len()
    }

    /// Block format.
    pub fn format(&self) -> BlockFormat {
        match self {
            Self::Matrix(m) => m.format(),
            Self::Stored(_, format) => *format,
        }
    }

    /// The tensor scale.
    pub fn tensor_scale(&self) -> GlobalScale {
        match self {
            Self::Matrix(m) => m.global_scale(),
            Self::Stored(source, _) => source.tensor_scale,
        }
    }

    /// The whole matrix.
    ///
    /// # Errors
    /// If what is stored breaks a rule of its format.
    pub fn read(&self) -> Result<Cow<'_, QuantizedMatrix<'a>>, Error> {
        Ok(match self {
            Self::Matrix(m) => Cow::Borrowed(m),
            Self::Stored(source, _) => Cow::Owned(source.blocks(0..source.rows())?),
        })
    }

    /// Calls `each` with runs of rows and the number of the first one, in order.
    fn runs(
        &self,
        mut each: impl FnMut(usize, &QuantizedMatrix<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self {
            Self::Matrix(m) => each(0, m),
            Self::Stored(source, _) => {
                let run = (RUN_BYTES / (source.k() / 2)).max(1).next_multiple_of(RUN_ROWS);
                (0..source.rows()).step_by(run).try_for_each(|first| {
                    each(first, &source.blocks(first..source.rows().min(first + run))?)?;
                    source.release();
                    Ok(())
                })
            }
        }
    }
}

/// What of a weight lies together in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightPart {
    /// Codes, row by row.
    Codes,
    /// Block scales, row by row.
    Scales,
    /// Codes of this many experts, each transposed after packing: `[experts, k / 2, rows]`.
    CodesTransposed(usize),
    /// Block scales of this many experts, each transposed: `[experts, k / block, rows]`.
    ScalesTransposed(usize),
    /// Both, in GGUF's blocks.
    GgufBlocks,
    /// The same, rows in the order in which llama.cpp rotates them, for this number of heads.
    GgufHeads(usize),
}

/// The rows of q or k in the order of llama.cpp, which rotates neighbours: Hugging Face's code rotates those half a head
/// apart. `rows` is a multiple of `2 · heads`.
pub(crate) fn rotated_rows(rows: usize, heads: usize) -> impl Iterator<Item = usize> + Clone {
    let (head, half) = (rows / heads, rows / heads / 2);
    (0..rows).map(move |row| row / head * head + row % 2 * half + row % head / 2)
}

impl WeightPart {
    /// Bytes of this part of a weight.
    pub(crate) fn len(self, weight: &WeightOut<'_>) -> usize {
        let codes = weight.rows() * (weight.k() / 2);
        let scales = weight.rows() * weight.blocks();
        match self {
            Self::Codes | Self::CodesTransposed(_) => codes,
            Self::Scales | Self::ScalesTransposed(_) => scales,
            Self::GgufBlocks | Self::GgufHeads(_) => codes + scales,
        }
    }

    /// Writes this part of a weight.
    ///
    /// # Errors
    /// Those of `write`; if the weight breaks a rule of its format, or one of the block scales to be written is NaN or
    /// negative. `file` is what is written, which errors name where the weight is in memory.
    pub(crate) fn write(
        self,
        weight: &WeightOut<'_>,
        file: &Path,
        write: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // What is wrong with a stored weight is wrong in the file that it comes from.
        let at_fault = match weight {
            WeightOut::Matrix(_) => file,
            WeightOut::Stored(source, _) => source.file(),
        };
        let fault = |source| Error::Format { file: at_fault.into(), source };
        if let Self::GgufHeads(heads) = self {
            let m = weight.read()?;
            // In its own order first, by which a fault is named.
            m.check_scales().map_err(fault)?;
            let rows: Vec<usize> = rotated_rows(m.rows(), heads).collect();
            let m = m.pick(m.name(), &rows).map_err(fault)?;
            return Self::GgufBlocks.write(&m.into(), file, write);
        }
        if let Self::CodesTransposed(experts) | Self::ScalesTransposed(experts) = self {
            let m = weight.read()?;
            m.check_scales().map_err(fault)?;
            let rows = m.rows() / experts;
            let (columns, of_codes) = match self {
                Self::CodesTransposed(_) => (m.k() / 2, true),
                _ => (m.blocks(), false),
            };
            let byte = |row, col| if of_codes { m.row_codes(row)[col] } else { m.scale_byte(row, col) };
            return (0..experts).flat_map(|e| (0..columns).map(move |col| (e * rows, col))).try_for_each(
                |(first, col)| write(&(first..first + rows).map(|row| byte(row, col)).collect::<Vec<u8>>()),
            );
        }
        weight.runs(|first, m| {
            if self == Self::Codes {
                return write(&dense_codes(m));
            }
            m.check_scales().map_err(|mut source| {
                // Counted in the whole weight; this is a run of it.
                if let dualgemm_formats::Error::ScaleByte { row, .. } = &mut source {
                    *row += first;
                }
                fault(source)
            })?;
            match (self, m.format()) {
                (Self::GgufBlocks, BlockFormat::Nvfp4) => write(&gguf::from_matrix(m).map_err(fault)?),
                (Self::GgufBlocks, BlockFormat::Mxfp4) => write(&mxfp4::pack(m)),
                _ => match m.scale_layout() {
                    ScaleLayout::Linear => write(m.scales()),
                    layout => write(&layout.convert(m.scales(), ScaleLayout::Linear, m.rows(), m.blocks())),
                },
            }
        })
    }
}
