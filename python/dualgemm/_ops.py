"""The operation and the conversions around it."""

import math
import weakref

import numpy as np

from . import _dualgemm
from ._arrays import (
    Quantized,
    as_scales,
    dtype_name,
    empty_like,
    first_array,
    float_name,
    float_of,
    is_float,
    is_followed,
    is_on_gpu,
    matrix_shape,
    stream_number,
    tell_autograd,
    torch_of,
)
from ._threads import follow
from .errors import OperandError, UnsupportedError

Weights, Linear, Mlp, Experts = _dualgemm.Weights, _dualgemm.Linear, _dualgemm.Mlp, _dualgemm.Experts


def from_checkpoint(kind, arguments, keywords):
    """What pickled weights are made by again."""
    return kind.from_checkpoint(*arguments, **keywords)


def swiglu(
    a,
    w,
    out=None,
    stream=None,
    *,
    out_dtype=None,
    quantize_a=None,
    activation=None,
    round_gate_up_to_bf16=False,
    out_scale=None,
    out_scale_layout="linear",
):
    """``C = SiLU(A·B1ᵀ) ∘ (A·B2ᵀ)``, or with the activation that the checkpoint names.

    ``a`` is ``[..., K]`` in float32, float16 or bfloat16, or a :class:`Quantized` ``[M, K]``; ``w`` are :class:`Weights`.
    C is ``[..., N]`` in ``out`` if given, else in a new array, of torch where A is and else of numpy, in ``out_dtype``: by
    default the type of A, float32 where A is quantized. ``out_dtype="nvfp4"`` re-quantizes C for the down projection, with ``out_scale``
    as tensor scale or, without it, one from C, and returns a :class:`Quantized`.

    ``quantize_a`` makes A nvfp4 first (W4A4): ``"static"`` with the checkpoint's input scale, ``"dynamic"`` with one
    from A, or a number. ``activation`` overrides that of the weights: silu, clamped-silu[:LIMIT],
    swiglustep[:LIMIT], swigluoai[:ALPHA,BETA,LIMIT], gelu-tanh, relu, relu2 or identity.

    On CUDA arrays the weights must be on the same device (``device="cuda:0"`` where they are made). The product is
    launched on ``stream``, a number or an object with one, by default torch's current stream, and not waited for; after
    one call of a shape on a stream, further ones allocate nothing but C and can be recorded into a graph. With weights on
    a GPU, arrays of the processor are copied there and C back.

    The GIL is released; any number of threads may use the same weights.
    """
    if not isinstance(w, Weights):
        raise TypeError(f"w is a {type(w).__name__}; dualgemm.Weights are needed")
    to_nvfp4 = out_dtype is not None and dtype_name(out_dtype) == "nvfp4"
    if not to_nvfp4 and (out_scale is not None or out_scale_layout != "linear"):
        raise OperandError('out_scale and out_scale_layout are for out_dtype="nvfp4"')
    how, more = (quantize_a, activation), (round_gate_up_to_bf16,)
    if to_nvfp4 and not _followed(a, out, stream, to_nvfp4):
        return _to_nvfp4(a, w, out, (*how, *more, _stream(a, stream)), out_scale, out_scale_layout)
    return _computed("swiglu", a, w, out, out_dtype, how, more, stream=stream)


def linear(a, w, out=None, *, bias=None, out_dtype=None, quantize_a=None):
    """``C = A·Wᵀ``, plus the layer's bias if it has one.

    ``a`` is ``[..., K]`` as :func:`swiglu` takes it, ``w`` a :class:`Linear`, or an array ``[N, K]`` of floats, which is read
    where it lies, with a ``bias`` ``[N]``; C is ``[..., N]`` in ``out`` or in a new array of ``out_dtype``, by default the type
    of A. ``quantize_a`` makes A nvfp4 first (W4A4): ``"static"`` with the checkpoint's input scale, ``"dynamic"`` with one
    from A, or a number. CUDA arrays are as for :func:`swiglu`, on torch's current stream, with a :class:`Linear`; on a GPU, A
    is in 16 bits or 4. The GIL is released.
    """
    if not isinstance(w, Linear):
        if not hasattr(w, "dtype"):
            raise TypeError(f"w is a {type(w).__name__}; a dualgemm.Linear or an array of floats is needed")
        if quantize_a is not None:
            raise OperandError("quantize_a is for weights in 4 bits; w is an array of floats")
        if _followed(a, out):
            raise UnsupportedError(
                "w is an array of floats, which is not available where torch compiles, traces or differentiates; "
                "torch.nn.functional.linear is"
            )
        return floats(a, _dualgemm.FloatLinear(w, bias), out, out_dtype, ())
    if bias is not None:
        raise OperandError("bias is for an array of floats; a dualgemm.Linear has its own")
    return _computed("linear", a, w, out, out_dtype, (quantize_a,))


