//! Memory of Python arrays, of whatever library, without importing any: where it is, its type, shape and strides.
//!
//! | found by | arrays |
//! |---|---|
//! | `data_ptr`, `stride` | torch tensors: every type torch has, on CPU and CUDA, also inside a graph capture |
//! | `__cuda_array_interface__` | cupy, numba |
//! | `__array_interface__` | numpy, with ml_dtypes |
//! | `__dlpack__` | anything else: jax, tinygrad, … |
//! | the buffer protocol | `memoryview`, `bytearray`, `array.array`, through numpy |
//!
//! Sources: <https://numpy.org/doc/stable/reference/arrays.interface.html>,
//! <https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html>,
//! <https://dmlc.github.io/dlpack/latest/c_api.html>.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use dualgemm_cli::machine;
use pyo3::exceptions::{PyMemoryError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyString};

use crate::error::Kind;

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
        let py = object.py();
        let array = if object.hasattr(intern!(py, "data_ptr"))? {
            torch(name, object)?
        } else if let Ok(interface) = object.getattr(intern!(py, "__cuda_array_interface__")) {
            interface_of(name, object, &interface, Place::Cuda(None))?
        } else if let Ok(interface) = object.getattr(intern!(py, "__array_interface__")) {
            interface_of(name, object, &interface, Place::Cpu)?
        } else if object.hasattr("__dlpack__")? {
            dlpack(name, object)?
        } else if let Ok(view) = buffer(object) {
            interface_of(name, &view, &view.getattr("__array_interface__")?, Place::Cpu)?
        } else {
            return Err(PyTypeError::new_err(format!(
                "{name} is a {}; valid are torch tensors, numpy arrays and objects with __dlpack__, \
                 __cuda_array_interface__ or the buffer protocol",
                object.get_type().name()?
            )));
        };
        array.require_memory(name)
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
            let message = format!("{name}: shape {shape:?} does not fit the address space");
            return Err(Kind::Operand.raise(message));
        }
        if self.pointer.is_null() {
            let message =
                format!("{name}: shape {shape:?} without memory; an array with its elements is needed");
            return Err(Kind::Operand.raise(message));
        }
        Ok(self)
    }

    /// The same, refusing what is not in this machine's memory.
    pub fn on_cpu(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        Self::of(name, object)?.require_cpu(name)
    }

    /// The array, if it is in this machine's memory.
    pub fn require_cpu(self, name: &str) -> PyResult<Self> {
        match self.place {
            Place::Cpu => Ok(self),
            place => {
                Err(Kind::Operand
                    .raise(format!("{name}: is on {place}; an array on the processor is needed")))
            }
        }
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
            return Err(Kind::Operand.raise(format!("{name}: is read-only")));
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

fn unknown(name: &str, dtype: &str) -> PyErr {
    let hint = match dtype {
        "float4_e2m1fn" => {
            "it holds one code per byte; two packed into a uint8, even element low, are needed"
        }
        "float8_e4m3fnuz" => "its zero and bias are others than those of float8_e4m3fn, which is needed",
        _ if name == "topk_ids" => "int32 or int64 is needed",
        _ => {
            "valid are float32, float16 and bfloat16, uint8 and float4_e2m1fn_x2 for codes, uint8, \
              float8_e4m3fn and float8_e8m0fnu for scales"
        }
    };
    Kind::Operand.raise(format!("{name}: its type is {dtype}; {hint}"))
}

/// A type of torch, known by its object once its name was read.
fn torch_dtype(name: &str, dtype: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    static KNOWN: Mutex<Vec<(Py<PyAny>, Dtype)>> = Mutex::new(Vec::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, found)) = known().iter().find(|(object, _)| object.is(dtype)) {
        return Ok(*found);
    }
    let full = dtype.str()?.to_string();
    let short = full.rsplit('.').next().unwrap_or(&full);
    let found = Dtype::named(short).ok_or_else(|| unknown(name, short))?;
    known().push((dtype.clone().unbind(), found));
    Ok(found)
}

