"""One token through a whole decoder layer in one call. For small models, calling its modules and torch's small operators takes
longer than the products. Needs torch and transformers.

A layer of a family that is known here gets a class that computes a token in one call where it is sure that this is what the
layer's modules would compute, and calls them where it is not: more tokens, masks, gradients, hooks, replaced modules, caches of
other kinds, functions of transformers that somebody has replaced.
"""

import functools
import sys
import weakref

import torch

from . import _dualgemm
from ._arrays import is_followed
from ._ops import Linear, Mlp
from ._threads import follow

#: Families of transformers whose decoder layer is norm, attention with rotated queries and keys, norm and gated MLP, each of the
#: two added to what enters it; and, of those, which norm queries and keys.
FAMILIES = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}

#: What transformers hands to a layer, and what this module knows the meaning of.
ARGUMENTS = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "position_embeddings"}


def _own_class(layer):
    """The class that a layer has in transformers."""
    return type(layer).__mro__[2] if isinstance(layer, OneCall) else type(layer)


def family(layer):
    """The family of a layer that is exactly one of those known, else None."""
    base = _own_class(layer)
    for name in FAMILIES:
        if base.__module__ == f"transformers.models.{name}.modeling_{name}" and base.__name__.endswith("DecoderLayer"):
            return name
    return None


def take_layers(model):
    """Gives the layers that have a call their class, and returns how many there are."""
    layers = [module for module in model.modules() if family(module) and _Parts(module).call is not None]
    for layer in layers:
        layer.__class__ = _with_one_call(type(layer))
    return len(layers)


