"""The vLLM plugin against stand-ins of the interfaces that it uses, or against vLLM itself where it is installed.

The stand-ins hold what vLLM's own modules promise (vllm/model_executor/layers/quantization/modelopt.py): a config whose
``get_quant_method`` gives a method per layer, parameters ``weight`` ``[2n, k/2]``, ``weight_scale`` ``[2n, k/16]``,
``weight_scale_2`` and ``input_scale`` ``[2]``, and an MLP of gate_up_proj, activation, down_proj.
"""

import sys
import types

import numpy as np
import pytest
from conftest import rel_l2

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
from dualgemm import vllm_plugin  # noqa: E402

N, K = 48, 64


class ModelOptNvFp4LinearMethod:
    def __init__(self, config):
        self.quant_config = config

    def create_weights(self, layer):
        layer.created = True


class ModelOptNvFp4Config:
    def get_quant_method(self, layer, prefix):
        return None if "norm" in prefix else ModelOptNvFp4LinearMethod(self)


class LlamaMLP:
    def __init__(self, gate_up_proj, down_proj):
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x):
        return "the model's own"


@pytest.fixture
def vllm(monkeypatch):
    registered = {}

    def register_quantization_config(name):
        return lambda cls: registered.setdefault(name, cls)

    modules = {
        "vllm.model_executor.layers.quantization": {"register_quantization_config": register_quantization_config},
        "vllm.model_executor.layers.quantization.modelopt": {
            "ModelOptNvFp4Config": type("ModelOptNvFp4Config", (ModelOptNvFp4Config,), {})
        },
        "vllm.model_executor.models.llama": {"LlamaMLP": type("LlamaMLP", (LlamaMLP,), {})},
    }
    for name, members in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in modules or package == name:
                module = sys.modules.get(package) if package in sys.modules else types.ModuleType(package)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, package, module)
        for key, value in members.items():
            setattr(sys.modules[name], key, value)
    return registered


@pytest.fixture(scope="module")
def pair():
    x = np.random.default_rng(1).standard_normal((2, N, K)).astype(np.float32)
    # Tensor scales that differ by the ratio of a known fault: one for both would show.
    return dualgemm.quantize(torch.from_numpy(x[0])), dualgemm.quantize(torch.from_numpy(2.14 * x[1]))


def loaded(pair, static=0.02):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.cat([q.codes for q in pair]), requires_grad=False)
    scales = torch.cat([q.scales.view(torch.uint8) for q in pair]).view(torch.float8_e4m3fn)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    layer.weight_scale_2 = torch.nn.Parameter(torch.tensor([q.global_scale for q in pair]), requires_grad=False)
    layer.input_scale = torch.nn.Parameter(torch.full((2,), static), requires_grad=False)
    return layer


def test_register_adds_the_method_once(vllm):
    vllm_plugin.register()
    config = vllm["dualgemm"]
    assert config.get_name() == "dualgemm"
    assert config.override_quantization_method({}, "dualgemm") == "dualgemm"
    assert config.override_quantization_method({}, None) is None
    forward = sys.modules["vllm.model_executor.models.llama"].LlamaMLP.forward
    vllm_plugin.register()
    assert sys.modules["vllm.model_executor.models.llama"].LlamaMLP.forward is forward


def test_only_dense_gate_and_up_are_replaced(vllm):
    vllm_plugin.register()
    config = vllm["dualgemm"]()
    names = {
        prefix: type(config.get_quant_method(None, prefix)).__name__
        for prefix in ("l.0.mlp.gate_up_proj", "l.0.mlp.down_proj", "l.0.mlp.experts.gate_up_proj", "l.0.norm")
    }
    assert list(names.values()) == ["GateUp", "ModelOptNvFp4LinearMethod", "ModelOptNvFp4LinearMethod", "NoneType"]


def test_an_mlp_is_computed_in_one_kernel_exact(vllm, pair):
    vllm_plugin.register()
    method = vllm["dualgemm"]().get_quant_method(None, "l.0.mlp.gate_up_proj")
    assert isinstance(method, ModelOptNvFp4LinearMethod)
    layer = loaded(pair)
    method.create_weights(layer)
    method.process_weights_after_loading(layer)
    assert layer.created and not hasattr(layer, "weight")
    with pytest.raises(dualgemm.UnsupportedError):
        method.apply(layer, None)

    down = torch.randn(K, N, dtype=torch.bfloat16)
    mlp = sys.modules["vllm.model_executor.models.llama"].LlamaMLP(layer, lambda c: (c @ down.t(), None))
    x = torch.randn(5, K).bfloat16()
    w = dualgemm.Weights.from_tensors(gate=pair[0], up=pair[1])
    c = dualgemm.swiglu(x, w, quantize_a=float(np.float32(0.02)))
    assert torch.equal(mlp.forward(x), c @ down.t())
    floats = [dualgemm.dequantize(q).double() for q in pair]
    x64 = x.double()
    want = torch.nn.functional.silu(x64 @ floats[0].t()) * (x64 @ floats[1].t())
    assert rel_l2(c.double(), want) < 0.2


def test_other_mlps_stay_as_they_were(vllm):
    vllm_plugin.register()
    mlp = sys.modules["vllm.model_executor.models.llama"].LlamaMLP(torch.nn.Module(), None)
    assert mlp.forward(None) == "the model's own"


def test_the_installed_vllm_has_these_interfaces():
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config as Installed

    config = vllm_plugin.quantization_config(Installed)
    assert issubclass(config, Installed) and config.get_name() == "dualgemm"
