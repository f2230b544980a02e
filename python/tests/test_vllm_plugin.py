"""The vLLM plugin against stand-ins of the interfaces that it uses; test_vllm_models.py has vLLM itself.

The stand-ins hold what vLLM's own modules promise (vllm/model_executor/layers/quantization/modelopt.py): a config whose
``get_quant_method`` gives a method per layer, parameters ``weight`` ``[2n, k/2]``, ``weight_scale`` ``[2n, k/16]``,
``weight_scale_2`` and ``input_scale`` ``[2]``, an MLP of gate_up_proj, act_fn, down_proj; and, of mixtures, what
``ModelOptNvFp4FusedMoE`` and ``fused_moe/routed_experts.py`` of 0.33.0 have.
"""

import os
import sys
import types

import numpy as np
import pytest
from conftest import rel_l2

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
# Before vLLM is imported by anybody: it has to know that there is no card.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
from dualgemm import vllm_plugin  # noqa: E402

N, K = 48, 64
STATIC = float(np.float32(0.02))


class SiluAndMul(torch.nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class ModelOptLinearMethod:
    def __init__(self, activation):
        self.spec = types.SimpleNamespace(activation=activation)

    def process_weights_after_loading(self, layer):
        layer.processed = True

    def apply(self, layer, x, bias=None):
        return torch.cat([x[..., :1].expand(*x.shape[:-1], N)] * 2, dim=-1)


class UnquantizedLinearMethod(ModelOptLinearMethod):
    pass


class ModelOptNvFp4FusedMoE:
    is_monolithic = False

    def __init__(self, use_a16):
        self.use_a16, self.moe_quant_config = use_a16, None

    def process_weights_after_loading(self, layer):
        layer.processed = True

    def get_fused_moe_quant_config(self, layer):
        return layer.w13_weight_scale

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return torch.full_like(x, 7)


class ModelOptNvFp4Config:
    activation = "nvfp4"

    def get_quant_method(self, layer, prefix):
        if prefix.endswith("experts"):
            return ModelOptNvFp4FusedMoE(self.activation is None)
        if "head" in prefix:
            return UnquantizedLinearMethod(None)
        return None if "norm" in prefix else ModelOptLinearMethod(self.activation)


class CompressedTensorsLinearMethod(ModelOptLinearMethod):
    def __init__(self):
        self.quantization_config = None


class CompressedTensorsConfig:
    @classmethod
    def from_config(cls, config):
        return cls()

    def get_quant_method(self, layer, prefix):
        layer.scheme = types.SimpleNamespace(use_a16="W4A16" in prefix)
        return CompressedTensorsLinearMethod()


class Linear(torch.nn.Module):
    def __init__(self, config, prefix):
        super().__init__()
        self.quant_method = config.get_quant_method(self, prefix)

    def forward(self, x):
        return self.quant_method.apply(self, x), None


class LlamaMLP(torch.nn.Module):
    def __init__(self, config, prefix="l.0.mlp"):
        super().__init__()
        self.gate_up_proj = Linear(config, f"{prefix}.gate_up_proj")
        self.act_fn = SiluAndMul()
        self.down = torch.nn.Linear(N, K, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        gate_up, _ = self.gate_up_proj(x)
        return self.down(self.act_fn(gate_up))


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
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors": {
            "CompressedTensorsConfig": type("CompressedTensorsConfig", (CompressedTensorsConfig,), {})
        },
        "vllm.model_executor.models.llama": {"LlamaMLP": type("LlamaMLP", (LlamaMLP,), {})},
    }
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, members in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in sys.modules:
                module = types.ModuleType(package)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, package, module)
        for key, value in members.items():
            setattr(sys.modules[name], key, value)
    vllm_plugin.register()
    return types.SimpleNamespace(
        config=registered["dualgemm"], mlp=sys.modules["vllm.model_executor.models.llama"].LlamaMLP
    )


@pytest.fixture(scope="module")
def pair():
    x = np.random.default_rng(1).standard_normal((2, N, K)).astype(np.float32)
    # Tensor scales that differ by the ratio of a known fault: one for both would show.
    return dualgemm.quantize(torch.from_numpy(x[0])), dualgemm.quantize(torch.from_numpy(2.14 * x[1]))


def parameter(x):
    return torch.nn.Parameter(x, requires_grad=False)


