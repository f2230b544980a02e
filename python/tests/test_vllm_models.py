"""vLLM itself, on one rank of the processor: models that ``quantize_model`` wrote, loaded by vLLM's own loader, with its own
classes for compressed-tensors and with the plugin. Skipped, visibly, where vLLM is not installed; 0.33.0 was tried,
its wheel for CUDA without most of what it depends on (docs/python.md)."""

import gc
import importlib
import os

import pytest
from conftest import dequantized, rel_l2

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
# Before vLLM is imported by anybody: it has to know that there is no card.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
pytest.importorskip("vllm", reason="vllm is not installed")
from test_model import llama, qwen2, qwen3_moe, saved  # noqa: E402
from test_vllm_plugin import STATIC, K, N, pair  # noqa: E402, F401

from dualgemm import vllm_plugin  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """vLLM chooses kernels by card; it has none for processors, so its emulations are named."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vllm runs on a card here")
    register_linear_kernel(EmulationNvFp4LinearKernel, current_platform._enum, "nvfp4")
    vllm_plugin.register()
    emulated = nvfp4.NvFp4MoeBackend.EMULATION
    of_experts = emulated, nvfp4.backend_to_kernel_cls(emulated)[0]
    quantization = "vllm.model_executor.layers.quantization"
    compressed = f"{quantization}.compressed_tensors"
    replaced = {
        (f"{quantization}.modelopt", "init_nvfp4_linear_kernel"): EmulationNvFp4LinearKernel(None),
        (f"{compressed}.schemes.compressed_tensors_w4a4_nvfp4", "init_nvfp4_linear_kernel"): EmulationNvFp4LinearKernel(None),
        (f"{quantization}.modelopt", "select_nvfp4_moe_backend"): of_experts,
        (f"{compressed}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4", "select_nvfp4_moe_backend"): of_experts,
    }
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        for (module, name), value in replaced.items():
            patch.setattr(importlib.import_module(module), name, lambda value=value, **_: value)
        store = tmp_path_factory.mktemp("store") / "store"
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def loaded(tmp_path):
    """A model, as vLLM loads what was written, and the values that were written by the names of the files."""

    def load(config, producer, quantization=None):
        from vllm.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        saved(config, tmp_path / "floats")
        dualgemm.quantize_model(tmp_path / "floats", tmp_path / "q", producer=producer)
        how = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True, "quantization": quantization}
        model = ModelConfig(model=str(tmp_path / "q"), **how)
        more = {"device_config": DeviceConfig(device="cpu"), "load_config": LoadConfig(), "cache_config": CacheConfig()}
        whole = VllmConfig(model_config=model, **more)
        with set_current_vllm_config(whole):
            return get_model(vllm_config=whole, model_config=model), dequantized(tmp_path / "q" / "model.safetensors")

    yield load
    # The plugin knows layers by their names while they live.
    gc.collect()


#: What vLLM merges.
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def written(state, name, ending="weight"):
    """What the file has of a layer of vLLM's."""
    parent, _, last = name.rpartition(".")
    parts = [state.get(f"{parent}.{part}.{ending}") for part in PARTS.get(last, (last,))]
    return None if parts[0] is None else torch.cat([torch.from_numpy(part) for part in parts])


def linears(model):
    """Linear layers of vLLM's that were quantized, by name."""
    for name, layer in model.named_modules():
        kind = type(getattr(layer, "quant_method", None)).__name__
        if kind.endswith("LinearMethod") and not kind.startswith("Unquantized"):
            yield name, layer


def values(codes, scales, global_scale):
    return dualgemm.dequantize(dualgemm.Quantized(codes.data, scales.data.view(torch.uint8), float(global_scale)))


