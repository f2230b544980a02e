"""Whether a module computes what takes its place: it is run once, on a few numbers, with others in the place of its weights.
Needs torch."""

import copy
import functools

import torch

from . import _ops
from ._dualgemm import Weights
from ._ops import quantize

#: Where activations differ from each other, and where some are clamped.
POINTS = [-300.0, -30, -11, -8, -5, -3, -2, -1, -0.3, -0.05, 0.05, 0.3, 1, 2, 3, 5, 8, 11, 30, 300]
N = len(POINTS) ** 2
WHOLE_BLOCKS = -(-N // 16) * 16
#: ``forward`` of a linear layer: torch's, and one that says the same.
PLAIN = {
    ("Linear.forward", "torch.nn.modules.linear"),
    ("FalconLinear.forward", "transformers.models.falcon.modeling_falcon"),
}


def of_its_own(module):
    """What a module and those in it do beside their classes' ``forward``, which a replacement would not; None if nothing. Classes
    that derive from ``torch.nn.Linear`` may do more, as adapters."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return "has hooks, which its replacement would not call"
        if "forward" in vars(part):
            return "has a forward of its own"
        forward = getattr(type(part).forward, "__qualname__", None), getattr(type(part).forward, "__module__", None)
        own_class = forward not in PLAIN or hasattr(part, "parametrizations")
        if isinstance(part, torch.nn.Linear) and own_class:
            return f"{'has' if name else 'is'} a {type(part).__name__}, which may do more than a linear layer"
    return None


@functools.lru_cache
def _points():
    """Gate, up, and what neither makes: every pair of points."""
    points = torch.tensor(POINTS, device="cpu", dtype=torch.float32)
    return points.repeat_interleave(len(POINTS)), points.repeat(len(POINTS))


@functools.lru_cache
def _wanted(activation):
    """What ``dualgemm`` makes of the points: rows of the unit matrix as weights hand on what they are given."""
    unit = torch.eye(2 * WHOLE_BLOCKS, device="cpu", dtype=torch.float32)
    gate, up = (quantize(half) for half in unit.chunk(2))
    a = torch.zeros(1, 2 * WHOLE_BLOCKS, device="cpu", dtype=torch.float32)
    a[0, :N], a[0, WHOLE_BLOCKS : WHOLE_BLOCKS + N] = _points()
    return _ops.swiglu(a, Weights.from_tensors(gate=gate, up=up, activation=activation))[0, :N]


def _is_wanted(got, activation):
    want, up = _wanted(activation), _points()[1]
    if got.numel() != N:
        return False
    return bool(((got.flatten().float() - want).abs() <= 1e-4 * want.abs() + 1e-6 * up.abs()).all())


def _products():
    """Gate and up of one matrix in every order."""
    gate, up = _points()
    return [torch.cat([gate, up]), torch.cat([up, gate]), torch.stack([gate, up], 1).flatten()]


class _Stub(torch.nn.Module):
    """In the place of a linear layer: keeps what goes in and says what comes out."""

    def __init__(self, layer, result):
        super().__init__()
        self.weight, self.bias, self.result, self.seen = layer.weight, layer.bias, result, None

    def forward(self, x):
        self.seen = x.detach()
        return self.result


def _copy(module):
    """With the same parameters and children, and not in training, where dropout would be at work."""
    copied = copy.copy(module)
    for kept in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[kept] = dict(getattr(module, kept))
    copied.training = False
    return copied


def _run(module, gates, down, results):
    """What enters the down projection, if the rest is handed on as it is."""
    copied = _copy(module)
    copied._modules = {name: _copy(child) for name, child in module.named_children()}
    k, h = getattr(module, gates[0]).in_features, getattr(module, down).out_features
    x, y = (torch.linspace(-1, 1, n, dtype=torch.float32)[None, None] for n in (k, h))
    stubs = [_Stub(getattr(module, name), result[None, None]) for name, result in zip(gates, results)]
    last = _Stub(getattr(module, down), y)
    copied._modules.update(zip(gates, stubs))
    copied._modules[down] = last
    out = type(module).forward(copied, x)
    same = [torch.equal(stub.seen.flatten(), x.flatten()) for stub in stubs]
    return last.seen if all(same) and torch.equal(out.flatten(), y.flatten()) else None


def is_plain_mlp(module, gates, down, activation):
    """Whether a module is ``down(activation(gate(x), up(x)))`` and nothing else."""
    if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers()):
        return False
    # transformers builds models on the meta device and in 16 bits.
    with torch.device("cpu"), torch.no_grad():
        runs = [(product,) for product in _products()] if len(gates) == 1 else [_points()]
        for results in runs:
            try:
                hidden = _run(module, gates, down, results)
            except Exception:  # noqa: BLE001 — whatever a foreign module does, it is not what is asked for.
                return False
            if hidden is not None and _is_wanted(hidden, activation):
                return True
    return False


#: Parameters of transformers' blocks of experts.
EXPERTS = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}


def gated(module, product):
    """What enters the down projections of a block of experts, of what its gate and up make."""
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(product)
    gate, up = product.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def are_plain_experts(module, activation):
    """Whether a block of experts has nothing but its gates, ups and downs, and this activation."""
    if {name for name, _ in module.named_parameters()} - EXPERTS or any(True for _ in module.buffers()):
        return False
    with torch.device("cpu"), torch.no_grad():
        for product in _products():
            try:
                hidden = gated(_copy(module), product[None])
            except Exception:  # noqa: BLE001 — as above.
                return False
            if _is_wanted(hidden, activation):
                return True
    return False
