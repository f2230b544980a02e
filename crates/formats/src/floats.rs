//! Matrices of floats; they borrow or own their elements, like [`tensor`](crate::tensor)'s.

use std::borrow::Cow;
use std::ops::Range;

use half::slice::HalfFloatSliceExt as _;
#[doc(hidden)]
pub use half::{bf16, f16};

use crate::Error;

/// A row-major `[rows, cols]` matrix of floats whose rows may lie farther apart than `cols`.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix<'a, T: Clone> {
    rows: usize,
    cols: usize,
    row_stride: usize,
    data: Cow<'a, [T]>,
}

impl<'a, T: Clone> Matrix<'a, T> {
    /// A dense matrix of exactly `rows · cols` elements. `name` is what the error calls it.
    ///
    /// # Errors
    /// If the buffer does not hold exactly that many elements, or there is no row.
    pub fn new(name: &str, rows: usize, cols: usize, data: impl Into<Cow<'a, [T]>>) -> Result<Self, Error> {
        let this = Self::strided(name, rows, cols, cols, data)?;
        if this.data.len() != rows * cols {
            return Err(this.len_error(name, rows * cols));
        }
        Ok(this)
    }

    /// A view whose rows lie `row_stride` elements apart; elements between rows are never read.
    ///
    /// # Errors
    /// If the buffer is too short, rows overlap, or there is no row.
    pub fn strided(
        name: &str,
        rows: usize,
        cols: usize,
        row_stride: usize,
        data: impl Into<Cow<'a, [T]>>,
    ) -> Result<Self, Error> {
        if rows == 0 {
            return Err(Error::NoRows { tensor: name.into() });
        }
        let this = Self { rows, cols, row_stride, data: data.into() };
        let needed = (rows - 1)
            .checked_mul(row_stride)
            .and_then(|n| n.checked_add(cols))
            .ok_or_else(|| Error::TooLarge { tensor: name.into(), rows, row_stride })?;
        if row_stride < cols {
            return Err(Error::RowStride { tensor: name.into(), row_stride, row: cols, unit: "elements" });
        }
        if this.data.len() < needed {
            return Err(this.len_error(name, needed));
        }
        Ok(this)
    }

    fn len_error(&self, name: &str, needed: usize) -> Error {
        Error::MatrixLen {
            tensor: name.into(),
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            found: self.data.len(),
            needed,
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The `cols` elements of a row.
    ///
    /// # Panics
    /// If the row lies past the elements.
    #[inline]
    pub fn row(&self, row: usize) -> &[T] {
        let start = row * self.row_stride;
        &self.data[start..start + self.cols]
    }

    /// All elements in order, if there are none between rows.
    pub fn as_dense(&self) -> Option<&[T]> {
        (self.row_stride == self.cols).then(|| &self.data[..self.rows * self.cols])
    }

    /// Some rows, copied.
    ///
    /// # Errors
    /// If `rows` is empty; `name` is what the error calls the matrix.
    ///
    /// # Panics
    /// If a row lies past the elements.
    pub fn pick(&self, name: &str, rows: &[usize]) -> Result<Matrix<'static, T>, Error> {
        let data: Vec<T> = rows.iter().flat_map(|&row| self.row(row)).cloned().collect();
        Matrix::new(name, rows.len(), self.cols, data)
    }

    /// Some rows and columns, borrowed.
    ///
    /// # Panics
    /// If they are not there.
    pub fn part(&self, rows: Range<usize>, cols: Range<usize>) -> Matrix<'_, T> {
        assert!(rows.end <= self.rows && cols.end <= self.cols, "{rows:?} and {cols:?} of a matrix");
        let data = Cow::Borrowed(&self.data[rows.start * self.row_stride + cols.start..]);
        Matrix { rows: rows.len(), cols: cols.len(), row_stride: self.row_stride, data }
    }

    /// The same matrix, owning its elements and nothing between rows.
    pub fn into_owned(self) -> Matrix<'static, T> {
        let Self { rows, cols, .. } = self;
        let data: Vec<T> = match (self.as_dense().map(<[T]>::len), self.data) {
            (Some(len), Cow::Borrowed(data)) => data[..len].to_vec(),
            (Some(len), Cow::Owned(mut data)) => {
                data.truncate(len);
                data
            }
            (None, data) => {
                let starts = (0..rows).map(|row| row * self.row_stride);
                starts.flat_map(|at| &data[at..at + cols]).cloned().collect()
            }
        };
        Matrix { rows, cols, row_stride: cols, data: data.into() }
    }
}

