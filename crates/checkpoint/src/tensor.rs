//! One stored tensor, as bytes inside a mapped file.

use std::borrow::Cow;
use std::ops::Range;

use bytemuck::Pod;
use dualgemm_formats::{Float as _, FloatMatrix, Matrix, match_floats};

use crate::{Dtype, Error};

#[cfg(target_endian = "big")]
compile_error!("safetensors and GGUF files are little-endian and are mapped, not decoded");

/// What a header says of one tensor, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Storage type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; their product is known not to overflow.
    pub shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub range: Range<usize>,
}

/// A stored tensor: name, type, shape (outermost dimension first) and its bytes in the mapped file.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorView<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Storage type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Exactly the tensor's bytes.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Number of elements; the reader has checked that it does not overflow.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// A matrix of floats `[rows, cols]`; leading dimensions are rows. Borrows the file where it is aligned.
    ///
    /// # Errors
    /// If the type is not F32, F16 or BF16, or there is no element.
    pub fn float_matrix(&self) -> Result<FloatMatrix<'a>, Error> {
        let Some((&cols, lead)) = self.shape.split_last() else {
            return Err(self.shape_error("a matrix", "[rows, columns]".into()));
        };
        let rows: usize = lead.iter().product();
        if rows == 0 || cols == 0 {
            return Err(self.shape_error("a matrix", "at least one row and one column".into()));
        }
        self.float_rows(0..rows, rows, cols)
    }

    /// Some of its `all` rows.
    pub(crate) fn float_rows(
        &self,
        rows: Range<usize>,
        all: usize,
        cols: usize,
    ) -> Result<FloatMatrix<'a>, Error> {
        let (of_row, n) = (self.bytes.len() / all, rows.len());
        let bytes = &self.bytes[rows.start * of_row..rows.end * of_row];
        let fault = |source| Error::Format { file: self.name.into(), source };
        let matrix = match_floats!(self.dtype,
            Dtype => FloatMatrix(Matrix::new(self.name, n, cols, cast(bytes)).map_err(fault)?),
            _ => return Err(self.dtype_error("a float matrix", "F32, F16 or BF16")));
        Ok(matrix)
    }

    /// All elements as f32, exact.
    ///
    /// # Errors
    /// If the type is not F32, F16 or BF16.
    pub fn to_f32(&self, what: &'static str) -> Result<Vec<f32>, Error> {
        Ok(match_floats!(self.dtype, Dtype[T] => cast::<T>(self.bytes).iter().map(|x| x.value()).collect(),
            _ => return Err(self.dtype_error(what, "F32, F16 or BF16"))))
    }

    pub(crate) fn dtype_error(&self, what: &'static str, valid: &'static str) -> Error {
        Error::Dtype { tensor: self.name.into(), what, found: self.dtype.to_string(), valid }
    }

    pub(crate) fn shape_error(&self, what: &'static str, valid: String) -> Error {
        Error::Shape { tensor: self.name.into(), what, found: self.shape.to_vec(), valid }
    }
}

/// Little-endian bytes as numbers: borrowed where aligned, copied where not. A file may start its data at any
/// byte.
pub(crate) fn cast<T: Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(slice) => Cow::Borrowed(slice),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misaligned_floats_are_read_right() {
        let mut bytes = [0u8; 13];
        bytes[1..5].copy_from_slice(&1.5f32.to_le_bytes());
        bytes[5..9].copy_from_slice(&(-2.0f32).to_le_bytes());
        for start in 0..4 {
            let moved: Vec<u8> = std::iter::repeat_n(0, start).chain(bytes[1..9].iter().copied()).collect();
            let view =
                TensorView { name: "x", dtype: Dtype::F32, shape: &[1, 2], bytes: &moved[start..start + 8] };
            let m = view.float_matrix().unwrap();
            assert_eq!([m.value(0, 0), m.value(0, 1)], [1.5, -2.0]);
        }
    }

    #[test]
    fn leading_dimensions_are_rows() {
        let bytes = [0u8; 24];
        let view = TensorView { name: "x", dtype: Dtype::Bf16, shape: &[2, 3, 2], bytes: &bytes };
        let m = view.float_matrix().unwrap();
        assert_eq!((m.rows(), m.cols()), (6, 2));
        let view = TensorView { name: "x", dtype: Dtype::U8, shape: &[24], bytes: &bytes };
        assert_eq!(
            view.float_matrix().unwrap_err().to_string(),
            "x: stored as U8; a float matrix must be F32, F16 or BF16"
        );
    }
}
