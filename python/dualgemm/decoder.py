"""One token, or a prompt in bf16, through a whole decoder layer in one call; or up to its MLP, where that is a mixture or in
floats. For small models, calling its modules and torch's small operators takes longer than the products. Needs torch and
transformers.

A layer of a family that is known here gets a class that computes these in one call where it is sure that this is what the
layer's modules would compute, and calls them where it is not: several tokens after others, masks that hide more than the first
tokens, gradients, hooks, replaced modules, caches of other kinds, functions of transformers that somebody has replaced.
"""

import functools
import sys
import weakref

import torch

from . import _dualgemm
from ._arrays import is_followed
from ._attention import attend, is_known
from ._ops import Linear, Mlp
from ._threads import follow

#: Families of transformers whose decoder layer is norm, attention with rotated queries and keys, norm and MLP or mixture, each of
#: the two added to what enters it; and what the attention of each has beside its projections: norms of queries and keys, or sinks.
FAMILIES = {name: set() for name in ("llama", "mistral", "mixtral", "qwen2")}
FAMILIES |= {name: {"q_norm", "k_norm"} for name in ("qwen3", "qwen3_moe")}
FAMILIES["gpt_oss"] = {"sinks"}

#: What their files compute attention by.
ROTATION = ("apply_rotary_pos_emb", "rotate_half")
WITH_SINKS = ("apply_rotary_pos_emb", "_apply_rotary_emb", "repeat_kv", "eager_attention_forward")

#: What transformers hands to a layer, and what this module knows the meaning of.
ARGUMENTS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "position_embeddings"}


def _own_class(layer):
    """The class that a layer has in transformers."""
    return type(layer).__mro__[2] if isinstance(layer, OneCall) else type(layer)


def family(layer):
    """The family of a layer that is exactly one of those known, else None."""
    return _family_of(_own_class(layer))


@functools.cache
def _family_of(base):
    for name in FAMILIES:
        if base.__module__ == f"transformers.models.{name}.modeling_{name}" and base.__name__.endswith("DecoderLayer"):
            return name
    return None


def take_layers(model):
    """Gives the layers that have a call their class, and returns how many there are."""
    known = [module for module in model.modules() if family(module) and _attends_as_known(module)]
    layers = [layer for layer in known if _Parts(layer).call is not None]
    for layer in layers:
        layer.__class__ = _with_one_call(_own_class(layer))
    return len(layers)


def _named_like(base, bases, **members):
    # transformers and others know classes by their names.
    return type(base.__name__, bases, {"__module__": base.__module__, "__qualname__": base.__qualname__, **members})


@functools.cache
def _with_one_call(base):
    return _named_like(base, (OneCall, base))


def _new_layer(base):
    return object.__new__(_with_one_call(base))


class OneCall:
    """What is added to the class of a layer."""

    def forward(self, hidden_states, *args, **kwargs):
        if not args and not torch.compiler.is_compiling():
            out = _tokens(self, hidden_states, **kwargs)
            if out is not None:
                return out
        return super().forward(hidden_states, *args, **kwargs)

    def __reduce_ex__(self, protocol):
        # Its class is made where it is needed, and its base has the name. A copy has modules of its own.
        return _new_layer, (_own_class(self),), {k: v for k, v in self.__dict__.items() if k != "_one_call"}


def _has_sinks(layer):
    return "sinks" in FAMILIES[family(layer)]


def _functions(layer, classes):
    """What a layer is computed by, beside the functions of torch."""
    from .nn import Packed

    base = _own_class(layer)
    modeling, kinds = sys.modules[base.__module__], sys.modules["transformers.cache_utils"]
    updates = [kind.update for kind in (kinds.DynamicCache, kinds.DynamicLayer, kinds.DynamicSlidingWindowLayer)]
    of_modules = [cls.forward for cls in classes]
    of_family = [getattr(modeling, name) for name in (WITH_SINKS if _has_sinks(layer) else ROTATION)]
    return [base.forward, *of_family, *updates, *of_modules, Packed._compute]