crate::named! {
    /// Element type of a [`FloatMatrix`].
    #[derive(serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum FloatType {
        /// 32-bit.
        F32 = "f32",
        /// IEEE half.
        F16 = "f16",
        /// bfloat16.
        Bf16 = "bf16",
    }
}

/// The numbers of a [`FloatMatrix`].
pub trait Float: Copy + Default + Send + Sync + Into<f32> + 'static {
    /// Which they are.
    const TYPE: FloatType;

    /// The nearest number of this type, ties to even; past the largest, infinity.
    fn nearest(x: f32) -> Self;

    /// [`nearest`](Self::nearest) of as many numbers as `to` has.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// The number, exact.
    #[inline]
    fn value(self) -> f32 {
        self.into()
    }

    /// [`value`](Self::value) of as many numbers as `to` has.
    fn widen(from: &[Self], to: &mut [f32]);
}

macro_rules! floats {
    ($($float:ident $type:ident: $nearest:expr, $narrow:expr, $widen:expr;)*) => {$(
        impl Float for $float {
            const TYPE: FloatType = FloatType::$type;

            #[inline]
            fn nearest(x: f32) -> Self {
                $nearest(x)
            }

            #[inline]
            fn narrow(from: &[f32], to: &mut [Self]) {
                $narrow(to, from);
            }

            #[inline]
            fn widen(from: &[Self], to: &mut [f32]) {
                $widen(from, to);
            }
        }
    )*};
}
floats! {
    f32 F32: |x| x, <[f32]>::copy_from_slice, |from, to: &mut [f32]| to.copy_from_slice(from);
    f16 F16: f16::from_f32, <[f16]>::convert_from_f32_slice, <[f16]>::convert_to_f32_slice;
    bf16 Bf16: bf16::from_f32, <[bf16]>::convert_from_f32_slice, <[bf16]>::convert_to_f32_slice;
}

/// One expression for any type of floats, of enums whose variants `F32`, `F16` and `Bf16` say which it is:
/// `match_floats!(matrix, FloatMatrix(m) => m.rows())`. With `=> FloatMatrix: m`, the result is the same variant of that enum.
/// `FloatType[T]` makes `T` the type. Further arms may follow.
#[doc(hidden)]
#[macro_export]
macro_rules! match_floats {
    ($value:expr, $of:ident($x:pat) => $to:ident: $body:expr $(, $($rest:tt)*)?) => {
        match $value {
            $of::F32($x) => $to::F32($body),
            $of::F16($x) => $to::F16($body),
            $of::Bf16($x) => $to::Bf16($body),
            $($($rest)*)?
        }
    };
    ($value:expr, $of:ident($x:pat) => $body:expr $(, $($rest:tt)*)?) => {
        match $value {
            $of::F32($x) => $body,
            $of::F16($x) => $body,
            $of::Bf16($x) => $body,
            $($($rest)*)?
        }
    };
    ($value:expr, $of:ident => $to:ident $(($body:expr))? $(, $($rest:tt)*)?) => {
        match $value {
            $of::F32 => $to::F32 $(($body))?,
            $of::F16 => $to::F16 $(($body))?,
            $of::Bf16 => $to::Bf16 $(($body))?,
            $($($rest)*)?
        }
    };
    ($value:expr, $of:ident[$type:ident] => $body:expr $(, $($rest:tt)*)?) => {
        match $value {
            $of::F32 => { type $type = f32; $body }
            $of::F16 => { type $type = $crate::floats::f16; $body }
            $of::Bf16 => { type $type = $crate::floats::bf16; $body }
            $($($rest)*)?
        }
    };
}

impl FloatType {
    /// The nearest number of this type, ties to even; past the largest, infinity.
    pub fn round(self, x: f32) -> f32 {
        match_floats!(self, Self[T] => T::nearest(x).value())
    }

    /// Bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Numbers from their little-endian bytes, exact; bytes that are left over are not read.
    pub fn values(self, bytes: &[u8]) -> Vec<f32> {
        match_floats!(self, Self[T] => bytes.as_chunks().0.iter().map(|&x| T::from_le_bytes(x).value()).collect())
    }
}

