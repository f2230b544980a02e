//! Memory of Python arrays, of whatever library, without importing any: where it is, its type, shape and strides.

mod protocols;

use dualgemm::formats::{FloatType, match_floats};
use dualgemm_cli::machine;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

use crate::error::{Kind, refuse};

/// Types of elements that operands come in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    /// Numbers of experts.
    I32,
    I64,
    /// A plain byte, signed or not: packed codes, or scales that the caller vouches for.
    Byte,
    /// Two e2m1 codes in a byte.
    F4x2,
    E4m3,
    Ue8m0,
}

impl Dtype {
    const NAMES: [(&'static str, Self); 11] = [
        ("float64", Self::F64),
        ("float32", Self::F32),
        ("float16", Self::F16),
        ("bfloat16", Self::Bf16),
        ("int32", Self::I32),
        ("int64", Self::I64),
        ("uint8", Self::Byte),
        ("int8", Self::Byte),
        ("float4_e2m1fn_x2", Self::F4x2),
        ("float8_e4m3fn", Self::E4m3),
        ("float8_e8m0fnu", Self::Ue8m0),
    ];

    fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype)
    }

    /// The type of floats that operands have, if it is one.
    pub fn float_type(self) -> Option<FloatType> {
        Some(match_floats!(self, Self => FloatType, _ => return None))
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Byte | Self::F4x2 | Self::E4m3 | Self::Ue8m0 => 1,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(Self::NAMES.iter().find(|(_, dtype)| dtype == self).map_or("unknown", |(name, _)| name))
    }
}

/// Where memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Cpu,
    /// A CUDA device by number, as far as the array says.
    Cuda(Option<i64>),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("the processor"),
            Self::Cuda(None) => f.write_str("a CUDA device"),
            Self::Cuda(Some(ordinal)) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A view of an array's memory, which the array keeps alive.
pub struct Array<'py> {
    /// First element.
    pub pointer: *mut u8,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// From element to element, in elements.
    pub strides: Vec<isize>,
    pub writable: bool,
    pub place: Place,
    _owner: Bound<'py, PyAny>,
}

impl<'py> Array<'py> {
    /// The array in `object`, which messages call `name`.
    pub fn of(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        protocols::array(name, object)?.require_memory(name)
    }