def _is_silent(hooks):
    """Whether hooks do nothing now: transformers leaves those by which a model once gave its hidden states."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None or capturing._active_collector.get():
        return False
    return all(getattr(hook, "__module__", None) == capturing.__name__ for hook in hooks.values())


class _Parts:
    """The modules of a layer that the call stands for, and the call."""

    call = None

    def __init__(self, layer):
        attention = layer.self_attn
        self.of_layer = {name: layer._modules[name] for name in layer._modules}
        self.of_attention = {name: attention._modules[name] for name in attention._modules}
        self.called = [*self.of_attention.values(), *(m for name, m in self.of_layer.items() if name != "mlp")]
        mlp = layer._modules.get("mlp")
        self.mlp = _weights(mlp)
        if self.mlp is not None:
            self.called.append(mlp)
        self.classes = [type(module) for module in self.called]
        self.functions = _functions(layer, self.classes)
        self.floats = []
        if not self._are_known(layer):
            return
        projections = [self.of_attention[name] for name in PROJECTIONS]
        linears = [_weights(module) for module in projections]
        self.floats = [(m, _places(m)) for m in projections if m._parameters]
        self.norms = [layer.input_layernorm, layer.post_attention_layernorm]
        self.norms += [self.of_attention[name] for name in ("q_norm", "k_norm") if name in self.of_attention]
        self.has_sinks, dim = _has_sinks(layer), attention.head_dim
        heads, kv_heads = (linear.shape[0] // dim for linear in linears[:2])
        self.like_keys = (1, kv_heads, dim)
        # gpt-oss has tables for half of a head, and norms of its own.
        self.of_rotation = dim // 2 if self.has_sinks else dim
        if dim % 16 == 0 and dim <= 512 and attention.num_key_value_groups * kv_heads == heads:
            self.call = _dualgemm.DecoderLayer(linears, self.mlp, heads, dim, self.has_sinks)

    def _are_known(self, layer):
        """Whether each module is what the family has, or one of ours with weights on the processor."""
        name = family(layer)
        norms = {"input_layernorm", "post_attention_layernorm"}
        of_attention = {*self.of_attention, *layer.self_attn._parameters}
        if set(self.of_layer) != norms | {"self_attn", "mlp"} or of_attention != {*PROJECTIONS} | FAMILIES[name]:
            return False
        if not all(map(is_known, self.functions)):
            return False
        modules = {**self.of_layer, **self.of_attention}
        for part in ("self_attn", *norms, *(FAMILIES[name] & modules.keys())):
            cls = type(modules[part])
            suffix = "Attention" if part == "self_attn" else "RMSNorm"
            if cls.__module__ != f"transformers.models.{name}.modeling_{name}" or not cls.__name__.endswith(suffix):
                return False
        return all(_weights(modules[part]) is not None for part in PROJECTIONS)

    def are_as_they_were(self, layer):
        """Whether nothing was replaced or changed its class since."""
        if layer._modules != self.of_layer or layer.self_attn._modules != self.of_attention:
            return False
        if any(type(module) is not cls for module, cls in zip(self.called, self.classes)):
            return False
        if any(_places(module) != places for module, places in self.floats):
            return False
        return _functions(layer, self.classes) == self.functions

    def are_plain(self):
        """Whether no module does more than its class."""
        for module in self.called:
            hooks = module._forward_hooks
            if hooks and not _is_silent(hooks) or module._forward_pre_hooks or "forward" in module.__dict__:
                return False
        return True


def _parameters(module):
    return {name: p for name, p in module._parameters.items() if p is not None}


def _places(module):
    """Where a module's parameters are, and their types."""
    return {name: (p.data_ptr(), p.dtype) for name, p in _parameters(module).items()}


