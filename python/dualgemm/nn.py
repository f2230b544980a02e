"""Linear layers, gated MLPs and blocks of experts as torch modules, and the replacement of those of a loaded model. Needs
torch."""

import copy
import functools
import sys

import torch

from . import _dualgemm, _torch
from ._arrays import is_followed
from ._attention import is_known
from ._ops import Experts, Linear, Mlp, Weights, floats
from ._parallel import check_group, experts_of, rank_of, together
from ._patch import PatchReport, patch_mlp, patch_model
from ._plan import opened, unsupported
from .errors import OperandError, UnsupportedError

#: The types whose weights :class:`FloatLinear` multiplies.
HALVES = (torch.bfloat16, torch.float16)

__all__ = [
    "FloatExperts",
    "FloatLinear",
    "NVFP4Experts",
    "NVFP4GatedMLP",
    "NVFP4Linear",
    "PatchReport",
    "patch_mlp",
    "patch_model",
]


class Packed(torch.nn.Module):
    """A module whose weights are packed for kernels. They never change: copies of the module share them. Pickled, it is its
    weights, which are read from their checkpoint again. Where they are on the processor and the model on a GPU, what goes in is
    brought to them and the result goes back."""

    #: True while a loader asks a model for the names of what it has yet to load.
    loading = False

    def __init__(self, weights, operation, quantize_a, how, more=(), group=None, split=None):
        super().__init__()
        _torch.quantize_a_text(quantize_a)
        check_group(group)
        self.weights, self.quantize_a, self.group, self.split = weights, quantize_a, group, split
        self._operation, self._how, self._more = operation, how, more
        self._place = torch.device(weights.device if weights.device.startswith("cuda") else "cpu")
        # Devices take longer to compare.
        self._is_on_cpu = self._place.type == "cpu"

    def _compute(self, x, *routing):
        # As torch's own linear layers.
        kind = "cpu" if x.is_cpu else "cuda" if x.is_cuda else None
        if torch._C._is_any_autocast_enabled() and kind and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        device = None if kind is None or x.is_cpu and self._is_on_cpu or x.device == self._place else x.device
        if device:
            x, *routing = (t.to(self._place) for t in (x, *routing))
        # An operator of torch takes longer to call than a small layer to compute.
        if kind is None or is_followed(torch, x):
            y = _torch.call(self._operation, x, self.weights, None, self._how, self._more, routing)
        else:
            y = floats(x, self.weights, None, None, self._how, self._more, routing)
        return y.to(device) if device else y

    def _summed(self, y):
        """The sum over the ranks, where their parts are parts of a sum."""
        if self.group is not None and self.split != "out":
            torch.distributed.all_reduce(y, group=self.group)
        return y

    def _names(self):
        """What is packed, for messages."""
        return repr(self.weights)

    def part(self):
        """What all ranks of a group have to say alike."""
        return f"{self.extra_repr()}, split={self.split!r}"

    def extra_repr(self):
        return f"{self.weights!r}, quantize_a={self.quantize_a!r}"

    def __reduce__(self):
        return _made_again, (type(self), *self._made_of())

    def __deepcopy__(self, memo):
        arguments, keywords = self._made_of()
        return type(self)(*copy.deepcopy(arguments, memo), **keywords)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self.loading:
            return
        # Left out, the weights would be missing from what is saved, and nobody would know before it is loaded.
        raise UnsupportedError(
            f"{prefix.rstrip('.') or type(self).__name__}: {self._names()}, packed for kernels, cannot be saved; "
            "the checkpoint that it comes from holds it: load the model and call patch_model or patch_mlp again"
        )


def _made_again(kind, arguments, keywords):
    return kind(*arguments, **keywords)


class FloatLinear(torch.nn.Linear):
    """``torch.nn.Linear`` whose weights in 16 bits are multiplied where they lie, on the processor. They stay a parameter,
    which may be tied to another module's and is saved as ever. What torch follows (to compile or to differentiate), and
    weights that were moved to a GPU or are in other types by now, torch multiplies."""

    @classmethod
    def of(cls, linear):
        """The same module with this class, its parameters and hooks."""
        new = cls.__new__(cls)
        new.__dict__ = linear.__dict__
        return new

    def forward(self, x):
        w, bias = self.weight, self.bias
        operands = [t for t in (x, w, bias) if t is not None]
        ours = w.dtype in HALVES and all(t.is_cpu and t.dtype == w.dtype for t in operands)
        if not ours or any(is_followed(torch, t) for t in operands) or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        w = _dualgemm.FloatLinear(w.detach(), None if bias is None else bias.detach())
        return floats(x, w, None, None, ())


