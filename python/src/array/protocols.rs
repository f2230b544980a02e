//! How arrays say where their memory is.
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

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyString};

use super::{Array, Dtype, Place};
use crate::error::{Kind, refuse};

/// The array in `object`, by the first protocol that it has.
pub fn array<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Array<'py>> {
    let py = object.py();
    if object.hasattr(intern!(py, "data_ptr"))? {
        torch(name, object)
    } else if let Ok(interface) = object.getattr(intern!(py, "__cuda_array_interface__")) {
        interface_of(name, object, &interface, Place::Cuda(None))
    } else if let Ok(interface) = object.getattr(intern!(py, "__array_interface__")) {
        interface_of(name, object, &interface, Place::Cpu)
    } else if object.hasattr("__dlpack__")? {
        dlpack(name, object)
    } else if let Ok(view) = buffer(object) {
        interface_of(name, &view, &view.getattr("__array_interface__")?, Place::Cpu)
    } else {
        Err(PyTypeError::new_err(format!(
            "{name} is a {}; valid are torch tensors, numpy arrays and objects with __dlpack__, \
             __cuda_array_interface__ or the buffer protocol",
            object.get_type().name()?
        )))
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
            refuse!(Unsupported, "{name}: is on device {kind}; valid are cpu and cuda");
        }
        Place::Cuda(device.getattr("index")?.extract()?)
    };
    let dtype = torch_dtype(name, &tensor.getattr(intern!(py, "dtype"))?)?;
    if tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        refuse!(Operand, "{name}: is a view that torch has yet to negate; resolve_neg() makes it a tensor");
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
    // numpy's masked arrays have the mask beside their interface, others in it.
    let mask = interface.get_item("mask")?.filter(|mask| !mask.is_none());
    if mask.is_some() || array.hasattr(intern!(array.py(), "mask"))? {
        refuse!(
            Operand,
            "{name}: is a masked array; filled() makes it an array without a mask, which is needed"
        );
    }
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
        refuse!(Operand, "{name}: strides {bytes:?} are not whole elements of {size} bytes");
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
            refuse!(Unsupported, "{name}: is on DLPack device {other}; valid are CPU and CUDA");
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
