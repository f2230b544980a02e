//! Arrays that C is written to.

use std::ops::Range;

use dualgemm::formats::{FloatType, ScaleLayout, match_floats};
use dualgemm::gemm::{OutFormat, OutScale, OutputMut};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::array::Array;
use crate::error::{Kind, refuse};
use crate::operand::{Source, layout};

/// Where C goes.
pub enum Destination<'py> {
    Float(Array<'py>),
    /// Codes and block scales.
    Nvfp4 {
        codes: Array<'py>,
        scales: Array<'py>,
        layout: ScaleLayout,
        scale: OutScale,
        /// Where a GPU writes the tensor scale.
        scale_out: Option<Array<'py>>,
    },
}

impl<'py> Destination<'py> {
    /// An array, or the tuple that `Weights._run` describes.
    pub fn of(out: &Bound<'py, PyAny>) -> PyResult<Self> {
        if !out.is_instance_of::<PyTuple>() {
            return Ok(Self::Float(Array::of("out", out)?));
        }
        type Parts<'py> =
            (Bound<'py, PyAny>, Bound<'py, PyAny>, String, Option<f32>, Option<Bound<'py, PyAny>>);
        let (codes, scales, layout_name, scale, scale_out): Parts<'py> = out.extract()?;
        Ok(Self::Nvfp4 {
            codes: Array::of("out codes", &codes)?,
            scales: Array::of("out scales", &scales)?,
            layout: layout(&layout_name)?,
            scale: scale.map_or(OutScale::Dynamic, OutScale::Static),
            scale_out: scale_out.map(|array| Array::of("out global_scale", &array)).transpose()?,
        })
    }

    /// The arrays of C.
    pub fn arrays(&self) -> Vec<&Array<'py>> {
        match self {
            Self::Float(array) => vec![array],
            Self::Nvfp4 { codes, scales, scale_out, .. } => {
                [codes, scales].into_iter().chain(scale_out).collect()
            }
        }
    }

    /// Checks shape, place and that C does not lie in A.
    pub fn check(&self, source: &Source<'_>, rows: usize, n: usize) -> PyResult<()> {
        let shape = match self {
            Self::Float(array) => (array, vec![rows, n]),
            Self::Nvfp4 { codes, .. } => (codes, vec![rows, n / 2]),
        };
        if shape.0.shape != shape.1 {
            refuse!(Operand, "out: shape {:?}; {:?} is needed", shape.0.shape, shape.1);
        }
        for array in self.arrays() {
            if array.place != source.place() {
                let (out, a) = (array.place, source.place());
                refuse!(Operand, "out: is on {out}; a is on {a}");
            }
        }
        if self.overlaps(&source.extents()) {
            refuse!(Operand, "out: shares memory with a; C cannot be computed in place");
        }
        Ok(())
    }

    /// Whether it lies in any of these ranges of memory.
    pub fn overlaps(&self, ranges: &[Range<usize>]) -> bool {
        let overlap = |own: Range<usize>| ranges.iter().any(|r| own.start < r.end && r.start < own.end);
        self.arrays().iter().any(|array| overlap(array.extent()))
    }

    /// The format of C.
    pub fn format(&self) -> OutFormat {
        match self {
            // Another type is refused where C is taken.
            Self::Float(array) => array.dtype.float_type().map_or(OutFormat::F32, Into::into),
            Self::Nvfp4 { layout, scale, .. } => {
                OutFormat::Nvfp4 { scale_layout: *layout, global_scale: *scale }
            }
        }
    }

    /// C in this machine's memory.
    pub fn output(&mut self) -> PyResult<OutputMut<'_>> {
        Ok(match self {
            Self::Float(array) => output("out", array)?,
            Self::Nvfp4 { codes, scales, .. } => OutputMut::Nvfp4 {
                codes: bytes_mut("out codes", codes)?,
                scales: bytes_mut("out scales", scales)?,
            },
        })
    }
}

/// An array of floats that can be written.
pub fn output<'a>(name: &str, array: &'a mut Array<'_>) -> PyResult<OutputMut<'a>> {
    Ok(match_floats!(array.float_type(name)?, FloatType => OutputMut(array.as_mut_slice(name)?)))
}

/// An array of one-byte elements that can be written.
pub fn bytes_mut<'a>(name: &str, array: &'a mut Array<'_>) -> PyResult<&'a mut [u8]> {
    match array.dtype.size() {
        1 => array.as_mut_slice(name),
        _ => Err(Kind::Operand.raise(format!("{name}: is {}; a type of one byte is needed", array.dtype))),
    }
}
