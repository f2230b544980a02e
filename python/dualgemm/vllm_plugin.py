"""A plugin for vLLM: ``vllm serve MODEL --quantization dualgemm`` computes the linear layers, MLPs and mixtures of experts of
NVFP4 checkpoints of ModelOpt and llm-compressor, gate, up and activation in one kernel.

vLLM calls :func:`register` in each of its processes, through the entry point ``vllm.general_plugins``. Its parts:

- a quantization method ``dualgemm``, which is vLLM's own for ModelOpt or compressed-tensors but for what becomes of weights in
  NVFP4 once they are loaded: :func:`linear_method` and :func:`experts_method` pack them. vLLM has sharded them by then, so
  each rank packs its own. Merged layers keep a tensor scale for each part;
- an ``__init__`` for the MLPs of :data:`MLPS` and those derived from them, which puts an :class:`Activation` where the
  activation was: it hands on what has been activated already. Their ``forward`` stays as it is.

The log says what is taken over and what is left to vLLM and why, once for each kind; at level DEBUG for each layer. Nothing of
vLLM's source is changed. SGLang has no plugins for quantization methods; there, :func:`dualgemm.nn.patch_mlp` on the loaded
model does the same for MLPs.
"""

import copy
import functools
import importlib
import logging

import torch

from . import Experts, Linear, Quantized, Weights, _torch
from ._plan import unsupported

#: Modules of vLLM with MLPs that are down_proj of act_fn of gate_up_proj, and their class.
MLPS = [
    ("vllm.model_executor.models.llama", "LlamaMLP"),
    ("vllm.model_executor.models.mistral", "MistralMLP"),
    ("vllm.model_executor.models.qwen2", "Qwen2MLP"),
    ("vllm.model_executor.models.qwen2_moe", "Qwen2MoeMLP"),
    ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeMLP"),
]

NAME = "dualgemm"

#: Below vLLM's own, whose handlers it has.
logger = logging.getLogger("vllm.dualgemm")

#: vLLM's names of activations in mixtures, and ours.
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu-tanh"}


@functools.cache
def _once(text, *args):
    logger.info(text, *args)


def say(kind, prefix, device, why=None):
    """Says in the log that layers of a kind are taken over, or left and why: of the first that is so, and at level DEBUG of
    each."""
    if why is None:
        text, args = "dualgemm computes %s on %s", (kind, str(device))
    else:
        text, args = "dualgemm leaves %s to vLLM: %s", (kind, why)
    _once(text, *args)
    logger.debug("%s: " + text, prefix, *args)


class Activation(torch.nn.Module):
    """The activation of an MLP, which does nothing to the product of a layer that has applied it."""

    def __init__(self, act_fn, gate_up):
        super().__init__()
        self.act_fn = act_fn
        # In a tuple, or torch would take the layer for one of this module's parts.
        self.gate_up = (gate_up,)

    def forward(self, x):
        return x if hasattr(self.gate_up[0], "dualgemm") else self.act_fn(x)


def nvfp4(layer, part=""):
    """Codes, block scales, tensor scales and input scales (or None) of a loaded layer in NVFP4, or of its ``part`` ("w13_",
    "w2_"); None in another format. Its parameters, whose names are the checkpoint's, tell; the classes of vLLM's methods have
    other names in every version. compressed-tensors stores tensor scales to divide by."""
    find = lambda name: getattr(layer, part + name, None)
    weight, scale = find("weight"), find("weight_scale")
    codes = find("weight_packed") if weight is None else weight
    if [getattr(x, "dtype", None) for x in (codes, scale)] != [torch.uint8, torch.float8_e4m3fn]:
        return None
    if weight is None:
        inverse = lambda divisors: None if divisors is None else 1 / divisors.data
        return codes, scale, inverse(find("weight_global_scale")), inverse(find("input_global_scale"))
    return None if find("weight_scale_2") is None else (codes, scale, find("weight_scale_2"), find("input_scale"))


def delete(layer, part=""):
    """Frees what :func:`nvfp4` reads."""
    modelopt = "weight", "weight_scale", "weight_scale_2", "input_scale"
    compressed = "weight_packed", "weight_global_scale", "input_global_scale"
    for name in modelopt + compressed:
        if hasattr(layer, part + name):
            delattr(layer, part + name)


def reads_floats(method, layer):
    """Whether a layer is weight-only, so that an input scale that a checkpoint may have is not to be used."""
    spec = getattr(method, "spec", None)
    use_a16 = any(getattr(x, "use_a16", False) for x in (method, getattr(layer, "scheme", None)))
    return use_a16 or "W4A16" in type(method).__name__ or (spec is not None and spec.activation is None)


def why_not_linear(layer, prefix, device):
    """Why a linear layer in NVFP4 is left to vLLM, None if it is not."""
    if prefix.rpartition(".")[2] == "kv_b_proj":
        return "attention reads the weights of kv_b_proj"
    if hasattr(layer, "num_embeddings"):
        return "a table of embeddings or an output head"
    if getattr(layer, "is_bmm", False) or getattr(layer, "_retain_weight_for_gather", False):
        return "the model reads their weights"
    return unsupported(device) if device.type == "cuda" else None


