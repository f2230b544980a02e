"""Which library an array belongs to, and new arrays of that library. Nothing is imported that is not loaded yet."""

import functools
import sys
from typing import Any, NamedTuple

import numpy as np

from .errors import OperandError

_FLOATS = ("float32", "float16", "bfloat16")


class Quantized(NamedTuple):
    """A matrix of 4-bit codes: ``value = code * scale * global_scale``.

    ``codes`` is ``[rows, k / 2]``, the even element in the low nibble: uint8 or torch.float4_e2m1fn_x2. ``scales`` has
    one byte per block, ``[rows, k / 16]`` (nvfp4: float8_e4m3fn or uint8) or ``[rows, k / 32]`` (mxfp4: float8_e8m0fnu or
    uint8), or any shape in another ``scale_layout``: ``"128x4"`` as cuBLAS and CUTLASS read them, ``"8x4"``.
    ``global_scale`` is the multiplier of the whole tensor; compressed-tensors stores its reciprocal.
    """

    codes: Any
    scales: Any
    global_scale: float = 1.0
    scale_layout: str = "linear"
    format: str = "nvfp4"

    @property
    def shape(self):
        """``(rows, k)``."""
        rows, row_bytes = self.codes.shape
        return rows, 2 * row_bytes

    def __repr__(self):
        codes = list(getattr(self.codes, "shape", ()))
        return f"Quantized({self.format}, codes {codes}, {self.scale_layout} scales, global_scale={self.global_scale})"


def torch_of(array):
    """The torch module if ``array`` is one of its tensors, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def is_followed(torch, a):
    """Whether torch follows what is computed from a tensor, so that it has to see an operator: where it compiles,
    traces, differentiates, maps over a dimension or computes shapes alone."""
    return (
        torch.compiler.is_compiling()
        or (a.requires_grad and torch.is_grad_enabled())
        or (type(a) is not torch.Tensor and type(a).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.jit.is_tracing()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def tell_autograd(out):
    """Says that an array is overwritten, as torch's own operators do: who keeps it for a gradient will be told."""
    torch = torch_of(out)
    if torch is None:
        return
    if out.requires_grad and torch.is_grad_enabled():
        raise OperandError("out: requires a gradient, which what is written to it does not have")
    torch.autograd.graph.increment_version(out)


def first_array(a):
    """The array that decides the library and the device of a result."""
    return a[0] if isinstance(a, tuple) else a


def is_on_gpu(array):
    """Whether an array's memory is that of a CUDA device."""
    torch = torch_of(array)
    if torch is not None:
        return array.is_cuda
    if hasattr(array, "__cuda_array_interface__"):
        return True
    # 2 and 13 are CUDA and CUDA managed memory in DLPack.
    return (
        not hasattr(array, "__array_interface__")
        and hasattr(array, "__dlpack_device__")
        and array.__dlpack_device__()[0] in (2, 13)
    )


def stream_number(array, stream):
    """A CUDA stream as the driver knows it; torch's current one for its tensors, else the default stream."""
    torch = torch_of(array)
    if stream is None:
        return torch.cuda.current_stream(array.device).cuda_stream if torch is not None else 0
    for name in ("cuda_stream", "ptr", "handle"):
        stream = getattr(stream, name, stream)
    return int(stream)


def dtype_name(dtype):
    """``"float32"``, ``"bfloat16"``, …, of a dtype of any library or its name."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, type):
        return np.dtype(dtype).name
    return getattr(dtype, "name", None) or str(dtype).rsplit(".", 1)[-1]


def float_of(a):
    """The name of the float type of A; float32 for what has none, codes among them."""
    return "float32" if isinstance(a, tuple) else _float_of(a.dtype)


@functools.lru_cache
def _float_of(dtype):
    name = dtype_name(dtype)
    return name if name in _FLOATS else "float32"


def float_name(dtype, default, valid="out_dtype is {}; valid are float32, float16 and bfloat16, and nvfp4 for swiglu"):
    """The name of a float type that results can have."""
    name = default if dtype is None else dtype_name(dtype)
    if name not in _FLOATS:
        raise OperandError(valid.format(name))
    return name


def is_float(name):
    """Whether floats of that type are computed with."""
    return name in _FLOATS


def matrix_shape(name, array):
    """The two dimensions of an array, which messages call ``name``."""
    shape = getattr(array, "shape", None)
    if shape is None:
        raise TypeError(f"{name} is a {type(array).__name__}; an array [rows, columns] is needed")
    if len(shape) != 2:
        raise OperandError(f"{name}: shape {list(shape)}; a matrix is needed")
    return tuple(shape)


def numpy_dtype(name):
    """A numpy dtype by name; those that numpy lacks come from ml_dtypes."""
    if name in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu"):
        try:
            import ml_dtypes
        except ImportError:
            raise OperandError(f"{name} arrays of numpy need the package ml_dtypes") from None
        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def empty_like(array, shape, name):
    """A new array of the library and on the device of ``array``."""
    torch = torch_of(array)
    if torch is not None:
        return torch.empty(shape, dtype=getattr(torch, name), device=array.device)
    if is_on_gpu(array):
        raise OperandError("out is needed: only torch can be asked for a new array on a GPU")
    return np.empty(shape, numpy_dtype(name))


def as_scales(scales, format):
    """Bytes of scales in the type that says what they are, where the library has it."""
    name = "float8_e4m3fn" if format == "nvfp4" else "float8_e8m0fnu"
    torch = torch_of(scales)
    if torch is not None:
        return scales.view(getattr(torch, name)) if hasattr(torch, name) else scales
    try:
        return scales.view(numpy_dtype(name))
    except OperandError:
        return scales