#: In the order of the call.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def _weights(module):
    """What the call multiplies by in the place of a linear layer or an MLP, None if the module has to be called."""
    from .nn import HALVES, FloatLinear, NVFP4GatedMLP, NVFP4Linear

    if type(module) is FloatLinear:
        w, bias = module.weight, module.bias
        ours = w.dtype in HALVES and w.is_cpu and (bias is None or bias.is_cpu)
        return _dualgemm.FloatLinear(w.detach(), None if bias is None else bias.detach()) if ours else None
    kind = {NVFP4Linear: Linear, NVFP4GatedMLP: Mlp}.get(type(module))
    if kind is None or type(module.weights) is not kind or module.weights.device != "cpu":
        return None
    return module.weights if module.quantize_a is None and module.group is None else None


def _parts(layer):
    """The modules of a layer if the call can stand for them now, else None."""
    parts = layer.__dict__.get("_one_call")
    if parts is None or not parts.are_as_they_were(layer):
        parts = layer.__dict__["_one_call"] = _Parts(layer)
    return parts if parts.call is not None and parts.are_plain() else None


def _without_room(layer, protocol):
    """A cache's layer as copies of it and files have it: its keys and values are no views of memory with room for more."""
    state = {name: value for name, value in layer.__dict__.items() if name != "_room"}
    state |= {name: state[name].clone() for name in ("keys", "values") if torch.is_tensor(state[name])}
    return object.__new__, (type(layer).__mro__[1],), state


@functools.cache
def _with_room(base):
    return _named_like(base, (base,), __reduce_ex__=_without_room)


