"""Experts that a model's files have in one tensor, experts and weights in floats, and checkpoints of other models. Skipped,
visibly, where torch or transformers is missing."""

import copy
import json
import pickle

import numpy as np
import pytest
from conftest import E2M1, dequantized, rel_l2, tensors
from test_model import SMALL, llama, load, log_probabilities, on_dequantized, qwen3_moe, saved

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
nn = pytest.importorskip("dualgemm.nn")

IDS = torch.arange(24).reshape(2, 12) * 7 % 96
MIXTURE = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}


def gpt_oss():
    return transformers.GptOssConfig(**SMALL, **MIXTURE, layer_types=["full_attention"] * 2)


def granite():
    return transformers.GraniteMoeConfig(**{k: v for k, v in SMALL.items() if k != "head_dim"}, **MIXTURE)


def gemma4():
    return transformers.Gemma4TextConfig(
        **SMALL, intermediate_size=96, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
        layer_types=["full_attention"] * 2, hidden_size_per_layer_input=0,
    )  # fmt: skip


def with_experts(model, path):
    """The model with the weights that a checkpoint's codes stand for."""
    held, one_by_one = tensors(path / "model.safetensors"), {}
    in_3d = {n: x for n, x in held.items() if x.dtype == np.uint8 and x.ndim == 3}
    for name, x in dequantized_2d(path).items():
        one_by_one[name] = torch.from_numpy(x.copy())
    own = model.state_dict()
    for name, param in own.items():
        path_, _, last = name.rpartition(".")
        if name in in_3d:
            x = in_3d[name]
            codes = np.stack([x & 15, x >> 4], 2).reshape(len(x), -1, x.shape[2])
            scales = held[f"{name}_weight_scale"].astype(np.float32) * held[f"{name}_weight_scale_2"]
            own[name] = torch.from_numpy(E2M1[codes] * np.repeat(scales, 16, 1))
        elif param.dim() == 3 and f"{path_}.0.down_proj.weight" in one_by_one:
            of = lambda e, p: one_by_one[f"{path_}.{e}.{p}_proj.weight"]
            for e in range(len(param)):
                matrix = of(e, "down") if last == "down_proj" else torch.cat([of(e, "gate"), of(e, "up")])
                if last != "down_proj" and model.config.model_type == "gpt_oss":
                    matrix = torch.stack([of(e, "gate"), of(e, "up")], 1).flatten(0, 1)
                transposed = model.config.model_type == "gpt_oss"
                own[name][e] = matrix.T if transposed else matrix
        elif name in one_by_one:
            own[name] = one_by_one[name]
    model.load_state_dict(own)
    return model


def dequantized_2d(path):
    """As ``dequantized``, without the experts that are in one tensor."""
    from safetensors.torch import load_file, save_file

    rest = {n: x for n, x in load_file(path / "model.safetensors").items() if x.dim() != 3 and ".experts.gate_up_proj" not in n}
    rest = {n: x for n, x in rest.items() if ".experts.down_proj" not in n}
    save_file(rest, path / "rest.tmp")
    try:
        return dequantized(path / "rest.tmp")
    finally:
        (path / "rest.tmp").unlink()


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("config", [gpt_oss, granite])
def test_experts_in_one_tensor_are_quantized_and_computed_close(tmp_path, config, producer):
    floats = saved(config(), tmp_path / "floats")
    names = tensors(floats / "model.safetensors")
    assert any(x.ndim == 3 for x in names.values())
    report = dualgemm.quantize_model(floats, tmp_path / "q", producer=producer)
    assert not [kept for kept in report["kept"] if "expert" in kept["name"] or "linear" in kept["name"]]
    model = load(floats)
    replaced = nn.patch_model(model, tmp_path / "q")
    assert list(replaced.replaced.values()).count("blocks of 4 experts") == 2 and not replaced.unused
    want = with_experts(load(floats), tmp_path / "q")
    p, q = log_probabilities(model, IDS), log_probabilities(want, IDS)
    assert (p - q).abs().max() < 2e-3 < (q - log_probabilities(load(floats), IDS)).abs().max()

    from dualgemm import hf

    hf.register()
    loaded = load(tmp_path / "q")
    assert torch.equal(log_probabilities(loaded, IDS), p)
    assert loaded.dualgemm_report.layers == replaced.layers == (2 if config is gpt_oss else 0)


