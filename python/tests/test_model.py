"""Whole models of transformers with their layers in 4 bits, against the same models on dequantized weights. Skipped,
visibly, where torch or transformers is missing."""

import contextlib
import copy
import types

import numpy as np
import pytest
from conftest import dequantized, rel_l2, tensors

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
nn = pytest.importorskip("dualgemm.nn")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

CONVENTIONS = ["modelopt", "compressed-tensors"]
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}


def llama(**more):
    return transformers.LlamaConfig(**{**SMALL, "intermediate_size": 96, **more})


def phi3():
    return transformers.Phi3Config(**SMALL, intermediate_size=96, pad_token_id=0)


def qwen2():
    """With biases at q, k and v."""
    return transformers.Qwen2Config(**SMALL, intermediate_size=96)


def qwen3_moe():
    return transformers.Qwen3MoeConfig(
        **SMALL, intermediate_size=96, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[1]
    )


def saved(config, directory, seed=0):
    """A model of random weights, saved in bf16."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for p in model.parameters():
        # Initial weights are so small that every token is as likely as any other.
        p.data = torch.randn_like(p) * (0.3 if p.dim() > 1 else 1)
    model.save_pretrained(directory)
    return directory


def load(directory, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def on_dequantized(model, state):
    """The model with the dequantized weights in place of its own; experts of one tensor each go into transformers' two."""
    own = model.state_dict()
    left = {name: torch.from_numpy(x.copy()) for name, x in state.items()}
    for name in own:
        if name in left:
            own[name] = left.pop(name)
        elif name.endswith("experts.gate_up_proj"):
            of = name.removesuffix(".gate_up_proj")
            halves = [[left.pop(f"{of}.{e}.{p}_proj.weight") for p in ("gate", "up")] for e in range(len(own[name]))]
            own[name] = torch.stack([torch.cat(pair) for pair in halves])
        elif name.endswith("experts.down_proj"):
            of = name.removesuffix(".down_proj")
            own[name] = torch.stack([left.pop(f"{of}.{e}.down_proj.weight") for e in range(len(own[name]))])
        else:
            assert name == "lm_head.weight", name
    assert not left, left.keys()
    model.load_state_dict(own)
    return model


