"""One token through a decoder layer in one call, against the layer's modules. Skipped, visibly, where torch or transformers is
missing."""

import copy
import pickle

import pytest
from test_model import SMALL, llama, load, qwen2, qwen3_moe, saved

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

from dualgemm import decoder, nn  # noqa: E402

# Without the token that pads.
IDS = torch.arange(24)[None] * 7 % 95 + 1


def mistral():
    return transformers.MistralConfig(**SMALL, intermediate_size=96, sliding_window=None)


def qwen3():
    """With norms of queries and keys."""
    return transformers.Qwen3Config(**SMALL, intermediate_size=96)


def windowed():
    """With a window that the tokens after a prompt of nine leave, and a cache that holds no more."""
    return transformers.MistralConfig(**SMALL, intermediate_size=96, sliding_window=12)


def gpt_oss(window=12):
    """With sinks, biases, half of each rotary table times a factor, and a window in the first layer."""
    mixture = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    types = ["sliding_attention", "full_attention"]
    return transformers.GptOssConfig(**SMALL, **mixture, layer_types=types, sliding_window=window)


def gpt_oss_of_5():
    """With a window shorter than the prompt."""
    return gpt_oss(5)


@pytest.fixture
def calls(monkeypatch):
    """What the call said of each layer and token: whether it computed it."""
    seen, token = [], decoder._tokens

    def watched(*args, **kwargs):
        out = token(*args, **kwargs)
        seen.append(out is not None)
        return out

    monkeypatch.setattr(decoder, "_tokens", watched)
    return seen


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}

    def of(config):
        if config not in made:
            path = tmp_path_factory.mktemp(config.__name__)
            dualgemm.quantize_model(saved(config(), path / "floats"), path / "q")
            made[config] = path
        return made[config]

    return of


@pytest.fixture
def patched(directories):
    def make(config=llama, dtype=torch.float32, layers=2, **how):
        model = load(directories(config) / "floats", dtype)
        assert nn.patch_model(model, directories(config) / "q", **how).layers == layers
        return model

    return make


def by_modules(monkeypatch):
    monkeypatch.setattr(decoder, "_tokens", lambda layer, x, **arguments: None)


def decode(model, ids=IDS, prompt=9, cache=None, **more):
    """Logits of each token after a prompt, from the cache, and the cache."""
    with torch.no_grad():
        cache = model(ids[:, :prompt], use_cache=True, cache=cache).cache
        steps = [model(ids[:, i : i + 1], cache=cache, use_cache=True, **more).logits for i in range(prompt, ids.shape[1])]
    return torch.cat(steps, 1).float(), cache


@pytest.mark.parametrize("dtype,close", [(torch.float32, 1e-4), (torch.bfloat16, 0.15), (torch.float16, 0.02)])
@pytest.mark.parametrize("config", [llama, mistral, windowed, qwen2, qwen3])
def test_a_token_in_one_call_is_that_of_the_modules_close(patched, calls, monkeypatch, config, dtype, close):
    model = patched(config, dtype)
    (ours, cache), count = decode(model), IDS.shape[1] - 9
    assert calls == [False] * 2 + [True] * 2 * count
    by_modules(monkeypatch)
    theirs, want = decode(model)
    assert (ours - theirs).abs().max() < close * theirs.abs().max()
    for ours, theirs in zip(cache.layers, want.layers):
        held = 11 if config is windowed else IDS.shape[1]
        assert ours.keys.shape == theirs.keys.shape == (1, 2, held, 16) and ours.get_seq_length() == IDS.shape[1]
        for ours, theirs in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert (ours.float() - theirs.float()).abs().max() < close * theirs.abs().max()