fn torch<'py>(name: &str, tensor: &Bound<'py, PyAny>) -> PyResult<Array<'py>> {
    // Names are made once: this is most of what a call of a small layer takes.
    let py = tensor.py();
    let place = if tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        Place::Cpu
    } else {
        let device = tensor.getattr("device")?;
        let kind: String = device.getattr("type")?.extract()?;
        if kind != "cuda" {
            let message = format!("{name}: is on device {kind}; valid are cpu and cuda");
            return Err(Kind::Unsupported.raise(message));
        }
        Place::Cuda(device.getattr("index")?.extract()?)
    };
    let dtype = torch_dtype(name, &tensor.getattr(intern!(py, "dtype"))?)?;
    if tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        let message =
            format!("{name}: is a view that torch has yet to negate; resolve_neg() makes it a tensor");
        return Err(Kind::Operand.raise(message));
    }
    // Sparse tensors have no memory of their own, nor have those that vmap makes.
    let pointer = tensor.call_method0(intern!(py, "data_ptr")).map_err(|error| {
        Kind::Operand.raise(format!("{name}: a dense tensor is needed; torch says: {}", error.value(py)))
    })?;
    Ok(Array {
        pointer: pointer.extract::<usize>()? as *mut u8,
        dtype,
        shape: tensor.getattr(intern!(py, "shape"))?.extract()?,
        strides: tensor.call_method0(intern!(py, "stride"))?.extract()?,
        writable: true,
        place,
        _owner: tensor.clone(),
    })
}

/// `__array_interface__` or `__cuda_array_interface__`.
fn interface_of<'py>(
    name: &str,
    array: &Bound<'py, PyAny>,
    interface: &Bound<'py, PyAny>,
    place: Place,
) -> PyResult<Array<'py>> {
    let interface = interface.cast::<PyDict>()?;
    let get = |key: &str| -> PyResult<Bound<'py, PyAny>> {
        interface
            .get_item(key)?
            .ok_or_else(|| PyTypeError::new_err(format!("{name}: no `{key}` in its interface")))
    };
    let typestr: String = get("typestr")?.extract()?;
    // Types of ml_dtypes look like raw bytes here; their name says more.
    let dtype = match (typestr.as_str(), array.getattr("dtype")) {
        ("<f8", _) => Dtype::F64,
        ("<f4", _) => Dtype::F32,
        ("<f2", _) => Dtype::F16,
        ("<i4", _) => Dtype::I32,
        ("<i8", _) => Dtype::I64,
        ("|u1" | "|i1", _) => Dtype::Byte,
        (_, Ok(dtype)) => {
            let known: String = dtype.getattr("name").unwrap_or(dtype).str()?.extract()?;
            let named =
                if typestr.starts_with('>') { Err(&typestr) } else { Dtype::named(&known).ok_or(&known) };
            named.map_err(|dtype| unknown(name, dtype))?
        }
        (_, Err(_)) => return Err(unknown(name, &typestr)),
    };
    let (pointer, read_only): (usize, bool) = get("data")?.extract()?;
    let shape: Vec<usize> = get("shape")?.extract()?;
    let strides = match interface.get_item("strides")?.filter(|s| !s.is_none()) {
        Some(bytes) => elements(name, &bytes.extract::<Vec<isize>>()?, dtype)?,
        None => dense_strides(&shape),
    };
    Ok(Array {
        pointer: pointer as *mut u8,
        dtype,
        shape,
        strides,
        writable: !read_only,
        place,
        _owner: array.clone(),
    })
}

fn elements(name: &str, bytes: &[isize], dtype: Dtype) -> PyResult<Vec<isize>> {
    let size = dtype.size() as isize;
    if bytes.iter().any(|stride| stride % size != 0) {
        let message = format!("{name}: strides {bytes:?} are not whole elements of {size} bytes");
        return Err(Kind::Operand.raise(message));
    }
    Ok(bytes.iter().map(|stride| stride / size).collect())
}