def why_not_experts(method, layer, device):
    """Why a mixture in NVFP4 is left to vLLM, None if it is not."""
    activation = getattr(layer.activation, "value", layer.activation)
    parallel = getattr(layer.moe_config, "moe_parallel_config", None)
    of_gate = [name for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta") if getattr(layer, name, None) is not None]
    if getattr(method, "is_monolithic", False):
        return "its kernel on this card routes, too"
    if activation not in ACTIVATIONS or of_gate:
        return f"activation {activation}{''.join(f' with {name}' for name in of_gate)}"
    if hasattr(layer, "w13_bias"):
        return "they have biases"
    spread = {"use_all2all_kernels": False, "enable_eplb": False, "dp_size": 1}
    for name, alone in spread.items():
        if getattr(parallel, name, alone) != alone:
            return f"{name} is {getattr(parallel, name)}"
    return unsupported(device) if device.type == "cuda" else None


def _changed(method, cls):
    """The method with a class derived from its own. vLLM chooses how to load a layer by the name of its method's class."""
    cls.__name__, cls.__qualname__ = type(method).__name__, type(method).__qualname__
    changed = copy.copy(method)
    changed.__class__ = cls
    return changed


def linear_method(method, prefix):
    """Turns vLLM's method of a linear layer into one that packs the weights once they are loaded, with the activation where
    the layer is gate and up of an MLP with an :class:`Activation`. Creating and loading them stays as it is; layers in other
    formats stay so altogether."""

    class Packed(type(method)):
        def process_weights_after_loading(self, layer):
            stored = nvfp4(layer)
            if stored is None:
                return super().process_weights_after_loading(layer)
            device, activates = stored[0].device, hasattr(layer, "dualgemm_activation")
            why = None if activates else why_not_linear(layer, prefix, device)
            say("gate, up and activation of MLPs" if activates else "linear layers", prefix, device, why)
            if why:
                return super().process_weights_after_loading(layer)
            *parts, static = stored
            static = None if reads_floats(method, layer) else static
            # vLLM keeps compiled graphs on disk, with these numbers in them: they must be the same in every process.
            if activates:
                weights = pack(*parts, static, getattr(layer, "bias", None))
                quantize_a = _torch.quantize_a_text(None if weights.input_scale is None else "static")
                layer.dualgemm_call = _torch.handle(weights, name=prefix), weights.shape[0], quantize_a
            else:
                weights = pack_linear(*parts, static, getattr(layer, "logical_widths", None))
                quantize_a = _torch.quantize_a_text(None if static is None else "static")
                layer.dualgemm_calls = [
                    (_torch.handle(w, name=f"{prefix}.{part}"), w.shape[0], quantize_a) for part, w in enumerate(weights)
                ]
            layer.dualgemm = weights
            delete(layer)

        def apply(self, layer, x, bias=None):
            if hasattr(layer, "dualgemm_call"):
                # The bias is in the weights.
                number, n, quantize_a = layer.dualgemm_call
                return torch.ops.dualgemm.swiglu(x, number, n, x.dtype, quantize_a, "", False)
            if not hasattr(layer, "dualgemm_calls"):
                return super().apply(layer, x, bias)
            parts = [
                torch.ops.dualgemm.linear(x, number, n, x.dtype, quantize_a)
                for number, n, quantize_a in layer.dualgemm_calls
            ]
            y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
            return y if bias is None else y + bias

    return _changed(method, Packed)


def experts_method(method, prefix):
    """The same for vLLM's method of the routed experts of a layer."""

    class Packed(type(method)):
        def process_weights_after_loading(self, layer):
            w13, w2 = nvfp4(layer, "w13_"), nvfp4(layer, "w2_")
            if w13 is None or w2 is None:
                return super().process_weights_after_loading(layer)
            device = w13[0].device
            why = why_not_experts(method, layer, device)
            say("mixtures of experts", prefix, device, why)
            if why:
                return super().process_weights_after_loading(layer)
            # Mixtures on a GPU take activations in 16 bits.
            static = not (reads_floats(method, layer) or device.type == "cuda")
            layer.dualgemm = weights = pack_experts(layer, w13, w2, static)
            how = (_torch.quantize_a_text("static" if static else None),) * 2
            layer.dualgemm_call = _torch.handle(weights, name=prefix), weights.shape[0], how
            delete(layer, "w13_")
            delete(layer, "w2_")

        def get_fused_moe_quant_config(self, layer):
            return None if hasattr(layer, "dualgemm") else super().get_fused_moe_quant_config(layer)

        def apply(self, layer, x, topk_weights, topk_ids, *shared, **more):
            if not hasattr(layer, "dualgemm"):
                return super().apply(layer, x, topk_weights, topk_ids, *shared, **more)
            if layer.expert_map is not None:
                # Experts of other ranks, and choices of none.
                topk_ids = torch.where(topk_ids < 0, -1, layer.expert_map[topk_ids.clamp(min=0).long()])
            number, n, how = layer.dualgemm_call
            return torch.ops.dualgemm.experts(x, number, n, x.dtype, topk_ids, topk_weights, *how)

    return _changed(method, Packed)


def _halves(weight, scale, scales):
    """Gate and up, one below the other, each with its own tensor scale."""
    n = weight.shape[0] // 2
    halves = slice(0, n), slice(n, 2 * n)
    return [Quantized(weight.data[rows], scale.data[rows], s) for rows, s in zip(halves, scales)]


def pack(weight, scale, scale_2, input_scale=None, bias=None):
    """Weights of a merged gate/up layer: ``[2n, k/2]`` codes, ``[2n, k/16]`` scales, a tensor scale for gate and one for
    up, and ``[2n]`` biases or none. The tensor scales are kept apart: one for both, as merged kernels need, is wrong where
    they differ."""
    scales = [float(s) for s in scale_2.reshape(-1).tolist()]
    gate, up = _halves(weight, scale, scales if len(scales) == 2 else scales * 2)
    static = None if input_scale is None else float(input_scale.max())
    biases = {} if bias is None else dict(zip(("gate_bias", "up_bias"), bias.data.chunk(2)))
    return Weights.from_tensors(gate=gate, up=up, input_scale=static, **biases)


def pack_linear(weight, scale, scale_2, input_scale=None, widths=None):
    """Weights of a linear layer, one for each part of ``widths`` rows with a tensor scale of its own, one if all are equal."""
    scales = [float(s) for s in scale_2.reshape(-1).tolist()]
    if len(set(scales)) == 1:
        scales, widths = scales[:1], [weight.shape[0]]
    static = None if input_scale is None else float(input_scale.max())
    parts = zip(weight.data.split(list(widths)), scale.data.split(list(widths)), scales)
    device = weight.device if weight.is_cuda else None
    return [
        Linear.from_tensors(Quantized(codes, blocks, s), input_scale=static, device=device) for codes, blocks, s in parts
    ]


def pack_experts(layer, w13, w2, static):
    """The routed experts of a layer that are here, as vLLM numbers them; with the largest input scales if ``static``."""
    scales = {}
    if static:
        scales = {"input_scale": float(w13[3].max()), "down_input_scale": float(w2[3].max())}
    experts = []
    for codes, blocks, pair, down, down_blocks, down_scale in zip(*w13[:3], *w2[:3]):
        gate, up = _halves(codes, blocks, pair.tolist())
        down = Quantized(down.data, down_blocks.data, float(down_scale))
        experts.append({"gate": gate, "up": up, "down": down, **scales})
    activation = ACTIVATIONS[getattr(layer.activation, "value", layer.activation)]
    device = w13[0].device if w13[0].is_cuda else None
    router = "input" if layer.apply_router_weight_on_input else "output"
    return Experts.from_tensors(experts, activation=activation, router_weights=router, device=device)


def changed_init(init):
    """The ``__init__`` of an MLP with an :class:`Activation` where it has SiLU."""

    @functools.wraps(init)
    def changed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if type(self.act_fn).__name__ == "SiluAndMul":
            self.act_fn = Activation(self.act_fn, self.gate_up_proj)
            self.gate_up_proj.dualgemm_activation = True

    return changed


def quantization_config(modelopt, compressed):
    """The quantization method: vLLM's classes for ModelOpt's NVFP4 and for compressed-tensors, whose methods pack weights. Which
    one is for a checkpoint, its configuration tells."""

    class Packing:
        @classmethod
        def get_name(cls):
            return NAME

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg, user_quant, *args, **kwargs):
            # Only where it is asked for.
            return NAME if user_quant == NAME else None

        def get_quant_method(self, layer, prefix):
            method = super().get_quant_method(layer, prefix)
            name = type(method).__name__
            if "Unquantized" in name:
                return method
            if "MoE" in name:
                return experts_method(method, prefix)
            return linear_method(method, prefix) if "LinearMethod" in name else method

    class Compressed(Packing, compressed):
        pass

    class DualGemmConfig(Packing, modelopt):
        @classmethod
        def from_config(cls, config):
            if config.get("quant_method") == "compressed-tensors":
                return Compressed.from_config(config)
            return super().from_config(config)

    return DualGemmConfig


def register():
    """Registers the method and changes the MLPs. vLLM calls it more than once; the second time does nothing."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    if getattr(ModelOptNvFp4Config, "dualgemm", False):
        return
    ModelOptNvFp4Config.dualgemm = True
    register_quantization_config(NAME)(quantization_config(ModelOptNvFp4Config, CompressedTensorsConfig))
    for module, name in MLPS:
        try:
            mlp = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        mlp.__init__ = changed_init(mlp.__init__)