class _Room:
    """Keys and values of a cache's layer, with room behind them. Each place is written once: what others were handed before,
    which are views of the same memory, never changes. A layer with a window holds the last ones, from ``first`` on."""

    views, first = None, 0

    def __init__(self, layer, held, heads, dim, rows):
        # A cycle would keep the memory until torch's next collection of garbage.
        self.layer = weakref.ref(layer)
        length = held or rows
        shape = (1, heads, length + max(64, length // 4), dim)
        self.buffers = [old.new_empty(shape) for old in (layer.keys, layer.values)]
        if held:
            for buffer, old in zip(self.buffers, (layer.keys, layer.values)):
                buffer[:, :, :held] = old

    @classmethod
    def of(cls, layer, *new):
        """That of a layer, if it holds what was put there by this module last, and there is room for more; else a ``new`` one."""
        room = layer.__dict__.get("_room")
        if room is not None and room.layer() is layer and room.views is not None:
            keys, values = room.views
            if layer.keys is keys and layer.values is values and room.first + keys.shape[2] < room.buffers[0].shape[2]:
                return room
        if room is None:
            layer.__class__ = _with_room(type(layer))
        layer._room = cls(layer, *new)
        return layer._room

    def grow(self, layer, held, rows):
        """The layer holds so many tokens more than it held; with a window, as many as will be seen with the next one."""
        end = self.first + held + rows
        if layer.is_sliding:
            layer.cumulative_length += rows
            self.first = max(self.first, end - layer.sliding_window + 1)
        layer.keys, layer.values = self.views = [buffer.narrow(2, self.first, end - self.first) for buffer in self.buffers]


def _tokens(layer, x, **arguments):
    """What a layer makes of one token or a prompt, None if its modules have to say."""
    if not x.is_cpu or x.dim() != 3 or x.shape[0] != 1 or is_followed(torch, x):
        return None
    rows, dtype = x.shape[1], x.dtype
    if rows != 1 and (rows == 0 or dtype is not torch.bfloat16):
        return None
    if torch._C._len_torch_function_stack():
        # Somebody sees every function of torch.
        return None
    for name in arguments.keys() - ARGUMENTS:
        if arguments[name] is not None and arguments[name] is not False:
            return None
    attention, mask = layer.self_attn, arguments.get("attention_mask")
    if mask is not None and rows != 1 or attention.training and attention.attention_dropout:
        return None
    cache = arguments.get("cache")
    kv = _cached(arguments.get("past_key_values") if cache is None else cache, attention)
    rotation = arguments.get("position_embeddings")
    if kv is None or rotation is None or not _is_plain(layer):
        return None
    # A prompt begins a cache, and a token goes on with one.
    if kv.is_initialized is (rows != 1):
        return None
    parts = _parts(layer)
    if parts is None or rows != 1 and (parts.has_sinks or not parts.call.takes_prompts):
        return None
    _, kv_heads, dim = parts.like_keys
    cached, (cos, sin) = (kv.keys, kv.values) if kv.is_initialized else (), rotation
    weights = [norm.weight for norm in parts.norms]
    sinks = attention.sinks if parts.has_sinks else None
    floats = [p for module, _ in parts.floats for p in _parameters(module).values()]
    operands = [t for t in (*cached, cos, sin, *weights, sinks, *floats) if t is not None]
    if any(t.dtype != dtype or not t.is_cpu for t in operands):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return None
    held = kv.keys.shape[2] if cached else 0
    if any(t.shape != (1, kv_heads, held, dim) for t in cached) or bool(cached) is not bool(held):
        return None
    if cos.shape != (1, rows, parts.of_rotation) or sin.shape != cos.shape:
        return None
    unseen = 0 if mask is None else _unseen(mask, held + 1, (dtype,) if parts.has_sinks else (dtype, torch.bool))
    if unseen is None:
        return None
    if not cached:
        kv.lazy_initialization(x, x)
    room = _Room.of(kv, held, kv_heads, dim, rows)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    normed = torch.empty_like(out) if parts.mlp is None else None
    norms = [(weight, norm.variance_epsilon) for weight, norm in zip(weights, parts.norms)]
    follow(torch)
    places = room.first + held, room.first + unseen
    parts.call._run(x, norms, (cos, sin), attention.scaling, room.buffers, *places, out, normed, sinks)
    room.grow(kv, held, rows)
    if normed is None:
        return out
    y = layer.mlp(normed)
    # gpt-oss returns what its router said, too.
    return out + (y[0] if parts.has_sinks else y)


def _unseen(mask, length, dtypes):
    """How many of a cache's tokens, the first ones, a mask hides from one token; None if it is another mask. One of another type is
    another mask: transformers' own functions add it to scores, and torch refuses it."""
    if mask.dtype not in dtypes or mask.shape != (1, 1, 1, length) or not mask.is_cpu or is_followed(torch, mask):
        return None
    return _dualgemm.unseen(mask.view(torch.uint8) if mask.dtype is torch.bool else mask)


def _cached(cache, attention):
    """The layer of a cache that grows as torch.cat would make it, else None."""
    kinds = sys.modules["transformers.cache_utils"]
    if type(cache) is not kinds.DynamicCache or cache.offloading or "update" in cache.__dict__:
        return None
    if attention.layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[attention.layer_idx]
    base = type(layer).__mro__["_room" in layer.__dict__]
    plain = base in (kinds.DynamicLayer, kinds.DynamicSlidingWindowLayer) and "update" not in layer.__dict__
    if plain and base.is_sliding and (getattr(layer, "record_past", False) or layer.sliding_window < 2):
        # It keeps more than its window.
        return None
    return layer if plain and (not layer.is_initialized or layer.keys.dim() == 4) else None


def _attends_as_known(layer):
    """Whether attention is what the call computes: ours, or transformers' own function for sinks."""
    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    # A configuration's own way to its attributes takes 10 µs, as long as all that is looked at here.
    name = object.__getattribute__(layer.self_attn.config, "__dict__").get("_attn_implementation_internal")
    if _has_sinks(layer):
        return name == "eager" and "eager" not in functions
    return name == "sdpa" and functions["sdpa"] is attend


def _is_plain(layer):
    """Whether attention is as it is known, and nobody listens to every module."""
    everywhere = torch.nn.modules.module
    return (
        _attends_as_known(layer)
        and not everywhere._global_forward_hooks
        and not everywhere._global_forward_pre_hooks
        and not torch.is_autocast_enabled("cpu")
    )
