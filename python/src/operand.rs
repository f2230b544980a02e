//! Arrays as matrices of the facade: borrowed where rows lie as it needs them, copied where they do not.

use std::borrow::Cow;

use dualgemm::device::DevicePtr;
use dualgemm::formats::{
    BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout, match_floats,
};
use dualgemm::gemm::AOperand;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyTuple};

use crate::array::{Array, Dtype, Place};
use crate::error::{Kind, facade, refuse};

/// The arrays of an operand, which it borrows.
pub enum Source<'py> {
    /// f32, f16 or bf16.
    Float(Array<'py>),
    /// Codes, scales and what belongs to them.
    Quantized(Quantized<'py>),
}

/// A quantized matrix in a GPU's memory.
#[derive(Debug, Clone, Copy)]
pub struct OnDevice {
    pub format: BlockFormat,
    pub rows: usize,
    pub k: usize,
    pub codes: DevicePtr,
    pub scales: DevicePtr,
    pub global_scale: f32,
    pub layout: ScaleLayout,
}

/// Codes, block scales, tensor scale (a multiplier), order of the block scales: a `dualgemm.Quantized`.
pub struct Quantized<'py> {
    codes: Array<'py>,
    scales: Array<'py>,
    global_scale: f32,
    layout: ScaleLayout,
    format: BlockFormat,
}

impl<'py> Source<'py> {
    /// An array, or the tuple of a `dualgemm.Quantized`.
    pub fn of(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        match object.is_instance_of::<PyTuple>() {
            true => Ok(Self::Quantized(Quantized::of(name, object)?)),
            false => Ok(Self::Float(Array::of(name, object)?)),
        }
    }

    /// Where its memory is.
    pub fn place(&self) -> Place {
        match self {
            Self::Float(array) => array.place,
            Self::Quantized(quantized) => quantized.place(),
        }
    }

    pub fn rows(&self) -> PyResult<usize> {
        match self {
            Self::Float(array) => Ok(array.matrix("a")?.0),
            Self::Quantized(quantized) => Ok(quantized.codes.matrix("a codes")?.0),
        }
    }

    /// The matrix, in this machine's memory.
    pub fn operand(&self, name: &str) -> PyResult<AOperand<'_>> {
        match self {
            Self::Float(array) => Ok(AOperand::Float(floats(name, array)?)),
            Self::Quantized(quantized) => Ok(AOperand::Quantized(quantized.matrix(name)?)),
        }
    }

    /// Bytes of memory that are read.
    pub fn extents(&self) -> Vec<std::ops::Range<usize>> {
        match self {
            Self::Float(array) => vec![array.extent()],
            Self::Quantized(quantized) => quantized.extents().into(),
        }
    }
}

impl<'py> Quantized<'py> {
    /// `(codes, scales, global_scale, scale_layout, format)`; the last two may be missing.
    pub fn of(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if !object.is_instance_of::<PyTuple>() {
            let found = object.get_type().name()?;
            return Err(
                Kind::Operand.raise(format!("{name} is of type {found}; a dualgemm.Quantized is needed"))
            );
        }
        let len = object.len()?;
        if !(3..=5).contains(&len) {
            return Err(Kind::Operand.raise(format!(
                "{name}: a tuple of {len}; codes, scales, global_scale, and optionally scale_layout and format, are needed"
            )));
        }
        let text = |at: usize, default: &str| -> PyResult<String> {
            if at < len { object.get_item(at)?.extract() } else { Ok(default.into()) }
        };
        let codes = Array::of(&format!("{name} codes"), &object.get_item(0)?)?;
        let scales = Array::of(&format!("{name} scales"), &object.get_item(1)?)?;
        if (codes.place == Place::Cpu) != (scales.place == Place::Cpu) {
            let (codes, scales) = (codes.place, scales.place);
            refuse!(Operand, "{name}: codes are on {codes} and scales on {scales}");
        }
        let this = Self {
            global_scale: number(&format!("{name} global_scale"), &object.get_item(2)?)? as f32,
            layout: layout(&text(3, "linear")?)?,
            format: format(&text(4, "nvfp4")?)?,
            codes,
            scales,
        };
        this.check_types(name)?;
        Ok(this)
    }

    fn check_types(&self, name: &str) -> PyResult<()> {
        if !matches!(self.codes.dtype, Dtype::Byte | Dtype::F4x2) {
            let found = self.codes.dtype;
            refuse!(Operand, "{name}: codes are {found}; uint8 or float4_e2m1fn_x2 is needed");
        }
        match (self.format, self.scales.dtype) {
            (_, Dtype::Byte) | (BlockFormat::Nvfp4, Dtype::E4m3) | (BlockFormat::Mxfp4, Dtype::Ue8m0) => {
                Ok(())
            }
            (format, found) => {
                let valid = match format {
                    BlockFormat::Nvfp4 => "float8_e4m3fn",
                    BlockFormat::Mxfp4 => "float8_e8m0fnu",
                };
                refuse!(Operand, "{name}: scales are {found}; uint8 or {valid} is needed for {format}");
            }
        }
    }

    /// Where its memory is.
    pub fn place(&self) -> Place {
        self.codes.place
    }

    /// Bytes of memory that are read.
    pub fn extents(&self) -> [std::ops::Range<usize>; 2] {
        [self.codes.extent(), self.scales.extent()]
    }