class FloatExperts(torch.nn.Module):
    """A block of experts of transformers whose weights in 16 bits are multiplied where they lie, on the processor, expert by
    expert. Else it is what it was, as :class:`FloatLinear` is: the parameters, and what torch computes."""

    @staticmethod
    def why_not(experts):
        """Why a block is left to transformers, None if it is not."""
        if getattr(experts, "is_transposed", None) is not False or getattr(experts, "has_post_expert_norm", False):
            return f"{type(experts).__name__} is no block of experts [out, in] as most families of transformers have it"
        return None

    @staticmethod
    def of(experts):
        """The same module with this class before its own."""
        new = _new_experts(type(experts))
        new.__dict__ = experts.__dict__
        return new

    def __reduce_ex__(self, protocol):
        # Its class is made where it is needed, and has no name of its own.
        return _new_experts, (type(self).__mro__[2],), self.__dict__

    def forward(self, hidden_states, top_k_index, top_k_weights):
        x, both, down = hidden_states, self.gate_up_proj, self.down_proj
        biases = {part: getattr(self, f"{part}_bias", None) for part in ("gate_up_proj", "down_proj")}
        operands = (x, both, down, top_k_weights, *biases.values())
        ours = both.dtype in HALVES and both.is_cpu and x.is_cpu and x.dtype == both.dtype == down.dtype
        followed = any(is_followed(torch, t) for t in operands if t is not None)
        if not ours or followed or implemented_elsewhere(self) or torch.is_autocast_enabled("cpu"):
            return super().forward(hidden_states, top_k_index, top_k_weights)

        def product(x, part, expert):
            w, bias = getattr(self, part)[expert].detach(), biases[part]
            bias = None if bias is None else bias[expert].detach()
            return floats(x, _dualgemm.FloatLinear(w, bias), None, None, ())

        y = torch.zeros_like(x)
        # Numbers beyond the experts are those of other ranks.
        for expert in (e for e in top_k_index.unique().tolist() if 0 <= e < len(both)):
            tokens, places = torch.where(top_k_index == expert)
            hidden = self._apply_gate(product(x[tokens], "gate_up_proj", expert))
            of_expert = product(hidden, "down_proj", expert) * top_k_weights[tokens, places, None]
            y.index_add_(0, tokens, of_expert.to(y.dtype))
        return y


def implemented_elsewhere(experts):
    """Whether a configuration names an implementation of experts that is not transformers' own."""
    functions = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", {})
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return name in functions and not is_known(functions[name])


def _new_experts(theirs):
    return object.__new__(_float_experts(theirs))


@functools.cache
def _float_experts(theirs):
    return type("FloatExperts", (FloatExperts, theirs), {"__doc__": FloatExperts.__doc__, "__module__": __name__})