def mlp(a, w, out=None, *, out_dtype=None, quantize_a=None, quantize_hidden=None):
    """A whole gated MLP: ``Y = act(A·gateᵀ, A·upᵀ)·downᵀ``, in one call.

    ``a`` is ``[..., K]`` as :func:`swiglu` takes it, ``w`` an :class:`Mlp`; Y is ``[..., H]`` in ``out`` or in a new array of
    ``out_dtype``, by default the type of A, which is also the type between the products. ``quantize_a`` makes A nvfp4
    first, ``quantize_hidden`` what is between the products: ``"static"`` with the checkpoint's input scale of the layer
    that follows, ``"dynamic"``, or a number. CUDA arrays are as for :func:`linear`; there ``quantize_hidden`` takes no
    ``"dynamic"``. The GIL is released.
    """
    if not isinstance(w, Mlp):
        raise TypeError(f"w is a {type(w).__name__}; a dualgemm.Mlp is needed")
    return _computed("mlp", a, w, out, out_dtype, (quantize_a, quantize_hidden))


def experts(
    a, topk_ids, topk_weights, w, out=None, *, out_dtype=None, quantize_a=None, quantize_hidden=None, add=False
):
    """A mixture of experts: ``Y[t] = Σⱼ topk_weights[t, j] · MLP of expert topk_ids[t, j] (A[t])``, in the order of j.

    ``a`` is ``[tokens, K]`` in floats or a :class:`Quantized`; ``topk_ids`` (int32 or int64) and ``topk_weights`` (floats)
    are ``[tokens, experts per token]``; ``w`` are :class:`Experts`. A token's choice of -1, or of an expert that is not here, adds
    nothing. Y is ``[tokens, H]`` in ``out`` or in a new array; ``add=True`` adds to what ``out`` holds, as to a shared
    expert's result. ``quantize_a`` and ``quantize_hidden`` are as for :func:`mlp`; "static" takes the largest scale of all
    experts. The GIL is released, and results depend on no number of threads.

    On CUDA tensors everything is there, A in float16 or bfloat16 and not quantized; no choice is looked at by the
    processor, and one beyond the experts adds nothing, where the processor refuses it.
    """
    if not isinstance(w, Experts):
        raise TypeError(f"w is a {type(w).__name__}; dualgemm.Experts are needed")
    if add and out is None:
        raise OperandError("add needs out, the array that is added to")
    matrix_shape("a", first_array(a))
    how = (quantize_a, quantize_hidden)
    return _computed("experts", a, w, out, out_dtype, how, (add,), (topk_ids, topk_weights))


# By experts and device, where each number of an expert is among those that are here, and what is beyond them.
_places = weakref.WeakKeyDictionary()


def _choices(torch, w, ids, weights):
    """A router's choices as kernels of a GPU read them: places of experts in int32, weights in float32."""
    if ids.dim() == 2 and w.count != len(w.here):
        known = _places.setdefault(w, {})
        if ids.device not in known:
            known[ids.device] = torch.tensor([*w._places, -1], dtype=torch.int32, device=ids.device)
        ids = known[ids.device][ids.long().clamp(-1, w.count)]
    return ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous()