    /// The array, if its elements can be counted and are somewhere. Torch has tensors that are nowhere: those that a
    /// tracer makes, and those whose storage was given back.
    fn require_memory(self, name: &str) -> PyResult<Self> {
        let shape = &self.shape;
        if shape.contains(&0) {
            return Ok(self);
        }
        let bytes = shape.iter().try_fold(self.dtype.size(), |bytes, &extent| bytes.checked_mul(extent));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            refuse!(Operand, "{name}: shape {shape:?} does not fit the address space");
        }
        if self.pointer.is_null() {
            refuse!(Operand, "{name}: shape {shape:?} without memory; an array with its elements is needed");
        }
        Ok(self)
    }

    /// The same, refusing what is not in this machine's memory.
    pub fn on_cpu(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let array = Self::of(name, object)?;
        array.check_cpu(name)?;
        Ok(array)
    }

    /// Refuses what is not in this machine's memory.
    pub fn check_cpu(&self, name: &str) -> PyResult<()> {
        match self.place {
            Place::Cpu => Ok(()),
            place => {
                Err(Kind::Operand
                    .raise(format!("{name}: is on {place}; an array on the processor is needed")))
            }
        }
    }

    /// The type of its floats, refusing others.
    pub fn float_type(&self, name: &str) -> PyResult<FloatType> {
        self.dtype.float_type().ok_or_else(|| {
            let found = self.dtype;
            Kind::Operand.raise(format!("{name}: is {found}; float32, float16 or bfloat16 is needed"))
        })
    }

    /// Elements in all.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The two dimensions of a matrix.
    pub fn matrix(&self, name: &str) -> PyResult<(usize, usize)> {
        match *self.shape {
            [rows, cols] => Ok((rows, cols)),
            _ => Err(Kind::Operand.raise(format!("{name}: shape {:?}; a matrix is needed", self.shape))),
        }
    }

    /// Whether elements follow each other row by row without gaps.
    pub fn is_dense(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&extent, &stride)| {
            let fits = extent <= 1 || stride == expected;
            expected *= extent as isize;
            fits
        })
    }

    /// Whether the memory can be read in place as elements of `T`.
    fn is_aligned<T>(&self) -> bool {
        self.pointer.addr().is_multiple_of(align_of::<T>())
    }

    /// All elements in one slice, if they are dense.
    ///
    /// `T` must be as large as the elements and take every bit pattern.
    pub fn as_slice<T>(&self) -> Option<&[T]> {
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        if self.len() == 0 {
            return Some(&[]);
        }
        (self.is_dense() && self.is_aligned::<T>()).then(|| {
            // SAFETY: dense and aligned; the array vouches for its memory and is kept alive; T takes every bit pattern.
            unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.len()) }
        })
    }

    /// The memory from the first element to the last one, if no stride is negative.
    pub fn as_span<T>(&self) -> Option<&[T]> {
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        let forward =
            self.len() > 0 && self.strides.iter().all(|&stride| stride >= 0) && self.is_aligned::<T>();
        let steps = self.shape.iter().zip(&self.strides);
        forward.then(|| {
            let last: isize = steps.map(|(&extent, &stride)| (extent as isize - 1) * stride).sum();
            // SAFETY: aligned, and the array vouches for its memory, from the first element to the last, and is kept alive; T
            // takes every bit pattern, also of what lies between elements.
            unsafe { std::slice::from_raw_parts(self.pointer.cast(), last as usize + 1) }
        })
    }

    /// Rows that lie in order with elements side by side, as one slice and the distance between rows.
    pub fn as_rows<T>(&self) -> Option<(&[T], usize)> {
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        let (&[rows, cols], &[row, col]) = (self.shape.as_slice(), self.strides.as_slice()) else {
            return None;
        };
        let stride = if rows == 1 { cols } else { usize::try_from(row).ok()? };
        let fits =
            rows > 0 && cols > 0 && (cols == 1 || col == 1) && stride >= cols && self.is_aligned::<T>();
        fits.then(|| {
            let len = (rows - 1) * stride + cols;
            // SAFETY: aligned, and the array vouches for its memory, from the first row to the end of the last, and is kept
            // alive; T takes every bit pattern, also of what lies between rows.
            (unsafe { std::slice::from_raw_parts(self.pointer.cast(), len) }, stride)
        })
    }

    /// All elements in one slice that can be written.
    pub fn as_mut_slice<T>(&mut self, name: &str) -> PyResult<&mut [T]> {
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        if !self.writable {
            refuse!(Operand, "{name}: is read-only");
        }
        if !self.is_aligned::<T>() {
            let (address, align) = (self.pointer.addr(), align_of::<T>());
            return Err(Kind::Operand.raise(format!(
                "{name}: starts at {address:#x}, which is no multiple of {align} bytes; an output must be aligned"
            )));
        }
        if !self.is_dense() {
            let (shape, strides) = (&self.shape, &self.strides);
            return Err(Kind::Operand.raise(format!(
                "{name}: shape {shape:?} with strides {strides:?} is not contiguous row by row, which an output must be"
            )));
        }
        if self.len() == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the array vouches for its memory, is kept alive and may be written; callers check that no operand
        // lies in it, and T takes every bit pattern.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.len()) })
    }

    /// A copy of all elements, row by row; of a broadcast array it is larger than the array.
    pub fn gather<T: Copy>(&self, name: &str) -> PyResult<Vec<T>> {
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        if !machine::has_room((self.len() * size_of::<T>()) as f64) {
            let message = format!("{name}: a copy of shape {:?} does not fit the memory", self.shape);
            return Err(PyMemoryError::new_err(message));
        }
        let mut out = Vec::with_capacity(self.len());
        let mut index = vec![0; self.shape.len()];
        for _ in 0..self.len() {
            let offset: isize = index.iter().zip(&self.strides).map(|(&i, stride)| i as isize * stride).sum();
            // SAFETY: the index is within the shape, whose elements all lie in the array's memory.
            out.push(unsafe { self.pointer.cast::<T>().offset(offset).read_unaligned() });
            for d in (0..index.len()).rev() {
                index[d] += 1;
                if index[d] < self.shape[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        Ok(out)
    }

    /// First and one past last byte of the memory, whatever the signs of the strides.
    pub fn extent(&self) -> std::ops::Range<usize> {
        let (mut low, mut high) = (0isize, 0isize);
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            let span = stride * (extent as isize - 1).max(0);
            (low, high) = (low + span.min(0), high + span.max(0));
        }
        let (base, size) = (self.pointer.addr() as isize, self.dtype.size() as isize);
        if self.len() == 0 {
            return base as usize..base as usize;
        }
        (base + low * size) as usize..(base + (high + 1) * size) as usize
    }
}