def test_texts_are_the_same(patched, calls, monkeypatch):
    model = patched()
    how = [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"}]

    def texts():
        return [model.generate(IDS[:, :9], max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0, **h) for h in how]

    ours = texts()
    assert sum(calls) >= 2 * 23
    by_modules(monkeypatch)
    assert all(torch.equal(*pair) for pair in zip(ours, texts()))


def hook(module):
    module.register_forward_hook(lambda module, a, out: out)


def replace(model):
    mlp = model.model.layers[1].mlp
    model.model.layers[1].mlp = torch.nn.Sequential(mlp)


def of_its_own(model):
    norm = model.model.layers[1].input_layernorm
    forward = norm.forward
    norm.forward = lambda x: 2 * forward(x)


def train(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()


@pytest.mark.parametrize("change,computed", [
    (lambda model: hook(model.model.layers[1].self_attn.q_proj), [True, False]),
    (lambda model: hook(model.model.layers[1].self_attn), [True, False]),
    (lambda model: hook(model.model.layers[1].mlp), [True, False]),
    (lambda model: model.model.layers[1].input_layernorm.register_forward_pre_hook(lambda module, a: None), [True, False]),
    (replace, [True, True]),
    (of_its_own, [True, False]),
    (train, [False, False]),
    (lambda model: model.set_attn_implementation("eager"), [False, False]),
    (lambda model: hook(model.model.layers[1]), [True, True]),
])  # fmt: skip
def test_modules_that_do_something_of_their_own_are_called(patched, calls, monkeypatch, change, computed):
    model = patched()
    decode(model, IDS[:, :10])
    change(model)
    calls.clear()
    torch.manual_seed(0)
    ours = decode(model, IDS[:, :10])[0]
    assert calls[2:] == computed
    by_modules(monkeypatch)
    torch.manual_seed(0)
    theirs = decode(model, IDS[:, :10])[0]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_what_needs_more_than_a_token_is_left_to_the_modules(patched, calls):
    model, ids = patched(), IDS[:, :10]
    mask = torch.ones_like(ids)
    mask[0, 3] = 0
    decode(model, ids, attention_mask=mask)
    decode(model, ids.repeat(2, 1))
    decode(model, ids, cache=transformers.StaticCache(config=model.config, max_cache_len=32))
    embedded = model.get_input_embeddings()(ids[:, :1])
    model(inputs_embeds=embedded)
    with torch.no_grad():
        model(ids[:, :1])
        cache = model(ids).cache
    # A gradient is asked for.
    model(ids[:, :1], cache=cache)
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    decode(model, ids)
    assert len(calls) == 2 * 12 and not any(calls)


def test_other_activations_and_weights_are_left_to_the_modules(patched):
    patched(layers=0, quantize_a="dynamic")
    with pytest.raises(dualgemm.OperandError, match="which is no layer of 3 heads of 16"):
        layer = patched().model.layers[0]
        linears = [getattr(layer.self_attn, name).weights for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        nn._dualgemm.DecoderLayer(linears, layer.mlp.weights, 3, 16)


def test_hidden_states_are_those_of_the_modules_close(patched, calls, monkeypatch):
    model = patched()
    cache = decode(model)[1]

    def states():
        with torch.no_grad():
            return model(IDS[:, :1], cache=copy.deepcopy(cache), output_hidden_states=True).hidden_states

    ours = states()
    by_modules(monkeypatch)
    for ours, theirs in zip(ours, states(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_hooks_of_transformers_are_passed_by_after_their_call(patched, calls):
    model = patched()
    cache = decode(model)[1]
    model(IDS[:, :1], output_hidden_states=True, output_attentions=True)
    parts = model.model.layers[0]._one_call
    assert any(m._forward_hooks for m in model.model.layers[0].modules())
    calls.clear()
    step(model, cache, 5)
    assert calls == [True, True] and model.model.layers[0]._one_call is parts
    # One of somebody's own is called.
    hook(model.model.layers[0].self_attn)
    calls.clear()
    step(model, cache, 6)
    step(model, cache, 7)
    assert calls == [False, True] * 2 and model.model.layers[0]._one_call is parts


@pytest.mark.parametrize("name", ["NVFP4Linear.forward", "NVFP4GatedMLP.forward", "Packed._compute"])
def test_modules_of_ours_that_somebody_changes_are_called(patched, calls, monkeypatch, name):
    model = patched()
    cache = decode(model)[1]
    kind, function = name.split(".")
    theirs = getattr(getattr(nn, kind), function)
    monkeypatch.setattr(getattr(nn, kind), function, lambda self, *args: 0 * theirs(self, *args))
    calls.clear()
    step(model, cache, 5)
    assert calls == [False, False]


def mixtral():
    return transformers.MixtralConfig(**SMALL, intermediate_size=96, num_local_experts=4, sliding_window=None)


@pytest.mark.parametrize("dtype,close", [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("config", [qwen3_moe, mixtral, gpt_oss, gpt_oss_of_5])
def test_a_mixture_is_called_after_the_rest_of_its_layer_close(patched, calls, monkeypatch, config, dtype, close):
    model = patched(config, dtype)
    ours, cache = decode(model)
    assert calls[2:] == [True] * 2 * (IDS.shape[1] - 9)
    by_modules(monkeypatch)
    theirs, want = decode(model)
    assert (ours - theirs).abs().max() < close * theirs.abs().max()
    for ours, theirs in zip(cache.layers, want.layers):
        assert ours.values.shape == theirs.values.shape
        assert (ours.values - theirs.values).abs().max() < close * theirs.values.abs().max()


@pytest.fixture(scope="module", params=[qwen3, gpt_oss])
def attention_in_16_bits(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed")
    dualgemm.quantize_model(saved(request.param(), path / "floats"), path / "q", skip=["self_attn"])
    model = load(path / "floats", torch.bfloat16)
    report = nn.patch_model(model, path / "q")
    assert report.replaced["model.layers.0.self_attn.q_proj"] == "linear layers in 16 bits" and report.layers == 2
    return model


def test_attention_in_16_bits_is_part_of_the_call_close(attention_in_16_bits, calls, monkeypatch):
    model, count = copy.deepcopy(attention_in_16_bits), IDS.shape[1] - 9
    ours = decode(model)[0]
    assert calls[2:] == [True] * 2 * count
    by_modules(monkeypatch)
    theirs = decode(model)[0]
    assert (ours - theirs).abs().max() < 0.15 * theirs.abs().max()


@pytest.mark.parametrize("change", [
    lambda linear: linear.weight.data.mul_(2),
    lambda linear: setattr(linear.weight, "data", 2 * linear.weight.data),
    lambda linear: setattr(linear, "weight", torch.nn.Parameter(2 * linear.weight.data)),
    lambda linear: setattr(linear, "bias", torch.nn.Parameter(torch.full((64,), 9.0, dtype=torch.bfloat16))),
    lambda linear: linear.bias.data.add_(9) if linear.bias is not None else linear.weight.data.mul_(2),
])  # fmt: skip
def test_weights_in_16_bits_that_change_are_seen_close(attention_in_16_bits, calls, monkeypatch, change):
    model = copy.deepcopy(attention_in_16_bits)
    before = decode(model)[0]
    change(model.model.layers[0].self_attn.o_proj)
    calls.clear()
    ours = decode(model)[0]
    assert all(calls[2:])
    by_modules(monkeypatch)
    theirs = decode(model)[0]
    assert (ours - theirs).abs().max() < 0.15 * theirs.abs().max() < 2 * (ours - before).abs().max()


def test_gradients_of_weights_in_16_bits_are_not_lost(attention_in_16_bits, calls):
    model = attention_in_16_bits
    cache = decode(model)[1]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    calls.clear()
    with pytest.raises(dualgemm.UnsupportedError, match="has no derivative"):
        model(IDS[:, :1], cache=cache).logits.sum().backward()
    assert calls == [False, False]


def test_a_compiled_model_has_its_modules(patched, calls):
    model = patched()
    cache = decode(model)[1]
    calls.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        want = model(IDS[:, :1], cache=copy.deepcopy(cache)).logits
        assert calls == [True, True]
        got = compiled(IDS[:, :1], cache=copy.deepcopy(cache)).logits
    assert calls == [True, True] and (got - want).abs().max() < 1e-4 * want.abs().max()


def step(model, cache, token):
    with torch.no_grad():
        return model(torch.tensor([[token]]), cache=cache).logits


def test_copies_of_a_cache_go_their_own_ways_exact(patched, calls):
    model = patched()
    cache = decode(model)[1]
    held = [layer.keys for layer in cache.layers]
    before = [keys.clone() for keys in held]
    shallow = copy.copy(cache)
    shallow.layers = [copy.copy(layer) for layer in cache.layers]
    copies = [cache, copy.deepcopy(cache), shallow, pickle.loads(pickle.dumps(cache))]
    calls.clear()
    # In turns: one that wrote into the memory of another would change what that one attends to.
    for token in (1, 2, 3):
        results = [step(model, one, token + i) for i, one in enumerate(copies)]
    assert all(calls)
    assert all(torch.equal(*pair) for pair in zip(held, before))
    for i, got in enumerate(results):
        alone = decode(model)[1]
        for token in (1, 2, 3):
            want = step(model, alone, token + i)
        assert torch.equal(got, want)


def test_a_cache_that_others_change_is_followed_exact(patched, calls):
    model = patched()
    text = torch.cat([IDS[:, :20], torch.tensor([[5, 6]])], 1)
    want = decode(model, text)[0][:, -1:]
    cache = decode(model)[1]
    rejected = [layer.keys for layer in cache.layers]
    kept = [keys.clone() for keys in rejected]
    cache.crop(-4)
    calls.clear()
    step(model, cache, 5)
    assert torch.equal(step(model, cache, 6), want) and calls == [True] * 4
    assert all(torch.equal(*pair) for pair in zip(rejected, kept))
    # More tokens at once, and then one.
    with torch.no_grad():
        model(torch.tensor([[7, 8]]), cache=cache)
    after = step(model, cache, 9)
    more = torch.cat([text, torch.tensor([[7, 8, 9]])], 1)
    want = decode(model, more)[0][:, -1:]
    assert (after - want).abs().max() < 1e-4 * want.abs().max()
    cache.batch_repeat_interleave(2)
    calls.clear()
    with torch.no_grad():
        assert model(torch.tensor([[7], [8]]), cache=cache).logits.shape[0] == 2 and not any(calls)


def test_saved_caches_and_copies_hold_their_tokens_alone(patched, tmp_path):
    cache = decode(patched())[1]
    held = cache.layers[0].keys
    assert held.untyped_storage().nbytes() > held.nbytes
    torch.save(cache, tmp_path / "cache")
    saved = torch.load(tmp_path / "cache", weights_only=False)
    for other in (saved, copy.deepcopy(cache), copy.copy(cache.layers[0])):
        layer = getattr(other, "layers", [other])[0]
        assert type(layer) is transformers.cache_utils.DynamicLayer and torch.equal(layer.keys, held)
        assert layer.keys.untyped_storage().nbytes() == layer.values.untyped_storage().nbytes() == held.nbytes


def test_copies_of_a_model_have_their_own_norms(patched, calls):
    model = patched()
    decode(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.layers[0].input_layernorm.weight.mul_(2)
    calls.clear()
    ours, theirs = decode(copied)[0], decode(model)[0]
    assert sum(calls) == 4 * (IDS.shape[1] - 9) and not torch.allclose(ours, theirs)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"
    assert torch.equal(decode(copy.deepcopy(model))[0], theirs)


@pytest.mark.parametrize("name", ["LlamaAttention.forward", "LlamaRMSNorm.forward", "apply_rotary_pos_emb"])
@pytest.mark.parametrize("before", [True, False])
def test_functions_that_somebody_has_replaced_are_called(patched, calls, monkeypatch, name, before):
    owner = transformers.models.llama.modeling_llama
    *path, last = name.split(".")
    owner = getattr(owner, path[0]) if path else owner
    theirs = getattr(owner, last)

    def other(*args, **kwargs):
        out = theirs(*args, **kwargs)
        return tuple(t if t is None else t * 1.5 for t in out) if isinstance(out, tuple) else out * 1.5

    if before:
        monkeypatch.setattr(owner, last, other)
    model = patched(layers=0 if before else 2)
    monkeypatch.setattr(owner, last, other)
    got, _ = decode(model)
    assert not any(calls)
    with torch.no_grad():
        want = model(IDS, use_cache=False).logits[:, 9:]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_a_mode_sees_the_functions_of_torch(patched, calls):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        decode(patched())
    assert not any(calls)


def test_gradients_of_cached_tokens_are_not_lost(patched, calls):
    model = patched()
    _, cache = decode(model)
    for layer in cache.layers:
        layer.keys = layer.keys.clone().requires_grad_()
    calls.clear()
    assert model(IDS[:, :1], cache=cache, use_cache=True).logits.requires_grad
    assert not any(calls)


def test_a_model_is_pickled_with_its_layers(patched, calls):
    model = patched()
    again = pickle.loads(pickle.dumps(model))
    calls.clear()
    assert torch.equal(decode(again)[0], decode(model)[0])
    assert sum(calls) == 2 * 2 * (IDS.shape[1] - 9)


def test_an_sdpa_of_somebodys_own_stays(patched, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", own := lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs))
    model = patched(layers=0)
    assert AttentionInterface._global_mapping["sdpa"] is own
    decode(model)