/// A matrix of one of the float types that activations come in.
#[derive(Debug, Clone, PartialEq)]
pub enum FloatMatrix<'a> {
    /// 32-bit.
    F32(Matrix<'a, f32>),
    /// IEEE half.
    F16(Matrix<'a, f16>),
    /// bfloat16.
    Bf16(Matrix<'a, bf16>),
}

impl FloatMatrix<'static> {
    /// A dense matrix of values rounded to a type, to the nearest number, ties to even.
    ///
    /// # Errors
    /// As [`Matrix::new`].
    pub fn rounded(
        name: &str,
        to: FloatType,
        rows: usize,
        cols: usize,
        values: impl Iterator<Item = f32>,
    ) -> Result<Self, Error> {
        fn of<T: Float>(values: impl Iterator<Item = f32>) -> Vec<T> {
            values.map(T::nearest).collect()
        }
        Ok(match_floats!(to, FloatType => Self(Matrix::new(name, rows, cols, of(values))?)))
    }
}

impl FloatMatrix<'_> {
    /// Every element, row by row, exact.
    pub fn values(&self) -> impl Iterator<Item = f32> {
        (0..self.rows()).flat_map(move |row| (0..self.cols()).map(move |col| self.value(row, col)))
    }

    /// Every element, row by row, as little-endian bytes.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        let rows = 0..self.rows();
        match_floats!(self, Self(m) => rows.flat_map(|row| m.row(row)).flat_map(|x| x.to_le_bytes()).collect())
    }

    /// Row and column of the first element that is NaN or infinite.
    pub fn not_finite(&self) -> Option<(usize, usize)> {
        let at = self.values().position(|value| !value.is_finite())?;
        Some((at / self.cols(), at % self.cols()))
    }

    /// Some rows, copied; see [`Matrix::pick`].
    ///
    /// # Errors
    /// As there.
    pub fn pick(&self, name: &str, rows: &[usize]) -> Result<FloatMatrix<'static>, Error> {
        Ok(match_floats!(self, Self(m) => FloatMatrix: m.pick(name, rows)?))
    }

    /// Some rows and columns, borrowed; see [`Matrix::part`].
    ///
    /// # Panics
    /// As there.
    pub fn part(&self, rows: Range<usize>, cols: Range<usize>) -> FloatMatrix<'_> {
        match_floats!(self, Self(m) => FloatMatrix: m.part(rows, cols))
    }

    /// The same matrix, owning its elements.
    pub fn into_owned(self) -> FloatMatrix<'static> {
        match_floats!(self, Self(m) => FloatMatrix: m.into_owned())
    }

    /// Type of the elements.
    pub fn float_type(&self) -> FloatType {
        fn of<T: Float>(_: &Matrix<'_, T>) -> FloatType {
            T::TYPE
        }
        match_floats!(self, Self(m) => of(m))
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        match_floats!(self, Self(m) => m.rows())
    }

    /// Elements per row.
    pub fn cols(&self) -> usize {
        match_floats!(self, Self(m) => m.cols())
    }

    /// The value of an element, exact in f32 for every type.
    ///
    /// # Panics
    /// If there is no such element.
    #[inline]
    pub fn value(&self, row: usize, col: usize) -> f32 {
        match_floats!(self, Self(m) => m.row(row)[col].value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_the_nearest_and_rows_picked_in_order() {
        let values = [1.0, 65519.0, 1.001, -2.5, f32::INFINITY, 3.0];
        for (to, rounded) in
            [(FloatType::F32, 65519.0), (FloatType::F16, 65504.0), (FloatType::Bf16, 65536.0)]
        {
            let m = FloatMatrix::rounded("a", to, 3, 2, values.into_iter()).unwrap();
            assert_eq!((m.float_type(), m.value(0, 1), m.not_finite()), (to, rounded, Some((2, 0))));
            let picked: Vec<f32> = m.pick("b", &[2, 0]).unwrap().values().collect();
            assert_eq!(picked, [f32::INFINITY, 3.0, 1.0, rounded]);
            assert_eq!(m.pick("b", &[1]).unwrap().not_finite(), None);
            let bytes = m.to_le_bytes();
            assert_eq!(bytes.len(), 6 * to.bytes());
            assert_eq!(to.values(&bytes), m.values().collect::<Vec<_>>());
            assert_eq!(to.values(&bytes[..3 * to.bytes() - 1]), to.values(&bytes[..2 * to.bytes()]));
            assert_eq!(
                m.pick("b", &[]).unwrap_err().to_string(),
                Error::NoRows { tensor: "b".into() }.to_string()
            );
        }
    }

    #[test]
    fn overflowing_sizes_are_refused() {
        let r = Matrix::<f32>::strided("a", usize::MAX, 4, 1 << 40, vec![]);
        assert!(matches!(r, Err(Error::TooLarge { .. })));
    }

    #[test]
    fn rows_that_overlap_are_refused_by_what_they_hold() {
        let message = Matrix::<f32>::strided("a", 4, 16, 1, vec![0.0; 64]).unwrap_err().to_string();
        assert_eq!(message, "a: a row stride of 1 elements; a row has 16, so at least that is needed");
    }
}