def are_equal(got, want):
    # The three factors of a value are multiplied in another order.
    return torch.allclose(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("config", [llama, qwen2, qwen3_moe])
def test_vllm_loads_compressed_tensors_as_they_were_written_close(loaded, config, caplog):
    model, state = loaded(config(), "compressed-tensors")
    found = dict(linears(model))
    assert len(found) == (6 if config is qwen3_moe else 8)
    for name, layer in found.items():
        assert layer.scheme.use_a16
        got = values(layer.weight, layer.weight_scale, layer.weight_global_scale)
        assert are_equal(got, written(state, name)), name
        bias = written(state, name, "bias")
        assert bias is None or torch.equal(layer.bias.float(), bias)
    blocks = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "w13_weight")]
    assert len(blocks) == (config is qwen3_moe)
    for name, block in blocks:
        for e in range(8):
            of = f"{name.rpartition('.experts')[0]}.experts.{e}"
            both = values(block.w13_weight[e], block.w13_weight_scale[e], block.w13_weight_scale_2[e])
            assert are_equal(both, written(state, f"{of}.gate_up_proj"))
            down = values(block.w2_weight[e], block.w2_weight_scale[e], block.w2_weight_scale_2[e])
            assert are_equal(down, written(state, f"{of}.down_proj"))
    head = state.get("lm_head.weight", state["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight[:96].float(), torch.from_numpy(head))
    # vLLM says so where layers that it merges have a scale each.
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert not [text for text in warned if "weight" in text and "scale" in text]


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("config", [llama, qwen2, qwen3_moe])
def test_the_plugin_computes_models_that_vllm_loads_close(loaded, config, producer):
    model, state = loaded(config(), producer, "dualgemm")
    found = dict(linears(model))
    assert len(found) == (6 if config is qwen3_moe else 8)
    for name, layer in found.items():
        assert hasattr(layer, "dualgemm") and not hasattr(layer, "weight")
        w, bias = written(state, name).double(), written(state, name, "bias")
        x = torch.randn(5, w.shape[1]).bfloat16()
        y = layer(x)
        want = x.double() @ w.T + (0 if bias is None else bias.double())
        if hasattr(layer, "dualgemm_call"):
            gate, up = want.chunk(2, -1)
            want = torch.nn.functional.silu(gate) * up
        assert rel_l2((y[0] if isinstance(y, tuple) else y).float(), want) < 6e-3, name
    blocks = [(name, layer) for name, layer in model.named_modules() if type(getattr(layer, "dualgemm", None)) is dualgemm.Experts]
    assert len(blocks) == (config is qwen3_moe)
    for name, block in blocks:
        x, ids = torch.randn(6, 64).bfloat16(), torch.randint(0, 8, (6, 2), dtype=torch.int32)
        weights, want = torch.rand(6, 2), torch.zeros(6, 64, dtype=torch.float64)
        for t in range(6):
            for e, weight in zip(ids[t].tolist(), weights[t].double()):
                of = f"{name.rpartition('.experts')[0]}.experts.{e}"
                gate, up = (written(state, f"{of}.gate_up_proj").double() @ x[t].double()).chunk(2)
                want[t] += weight * (written(state, f"{of}.down_proj").double() @ (torch.nn.functional.silu(gate) * up))
        got = block.quant_method.apply(block, x, weights, ids, None, None)
        assert rel_l2(got.float(), want) < 6e-3


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*down_proj*"]}


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
@pytest.mark.parametrize("module,name", vllm_plugin.MLPS)
def test_an_mlp_of_the_installed_vllm_loads_and_computes_exact(pair, module, name, algo):  # noqa: F811
    from vllm.model_executor.layers.quantization import get_quantization_config

    cls = getattr(importlib.import_module(module), name)
    config = get_quantization_config("dualgemm").from_config({**MODELOPT, "quant_algo": algo})
    torch.set_default_dtype(torch.bfloat16)
    try:
        mlp = cls(K, N, "silu", quant_config=config, prefix=f"model.{name}.{algo}.mlp")
    finally:
        torch.set_default_dtype(torch.float32)

    # As vLLM's loader does: each parameter by its own weight_loader, gate as shard 0, up as shard 1.
    layer = mlp.gate_up_proj
    for shard, q in enumerate(pair):
        layer.weight.weight_loader(layer.weight, q.codes, shard)
        scales = q.scales.view(torch.uint8).view(torch.float8_e4m3fn)
        layer.weight_scale.weight_loader(layer.weight_scale, scales, shard)
        layer.weight_scale_2.weight_loader(layer.weight_scale_2, torch.tensor(q.global_scale), shard)
        layer.input_scale.weight_loader(layer.input_scale, torch.tensor(STATIC), shard)
    down = torch.randn(K, N).bfloat16()
    mlp.down_proj.weight.data.copy_(down)
    for part in (layer, mlp.down_proj):
        part.quant_method.process_weights_after_loading(part)

    x = torch.randn(5, K).bfloat16()
    w = dualgemm.Weights.from_tensors(gate=pair[0], up=pair[1])
    c = dualgemm.swiglu(x, w, quantize_a=STATIC if algo == "NVFP4" else None)
    assert torch.equal(mlp(x), torch.nn.functional.linear(c, down))


def test_the_installed_vllm_gives_the_method_precedence():
    from vllm.model_executor.layers import quantization

    # vLLM asks in this order, and the first that answers is taken.
    built_in = set(quantization.QuantizationMethods.__args__)
    custom = [name for name in quantization.QUANTIZATION_METHODS if name not in built_in]
    assert "dualgemm" in custom
    config = quantization.get_quantization_config("dualgemm")
    assert config.override_quantization_method(MODELOPT, "dualgemm", hf_config=None) == "dualgemm"
    assert config.override_quantization_method(MODELOPT, None, hf_config=None) is None
