"""A plugin for vLLM: ``vllm serve MODEL --quantization dualgemm`` computes gate, up and activation of NVFP4 checkpoints
of ModelOpt in one kernel.

vLLM calls :func:`register` in each of its processes, through the entry point ``vllm.general_plugins``. Its parts:

- a quantization method ``dualgemm``, which is vLLM's own for ModelOpt's NVFP4 except for the merged gate and up of an
  MLP: there :func:`gate_up_method` packs the weights once they are loaded, and applies the activation too. vLLM has sharded
  them by then, so each rank packs its own;
- an ``__init__`` for the MLPs of :data:`MLPS` and those derived from them, which puts an :class:`Activation` where the
  activation was: it hands on what has been activated already. Their ``forward`` stays as it is.

Nothing of vLLM's source is changed; what is not such an MLP, or not in NVFP4, stays as it was. SGLang has no plugins for
quantization methods; there, :func:`dualgemm.nn.patch_mlp` on the loaded model does the same.
"""

import copy
import functools
import importlib

import torch

from . import Quantized, Weights, _torch

#: Modules of vLLM with MLPs that are down_proj of act_fn of gate_up_proj, and their class.
MLPS = [
    ("vllm.model_executor.models.llama", "LlamaMLP"),
    ("vllm.model_executor.models.mistral", "MistralMLP"),
    ("vllm.model_executor.models.qwen2", "Qwen2MLP"),
    ("vllm.model_executor.models.qwen2_moe", "Qwen2MoeMLP"),
    ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeMLP"),
]

NAME = "dualgemm"


class Activation(torch.nn.Module):
    """The activation of an MLP, which does nothing to the product of a layer that has applied it."""

    def __init__(self, act_fn, gate_up):
        super().__init__()
        self.act_fn = act_fn
        # In a tuple, or torch would take the layer for one of this module's parts.
        self.gate_up = (gate_up,)

    def forward(self, x):
        return x if hasattr(self.gate_up[0], "dualgemm") else self.act_fn(x)


def is_nvfp4(layer):
    """Whether a loaded linear layer is in ModelOpt's NVFP4. Its parameters, whose names are the checkpoint's, tell; the
    classes of vLLM's methods have other names in every version."""
    dtypes = [getattr(getattr(layer, name, None), "dtype", None) for name in ("weight", "weight_scale")]
    return dtypes == [torch.uint8, torch.float8_e4m3fn] and hasattr(layer, "weight_scale_2")


def reads_floats(method):
    """Whether a method is weight-only, so that an input scale that a checkpoint may have is not to be used."""
    spec = getattr(method, "spec", None)
    return "W4A16" in type(method).__name__ or (spec is not None and spec.activation is None)


def gate_up_method(method, prefix):
    """Turns vLLM's method of a merged gate/up layer into one that packs the weights once they are loaded. Creating and
    loading them stays as it is; layers in other formats or without an :class:`Activation` stay so altogether."""

    class GateUp(type(method)):
        def process_weights_after_loading(self, layer):
            if not (hasattr(layer, "dualgemm_activation") and is_nvfp4(layer)):
                return super().process_weights_after_loading(layer)
            static = None if reads_floats(method) else layer.input_scale
            weights = pack(layer.weight, layer.weight_scale, layer.weight_scale_2, static, getattr(layer, "bias", None))
            quantize_a = _torch.quantize_a_text(None if weights.input_scale is None else "static")
            # vLLM keeps compiled graphs on disk, with this number in them: it must be the same in every process.
            layer.dualgemm_call = _torch.handle(weights, name=prefix), weights.shape[0], quantize_a
            layer.dualgemm = weights
            for name in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                if hasattr(layer, name):
                    delattr(layer, name)

        def apply(self, layer, x, bias=None):
            if not hasattr(layer, "dualgemm"):
                return super().apply(layer, x, bias)
            # The bias is in the weights.
            handle, n, quantize_a = layer.dualgemm_call
            return torch.ops.dualgemm.swiglu(x, handle, n, x.dtype, quantize_a, "", False)

    # vLLM chooses how to load a layer by the name of its method's class.
    GateUp.__name__, GateUp.__qualname__ = type(method).__name__, type(method).__qualname__
    changed = copy.copy(method)
    changed.__class__ = GateUp
    return changed


def pack(weight, scale, scale_2, input_scale=None, bias=None):
    """Weights of a merged gate/up layer: ``[2n, k/2]`` codes, ``[2n, k/16]`` scales, a tensor scale for gate and one for
    up, and ``[2n]`` biases or none. The tensor scales are kept apart: one for both, as merged kernels need, is wrong where
    they differ."""
    n = weight.shape[0] // 2
    scales = [float(s) for s in scale_2.reshape(-1).tolist()]
    gate_scale, up_scale = scales if len(scales) == 2 else scales * 2
    static = None if input_scale is None else float(input_scale.max())
    halves = slice(0, n), slice(n, 2 * n)
    gate, up = (
        Quantized(weight.data[rows], scale.data[rows], tensor_scale)
        for rows, tensor_scale in zip(halves, (gate_scale, up_scale))
    )
    biases = {} if bias is None else {"gate_bias": bias.data[halves[0]], "up_bias": bias.data[halves[1]]}
    return Weights.from_tensors(gate=gate, up=up, input_scale=static, **biases)


def changed_init(init):
    """The ``__init__`` of an MLP with an :class:`Activation` where it has SiLU."""

    @functools.wraps(init)
    def changed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if type(self.act_fn).__name__ == "SiluAndMul":
            self.act_fn = Activation(self.act_fn, self.gate_up_proj)
            self.gate_up_proj.dualgemm_activation = True

    return changed


def quantization_config(base):
    """The quantization method: vLLM's class for ModelOpt's NVFP4 with gate and up replaced."""

    class DualGemmConfig(base):
        @classmethod
        def get_name(cls):
            return NAME

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg, user_quant, *args, **kwargs):
            # Only where it is asked for.
            return NAME if user_quant == NAME else None

        def get_quant_method(self, layer, prefix):
            method = super().get_quant_method(layer, prefix)
            merged = prefix.rpartition(".")[2] == "gate_up_proj"
            return gate_up_method(method, prefix) if merged and method is not None else method

    return DualGemmConfig


def register():
    """Registers the method and changes the MLPs. vLLM calls it more than once; the second time does nothing."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    if getattr(ModelOptNvFp4Config, "dualgemm", False):
        return
    ModelOptNvFp4Config.dualgemm = True
    register_quantization_config(NAME)(quantization_config(ModelOptNvFp4Config))
    for module, name in MLPS:
        try:
            mlp = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        mlp.__init__ = changed_init(mlp.__init__)