def load(layer, pair):
    layer.weight = parameter(torch.cat([q.codes for q in pair]))
    scales = torch.cat([q.scales.view(torch.uint8) for q in pair]).view(torch.float8_e4m3fn)
    layer.weight_scale = parameter(scales)
    layer.weight_scale_2 = parameter(torch.tensor([q.global_scale for q in pair]))
    layer.input_scale = parameter(torch.full((2,), STATIC))
    layer.quant_method.process_weights_after_loading(layer)


def test_register_adds_the_method_once(vllm):
    assert vllm.config.get_name() == "dualgemm"
    assert vllm.config.override_quantization_method({}, "dualgemm") == "dualgemm"
    assert vllm.config.override_quantization_method({}, None) is None
    init = vllm.mlp.__init__
    vllm_plugin.register()
    assert vllm.mlp.__init__ is init


def test_what_is_quantized_gets_another_method(vllm):
    config = vllm.config()
    prefixes = ("l.0.mlp.gate_up_proj", "l.0.mlp.down_proj", "l.0.mlp.experts", "lm_head", "l.0.norm")
    methods = [type(config.get_quant_method(None, prefix)) for prefix in prefixes]
    assert methods[3:] == [UnquantizedLinearMethod, type(None)]
    # vLLM looks the class up by its name.
    assert [m.__name__ for m in methods[:3]] == ["ModelOptLinearMethod"] * 2 + ["ModelOptNvFp4FusedMoE"]
    assert not {ModelOptLinearMethod, ModelOptNvFp4FusedMoE} & set(methods[:3])


@pytest.mark.parametrize("activation", ["nvfp4", None])
def test_an_mlp_is_computed_in_one_kernel_exact(vllm, pair, activation):
    vllm.config.activation = activation
    mlp = vllm.mlp(vllm.config())
    load(mlp.gate_up_proj, pair)
    assert not hasattr(mlp.gate_up_proj, "weight") and not hasattr(mlp.gate_up_proj, "processed")
    x = torch.randn(5, K).bfloat16()
    w = dualgemm.Weights.from_tensors(gate=pair[0], up=pair[1])
    c = dualgemm.swiglu(x, w, quantize_a=STATIC if activation else None)
    want = mlp.down(c)
    assert torch.equal(mlp(x), want)
    assert torch.equal(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), want)
    floats = [dualgemm.dequantize(q).double() for q in pair]
    x64 = x.double()
    exact = torch.nn.functional.silu(x64 @ floats[0].t()) * (x64 @ floats[1].t())
    assert rel_l2(c.double(), exact) < (0.2 if activation else 0.01)
    with pytest.raises(dualgemm.OperandError, match="two layers are called l.0.mlp"):
        load(vllm.mlp(vllm.config()).gate_up_proj, pair)


def test_biases_are_packed_with_the_weights_close(pair):
    bias = parameter(torch.linspace(-1, 1, 2 * N))
    codes, scales = (torch.cat([getattr(q, name) for q in pair]) for name in ("codes", "scales"))
    w = vllm_plugin.pack(codes, scales, torch.tensor([q.global_scale for q in pair]), bias=bias)
    x = torch.randn(3, K, dtype=torch.float64)
    gate, up = (x @ dualgemm.dequantize(q).double().t() + b for q, b in zip(pair, bias.double().chunk(2)))
    assert rel_l2(dualgemm.swiglu(x.float(), w), torch.nn.functional.silu(gate) * up) < 1e-5


def test_other_layers_stay_as_they_were(vllm, pair):
    mlp = vllm.mlp(vllm.config(), "l.1.mlp")
    # In floats.
    mlp.gate_up_proj.weight = parameter(torch.zeros(2 * N, K, dtype=torch.bfloat16))
    mlp.gate_up_proj.quant_method.process_weights_after_loading(mlp.gate_up_proj)
    assert mlp.gate_up_proj.processed
    x = torch.ones(2, K, dtype=torch.bfloat16)
    torch.testing.assert_close(mlp(x), mlp.down(torch.full((2, N), 0.7311, dtype=torch.bfloat16)))
    # In floats altogether.
    head = Linear(vllm.config(), "lm_head")
    load(head, pair)
    assert head.processed and hasattr(head, "weight")
    # What reads its weights itself.
    for prefix, more in (("l.2.kv_b_proj", {}), ("l.2.table", {"num_embeddings": 3}), ("l.2.bmm", {"is_bmm": True})):
        alone = Linear(vllm.config(), prefix)
        alone.__dict__.update(more)
        load(alone, pair)
        assert alone.processed and hasattr(alone, "weight") and not hasattr(alone, "dualgemm")