def test_experts_of_gemma_4_are_quantized(tmp_path):
    floats = saved(gemma4(), tmp_path / "floats")
    report = dualgemm.quantize_model(floats, tmp_path / "q", producer="compressed-tensors")
    experts = [t["name"] for t in report["tensors"] if ".experts." in t["name"]]
    assert len(experts) == 2 * 4 * 3 and not [k for k in report["kept"] if "experts" in k["name"]]


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_experts_whose_down_is_in_16_bits_are_computed_close(tmp_path, producer, registered):
    floats, path = saved(qwen3_moe(), tmp_path / "floats"), tmp_path / "q"
    dualgemm.quantize_model(floats, path, skip=["down_proj"], producer=producer)
    model, want = load(floats), on_dequantized(load(floats), dequantized(path / "model.safetensors"))
    report = nn.patch_model(model, path)
    assert report.replaced["model.layers.0.mlp.experts"] == "blocks of 8 experts" and not report.unused
    experts = model.model.layers[0].mlp.experts
    assert experts.weights.formats == ("nvfp4", "bf16")
    p, q = log_probabilities(model, IDS), log_probabilities(want, IDS)
    assert (p - q).abs().max() < 2e-3 < (q - log_probabilities(load(floats), IDS)).abs().max()
    loaded = load(path)
    assert torch.equal(log_probabilities(loaded, IDS), p)
    loaded.save_pretrained(tmp_path / "copy")
    assert tensors(tmp_path / "copy" / "model.safetensors").keys() == tensors(path / "model.safetensors").keys()

    # In bf16, and with what goes into gate and up in 4 bits.
    x, ids = torch.randn(5, 64), torch.arange(10).reshape(5, 2) % 8
    with torch.no_grad():
        exact = want.model.layers[0].mlp.experts(x, ids, torch.full((5, 2), 0.5))
        assert rel_l2(experts(x.bfloat16(), ids, torch.full((5, 2), 0.5)).float(), exact) < 1e-2
        of_blocks = nn.NVFP4Experts.from_checkpoint(path, 0, quantize_a="dynamic")
        assert 1e-2 < rel_l2(of_blocks(x, ids, torch.full((5, 2), 0.5)), exact) < 0.2
    with pytest.raises(dualgemm.UnsupportedError, match="the down projection is bf16; on a GPU nvfp4 or mxfp4 is needed"):
        dualgemm.Experts.from_checkpoint(path, 0, device="sim:sm_90a")


