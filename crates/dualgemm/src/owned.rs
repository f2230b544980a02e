//! Matrices in memory of their own: what one product writes and the next one reads.

use dualgemm_cpu::Aligned;
use dualgemm_formats::{
    BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout, match_floats,
};
use dualgemm_gemm::{AFormat, AOperand, DualGemmDesc, Error as GemmError, OutFormat, OutputMut};
use half::{bf16, f16};

use crate::Error;

/// Rows of one format: written as a C, read as an A. They start on a cache line: threads that write neighbouring features would
/// else write to one line at the same time.
#[derive(Debug, Clone)]
pub enum OwnedMatrix {
    /// Row-major.
    F32(Aligned<f32>),
    /// Row-major.
    F16(Aligned<f16>),
    /// Row-major.
    Bf16(Aligned<bf16>),
    /// Codes with their scales.
    Quantized {
        /// What of.
        format: BlockFormat,
        /// Even feature in the low nibble.
        codes: Aligned<u8>,
        /// Scale bytes, padding included.
        scales: Aligned<u8>,
        /// Their order.
        layout: ScaleLayout,
        /// Tensor scale, a multiplier.
        global_scale: f32,
    },
}

impl OwnedMatrix {
    /// Room for rows of a format, zeroed; block scales are in this order.
    ///
    /// # Errors
    /// If the memory does not hold it; `tensor` is how the message calls it.
    pub fn new(
        tensor: &'static str,
        [rows, cols]: [usize; 2],
        format: AFormat,
        layout: ScaleLayout,
    ) -> Result<Self, Error> {
        let values = rows.checked_mul(cols);
        let made = match (format, format.block_format()) {
            (AFormat::F16, _) => values.and_then(Aligned::try_zeroed).map(Self::F16),
            (AFormat::Bf16, _) => values.and_then(Aligned::try_zeroed).map(Self::Bf16),
            (_, None) => values.and_then(Aligned::try_zeroed).map(Self::F32),
            (_, Some(format)) => {
                let codes = values.and_then(|values| Aligned::try_zeroed(values / 2));
                let scales = layout.checked_len(rows, cols / format.block_len());
                let scales = scales.and_then(Aligned::try_zeroed);
                let both = codes.zip(scales);
                both.map(|(codes, scales)| Self::Quantized {
                    format,
                    codes,
                    scales,
                    layout,
                    global_scale: 1.0,
                })
            }
        };
        Ok(made.ok_or(GemmError::TooLarge { tensor, batch: 1, rows, cols })?)
    }

    /// Room for C of a problem.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_c(tensor: &'static str, desc: &DualGemmDesc) -> Result<Self, Error> {
        let layout = match desc.out {
            OutFormat::Nvfp4 { scale_layout, .. } => scale_layout,
            _ => ScaleLayout::Linear,
        };
        Self::new(tensor, [desc.m, desc.n], desc.out.into(), layout)
    }

    /// The first rows, to be written. The tensor scale of an nvfp4 C is what the run returns.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn output(&mut self, rows: usize, cols: usize) -> OutputMut<'_> {
        let values = rows * cols;
        match_floats!(self, Self(c) => OutputMut: &mut c[..values],
            Self::Quantized { format, codes, scales, layout, .. } => {
                let scale_bytes = layout.len(rows, cols / format.block_len());
                OutputMut::Nvfp4 { codes: &mut codes[..values / 2], scales: &mut scales[..scale_bytes] }
            }
        )
    }

    /// Takes the tensor scale that a run returns for an nvfp4 C.
    pub fn set_global_scale(&mut self, scale: Option<f32>) {
        if let (Self::Quantized { global_scale, .. }, Some(scale)) = (self, scale) {
            *global_scale = scale;
        }
    }

    /// The first rows, to be read.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn operand<'a>(&'a self, name: &'a str, rows: usize, cols: usize) -> Result<AOperand<'a>, Error> {
        fn floats<'a, T>(name: &str, rows: usize, cols: usize, c: &'a [T]) -> Result<Matrix<'a, T>, Error>
        where
            T: Copy,
        {
            Ok(Matrix::new(name, rows, cols, &c[..c.len().min(rows * cols)])?)
        }
        Ok(AOperand::Float(match_floats!(self, Self(c) => FloatMatrix: floats(name, rows, cols, c)?,
            &Self::Quantized { format, ref codes, ref scales, layout, global_scale } => {
                let codes = &codes[..codes.len().min(rows * cols / 2)];
                let scales = &scales[..scales.len().min(layout.len(rows, cols / format.block_len()))];
                let global = GlobalScale::multiplier(global_scale);
                let matrix = QuantizedMatrix::new(name, format, rows, cols, codes, scales, layout, global)?;
                return Ok(AOperand::Quantized(matrix));
            }
        )))
    }
}
