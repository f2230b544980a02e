//! Values that cross the border. Enumerations travel as `uint32_t`, so that a wrong number is an error and not
//! undefined behaviour.

use std::ffi::c_void;

use dualgemm::DeviceA;
use dualgemm::device::DevicePtr;
use dualgemm::formats::{
    BlockFormat, FloatMatrix, GlobalScale, Matrix, QuantizedMatrix, ScaleLayout, match_floats,
};
use dualgemm::gemm::{AFormat, AOperand};

use crate::device::address;
use crate::status::Failure;

/// Formats of elements.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum dualgemm_format {
    /// 32-bit float.
    F32 = 0,
    /// IEEE half.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
    /// 4-bit codes, two per byte, the even element low; an e4m3 scale per 16.
    Nvfp4 = 3,
    /// 4-bit codes, two per byte, the even element low; a ue8m0 scale per 32.
    Mxfp4 = 4,
}

/// Orders of block scales in memory.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum dualgemm_scale_layout {
    /// Row-major, no padding.
    Linear = 0,
    /// Tiles of 128 rows by 4 blocks, as cuBLAS and CUTLASS read them.
    Sf128x4 = 1,
    /// Tiles of 8 rows by 4 blocks.
    Sf8x4 = 2,
}

/// A matrix `[rows, k]` in memory that the caller keeps for as long as the call lasts; for a run on a GPU, device memory,
/// kept until the run has ended.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct dualgemm_matrix {
    /// A `dualgemm_format`.
    pub format: u32,
    /// Rows: tokens of A, features of gate and up.
    pub rows: usize,
    /// Elements per row.
    pub k: usize,
    /// Bytes from one row to the next; 0 where rows follow each other without gaps. Codes on a GPU do; floats there have
    /// rows at multiples of 16 bytes.
    pub row_stride: usize,
    /// Elements or codes, aligned as their type is; on a GPU at a multiple of 16 bytes.
    pub data: *const c_void,
    /// Block scales of a 4-bit matrix, else null.
    pub scales: *const u8,
    /// A `dualgemm_scale_layout`.
    pub scale_layout: u32,
    /// What a 4-bit matrix is multiplied with; the reciprocal of what compressed-tensors stores.
    pub global_scale: f32,
}

/// The format of a number from C.
pub(crate) fn format(value: u32) -> Result<dualgemm_format, Failure> {
    use dualgemm_format::{Bf16, F16, F32, Mxfp4, Nvfp4};
    [F32, F16, Bf16, Nvfp4, Mxfp4]
        .into_iter()
        .find(|known| *known as u32 == value)
        .ok_or_else(|| Failure::argument(format!("format {value} is unknown; see dualgemm_format")))
}

/// The format of A of a number from C.
pub(crate) fn a_format(value: u32) -> Result<AFormat, Failure> {
    Ok(match_floats!(format(value)?, dualgemm_format => AFormat,
        dualgemm_format::Nvfp4 => AFormat::Nvfp4,
        dualgemm_format::Mxfp4 => AFormat::Mxfp4))
}

/// The layout of a number from C.
pub(crate) fn layout(value: u32) -> Result<ScaleLayout, Failure> {
    match value {
        0 => Ok(ScaleLayout::Linear),
        1 => Ok(ScaleLayout::Sf128x4),
        2 => Ok(ScaleLayout::Sf8x4),
        _ => Err(Failure::argument(format!("scale layout {value} is unknown; see dualgemm_scale_layout"))),
    }
}

/// The block format of a 4-bit format.
pub(crate) fn block_format(name: &str, value: u32) -> Result<BlockFormat, Failure> {
    match format(value)? {
        dualgemm_format::Nvfp4 => Ok(BlockFormat::Nvfp4),
        dualgemm_format::Mxfp4 => Ok(BlockFormat::Mxfp4),
        other => Err(Failure::argument(format!("{name}: is {other:?}; Nvfp4 or Mxfp4 is needed"))),
    }
}

/// `len` elements at a pointer from C.
///
/// # Safety
/// A pointer that is not null points at that many elements, which live and do not change for `'a`.
unsafe fn slice<'a, T>(name: &str, pointer: *const c_void, len: usize) -> Result<&'a [T], Failure> {
    if pointer.is_null() {
        return Err(Failure::argument(format!("{name}: is null")));
    }
    if !pointer.addr().is_multiple_of(align_of::<T>()) {
        return Err(Failure::argument(format!("{name}: is not aligned to {} bytes", align_of::<T>())));
    }
    if len > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Failure::argument(format!("{name}: {len} elements do not fit the address space")));
    }
    // SAFETY: not null, aligned, of a possible size; `len` elements are there for `'a`, by the caller's word.
    Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), len) })
}

