"""The operator ``torch.ops.dualgemm.swiglu``: opaque to torch.compile, with a fake implementation for its shapes."""

import hashlib
import weakref

import torch

from ._arrays import float_name, is_on_gpu, stream_number
from ._ops import floats
from .errors import ArgumentError, OperandError, UnsupportedError

# An operator takes tensors and numbers; weights are named by a number while they live. `Weights._number` enters them.
WEIGHTS = weakref.WeakValueDictionary()


def handle(w, name=None):
    """The number by which the operator knows weights. It stays theirs for as long as somebody keeps them.

    With a name it is the same in every process, for graphs that are kept on disk.
    """
    if name is None:
        # An attribute, which torch.compile reads while it traces and guards.
        return w._number
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    if WEIGHTS.get(number, w) is not w:
        raise OperandError(f"two layers are called {name}")
    WEIGHTS[number] = w
    return number


@torch.library.custom_op("dualgemm::swiglu", mutates_args=())
def _swiglu(
    a: torch.Tensor,
    weights: int,
    n: int,
    out_dtype: torch.dtype,
    quantize_a: str,
    activation: str,
    round_gate_up_to_bf16: bool,
) -> torch.Tensor:
    w = WEIGHTS.get(weights)
    if w is None:
        raise OperandError(f"weights: the number {weights} is that of none that live; a graph keeps none alive")
    _refuse_tangent(a)
    a = a.detach()
    stream = stream_number(a, None) if is_on_gpu(a) else 0
    how = _quantize_a(quantize_a)
    return floats(a, w, None, stream, out_dtype, how, activation or None, round_gate_up_to_bf16)


@_swiglu.register_fake
def _(a, weights, n, out_dtype, quantize_a, activation, round_gate_up_to_bf16):
    return a.new_empty((*a.shape[:-1], n), dtype=out_dtype)


@_swiglu.register_autograd
def _(ctx, grad):
    raise UnsupportedError("dualgemm.swiglu has no derivative; to differentiate, use weights in floats")


def _refuse_tangent(a):
    """Torch looks for a backward alone and lets forward derivatives of operators be zero."""
    if torch.autograd.forward_ad.unpack_dual(a).tangent is not None:
        raise UnsupportedError("a: has a tangent; dualgemm.swiglu has no derivative")


def _quantize_a(text):
    if text == "":
        return None
    return text if text in ("static", "dynamic") else float(text)


def quantize_a_text(how):
    """``quantize_a`` as the operator takes it."""
    if isinstance(how, bool) or isinstance(how, str) and how not in ("static", "dynamic"):
        raise ArgumentError(f'quantize_a `{how}` is unknown; valid are None, "static", "dynamic" or a number')
    return "" if how is None else how if isinstance(how, str) else repr(float(how))


def swiglu(a, w, out_dtype=None, quantize_a=None, activation=None, round_gate_up_to_bf16=False):
    """``dualgemm.swiglu`` through the operator."""
    if not torch.compiler.is_compiling():
        # The kernel sees none of those that torch.func makes.
        _refuse_tangent(a)
    out_dtype = a.dtype if out_dtype is None else getattr(torch, float_name(out_dtype, None))
    return torch.ops.dualgemm.swiglu(
        a,
        handle(w),
        w.shape[0],
        out_dtype,
        quantize_a_text(quantize_a),
        activation or "",
        round_gate_up_to_bf16,
    )