@pytest.fixture
def log(caplog):
    vllm_plugin._once.cache_clear()
    caplog.set_level("DEBUG", logger="vllm.dualgemm")
    return lambda level: [r.getMessage() for r in caplog.records if r.levelname == level]


@pytest.mark.parametrize("activation", ["nvfp4", None])
def test_linear_layers_keep_a_tensor_scale_for_each_part_exact(vllm, pair, activation, log):
    vllm.config.activation = activation
    quantize_a = STATIC if activation else None
    x = torch.randn(2, 5, K).bfloat16()
    want = torch.cat([dualgemm.linear(x, dualgemm.Linear.from_tensors(q), quantize_a=quantize_a) for q in pair], -1)
    for prefix, q in ((f"{activation}.qkv_proj", pair), (f"{activation}.gate_up_proj", pair)):
        layer = Linear(vllm.config(), prefix)
        layer.logical_widths = [N, N]
        load(layer, q)
        assert not hasattr(layer, "weight") and not hasattr(layer, "processed")
        assert len(layer.dualgemm) == 2 and torch.equal(layer(x)[0], want)
        bias = torch.randn(2 * N).bfloat16()
        assert torch.equal(layer.quant_method.apply(layer, x, bias), want + bias)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x)[0], want)
    # One scale for all is one product.
    layer = Linear(vllm.config(), f"{activation}.o_proj")
    same = dualgemm.quantize(torch.randn(2 * N, K))
    layer.logical_widths = [N, N]
    halves = [dualgemm.Quantized(c, s, same.global_scale) for c, s in zip(same.codes.chunk(2), same.scales.chunk(2))]
    load(layer, halves)
    (weights,) = layer.dualgemm
    assert torch.equal(layer(x)[0], dualgemm.linear(x, weights, quantize_a=quantize_a))
    assert log("INFO") == ["dualgemm computes linear layers on cpu"]
    assert log("DEBUG")[0] == f"{activation}.qkv_proj: dualgemm computes linear layers on cpu"


@pytest.mark.parametrize("scheme", ["W4A4", "W4A16"])
def test_compressed_tensors_are_read_by_their_names_exact(vllm, pair, scheme):
    layer = Linear(vllm.config.from_config({"quant_method": "compressed-tensors"}), f"{scheme}.qkv_proj")
    layer.logical_widths = [N, N]
    layer.weight_packed = parameter(torch.cat([q.codes for q in pair]))
    layer.weight_scale = parameter(torch.cat([q.scales.view(torch.uint8) for q in pair]).view(torch.float8_e4m3fn))
    # Their tensor scales divide, and the input's are there for activations in 4 bits only.
    layer.weight_global_scale = parameter(torch.tensor([256.0, 32.0]))
    if scheme == "W4A4":
        layer.input_global_scale = parameter(torch.tensor([64.0, 128.0]))
    layer.quant_method.process_weights_after_loading(layer)
    assert not list(layer.parameters()) and not hasattr(layer, "processed")
    x = torch.randn(5, K).bfloat16()
    parts = [dualgemm.Quantized(q.codes, q.scales, scale) for q, scale in zip(pair, (1 / 256, 1 / 32))]
    quantize_a = 1 / 64 if scheme == "W4A4" else None
    want = torch.cat([dualgemm.linear(x, dualgemm.Linear.from_tensors(q), quantize_a=quantize_a) for q in parts], -1)
    assert torch.equal(layer(x)[0], want)


E = 4