fn dense_strides(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for d in (0..shape.len().saturating_sub(1)).rev() {
        strides[d] = strides[d + 1] * shape[d + 1] as isize;
    }
    strides
}

fn buffer<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    // numpy would make an array of a string or a number too; a memoryview is made of buffers alone.
    let view = py.import("builtins")?.getattr("memoryview")?.call1((object,))?;
    py.import("numpy")?.call_method1("asarray", (view,))
}

/// `DLDevice`, `DLDataType` and `DLTensor` of dlpack.h.
#[repr(C)]
struct DlTensor {
    data: *mut u8,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

const DL_CPU: i32 = 1;
const DL_CUDA: i32 = 2;
const DL_CUDA_HOST: i32 = 3;
const DL_CUDA_MANAGED: i32 = 13;

fn dlpack<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Array<'py>> {
    let (device, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    // -1 asks for no synchronization, which is the caller's business, and which a graph capture forbids.
    let capsule = if device == DL_CUDA {
        let options = PyDict::new(object.py());
        options.set_item(PyString::new(object.py(), "stream"), -1)?;
        object.call_method("__dlpack__", (), Some(&options))?
    } else {
        object.call_method0("__dlpack__")?
    };
    let pointer: *mut c_void = capsule.cast::<PyCapsule>()?.pointer_checked(Some(c"dltensor"))?.as_ptr();
    // SAFETY: a capsule of this name points at a DLManagedTensor, which begins with the tensor and lives as long as
    // the capsule, which is kept and whose destructor frees it.
    let tensor = unsafe { &*pointer.cast::<DlTensor>() };
    let place = match tensor.device_type {
        DL_CPU | DL_CUDA_HOST => Place::Cpu,
        DL_CUDA | DL_CUDA_MANAGED => Place::Cuda(Some(tensor.device_id.into())),
        other => {
            let message = format!("{name}: is on DLPack device {other}; valid are CPU and CUDA");
            return Err(Kind::Unsupported.raise(message));
        }
    };
    let dtype = match (tensor.code, tensor.bits, tensor.lanes) {
        (2, 64, 1) => Dtype::F64,
        (2, 32, 1) => Dtype::F32,
        (2, 16, 1) => Dtype::F16,
        (4, 16, 1) => Dtype::Bf16,
        (0, 32, 1) => Dtype::I32,
        (0, 64, 1) => Dtype::I64,
        (0 | 1, 8, 1) => Dtype::Byte,
        (10, 8, 1) => Dtype::E4m3,
        (14, 8, 1) => Dtype::Ue8m0,
        (17, 4, 2) => Dtype::F4x2,
        (code, bits, lanes) => {
            return Err(unknown(name, &format!("DLPack code {code}, {bits} bits, {lanes} lanes")));
        }
    };
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    let numbers = |from: *const i64| -> Vec<i64> {
        if ndim == 0 || from.is_null() {
            return Vec::new();
        }
        // SAFETY: shape and strides hold `ndim` numbers.
        unsafe { std::slice::from_raw_parts(from, ndim) }.to_vec()
    };
    let shape: Vec<usize> =
        numbers(tensor.shape).into_iter().map(|n| usize::try_from(n).unwrap_or(0)).collect();
    let strides = match tensor.strides.is_null() {
        true => dense_strides(&shape),
        false => numbers(tensor.strides).into_iter().map(|n| n as isize).collect(),
    };
    Ok(Array {
        pointer: tensor.data.wrapping_add(tensor.byte_offset as usize),
        dtype,
        shape,
        strides,
        // Version 0 of DLPack cannot say; its producers refuse to export what is read-only.
        writable: true,
        place,
        _owner: capsule,
    })
}