@functools.cache
def _with_one_call(base):
    # transformers and others know layers by the names of their classes.
    return type(base.__name__, (OneCall, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def _new_layer(base):
    return object.__new__(_with_one_call(base))


class OneCall:
    """What is added to the class of a layer."""

    def forward(self, hidden_states, *args, **kwargs):
        if not args and not torch.compiler.is_compiling():
            out = _token(self, hidden_states, **kwargs)
            if out is not None:
                return out
        return super().forward(hidden_states, *args, **kwargs)

    def __reduce_ex__(self, protocol):
        # Its class is made where it is needed, and its base has the name.
        return _new_layer, (_own_class(self),), self.__dict__


def _functions(layer, classes):
    """What transformers computes a layer by, beside the functions of torch."""
    base = _own_class(layer)
    modeling, kinds = sys.modules[base.__module__], sys.modules["transformers.cache_utils"]
    theirs = [cls.forward for cls in classes if not cls.__module__.startswith("dualgemm.")]
    updates = kinds.DynamicCache.update, kinds.DynamicLayer.update
    return [base.forward, modeling.apply_rotary_pos_emb, modeling.rotate_half, *updates, *theirs]


class _Kept:
    """Something that belongs to one object: copies of that object start without."""

    def __reduce__(self):
        return type(self), ()


class _Parts(_Kept):
    """The modules of a layer that the call stands for, and the call."""

    call, of_layer, of_attention = None, None, None

    def __init__(self, layer=None):
        if layer is None:
            return
        attention = layer.self_attn
        self.of_layer = {name: layer._modules[name] for name in layer._modules}
        self.of_attention = {name: attention._modules[name] for name in attention._modules}
        self.classes = [type(module) for module in self.modules()]
        self.functions = _functions(layer, self.classes)
        if not self._are_known(layer):
            return
        linears = [self.of_attention[name].weights for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        self.norms = [layer.input_layernorm, layer.post_attention_layernorm]
        if FAMILIES[family(layer)]:
            self.norms += [attention.q_norm, attention.k_norm]
        self.head_dim = attention.head_dim
        heads = linears[0].shape[0] // self.head_dim
        kv_heads = linears[1].shape[0] // self.head_dim
        self.like_keys = (1, kv_heads, self.head_dim)
        if self.head_dim % 16 == 0 and self.head_dim <= 512 and attention.num_key_value_groups * kv_heads == heads:
            self.call = _dualgemm.DecoderLayer(linears, layer.mlp.weights, heads, self.head_dim)

    def modules(self):
        return [*self.of_layer.values(), *self.of_attention.values()]

    def _are_known(self, layer):
        """Whether each module is what the family has, or one of ours with weights on the processor."""
        from .nn import NVFP4GatedMLP, NVFP4Linear

        name = family(layer)
        of_heads = {"q_norm", "k_norm"} if FAMILIES[name] else set()
        norms = {"input_layernorm", "post_attention_layernorm"}
        projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
        if set(self.of_layer) != norms | {"self_attn", "mlp"} or set(self.of_attention) != projections | of_heads:
            return False
        from ._patch import is_theirs

        if not all(map(is_theirs, self.functions)):
            return False
        modules = {**self.of_layer, **self.of_attention}
        for part in ("self_attn", *norms, *of_heads):
            cls = type(modules[part])
            suffix = "Attention" if part == "self_attn" else "RMSNorm"
            if cls.__module__ != f"transformers.models.{name}.modeling_{name}" or not cls.__name__.endswith(suffix):
                return False
        ours = [modules[part] for part in projections]
        mlp = modules["mlp"]
        if any(type(module) is not NVFP4Linear or type(module.weights) is not Linear for module in ours):
            return False
        if type(mlp) is not NVFP4GatedMLP or type(mlp.weights) is not Mlp or mlp.group is not None:
            return False
        return all(module.weights.device == "cpu" and module.quantize_a is None for module in (*ours, mlp))

    def are_as_they_were(self, layer):
        """Whether nothing was replaced, changed its class or got hooks since."""
        attention = layer.self_attn
        if layer._modules != self.of_layer or attention._modules != self.of_attention:
            return False
        if _functions(layer, self.classes) != self.functions:
            return False
        for module, cls in zip(self.modules(), self.classes):
            if type(module) is not cls or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
                return False
        return True


class _Room(_Kept):
    """Keys and values of a cache's layer, with room behind them. Each place is written once: what others were handed before,
    which are views of the same memory, never changes."""

    def __init__(self, layer=None, like=None):
        self.layer = self.views = None
        if layer is None:
            return
        self.layer = weakref.ref(layer)
        length = like[2]
        shape = (*like[:2], length + max(64, length // 4), like[3])
        self.buffers = [old.new_empty(shape) for old in (layer.keys, layer.values)]
        for buffer, old in zip(self.buffers, (layer.keys, layer.values)):
            buffer[:, :, :length] = old

    def is_of(self, layer):
        """Whether the layer holds what was put there by this module last, and there is room for more."""
        if self.layer is None or self.layer() is not layer or self.views is None:
            return False
        keys, values = self.views
        return layer.keys is keys and layer.values is values and keys.shape[2] < self.buffers[0].shape[2]

    def grow(self, layer, length):
        """The layer holds so many tokens now."""
        layer.keys, layer.values = self.views = [buffer.narrow(2, 0, length) for buffer in self.buffers]


def _token(layer, x, **arguments):
    """What a layer makes of one token, None if its modules have to say."""
    if not x.is_cpu or x.dim() != 3 or x.shape[0] != 1 or x.shape[1] != 1 or is_followed(torch, x):
        return None
    if torch._C._len_torch_function_stack():
        # Somebody sees every function of torch.
        return None
    for name in arguments.keys() - ARGUMENTS:
        if arguments[name] is not None and arguments[name] is not False:
            return None
    attention = layer.self_attn
    if arguments.get("attention_mask") is not None or attention.training and attention.attention_dropout:
        return None
    cache = arguments.get("cache")
    kv = _cached(arguments.get("past_key_values") if cache is None else cache, attention)
    rotation = arguments.get("position_embeddings")
    if kv is None or rotation is None or not _is_plain(attention):
        return None
    parts = layer.__dict__.get("_one_call")
    if parts is None or not parts.are_as_they_were(layer):
        parts = layer.__dict__["_one_call"] = _Parts(layer)
        if not parts.are_as_they_were(layer):
            return None
    if parts.call is None:
        return None
    keys, (cos, sin) = kv.keys, rotation
    weights, dtype = [norm.weight for norm in parts.norms], x.dtype
    for operand in (keys, kv.values, cos, sin, *weights):
        if operand.dtype != dtype or not operand.is_cpu:
            return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in (keys, kv.values, cos, sin, *weights)):
        return None
    batch, kv_heads, length, dim = keys.shape
    if (batch, kv_heads, dim) != parts.like_keys or kv.values.shape != keys.shape or not length:
        return None
    if cos.shape != (1, 1, dim) or sin.shape != cos.shape:
        return None
    room = kv.__dict__.get("_dualgemm_room")
    if room is None or not room.is_of(kv):
        room = kv.__dict__["_dualgemm_room"] = _Room(kv, keys.shape)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    norms = [(weight, norm.variance_epsilon) for weight, norm in zip(weights, parts.norms)]
    follow(torch)
    parts.call._run(x, norms, (cos, sin), attention.scaling, room.buffers, length, out)
    room.grow(kv, length + 1)
    return out


def _cached(cache, attention):
    """The layer of a cache that grows as torch.cat would make it, with the tokens before, else None."""
    kinds = sys.modules["transformers.cache_utils"]
    if type(cache) is not kinds.DynamicCache or cache.offloading or "update" in cache.__dict__:
        return None
    if attention.layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[attention.layer_idx]
    plain = type(layer) is kinds.DynamicLayer and "update" not in layer.__dict__ and layer.is_initialized
    return layer if plain and layer.keys.dim() == 4 else None


def _is_plain(attention):
    """Whether attention is ours, and nobody listens to every module."""
    from ._patch import attend

    functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    everywhere = torch.nn.modules.module
    # A configuration's own way to its attributes takes 10 µs, as long as all that is looked at here.
    config = object.__getattribute__(attention.config, "__dict__")
    return (
        config.get("_attn_implementation_internal") == "sdpa"
        and functions["sdpa"] is attend
        and not everywhere._global_forward_hooks
        and not everywhere._global_forward_pre_hooks
        and not torch.is_autocast_enabled("cpu")
    )