def mixture(vllm, prefix, seed=0, **more):
    """vLLM's ``RoutedExperts`` as its loader leaves it, and the matrices of its experts."""
    rng = np.random.default_rng(seed)
    quantized = lambda rows, k: dualgemm.quantize(torch.from_numpy(rng.standard_normal((rows, k)).astype(np.float32)))
    experts = [{"gate": quantized(N, K), "up": quantized(N, K), "down": quantized(K, N)} for _ in range(E)]
    layer = torch.nn.Module()
    parallel = types.SimpleNamespace(use_all2all_kernels=False, enable_eplb=False, dp_size=1)
    layer.moe_config = types.SimpleNamespace(moe_parallel_config=parallel)
    layer.activation, layer.apply_router_weight_on_input = types.SimpleNamespace(value="silu"), False
    layer.expert_map, layer.swiglu_limit = None, None
    fp8 = lambda x: x.view(torch.uint8).view(torch.float8_e4m3fn)
    both = lambda e, part: torch.cat([getattr(e[p], part) for p in ("gate", "up")])
    layer.w13_weight = parameter(torch.stack([both(e, "codes") for e in experts]))
    layer.w13_weight_scale = parameter(torch.stack([fp8(both(e, "scales")) for e in experts]))
    layer.w13_weight_scale_2 = parameter(torch.tensor([[e["gate"].global_scale, e["up"].global_scale] for e in experts]))
    layer.w2_weight = parameter(torch.stack([e["down"].codes for e in experts]))
    layer.w2_weight_scale = parameter(torch.stack([fp8(e["down"].scales) for e in experts]))
    layer.w2_weight_scale_2 = parameter(torch.tensor([e["down"].global_scale for e in experts]))
    layer.w13_input_scale = parameter(torch.tensor([[STATIC, STATIC / 2]] * E))
    layer.w2_input_scale = parameter(torch.tensor([STATIC * e for e in range(1, E + 1)]))
    layer.__dict__.update(more)
    layer.quant_method = vllm.config().get_quant_method(layer, prefix)
    return layer, experts


@pytest.mark.parametrize("activation,on_input", [("nvfp4", False), (None, False), (None, True)])
def test_mixtures_are_computed_in_one_call_exact(vllm, activation, on_input, log):
    vllm.config.activation = activation
    layer, experts = mixture(vllm, f"{activation}.experts", apply_router_weight_on_input=on_input)
    layer.quant_method.process_weights_after_loading(layer)
    assert not hasattr(layer, "processed") and not list(layer.parameters())
    # What vLLM asks for before each forward.
    assert layer.quant_method.get_fused_moe_quant_config(layer) is None
    scales = {"input_scale": STATIC, "down_input_scale": float(np.float32(STATIC) * 4)} if activation else {}
    router = "input" if on_input else "output"
    weights = dualgemm.Experts.from_tensors([{**e, **scales} for e in experts], router_weights=router)
    how = {"quantize_a": "static", "quantize_hidden": "static"} if activation else {}
    x = torch.randn(6, K).bfloat16()
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [-1, 1], [0, -1]], dtype=torch.int32)
    routing = torch.rand(6, 2)
    apply = lambda: layer.quant_method.apply(layer, x, routing, ids, None, shared_experts_input=None)
    assert torch.equal(apply(), dualgemm.experts(x, ids, routing, weights, **how))
    # Of eight experts those at 2, 0, 5 and 7 are here.
    layer.expert_map = torch.tensor([1, -1, 0, -1, -1, 2, -1, 3], dtype=torch.int32)
    ids = torch.tensor([[0, 3], [2, 5], [7, 1], [4, 0], [-1, 2], [6, -1]], dtype=torch.int32)
    here = torch.tensor([[1, -1], [0, 2], [3, -1], [-1, 1], [-1, 0], [-1, -1]], dtype=torch.int32)
    assert torch.equal(apply(), dualgemm.experts(x, here, routing, weights, **how))
    assert log("INFO") == ["dualgemm computes mixtures of experts on cpu"]


@pytest.mark.parametrize("more,why", [
    ({"activation": types.SimpleNamespace(value="swigluoai")}, "activation swigluoai"),
    ({"swiglu_limit": 7.0}, "activation silu with swiglu_limit"),
    ({"w13_bias": 1}, "they have biases"),
    ({"moe_config": types.SimpleNamespace(moe_parallel_config=types.SimpleNamespace(dp_size=2))}, "dp_size is 2"),
])  # fmt: skip
def test_other_mixtures_are_left_with_the_reason(vllm, more, why, log):
    layer, _ = mixture(vllm, "left.experts", **more)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.processed and hasattr(layer, "w13_weight") and layer.quant_method.get_fused_moe_quant_config(layer) is not None
    assert torch.equal(layer.quant_method.apply(layer, torch.ones(1, K), None, None, None, None), torch.full((1, K), 7.0))
    assert log("INFO") == [f"dualgemm leaves mixtures of experts to vLLM: {why}"]