impl dualgemm_matrix {
    /// Elements of `size` bytes from the first of the first row to the last of the last.
    fn extent(&self, name: &str, size: usize, row: usize) -> Result<(usize, usize), Failure> {
        let stride = match self.row_stride {
            0 => row,
            bytes if bytes.is_multiple_of(size) => bytes / size,
            bytes => {
                let message =
                    format!("{name}: a row stride of {bytes} bytes is not whole elements of {size}");
                return Err(Failure::argument(message));
            }
        };
        let last = self.rows.saturating_sub(1).checked_mul(stride).and_then(|n| n.checked_add(row));
        let len =
            last.ok_or_else(|| Failure::argument(format!("{name}: is larger than the address space")))?;
        Ok((len, stride))
    }

    /// A 4-bit matrix.
    ///
    /// # Safety
    /// `data` and `scales` point at what shape, stride and layout say, for `'a`.
    pub(crate) unsafe fn quantized<'a>(&self, name: &str) -> Result<QuantizedMatrix<'a>, Failure> {
        let (format, layout) = (block_format(name, self.format)?, layout(self.scale_layout)?);
        let (len, stride) = self.extent(name, 1, self.k / 2)?;
        let blocks = self.k / format.block_len();
        let scales_len = layout
            .checked_len(self.rows, blocks)
            .ok_or_else(|| Failure::argument(format!("{name}: is larger than the address space")))?;
        // SAFETY: shape and stride make it `len` bytes, which are there for `'a`, by the caller's word.
        let codes = unsafe { slice::<u8>(&format!("{name} data"), self.data, len) }?;
        // SAFETY: shape and layout make it `scales_len` bytes, which are there for `'a`, by the caller's word.
        let scales = unsafe { slice::<u8>(&format!("{name} scales"), self.scales.cast(), scales_len) }?;
        let global = GlobalScale::multiplier(self.global_scale);
        let (name, rows, k) = (name.to_owned(), self.rows, self.k);
        Ok(QuantizedMatrix::strided(name, format, rows, k, stride, codes, scales, layout, global)?)
    }

    /// The matrix A, of any format.
    ///
    /// # Safety
    /// As [`quantized`](Self::quantized).
    pub(crate) unsafe fn operand<'a>(&self, name: &str) -> Result<AOperand<'a>, Failure> {
        // SAFETY: the caller promises what `floats` and `quantized` ask for, and elements are of the format's type.
        unsafe {
            let floats = match_floats!(format(self.format)?, dualgemm_format => FloatMatrix(self.floats(name)?),
                _ => return Ok(AOperand::Quantized(self.quantized(name)?)));
            Ok(AOperand::Float(floats))
        }
    }

    /// The matrix A of a run on a GPU, whose plan asks for a format and an order of block scales. Nothing is read here.
    pub(crate) fn on_device(&self, name: &str, plan: (AFormat, ScaleLayout)) -> Result<DeviceA, Failure> {
        let found = a_format(self.format)?;
        if found != plan.0 {
            return Err(Failure::operand(format!("{name}: is {found}; the plan asks for {}", plan.0)));
        }
        if self.data.is_null() {
            return Err(Failure::argument(format!("{name} data: is null")));
        }
        let Some(format) = found.block_format() else {
            let size = (found.bits_per_element() / 8.0) as usize;
            let row = self.k.checked_mul(size);
            let row =
                row.ok_or_else(|| Failure::argument(format!("{name}: is larger than the address space")))?;
            let pitch = if self.row_stride == 0 { row } else { self.row_stride };
            return Ok(DeviceA::Float { values: address(self.data), pitch });
        };
        let (codes, scales) = self.codes_on_device(name)?;
        let layout = layout(self.scale_layout)?;
        if layout != plan.1 {
            let message = format!("{name}: has scales in the layout {layout}; the plan asks for {}", plan.1);
            return Err(Failure::operand(message));
        }
        Ok(DeviceA::Blocks { format, codes, scales, global_scale: self.global_scale })
    }

    /// Where the codes and the block scales of a dense 4-bit matrix are in device memory.
    pub(crate) fn codes_on_device(&self, name: &str) -> Result<(DevicePtr, DevicePtr), Failure> {
        if self.data.is_null() || self.scales.is_null() {
            return Err(Failure::argument(format!("{name}: its data or scales are null")));
        }
        if self.row_stride != 0 && self.row_stride != self.k / 2 {
            let message = format!("{name}: has gaps between rows of codes; on a GPU none are possible");
            return Err(Failure::unsupported(message));
        }
        Ok((address(self.data), address(self.scales.cast())))
    }

    /// # Safety
    /// As [`quantized`](Self::quantized).
    unsafe fn floats<'a, T: Clone>(&self, name: &str) -> Result<Matrix<'a, T>, Failure> {
        let (len, stride) = self.extent(name, size_of::<T>(), self.k)?;
        // SAFETY: shape and stride make it `len` elements, which are there for `'a`, by the caller's word.
        let data = unsafe { slice::<T>(&format!("{name} data"), self.data, len)? };
        Ok(Matrix::strided(name, self.rows, self.k, stride, data)?)
    }
}