def _followed(a, out, stream=None, to_nvfp4=False):
    """Whether torch has to see an operator: torch.compile sees it as opaque, and autograd says that it has no derivative."""
    torch = torch_of(a)
    if torch is None or not is_followed(torch, a):
        return False
    if out is not None or stream is not None or to_nvfp4:
        raise OperandError(
            "out, stream and nvfp4 results are not available where torch compiles, traces or differentiates"
        )
    return True


def _computed(name, a, w, out, out_dtype, how, more=(), routing=(), stream=None):
    """C by an operator where torch has to see one, else at once; see :func:`floats`."""
    if _followed(a, out, stream):
        from . import _torch

        return _torch.call(name, a, w, out_dtype, how, more, routing)
    return floats(a, w, out, out_dtype, how, more, routing, stream)


def _stream(a, stream):
    """The number of the stream that work on ``a`` goes to; 0 on the processor."""
    if is_on_gpu(first_array(a)):
        return stream_number(first_array(a), stream)
    if stream is not None:
        raise OperandError("stream is for CUDA arrays; a is on the processor")
    return 0


def floats(a, w, out, out_dtype, how, more=(), routing=(), stream=None):
    """C in floats, computed at once whatever torch does: every operation and its operator end here. ``how`` says how C is
    computed, which weights can check without an A; ``more`` and ``routing`` go with it."""
    n, k = w.shape
    torch = torch_of(a)
    is_on_card = torch is not None and a.is_cuda
    # What is known is not asked again: a question takes as long as a part of a small layer.
    stream = 0 if torch is not None and not is_on_card and stream is None else _stream(a, stream)
    if torch is not None:
        follow(torch)
        if routing and is_on_card and all(map(torch.is_tensor, routing)):
            routing = _choices(torch, w, *routing)
    a, rows, lead = _rows(a, k)
    if is_on_card and (a.stride() != (k, 1) or a.data_ptr() % 16):
        # Kernels there read rows of elements that lie side by side, at multiples of 16 bytes.
        a = a.clone(memory_format=torch.contiguous_format)
    if out is None:
        flat = empty_like(first_array(a), (rows, n), float_name(out_dtype, float_of(a)))
        out = flat if lead is None else flat.reshape((*lead, n))
    else:
        if isinstance(out, tuple):
            raise OperandError("out is a tuple; an array of floats is needed, and nvfp4 results are new arrays")
        if out_dtype is not None and dtype_name(out_dtype) != dtype_name(out.dtype):
            raise OperandError(f"out is {dtype_name(out.dtype)}; out_dtype asks for {dtype_name(out_dtype)}")
        flat = _flat_out(out, lead, n)
        tell_autograd(out)
    if rows:
        w._run(a, flat, *routing, *how, *more, stream)
    else:
        _check_empty(a, flat, n)
        w._check(*how)
    return out


def _check_empty(a, out, n):
    """No rows are no work, but operands that are wrong with rows are wrong without."""
    if not isinstance(a, tuple) and not is_float(dtype_name(a.dtype)):
        raise OperandError(f"a: is {dtype_name(a.dtype)}; float32, float16 or bfloat16 is needed")
    if tuple(out.shape) != (0, n):
        raise OperandError(f"out: shape {list(out.shape)}; {[0, n]} is needed")
    if not is_float(dtype_name(out.dtype)):
        raise OperandError(f"out: is {dtype_name(out.dtype)}; float32, float16 or bfloat16 is needed")


def _rows(a, k):
    """``a`` as ``[M, K]`` or quantized, M, and its leading dimensions, None if it had the two already."""
    if isinstance(a, tuple):
        rows, half = matrix_shape("a codes", a[0])
        # Codes of other types are refused by the call, for their type.
        if dtype_name(getattr(a[0], "dtype", None)) in ("uint8", "float4_e2m1fn_x2") and 2 * half != k:
            raise OperandError(f"a: shape [{rows}, {2 * half}]; the weights need [..., {k}]")
        return a, rows, None
    if not hasattr(a, "dtype"):
        try:
            a = np.asarray(memoryview(a))
        except TypeError:
            raise TypeError(f"a is a {type(a).__name__}; an array of floats or a dualgemm.Quantized is needed") from None
    shape = a.shape
    if len(shape) == 0 or shape[-1] != k:
        raise OperandError(f"a: shape {list(shape)}; the weights need [..., {k}]")
    if len(shape) == 2:
        return a, shape[0], None
    lead = tuple(shape[:-1])
    rows = math.prod(lead)
    return a.reshape((rows, k)), rows, lead