def test_one_expert_in_another_format_is_named_and_leaves_the_model_as_it_was(tmp_path):
    floats = saved(qwen3_moe(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", skip=["layers.0.mlp.experts.1.down_proj"])
    model = load(floats)
    before = [id(m) for m in model.modules()]
    message = r"experts.1.gate_proj.*nvfp4 \[32, 64\] and bf16 \[64, 32\].*asks for nvfp4 \[32, 64\] and nvfp4"
    with pytest.raises(dualgemm.OperandError, match=message):
        nn.patch_model(model, tmp_path / "q")
    assert [id(m) for m in model.modules()] == before


@pytest.mark.parametrize("skip", [["gate_proj", "up_proj"], ["up_proj", "down_proj"]])
def test_experts_without_gate_and_up_in_4_bits_stay(tmp_path, registered, skip):
    floats, path = saved(qwen3_moe(), tmp_path / "floats"), tmp_path / "q"
    dualgemm.quantize_model(floats, path, skip=skip)
    report = nn.patch_model(load(floats), path)
    assert report.left["model.layers.0.mlp.experts"] == "its gate and up are not both in 4 bits in the checkpoint"
    with pytest.raises(dualgemm.CheckpointError, match=r"experts.0.(down|gate)_proj.weight is in 4 bits, and "):
        load(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_in_16_bits_are_computed_where_they_lie_close(tmp_path, dtype):
    floats = saved(qwen3_moe(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", skip=["experts"])
    model, want = load(floats, dtype), load(floats, dtype)
    block, theirs = model.model.layers[0].mlp.experts, want.model.layers[0].mlp.experts
    weights = block.gate_up_proj
    report = nn.patch_model(model, tmp_path / "q")
    assert report.replaced["model.layers.0.mlp.experts"] == "blocks of experts in 16 bits"
    ours = model.model.layers[0].mlp.experts
    assert isinstance(ours, nn.FloatExperts) and isinstance(ours, type(theirs)) and ours.gate_up_proj is weights
    for tokens in (1, 13):
        x = torch.randn(tokens, 64, dtype=dtype)
        ids = torch.stack([torch.randperm(9)[:3] for _ in range(tokens)])  # 8 is nobody's here.
        routing = torch.rand(tokens, 3, dtype=dtype)
        with torch.no_grad():
            exact = sum(
                routing[:, j, None].double() * one_expert(theirs, x.double(), ids[:, j]) for j in range(3)
            )
            assert rel_l2(ours(x, ids, routing).double(), exact) < (8e-3 if dtype is torch.bfloat16 else 1e-3)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(ours)(x, ids, routing), ours(x, ids, routing))
    # What torch has to see, it computes.
    x = torch.randn(3, 64, dtype=dtype, requires_grad=True)
    ours(x, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1, dtype=dtype)).sum().backward()
    assert x.grad is not None and weights.grad is not None


def one_expert(experts, x, ids):
    """What each token's one expert makes of it, in f64; zeros where there is none."""
    y = torch.zeros(len(x), x.shape[1], dtype=torch.double)
    for t, e in enumerate(ids.tolist()):
        if e < len(experts.gate_up_proj):
            gate, up = (experts.gate_up_proj[e].double() @ x[t]).chunk(2)
            y[t] = experts.down_proj[e].double() @ (torch.nn.functional.silu(gate) * up)
    return y


def test_experts_that_are_left_say_why(tmp_path):
    floats = saved(gpt_oss(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", skip=["experts"])
    report = nn.patch_model(load(floats, torch.bfloat16), tmp_path / "q")
    assert report.left["model.layers.0.mlp.experts"] == (
        "not in 4 bits in the checkpoint, and GptOssExperts is no block of experts [out, in] as most families of "
        "transformers have it"
    )
    assert nn.patch_model(load(floats), tmp_path / "q").left["model.layers.0.mlp.experts"] == "not in 4 bits in the checkpoint"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_in_4_bits_has_its_weight_for_who_asks_exact(tmp_path, dtype):
    floats = saved(llama(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    model = load(floats, dtype)
    nn.patch_model(model, tmp_path / "q")
    layer = model.model.layers[0].self_attn.q_proj
    held, name = tensors(tmp_path / "q" / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    codes = np.stack([held[name] & 15, held[name] >> 4], -1).reshape(64, 64)
    scales = held[f"{name}_scale"].astype(np.float64) * held[f"{name}_scale_2"].astype(np.float64)
    want = torch.from_numpy(E2M1[codes] * np.repeat(scales, 16, 1)).float()
    w = layer.weight
    assert (w.shape, w.dtype, w.device.type, w.requires_grad) == (want.shape, dtype, "cpu", False)
    assert "DecodedWeight([64, 64]" in repr(w)
    assert torch.equal(w.detach(), want.to(dtype)) and torch.equal(w.T[3], want.to(dtype).T[3])
    x = torch.randn(3, 64, dtype=dtype)
    assert torch.equal(torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, want.to(dtype)))
    assert type(w + 1) is torch.Tensor
    for write in (lambda: w.mul_(2), lambda: w.copy_(want), lambda: torch.nn.init.zeros_(w)):
        with pytest.raises(dualgemm.UnsupportedError, match="would write to a weight in 4 bits"):
            write()
    # It is no parameter, follows the type of its module, and is nobody's memory.
    assert "weight" not in dict(layer.named_parameters()) and layer.bias is None
    assert torch.equal(copy.deepcopy(layer).double().weight.detach(), want.double())
    assert model.half().model.layers[0].self_attn.q_proj.weight.dtype == torch.float16
    assert torch.equal(layer.weight.detach(), want.half())
    alone = nn.NVFP4Linear.from_checkpoint(tmp_path / "q", "model.layers.0.self_attn.q_proj", dtype=torch.float32)
    assert torch.equal(alone.weight.detach(), want)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        nn.NVFP4Linear.from_checkpoint(tmp_path / "q", "model.layers.0.self_attn.q_proj", rank=0)
    made = nn.NVFP4Linear(dualgemm.Linear.from_tensors(dualgemm.quantize(want)))
    assert not hasattr(made, "weight")


def test_layers_that_their_model_takes_apart_stay(tmp_path):
    config = transformers.JambaConfig(
        **{k: v for k, v in SMALL.items() if k != "head_dim"}, intermediate_size=64, num_experts=1, mamba_dt_rank=16,
        attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, pad_token_id=0, mamba_d_state=8,
    )  # fmt: skip
    floats = saved(config, tmp_path / "floats")
    from safetensors.torch import load_file, save_file

    dualgemm.quantize_model(floats, tmp_path / "q")
    state = load_file(tmp_path / "q" / "model.safetensors")
    (name,) = (n for n in state if n.endswith("mamba.dt_proj.weight"))
    q = dualgemm.quantize(state.pop(name).float())
    module = name.removesuffix(".weight")
    state |= {name: q.codes, f"{name}_scale": q.scales.view(torch.float8_e4m3fn), f"{name}_scale_2": torch.tensor(q.global_scale)}
    save_file(state, tmp_path / "q" / "model.safetensors")
    for file in ("config.json", "hf_quant_config.json"):
        text = (tmp_path / "q" / file).read_text()
        (tmp_path / "q" / file).write_text(text.replace(f'"{module}"', '"none"'))
    model = load(floats)
    report = nn.patch_model(model, tmp_path / "q")
    assert report.left[module] == "its model reads its weights and bias by itself"
    assert torch.isfinite(log_probabilities(model, IDS)).all()


@pytest.mark.parametrize("change,message", [
    ({"model_type": "mistral"}, "model_type: the model's is llama, that of .* mistral; other_model=True takes"),
    ({"hidden_size": 128}, "hidden_size: the model's is 64, that of .* 128; other_model=True takes"),
])  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change, message):
    floats = saved(llama(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    config = tmp_path / "q" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    model = load(floats)
    before = [id(m) for m in model.modules()]
    for patch in (nn.patch_model, nn.patch_mlp):
        with pytest.raises(dualgemm.OperandError, match=message):
            patch(model, tmp_path / "q")
    assert [id(m) for m in model.modules()] == before
    assert nn.patch_model(model, tmp_path / "q", other_model=True).replaced


def test_the_language_model_of_another_is_the_same_model(tmp_path):
    """A checkpoint of a model with pictures, whose text model is that of the class."""
    floats = saved(llama(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    config = tmp_path / "q" / "config.json"
    held = json.loads(config.read_text())
    text = {"model_type": "llama", "hidden_size": 64}
    config.write_text(json.dumps({**held, "model_type": "llava", "hidden_size": None, "text_config": text}))
    assert nn.patch_model(load(floats), tmp_path / "q").replaced


@pytest.mark.parametrize("skip", [[], ["experts"]])
def test_a_pickled_model_reads_its_checkpoint_again_exact(tmp_path, skip):
    floats = saved(qwen3_moe(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", skip=skip)
    model = load(floats, torch.bfloat16)
    nn.patch_model(model, tmp_path / "q")
    again = pickle.loads(pickle.dumps(model))
    experts = again.model.layers[0].mlp.experts
    assert isinstance(experts, nn.FloatExperts if skip else nn.NVFP4Experts)
    assert again.model.layers[1].mlp.weights is not model.model.layers[1].mlp.weights
    assert torch.equal(again.model.layers[0].self_attn.q_proj.weight.detach(), model.model.layers[0].self_attn.q_proj.weight.detach())
    assert torch.equal(log_probabilities(again, IDS), log_probabilities(model, IDS))


def test_a_weight_in_4_bits_is_not_written_to_by_any_way(tmp_path):
    dualgemm.quantize_model(saved(llama(), tmp_path / "floats"), tmp_path / "q")
    layer = nn.NVFP4Linear.from_checkpoint(tmp_path / "q", "model.layers.0.self_attn.q_proj", dtype=torch.float32)
    want = layer.weight.clone()
    writes = [
        lambda w: w.data.add_(1),
        lambda w: setattr(w, "data", want),
        lambda w: w.__setitem__((0, 0), 7.0),
        lambda w: w[:5].mul_(2),
        lambda w: w.t().mul_(0),
        lambda w: w.view(-1).zero_(),
        lambda w: w.detach().zero_(),
        lambda w: torch.add(w, 1, out=w),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: w.split(8)[0].zero_(),
    ]
    for write in writes:
        with pytest.raises(dualgemm.UnsupportedError, match="never changes"):
            write(layer.weight)
    assert torch.equal(layer.weight.detach().clone(), want) and (layer.weight.numpy() == want.numpy()).all()
    x = torch.randn(3, want.shape[1])
    assert torch.equal(x @ layer.weight.t(), x @ want.t())


def test_experts_of_somebodys_implementation_and_trained_biases_are_torchs(monkeypatch):
    linear = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
    linear.weight.requires_grad_(False)
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    assert nn.FloatLinear.of(linear)(x).requires_grad
    with torch.autocast("cpu", torch.float16):
        assert nn.FloatLinear.of(linear)(x).dtype == torch.float16
    moe = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    experts = torch.nn.Module()
    experts.config = transformers.PretrainedConfig()
    for name, elsewhere in (("grouped_mm", False), ("mine", True), ("eager", False)):
        monkeypatch.setitem(moe._global_mapping, "mine", lambda *args: None)
        experts.config._experts_implementation = name
        assert nn.implemented_elsewhere(experts) is elsewhere