def test_what_stays_in_16_bits_is_multiplied_where_it_lies(tmp_path):
    floats = saved(llama(tie_word_embeddings=True), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    left = nn.patch_model(load(floats), tmp_path / "q").left["lm_head"]
    assert left == "not in 4 bits in the checkpoint; its weights are those of model.embed_tokens"
    model = load(floats, torch.bfloat16)
    weight = model.lm_head.weight
    assert weight is model.get_input_embeddings().weight
    report = nn.patch_model(model, tmp_path / "q")
    assert report.replaced["lm_head"] == "linear layers in 16 bits" and "lm_head" not in report.left
    assert type(model.lm_head) is nn.FloatLinear and model.lm_head.weight is weight
    for rows in (1, 40):
        x = torch.randn(2, rows, weight.shape[1], dtype=torch.bfloat16)
        with torch.no_grad():
            want = torch.nn.functional.linear(x.double(), weight.double())
            assert rel_l2(model.lm_head(x).float(), want) < 3e-3
        # What torch has to see, it computes.
        x.requires_grad_()
        model.lm_head(x).sum().backward()
        assert x.grad is not None and weight.grad is not None
    assert torch.equal(model.float().lm_head(x.float()), torch.nn.functional.linear(x.float(), model.lm_head.weight))


def test_attention_of_one_token_is_that_of_transformers_close(tmp_path):
    floats = saved(llama(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    model = load(floats)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    # The name stays: some models ask for it.
    assert nn.patch_model(model, tmp_path / "q").attention == "dualgemm" and model.config._attn_implementation == "sdpa"
    ids = torch.arange(24).reshape(2, 12) * 7 % 96

    def step(mask=None):
        with torch.no_grad():
            cache = model(ids[:, :-1], attention_mask=None if mask is None else mask[:, :-1], use_cache=True).past_key_values
            return model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits

    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    ours = [step(mask) for mask in (None, padded)]
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    for ours, theirs in zip(ours, (step(mask) for mask in (None, padded))):
        assert (ours - theirs).abs().max() < 1e-4


def test_a_token_on_a_gpu_is_not_for_cudnn(monkeypatch):
    from dualgemm._attention import attend

    asked = []

    def theirs(module, query, *more, **how):
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return 1 / query.value

    monkeypatch.setattr("transformers.integrations.sdpa_attention.sdpa_attention_forward", theirs)
    for rows, value in ((1, 1), (1, 0), (2, 1)):
        query = types.SimpleNamespace(shape=(1, 4, rows, 16), is_cuda=True, is_cpu=False, value=value)
        key = types.SimpleNamespace(shape=(1, 2, 9, 16))
        with contextlib.nullcontext() if value else pytest.raises(ZeroDivisionError):
            attend(None, query, key, key, None)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert asked == [False, False, True]


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_what_a_model_does_beside_its_classes_stays(tmp_path):
    floats = saved(llama(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    model = load(floats)
    first, second = model.model.layers[:2]
    first.mlp.gate_proj.register_forward_hook(lambda module, a, c: c * 2)
    second.self_attn.q_proj.__class__ = Doubled
    old = second.mlp.forward
    second.mlp.forward = lambda x: old(x) * 2
    with pytest.raises(dualgemm.OperandError, match="layers.0.mlp: has hooks"):
        nn.patch_mlp(model, tmp_path / "q")
    left = nn.patch_model(model, tmp_path / "q").left
    assert left["model.layers.0.mlp.gate_proj"] == "has hooks, which its replacement would not call"
    assert left["model.layers.1.self_attn.q_proj"] == "is a Doubled, which may do more than a linear layer"
    assert "one by one: has a forward of its own" in left["model.layers.1.mlp"]
    with pytest.raises(dualgemm.OperandError, match="patch it first"):
        nn.patch_model(torch.compile(load(floats)), tmp_path / "q")
    model = load(floats)
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp)
    with pytest.raises(dualgemm.OperandError, match="layers.0.mlp: is compiled"):
        nn.patch_model(model, tmp_path / "q")


def log_probabilities(model, ids):
    with torch.no_grad():
        return model(ids).logits.double().log_softmax(-1)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("config,replaced", [
    (llama, "8 linear layers, 2 MLPs"),
    (qwen2, "8 linear layers, 2 MLPs"),
    (phi3, "4 linear layers, 2 MLPs"),
    (qwen3_moe, "8 linear layers, 1 blocks of 8 experts, 1 MLPs"),
])  # fmt: skip
def test_tiny_models_are_those_on_dequantized_weights_close(tmp_path, convention, config, replaced):
    floats = saved(config(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", producer=convention)
    model = load(floats)
    report = nn.patch_model(model, tmp_path / "q", **({"gate_up_order": "gate-up"} if config is phi3 else {}))
    assert sorted(repr(report).split("replaced ")[1].split("; left")[0].split(", ")) == sorted(replaced.split(", "))
    assert report.left["lm_head"] == "not in 4 bits in the checkpoint" and not report.unused
    want = on_dequantized(load(floats), dequantized(tmp_path / "q" / "model.safetensors"))
    ids = torch.arange(24).reshape(2, 12) * 7 % 96
    p, q = log_probabilities(model, ids), log_probabilities(want, ids)
    assert (p - q).abs().max() < 1e-3 < (q - log_probabilities(load(floats), ids)).abs().max()
    greedy = [m.generate(ids[:1], max_new_tokens=16, do_sample=False, pad_token_id=0) for m in (model, want)]
    assert torch.equal(*greedy)


def test_a_tiny_gpt_oss_is_that_on_its_codes_close(tmp_path):
    """MXFP4 blocks as OpenAI's files hold them, against transformers' own experts on what they decode to."""
    config = transformers.GptOssConfig(
        **SMALL, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2
    )
    floats = saved(config, tmp_path / "floats")
    model, want = load(floats), load(floats)
    rng, stored = np.random.default_rng(0), {}
    for name, p in model.state_dict().items():
        *_, last = name.split(".")
        if last not in ("gate_up_proj", "down_proj"):
            stored[name] = p.contiguous()
            continue
        experts, k, rows = p.shape
        codes = rng.integers(0, 256, (experts, rows, k // 32, 16), np.uint8)
        scales = rng.integers(122, 126, (experts, rows, k // 32)).astype(np.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = torch.from_numpy(codes), torch.from_numpy(scales)
        for e in range(experts):
            q = dualgemm.Quantized(codes[e].reshape(rows, k // 2), scales[e], format="mxfp4")
            want.state_dict()[name][e] = torch.from_numpy(dualgemm.dequantize(q)).T
    (tmp_path / "q").mkdir()
    save_file(stored, tmp_path / "q" / "model.safetensors")
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.save_pretrained(tmp_path / "q")
    report = nn.patch_model(model, tmp_path / "q")
    assert set(report.replaced.values()) == {"blocks of 4 experts"} and len(report.replaced) == 2
    ids = torch.arange(24).reshape(2, 12) * 7 % 96
    assert (log_probabilities(model, ids) - log_probabilities(want, ids)).abs().max() < 1e-3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    dualgemm.quantize_model(saved(llama(), directory / "floats"), directory / "q")
    return directory


def test_activations_in_4_bits_too_close(tiny):
    ids = torch.arange(12)[None] * 7 % 96
    model = load(tiny / "floats")
    nn.patch_model(model, tiny / "q", quantize_a="dynamic")
    plain = load(tiny / "floats")
    nn.patch_model(plain, tiny / "q")
    # Four bits cost something, a wrong scale far more.
    kl = log_probabilities(plain, ids).exp() * (log_probabilities(plain, ids) - log_probabilities(model, ids))
    assert 1e-4 < kl.sum(-1).mean() < 1


def test_a_patched_model_compiles_in_one_graph_exact(tiny):
    model = load(tiny / "floats", torch.bfloat16)
    nn.patch_model(model, tiny / "q")
    ids = torch.arange(12)[None] * 7 % 96
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(ids, use_cache=False).logits, want)


def test_copies_of_a_patched_model_share_its_weights_exact(tiny):
    model = load(tiny / "floats")
    nn.patch_model(model, tiny / "q")
    copied, ids = copy.deepcopy(model), torch.arange(12)[None]
    assert copied.model.layers[0].mlp.weights is model.model.layers[0].mlp.weights
    assert torch.equal(log_probabilities(copied, ids), log_probabilities(model, ids))


def test_a_second_call_says_that_it_is_the_second(tiny):
    model = load(tiny / "floats")
    nn.patch_model(model, dualgemm.Checkpoint(tiny / "q"))
    with pytest.raises(dualgemm.OperandError, match=r"layers.0.self_attn.q_proj: is a NVFP4Linear; .* already patched"):
        nn.patch_model(model, tiny / "q")
    with pytest.raises(dualgemm.UnsupportedError, match="cannot be saved"):
        model.save_pretrained(tiny / "again")


@pytest.mark.parametrize("change,other,message", [
    ({"intermediate_size": 128}, False, r"layers.0.mlp: the model has gate and up of \[128, 64\] and down of \[64, 128\]; .*\[96, 64\]"),
    ({"num_key_value_heads": 4}, False, r"num_key_value_heads: the model's is 4, that of .* 2; other_model=True takes"),
    ({"num_key_value_heads": 4}, True, r"layers.0.self_attn.k_proj: the model has \[64, 64\] without a bias; .* \[32, 64\] without"),
    ({"attention_bias": True}, False, r"layers.0.self_attn.q_proj: the model has \[64, 64\] with a bias; .* without a bias"),
])  # fmt: skip
def test_a_model_that_does_not_fit_is_named_and_left_as_it_was(tiny, change, other, message):
    model = transformers.AutoModelForCausalLM.from_config(llama(**change))
    before = [id(m) for m in model.modules()]
    with pytest.raises(dualgemm.OperandError, match=message):
        nn.patch_model(model, tiny / "q", other_model=other)
    assert [id(m) for m in model.modules()] == before


@pytest.mark.parametrize("devices,kind,message", [
    ("cuda", TypeError, r'^devices is a str; a dictionary is needed, such as {"": "cuda"}$'),
    ({"model.layrs.3": "cpu"}, dualgemm.OperandError, r'no module of the model is called "model.layrs.3" or begins with it'),
    ({"": "cpu", "model.layers.1": "cuda:64"}, dualgemm.UnsupportedError, '"model.layers.1" cannot go to cuda:64; torch has cpu and'),
    ({"": "meta"}, dualgemm.UnsupportedError, '"" cannot go to meta; torch has cpu and'),
    ({"": "gpu"}, dualgemm.OperandError, "\"\" cannot go to 'gpu'; Expected one of cpu, cuda"),
])  # fmt: skip
def test_devices_that_are_not_there_leave_the_model_as_it_was(tiny, devices, kind, message):
    model = load(tiny / "floats")
    before = [id(m) for m in model.modules()]
    with pytest.raises(kind, match=message):
        nn.patch_model(model, tiny / "q", devices=devices)
    assert [id(m) for m in model.modules()] == before


def test_a_model_in_float64_is_left_as_it_was(tiny):
    model = load(tiny / "floats", torch.float64)
    before = [id(m) for m in model.modules()]
    for patch in (nn.patch_model, nn.patch_mlp):
        with pytest.raises(dualgemm.OperandError, match=r"^the model is in float64; .* is needed: model.to\(torch.bfloat16\)$"):
            patch(model, tiny / "q")
    assert [id(m) for m in model.modules()] == before


def test_a_checkpoint_that_is_broken_in_its_last_layer_leaves_the_model_as_it_was(tiny, tmp_path):
    path = tmp_path / "broken"
    path.mkdir()
    for file in (tiny / "q").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    data = bytearray((path / "model.safetensors").read_bytes())
    name = "model.layers.1.mlp.down_proj.weight_scale"
    scales = tensors(path / "model.safetensors")[name]
    at = bytes(data).rindex(scales.tobytes())
    data[at] = 0x7F
    (path / "model.safetensors").write_bytes(data)
    model = load(tiny / "floats")
    before = [id(m) for m in model.modules()]
    with pytest.raises(dualgemm.Error, match=r"model.layers.1.mlp.down_proj.*NaN"):
        nn.patch_model(model, path)
    assert [id(m) for m in model.modules()] == before


def test_what_the_model_has_no_place_for_is_reported(tiny):
    model = transformers.AutoModelForCausalLM.from_config(llama(num_hidden_layers=1))
    report = nn.patch_model(model, tiny / "q")
    assert len(report.unused) == 7 and all(".layers.1." in module for module in report.unused)
    assert "unused 7 of the checkpoint: model.layers.1." in repr(report)
    with pytest.raises(dualgemm.OperandError, match="Linear: no module has a counterpart in 4 bits"):
        nn.patch_model(torch.nn.Linear(2, 2), tiny / "q")


def test_experts_that_lack_a_projection_are_named(tmp_path):
    floats = saved(qwen3_moe(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    file = tmp_path / "q" / "model.safetensors"
    state = {n: t for n, t in load_file(file).items() if ".layers.0.mlp.experts.5.down_proj" not in n}
    save_file(state, file)
    model = load(floats)
    with pytest.raises(dualgemm.CheckpointError, match="the down projection of expert 5 beside .*model.layers.0.mlp.experts"):
        nn.patch_model(model, tmp_path / "q")


def test_routing_that_is_wrong_names_the_layer(tmp_path):
    floats = saved(qwen3_moe(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    model, x, ones = load(floats), torch.ones(1, 64), torch.ones(1, 1)
    nn.patch_model(model, tmp_path / "q")
    name = "model.layers.0.mlp.experts"
    for expert, weight, why in ((8, 1, r"topk_ids\[0, 0\] is 8"), (0, torch.nan, r"topk_weights\[0, 0\] is NaN")):
        with pytest.raises(dualgemm.OperandError, match=rf"^{name}: {why}"):
            model.get_submodule(name)(x, ones.long() * expert, ones * weight)


def test_models_without_memory_of_their_own_are_patched_from_a_skeleton(tiny):
    """The floats are never there, nor twice what is in 4 bits."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(llama())
    nn.patch_model(model, tiny / "q")
    assert {p.shape for p in model.model.layers.parameters()} == {torch.Size([64])}
    x = torch.randn(2, 64)
    want = dualgemm.mlp(x, dualgemm.Mlp.from_checkpoint(tiny / "q", 1))
    assert torch.equal(model.model.layers[1].mlp(x), want)


def test_models_in_float32_stay_on_a_card(tiny, monkeypatch):
    """Which no card is needed for: nothing is packed."""
    from dualgemm import _plan

    monkeypatch.setattr(_plan.Plan, "device", lambda self, name, weight: torch.device("cuda", 0))
    monkeypatch.setattr(_plan, "unsupported", lambda device: None)
    report = nn.patch_model(load(tiny / "floats"), tiny / "q")
    assert "MLPs" not in str(report)
    mlps = [name for name in report.left if "mlp" in name]
    assert mlps and all("float32 on cuda:0, where float16" in report.left[name] for name in mlps)


def test_what_stays_in_16_bits_is_torchs_on_a_card(tiny, monkeypatch):
    from dualgemm import _plan

    monkeypatch.setattr(_plan.Plan, "device", lambda self, name, weight: torch.device("cuda" if name == "lm_head" else "cpu"))
    model = load(tiny / "floats", torch.bfloat16)
    report = nn.patch_model(model, tiny / "q")
    assert type(model.lm_head) is torch.nn.Linear and report.left == {"lm_head": "not in 4 bits in the checkpoint"}


def test_what_a_card_computes_is_asked_while_transformers_builds_without_memory():
    from dualgemm import _plan

    with torch.device("meta"):
        assert _plan.unsupported.__wrapped__("sim:sm_90a") is None


@pytest.mark.parametrize("config", [llama, qwen3_moe])
def test_autocast_is_followed_as_by_torchs_layers(tmp_path, config):
    floats = saved(config(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    model, x = load(floats), torch.randn(3, 64)
    nn.patch_model(model, tmp_path / "q")
    linear = model.model.layers[0].self_attn.q_proj
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = linear(x)
        assert got.dtype == torch.bfloat16 and torch.equal(got, linear(x.bfloat16()))
        assert torch.equal(torch.compile(linear, fullgraph=True, backend="aot_eager")(x), got)
        assert linear(x.to("meta")).is_meta
        mlp = model.model.layers[1].mlp
        assert type(mlp) is nn.NVFP4GatedMLP and mlp(x).dtype == torch.bfloat16
        logits = model(torch.arange(12)[None]).logits
    assert logits.dtype == torch.bfloat16
    with torch.no_grad():
        want = model(torch.arange(12)[None]).logits
    assert rel_l2(logits.float(), want) < 0.1


def test_experts_follow_autocast_and_keep_the_type_of_tokens(tmp_path):
    floats = saved(qwen3_moe(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    dualgemm.quantize_model(floats, tmp_path / "in_floats", skip=["experts"])
    x, ids, weights = torch.randn(5, 64), torch.tensor([[0, 3]] * 5), torch.rand(5, 2)
    for path, kind in (("q", nn.NVFP4Experts), ("in_floats", nn.FloatExperts)):
        model = load(floats, torch.bfloat16)
        theirs = copy.deepcopy(model.model.layers[0].mlp.experts)
        nn.patch_model(model, tmp_path / path)
        experts = model.model.layers[0].mlp.experts
        assert isinstance(experts, kind)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            got, want = experts(x, ids, weights), theirs(x, ids, weights)
        assert got.dtype == want.dtype == torch.float32
        if kind is nn.FloatExperts:
            assert torch.equal(got, want)
        else:
            with torch.no_grad():
                assert torch.equal(got, experts(x.bfloat16(), ids, weights).float())


def test_linear_layers_in_16_bits_are_mapped_over_a_dimension_exact():
    linear = nn.FloatLinear.of(torch.nn.Linear(32, 16).bfloat16())
    x = torch.randn(3, 4, 32).bfloat16()
    theirs = torch.nn.Linear(32, 16).bfloat16()
    theirs.load_state_dict(linear.state_dict())
    assert torch.equal(torch.func.vmap(linear)(x), torch.func.vmap(theirs)(x))
