"""The operator ``torch.ops.dualgemm.swiglu``: opaque to torch.compile, with a fake implementation for its shapes."""

import hashlib
import weakref

import torch

from ._arrays import float_name
from ._ops import swiglu as _direct
from .errors import ArgumentError, OperandError

# An operator takes tensors and numbers; weights are named by a number while they live.
_WEIGHTS = weakref.WeakValueDictionary()


def handle(w, name=None):
    """The number by which the operator knows weights. It stays theirs for as long as somebody keeps them.

    With a name it is the same in every process, for graphs that are kept on disk.
    """
    number = id(w)
    if name is not None:
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        if _WEIGHTS.get(number, w) is not w:
            raise OperandError(f"two layers are called {name}")
    _WEIGHTS[number] = w
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
    w = _WEIGHTS.get(weights)
    if w is None:
        raise OperandError(f"weights: the number {weights} is that of none that live; a graph keeps none alive")
    return _direct(
        a.detach(),
        w,
        out_dtype=out_dtype,
        quantize_a=_quantize_a(quantize_a),
        activation=activation or None,
        round_gate_up_to_bf16=round_gate_up_to_bf16,
    )


@_swiglu.register_fake
def _(a, weights, n, out_dtype, quantize_a, activation, round_gate_up_to_bf16):
    return a.new_empty((*a.shape[:-1], n), dtype=out_dtype)


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