def _flat_out(out, lead, n):
    if lead is None:
        return out
    if tuple(out.shape) != (*lead, n):
        raise OperandError(f"out: shape {list(out.shape)}; {[*lead, n]} is needed")
    # A copy instead of a view would swallow the result.
    try:
        if torch_of(out) is not None:
            return out.view((math.prod(lead), n))
        if isinstance(out, np.ndarray):
            flat = out.reshape((math.prod(lead), n))
            # numpy's own way to refuse a copy is newer than what this package asks for.
            if flat.size == 0 or np.may_share_memory(flat, out):
                return flat
        else:
            flat = out.view()
            flat.shape = (math.prod(lead), n)
            return flat
    except (AttributeError, RuntimeError):
        pass
    raise OperandError(f"out: shape {list(out.shape)} is not contiguous row by row, which an output must be")


def _to_nvfp4(a, w, out, options, out_scale, out_scale_layout):
    n, k = w.shape
    if out is not None:
        raise OperandError("out is for float results; nvfp4 results are new arrays")
    if n % 16:
        raise OperandError(f"N = {n} is not a multiple of 16, which nvfp4 output needs")
    a, rows, _ = _rows(a, k)
    like = first_array(a)
    codes = empty_like(like, (rows, n // 2), "uint8")
    length = _dualgemm.scales_len(rows, n, "nvfp4", out_scale_layout)
    shape = (rows, n // 16) if out_scale_layout == "linear" else (length,)
    scales = empty_like(like, shape, "uint8")
    scale = None
    if is_on_gpu(like):
        # Kernels there leave padding as it is, and write a scale of C's own without telling the processor.
        scales[...] = 0
        scale = empty_like(like, (1,), "float32") if out_scale is None else None
    known = w._run(a, (codes, scales, out_scale_layout, out_scale, scale), *options)
    return Quantized(codes, as_scales(scales, "nvfp4"), known if scale is None else scale, out_scale_layout)


def quantize(
    x, *, format="nvfp4", producer="modelopt", search="plain", global_scale=None, scale_layout="linear"
):
    """Quantizes a float matrix ``[rows, k]``, bit for bit as ``producer`` does: modelopt, compressed-tensors, torchao, te
    (Transformer Engine) or ggml. ``search="mse"`` chooses the block scales of least squared error instead.
    ``global_scale`` is a multiplier; without it the producer's rule makes one. All three are for nvfp4: mxfp4 has one
    rule, that of OCP. Returns a :class:`Quantized`."""
    rows, k = matrix_shape("x", x)
    block = 16 if format == "nvfp4" else 32
    length = _dualgemm.scales_len(rows, k, format, scale_layout)
    codes = empty_like(x, (rows, k // 2), "uint8")
    shape = (rows, k // block) if scale_layout == "linear" else (length,)
    scales = empty_like(x, shape, "uint8")
    scale = _dualgemm.quantize(x, codes, scales, format, producer, search, global_scale, scale_layout)
    return Quantized(codes, as_scales(scales, format), scale, scale_layout, format)


def dequantize(q, dtype=None, *, out=None):
    """The float values of a :class:`Quantized`, ``[rows, k]``, in ``dtype`` (float32 by default)."""
    if not isinstance(q, tuple):
        raise TypeError(f"q is a {type(q).__name__}; a dualgemm.Quantized is needed")
    q = Quantized(*q)
    matrix_shape("q codes", q.codes)
    valid = "dtype is {}; valid are float32, float16 and bfloat16"
    if out is None:
        out = empty_like(q.codes, q.shape, float_name(dtype, "float32", valid))
    elif dtype is not None and dtype_name(dtype) != dtype_name(out.dtype):
        raise OperandError(f"out is {dtype_name(out.dtype)}; dtype asks for {dtype_name(dtype)}")
    else:
        tell_autograd(out)
    _dualgemm.dequantize(q, out)
    return out
