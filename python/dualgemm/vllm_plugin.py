"""A plugin for vLLM: ``vllm serve MODEL --quantization dualgemm`` computes gate, up and activation of NVFP4 checkpoints
of ModelOpt in one kernel.

vLLM calls :func:`register` in each of its processes, through the entry point ``vllm.general_plugins``. Its parts:

- a quantization method ``dualgemm``, which is vLLM's own for ModelOpt's NVFP4 except for the merged gate and up of an
  MLP: there :func:`gate_up_method` packs the weights once they are loaded. vLLM has sharded them by then, so each rank packs
  its own;
- a ``forward`` for the MLPs that are gate_up_proj, activation, down_proj (Llama, Qwen2, Qwen3, Mistral and those
  derived from them): gate and up never become a matrix of their own.

Nothing of vLLM's source is changed; what is not such an MLP stays as it was. SGLang has no plugins for quantization
methods; there, :func:`dualgemm.nn.patch_mlp` on the loaded model does the same.
"""

import copy
import functools

from .errors import UnsupportedError

#: Modules of vLLM with MLPs of that form, and their class.
MLPS = [
    ("vllm.model_executor.models.llama", "LlamaMLP"),
    ("vllm.model_executor.models.qwen2", "Qwen2MLP"),
    ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeMLP"),
]

NAME = "dualgemm"


def gate_up_method(method):
    """Turns vLLM's method of a merged gate/up layer into one that packs the weights once they are loaded. Creating and
    loading them stays as it is."""

    class GateUp(type(method)):
        def process_weights_after_loading(self, layer):
            # Weight-only methods load a placeholder here that holds nothing.
            static = None if "W4A16" in type(method).__name__ else layer.input_scale
            layer.dualgemm = pack(layer.weight, layer.weight_scale, layer.weight_scale_2, static)
            for name in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                if hasattr(layer, name):
                    delattr(layer, name)

        def apply(self, layer, x, bias=None):
            raise UnsupportedError(
                "this model uses gate and up apart from their activation, which --quantization modelopt_fp4 computes"
            )

    changed = copy.copy(method)
    changed.__class__ = GateUp
    return changed


def pack(weight, scale, scale_2, input_scale=None):
    """Weights of a merged gate/up layer: ``[2n, k/2]`` codes, ``[2n, k/16]`` scales, a tensor scale for gate and one for
    up. The two are kept apart: one for both, as merged kernels need, is wrong where they differ."""
    from . import Quantized, Weights

    n = weight.shape[0] // 2
    scales = [float(s) for s in scale_2.reshape(-1).tolist()]
    gate_scale, up_scale = scales if len(scales) == 2 else scales * 2
    static = None if input_scale is None else float(input_scale.max())
    halves = [
        Quantized(weight.data[rows], scale.data[rows], tensor_scale)
        for rows, tensor_scale in ((slice(0, n), gate_scale), (slice(n, 2 * n), up_scale))
    ]
    return Weights.from_tensors(gate=halves[0], up=halves[1], input_scale=static)


def fused_forward(forward):
    """The forward of an MLP, in one kernel up to the down projection where gate and up are ours."""

    @functools.wraps(forward)
    def fused(self, x, *args, **kwargs):
        weights = getattr(self.gate_up_proj, "dualgemm", None)
        if weights is None:
            return forward(self, x, *args, **kwargs)
        from ._torch import swiglu

        quantize_a = None if weights.input_scale is None else "static"
        c = swiglu(x, weights, quantize_a=quantize_a)
        return self.down_proj(c)[0]

    fused.dualgemm = True
    return fused


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
            merged = prefix.rpartition(".")[2] == "gate_up_proj" and ".experts." not in prefix
            # Layers that a checkpoint leaves in floats have a method of another kind.
            quantized = "NvFp4" in type(method).__name__
            return gate_up_method(method) if merged and quantized else method

    return DualGemmConfig


def register():
    """Registers the method and the forwards. vLLM calls it more than once; the second time does nothing."""
    import importlib

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
        mlp.forward = fused_forward(mlp.forward)
