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


#: What each operator takes beside A, the number of its weights, N and the type of C.
OPERATORS = {
    "swiglu": "str quantize_a, str activation, bool round_gate_up_to_bf16",
    "linear": "str quantize_a",
    "mlp": "str quantize_a, str quantize_hidden",
    "experts": "Tensor topk_ids, Tensor topk_weights, str quantize_a, str quantize_hidden",
}


def _operator(name, takes):
    """An operator, its shapes, and the word that it has no derivative."""

    def compute(a, weights, n, out_dtype, *rest):
        w = WEIGHTS.get(weights)
        if w is None:
            raise OperandError(f"weights: the number {weights} is that of none that live; a graph keeps none alive")
        _refuse_tangent(a)
        routing, how = [t.detach() for t in rest if torch.is_tensor(t)], [t for t in rest if not torch.is_tensor(t)]
        if name == "swiglu":
            quantize_a, activation, *more = how
            how = _quantize_a(quantize_a), activation or None
        else:
            how, more = map(_quantize_a, how), [False] * (name == "experts")
        return floats(a.detach(), w, None, out_dtype, tuple(how), more, routing)

    def fake(a, weights, n, out_dtype, *rest):
        return a.new_empty((*a.shape[:-1], n), dtype=out_dtype)

    def backward(ctx, grad):
        raise UnsupportedError(f"dualgemm.{name} has no derivative; to differentiate, use weights in floats")

    schema = f"(Tensor a, SymInt weights, SymInt n, ScalarType out_dtype, {takes}) -> Tensor"
    operator = torch.library.custom_op(f"dualgemm::{name}", compute, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    operator.register_autograd(backward)


for _name, _takes in OPERATORS.items():
    _operator(_name, _takes)


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


def call(name, a, w, out_dtype, how, more=(), routing=()):
    """An operation through its operator, with the arguments of :func:`dualgemm._ops.floats`."""
    if not torch.compiler.is_compiling():
        # The kernel sees none of those that torch.func makes.
        _refuse_tangent(a)
    out_dtype = a.dtype if out_dtype is None else getattr(torch, float_name(out_dtype, None))
    quantize_a, *rest = how
    if name == "swiglu":
        rest = [rest[0] or "", *more]
    else:
        rest = [quantize_a_text(hidden, "quantize_hidden") for hidden in rest]
    operator = getattr(torch.ops.dualgemm, name)
    return operator(a, handle(w), w.shape[0], out_dtype, *routing, quantize_a_text(quantize_a), *rest)
