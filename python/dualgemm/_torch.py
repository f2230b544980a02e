"""The operators ``torch.ops.dualgemm.swiglu``, ``linear``, ``mlp`` and ``experts``: opaque to torch.compile, with fake
implementations for their shapes."""

import hashlib
import weakref

import torch

from ._arrays import float_name
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


def _operator(function):
    """The operator of a function, its shapes, and the word that it has no derivative."""
    name = function.__name__.lstrip("_")
    operator = torch.library.custom_op(f"dualgemm::{name}", mutates_args=())(function)

    def fake(a, weights, n, out_dtype, *rest):
        return a.new_empty((*a.shape[:-1], n), dtype=out_dtype)

    def backward(ctx, grad):
        raise UnsupportedError(f"dualgemm.{name} has no derivative; to differentiate, use weights in floats")

    operator.register_fake(fake)
    operator.register_autograd(backward)


def _compute(a, number, out_dtype, how, more=(), routing=()):
    w = WEIGHTS.get(number)
    if w is None:
        raise OperandError(f"weights: the number {number} is that of none that live; a graph keeps none alive")
    _refuse_tangent(a)
    return floats(a.detach(), w, None, out_dtype, how, more, routing)


@_operator
def _swiglu(
    a: torch.Tensor,
    weights: int,
    n: int,
    out_dtype: torch.dtype,
    quantize_a: str,
    activation: str,
    round_gate_up_to_bf16: bool,
) -> torch.Tensor:
    how = (_quantize_a(quantize_a), activation or None)
    return _compute(a, weights, out_dtype, how, (round_gate_up_to_bf16,))


@_operator
def _linear(a: torch.Tensor, weights: int, n: int, out_dtype: torch.dtype, quantize_a: str) -> torch.Tensor:
    return _compute(a, weights, out_dtype, (_quantize_a(quantize_a),))


@_operator
def _mlp(
    a: torch.Tensor, weights: int, n: int, out_dtype: torch.dtype, quantize_a: str, quantize_hidden: str
) -> torch.Tensor:
    return _compute(a, weights, out_dtype, (_quantize_a(quantize_a), _quantize_a(quantize_hidden)))


@_operator
def _experts(
    a: torch.Tensor,
    weights: int,
    n: int,
    out_dtype: torch.dtype,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    quantize_a: str,
    quantize_hidden: str,
) -> torch.Tensor:
    how = (_quantize_a(quantize_a), _quantize_a(quantize_hidden))
    return _compute(a, weights, out_dtype, how, (False,), (topk_ids, topk_weights.detach()))


def _refuse_tangent(a):
    """Torch looks for a backward alone and lets forward derivatives of operators be zero."""
    if torch.autograd.forward_ad.unpack_dual(a).tangent is not None:
        raise UnsupportedError("a: has a tangent; operators of dualgemm have no derivative")


def _quantize_a(text):
    if text == "":
        return None
    return text if text in ("static", "dynamic") else float(text)


def quantize_a_text(how, argument="quantize_a"):
    """``quantize_a`` as the operators take it."""
    if isinstance(how, bool) or isinstance(how, str) and how not in ("static", "dynamic"):
        raise ArgumentError(f'{argument} `{how}` is unknown; valid are None, "static", "dynamic" or a number')
    return "" if how is None else how if isinstance(how, str) else repr(float(how))


def _head(a, w, out_dtype):
    """What every operator begins with."""
    if not torch.compiler.is_compiling():
        # The kernel sees none of those that torch.func makes.
        _refuse_tangent(a)
    out_dtype = a.dtype if out_dtype is None else getattr(torch, float_name(out_dtype, None))
    return a, handle(w), w.shape[0], out_dtype


def swiglu(a, w, out_dtype, quantize_a, activation, round_gate_up_to_bf16):
    """``dualgemm.swiglu`` through the operator."""
    how = quantize_a_text(quantize_a), activation or "", round_gate_up_to_bf16
    return torch.ops.dualgemm.swiglu(*_head(a, w, out_dtype), *how)


def linear(a, w, out_dtype, quantize_a):
    """``dualgemm.linear`` through the operator."""
    return torch.ops.dualgemm.linear(*_head(a, w, out_dtype), quantize_a_text(quantize_a))


def mlp(a, w, out_dtype, quantize_a, quantize_hidden):
    """``dualgemm.mlp`` through the operator."""
    how = quantize_a_text(quantize_a), quantize_a_text(quantize_hidden, "quantize_hidden")
    return torch.ops.dualgemm.mlp(*_head(a, w, out_dtype), *how)


def experts(a, topk_ids, topk_weights, w, out_dtype, quantize_a, quantize_hidden):
    """``dualgemm.experts`` through the operator."""
    how = quantize_a_text(quantize_a), quantize_a_text(quantize_hidden, "quantize_hidden")
    return torch.ops.dualgemm.experts(*_head(a, w, out_dtype), topk_ids, topk_weights, *how)