    /// That linear scales lie as their order says: as many bytes in another shape, such as the transposed one, are others.
    fn check_scales_shape(&self, name: &str, rows: usize, blocks: usize) -> PyResult<()> {
        if self.layout != ScaleLayout::Linear || self.scales.shape == [rows, blocks] {
            return Ok(());
        }
        let found = &self.scales.shape;
        Err(Kind::Operand.raise(format!(
            "{name}: scales have shape {found:?}; [{rows}, {blocks}] is needed for linear scales"
        )))
    }

    /// Codes and scales in a GPU's memory: dense, as kernels there read them.
    pub fn on_device(&self, name: &str) -> PyResult<OnDevice> {
        let (rows, row_bytes) = self.codes.matrix(name)?;
        let (format, layout, k) = (self.format, self.layout, 2 * row_bytes);
        if k == 0 || !k.is_multiple_of(format.block_len()) {
            return Err(facade(dualgemm::formats::Error::KNotWholeBlocks { tensor: name.into(), format, k }));
        }
        let (found, needed) = (self.scales.len(), layout.len(rows, k / format.block_len()));
        if found != needed {
            let blocks = k / format.block_len();
            let tensor = name.into();
            return Err(facade(dualgemm::formats::Error::ScalesLen {
                tensor,
                rows,
                blocks,
                layout,
                found,
                needed,
            }));
        }
        self.check_scales_shape(name, rows, k / format.block_len())?;
        if !self.codes.is_dense() || !self.scales.is_dense() {
            refuse!(Operand, "{name}: on a GPU, codes and scales have to be contiguous row by row");
        }
        Ok(OnDevice {
            format,
            rows,
            k,
            codes: DevicePtr(self.codes.pointer.addr() as u64),
            scales: DevicePtr(self.scales.pointer.addr() as u64),
            global_scale: self.global_scale,
            layout,
        })
    }

    /// The matrix, `[rows, k]`, in this machine's memory.
    pub fn matrix(&self, name: &str) -> PyResult<QuantizedMatrix<'_>> {
        if self.place() != Place::Cpu {
            let place = self.place();
            refuse!(Operand, "{name}: is on {place}; arrays on the processor are needed");
        }
        let (rows, row_bytes) = self.codes.matrix(name)?;
        let (codes, stride) = match self.codes.as_rows::<u8>() {
            Some((codes, stride)) => (Cow::Borrowed(codes), stride),
            None => (Cow::Owned(self.codes.gather(name)?), row_bytes),
        };
        let scales = match self.scales.as_slice::<u8>() {
            Some(scales) => Cow::Borrowed(scales),
            None => Cow::Owned(self.scales.gather(name)?),
        };
        let matrix = QuantizedMatrix::strided(
            name.to_owned(),
            self.format,
            rows,
            row_bytes * 2,
            stride,
            codes,
            scales,
            self.layout,
            GlobalScale::multiplier(self.global_scale),
        )
        .map_err(facade)?;
        self.check_scales_shape(name, rows, matrix.blocks())?;
        Ok(matrix)
    }
}

/// A number, or an array that holds one, as checkpoints store it.
fn number(name: &str, object: &Bound<'_, PyAny>) -> PyResult<f64> {
    // What most are; to find that one has no `item` takes longer than all the rest.
    if object.is_instance_of::<PyFloat>() {
        return object.extract();
    }
    let one = object.call_method0("item");
    one.as_ref()
        .unwrap_or(object)
        .extract()
        .map_err(|_| PyTypeError::new_err(format!("{name} is {object}; a number is needed")))
}

pub fn floats<'a>(name: &str, array: &'a Array<'_>) -> PyResult<FloatMatrix<'a>> {
    fn matrix<'a, T: Copy>(name: &str, array: &'a Array<'_>) -> PyResult<Matrix<'a, T>> {
        array.check_cpu(name)?;
        let (rows, cols) = array.matrix(name)?;
        match array.as_rows::<T>() {
            Some((data, stride)) => Matrix::strided(name, rows, cols, stride, data),
            None => Matrix::new(name, rows, cols, array.gather::<T>(name)?),
        }
        .map_err(facade)
    }
    Ok(match_floats!(array.dtype, Dtype => FloatMatrix(matrix(name, array)?), other => {
        let hint = match other {
            Dtype::F64 | Dtype::I32 | Dtype::I64 => "round it to one of them first",
            _ => "codes come as a dualgemm.Quantized with their scales",
        };
        refuse!(Operand, "{name}: is {other}; float32, float16 or bfloat16 is needed; {hint}");
    }))
}

/// The value that a name stands for, `what` in messages.
pub fn named<T: Clone + ToString>(what: &str, name: &str, all: &[T]) -> PyResult<T> {
    all.iter().find(|value| value.to_string() == name).cloned().ok_or_else(|| {
        let valid = all.iter().map(T::to_string).collect::<Vec<_>>().join(", ");
        Kind::Argument.raise(format!("{what} `{name}` is unknown; valid are {valid}"))
    })
}

/// An order of block scales by name.
pub fn layout(name: &str) -> PyResult<ScaleLayout> {
    named("scale layout", name, &ScaleLayout::ALL)
}

pub fn format(name: &str) -> PyResult<BlockFormat> {
    named("format", name, &BlockFormat::ALL)
}