class DecodedWeight(torch.Tensor):
    """The weight of a layer in 4 bits as a model sees it that asks for it. Type, shape and device are there at once; what is
    computed of it decodes it from the checkpoint, each time, and nobody keeps that. It cannot be written to."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, read, shape, dtype, device, strides=None):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        self._read = read
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs, is_view, map_tree = kwargs or {}, False, torch.utils._pytree.tree_map
        given = {a.name: value for a, value in zip(func._schema.arguments, args)} | kwargs
        for argument in func._schema.arguments:
            value, alias = given.get(argument.name), argument.alias_info
            held = any(isinstance(x, cls) for x in (value if isinstance(value, (list, tuple)) else [value]))
            if held and alias is not None:
                is_view = True
                if alias.is_write:
                    raise UnsupportedError(f"{func}: would write to a weight in 4 bits, which never changes")
        args, kwargs = map_tree(lambda x: x._read() if isinstance(x, cls) else x, (args, kwargs))
        out = func(*args, **kwargs)
        # Views of it cannot be written to, either.
        view = lambda x: cls(lambda: x, x.shape, x.dtype, x.device, x.stride()) if isinstance(x, torch.Tensor) else x
        return map_tree(view, out) if is_view else out

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, _):
        raise UnsupportedError("data: would write to a weight in 4 bits, which never changes")

    def numpy(self, **how):
        return self.clone().numpy(**how)

    def __repr__(self):
        return f"DecodedWeight({list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


class NVFP4Linear(Packed):
    """``x·Wᵀ + b`` with W, a :class:`dualgemm.Linear`, in 4 bits, where W was put. ``weight`` is W in floats for models that ask
    for it, a :class:`DecodedWeight`, where the layer comes from a checkpoint: ``source`` is that, the module's name in it and
    the type of ``weight`` and ``bias``.

    With a process ``group`` of torch.distributed, the layer is this rank's part: ``split="out"`` has some of the features that go
    out (column-parallel, as gate and up or queries), and says nothing to the others; ``split="in"`` takes some of those that go in
    (row-parallel, as down), and sums the results over the ranks."""

    def __init__(self, weights, *, quantize_a=None, source=None, split=None, group=None):
        super().__init__(weights, "linear", quantize_a, (quantize_a,), group=group, split=split)
        self.source = source
        self.out_features, self.in_features = weights.shape

    @classmethod
    def from_checkpoint(
        cls, path, module, *, quantize_a=None, dtype=torch.bfloat16, split=None, group=None, **reading
    ):
        """A module of a checkpoint by its name; ``dtype`` is that of ``weight``, which parts of a layer have not. ``group`` says
        which part; all its ranks have to call this."""
        if (group is None) != (split is None) or split not in (None, "out", "in"):
            raise OperandError(f'split is {split!r}; with a group it is "out" or "in", without one None')
        for key in reading.keys() & {"rank", "world"}:
            raise TypeError(f"unexpected keyword argument '{key}'; a group says it")

        def make():
            weights = Linear.from_checkpoint(path, module, split=split, **rank_of(group), **reading)
            reading.pop("device", None)
            source = (opened(path, reading), module, dtype) if group is None else None
            return cls(weights, quantize_a=quantize_a, source=source, split=split, group=group)

        return together(group, make, path)

    @property
    def weight(self):
        if self.source is None:
            raise AttributeError("weight")
        checkpoint, module, dtype = self.source
        device = self._place

        def read():
            decoded = dtype if dtype in HALVES else torch.float32
            w = torch.empty(self.weights.shape, dtype=decoded, device="cpu")
            checkpoint._decode(module, w)
            return w.to(device, dtype)

        return DecodedWeight(read, self.weights.shape, dtype, device)

    @property
    def bias(self):
        if self.source is None:
            raise AttributeError("bias")
        if not self.weights.has_bias:
            return None
        w = self.weight
        # What is added to nothing.
        return self._compute(torch.zeros(self.in_features, dtype=w.dtype, device=w.device))

    def _apply(self, fn, recurse=True):
        if self.source is not None:
            checkpoint, module, dtype = self.source
            self.source = checkpoint, module, fn(torch.empty(0, dtype=dtype)).dtype
        return super()._apply(fn, recurse)

    def forward(self, x):
        return self._summed(self._compute(x))

    def _names(self):
        return self.weights.name

    def _made_of(self):
        more = {"source": self.source, "split": self.split, "group": self.group}
        return (self.weights,), {"quantize_a": self.quantize_a, **more}


class NVFP4GatedMLP(Packed):
    """``down(SiLU(x·gateᵀ) ∘ (x·upᵀ))``.

    With a :class:`dualgemm.Mlp` all three matrices are in 4 bits. With :class:`dualgemm.Weights` gate and up are, and ``down_proj`` is a module; without one the result is the product of both, ``[..., N]``. ``quantize_a``
    ``"static"`` or ``"dynamic"`` quantizes what goes into each product that is in 4 bits, a number what goes into the
    first. With a process ``group`` of torch.distributed, weights and ``down_proj`` are this rank's shards and the results are
    summed over the ranks.
    """

    def __init__(self, weights, down_proj=None, *, quantize_a=None, group=None):
        if not isinstance(weights, Mlp):
            super().__init__(weights, "swiglu", quantize_a, (quantize_a, None), (False,), group)
        elif down_proj is None:
            super().__init__(weights, "mlp", quantize_a, both(quantize_a), group=group)
        else:
            raise OperandError("down_proj: is given, and the weights have a down projection")
        self.down_proj = down_proj

    @classmethod
    def from_checkpoint(
        cls, path, layer=None, *, dtype=torch.bfloat16, device=None, quantize_a=None, group=None, **reading
    ):
        """A layer of a checkpoint on a ``device``, with all three matrices in 4 bits; on a GPU that has no kernels for linear
        layers, with its down projection decoded to ``dtype``. ``reading`` is handed to
        :meth:`dualgemm.Mlp.from_checkpoint`; ``group`` gives its rank and world."""
        device = torch.device(device or "cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        reading = {**rank_of(group), **reading}

        def make():
            if device.type != "cuda" or unsupported(device) is None:
                weights = Mlp.from_checkpoint(path, layer, device=device, **reading)
                return cls(weights, quantize_a=quantize_a, group=group)
            weights = Weights.from_checkpoint(path, layer, device=device, **reading)
            down = _down(path, layer, weights, dtype, reading).to(device=device)
            return cls(weights, down, quantize_a=quantize_a, group=group)

        return together(group, make, path)

    def forward(self, x):
        y = self._compute(x)
        if isinstance(self.weights, Weights) and self.down_proj is None:
            return y
        return self._summed(y if self.down_proj is None else self.down_proj(y))

    def _names(self):
        return " and ".join(self.weights.names)

    def _made_of(self):
        return (self.weights, self.down_proj), {"quantize_a": self.quantize_a, "group": self.group}


class NVFP4Experts(Packed):
    """A block of experts, :class:`dualgemm.Experts`, in the place of transformers' own: it takes tokens ``[tokens, K]``, the
    numbers of their experts and the weights of these. With a process ``group`` of torch.distributed, each rank has some of the experts (``split="experts"``) or some
    features of all (``split="features"``), takes all tokens, and the results are summed over the ranks."""

    def __init__(self, weights, *, quantize_a=None, split=None, group=None):
        super().__init__(weights, "experts", quantize_a, both(quantize_a), (False,), group, split)
        self.num_experts = weights.count

    @classmethod
    def from_checkpoint(cls, path, layer=None, *, quantize_a=None, split=None, group=None, **reading):
        """The routed experts of a layer of a checkpoint; see :meth:`dualgemm.Experts.from_checkpoint`. ``group`` says which part,
        of the experts unless ``split="features"``; all its ranks have to call this."""
        if split not in ((None,) if group is None else (None, "experts", "features")):
            raise OperandError(f'split is {split!r}; with a group it is "experts" or "features", without one None')
        split = "experts" if group is not None and split is None else split

        def make():
            of, number, held = {}, layer, path
            if split == "experts":
                how = {key: reading.pop(key) for key in list(reading) if key not in ("device", "router_weights")}
                held = opened(path, how)
                here, number, of["count"] = experts_of(held, layer, group)
                of["experts"] = here
            else:
                of = rank_of(group)
            weights = Experts.from_checkpoint(held, number, **of, **reading)
            return cls(weights, quantize_a=quantize_a, split=split, group=group)

        return together(group, make, path)

    def part(self):
        w = self.weights
        of = f"{w.count} experts {list(w.shape)} with {w.hidden} features between, {w.formats}, {w.activation}"
        return f"{of}, quantize_a={self.quantize_a!r}, split={self.split!r}"

    def forward(self, hidden_states, top_k_index, top_k_weights):
        # Under autocast, too, a mixture has the type of its tokens.
        return self._summed(self._compute(hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype))

    def _made_of(self):
        return (self.weights,), {"quantize_a": self.quantize_a, "split": self.split, "group": self.group}


class NVFP4SortedExperts(NVFP4Experts):
    """Llama 4's block of experts: it is given all tokens for each expert in turn, times the router's weight, which is 0 where it chose
    others."""

    def forward(self, hidden_states):
        ids = torch.arange(self.num_experts, dtype=torch.int32, device=hidden_states.device)
        ids = ids.repeat_interleave(len(hidden_states) // self.num_experts)
        # Without biases, nothing becomes of 0.
        ids = torch.where(hidden_states.any(-1), ids, -1)[:, None]
        return super().forward(hidden_states, ids, torch.ones_like(ids, dtype=torch.float32))


def both(quantize_a):
    """What a module says of both products: a number is that of the first."""
    return quantize_a, quantize_a if isinstance(quantize_a, str) else None


def _down(path, layer, weights, dtype, reading):
    n, k = weights.shape
    down = torch.nn.Linear(n, k, bias=False, dtype=dtype, device="cpu")
    down.weight.requires_grad_(False)
    _dualgemm.down(down.weight, path, layer, **{key: value for key, value in reading.items() if key != "activation"})
    return down
