"""What a layer in one call attends to: windows, sinks, padding, prompts. Skipped, visibly, where torch or transformers is missing."""

import pytest
from test_decoder import (  # noqa: F401 — fixtures are found by their names.
    IDS,
    by_modules,
    calls,
    decode,
    directories,
    gpt_oss,
    gpt_oss_of_5,
    patched,
    step,
    windowed,
)
from test_model import llama

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.modeling_utils import AttentionInterface  # noqa: E402

from dualgemm import _attention  # noqa: E402


@pytest.mark.parametrize("config", [windowed, gpt_oss, gpt_oss_of_5])
def test_a_window_is_left_behind_by_far_close(patched, calls, monkeypatch, config):
    """The memory with room for 64 more is made anew twice."""
    model, ids = patched(config), torch.arange(170)[None] * 7 % 95 + 1
    ours, cache = decode(model, ids)
    held = [layer.keys for layer in cache.layers]
    before = [keys.clone() for keys in held]
    assert all(calls[2:])
    # A cache of its own has all tokens in all layers, and masks that hide those before a window.
    everything = decode(model, ids, cache=transformers.DynamicCache())
    assert all(calls[-2 * (ids.shape[1] - 9) :]) and everything[1].layers[0].keys.shape[2] == ids.shape[1]
    step(model, cache, 5)
    assert all(torch.equal(*pair) for pair in zip(held, before))
    by_modules(monkeypatch)
    theirs = decode(model, ids)[0]
    for ours in (ours, everything[0]):
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("config", [llama, gpt_oss])
def test_padding_before_a_token_is_not_attended_to_close(patched, calls, monkeypatch, config):
    model, mask = patched(config), torch.ones_like(IDS)
    mask[0, :3] = 0

    def logits():
        with torch.no_grad():
            cache = model(IDS[:, :9], attention_mask=mask[:, :9]).cache
            steps = [model(IDS[:, i : i + 1], cache=cache, attention_mask=mask[:, : i + 1]).logits for i in range(9, 14)]
        return torch.cat(steps, 1)

    ours = logits()
    assert calls == [False] * 2 + [True] * 2 * 5
    by_modules(monkeypatch)
    theirs = logits()
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert (theirs - decode(model)[0][:, :5]).abs().max() > 1e-2 * theirs.abs().max()


def hiding(dtype):
    """A mask that hides the first three of ten tokens."""
    if dtype is torch.bool:
        return torch.arange(10).ge(3)[None, None, None]
    return torch.zeros(1, 1, 1, 10, dtype=dtype).index_fill(3, torch.arange(3), torch.finfo(dtype).min)


@pytest.mark.parametrize(
    "config,dtype,here",
    [
        (llama, torch.bool, True),
        (llama, torch.float32, True),
        (gpt_oss, torch.float32, True),
        # Functions of transformers add it to scores, True as 1.
        (gpt_oss, torch.bool, False),
        (gpt_oss, torch.float64, False),
    ],
)
def test_a_mask_says_what_it_says_to_the_modules_close(patched, calls, monkeypatch, config, dtype, here):
    model = patched(config)

    def logits():
        with torch.no_grad():
            cache = model(IDS[:, :9]).cache
            return model(IDS[:, 9:10], cache=cache, attention_mask=hiding(dtype)).logits

    ours = logits()
    assert calls[2:] == [here] * 2
    by_modules(monkeypatch)
    theirs = logits()
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_sinks_that_change_are_seen_close(patched, calls, monkeypatch):
    model = patched(gpt_oss)
    before = decode(model)[0]
    with torch.no_grad():
        model.model.layers[0].self_attn.sinks.add_(3)
    ours = decode(model)[0]
    assert (ours - before).abs().max() > 1e-2 * before.abs().max()
    by_modules(monkeypatch)
    theirs = decode(model)[0]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_gpt_oss_has_modules_where_they_may_compute_something_else(patched, calls, monkeypatch):
    model, gpt = patched(gpt_oss), transformers.models.gpt_oss.modeling_gpt_oss
    decode(model, IDS.repeat(2, 1))
    # Its norms are in f32 then.
    decode(patched(gpt_oss, torch.float16))
    with torch.no_grad():
        embedded = model.get_input_embeddings()(IDS)
        cache, prompt = transformers.DynamicCache(), torch.bfloat16
        rotation = model.model.rotary_emb(embedded, torch.arange(24)[None])
        # transformers, too, lets all attend to all if it is given no mask.
        model.model.layers[0](embedded, cache=cache, position_embeddings=rotation)
    recording = decode(model, IDS[:, :10])[1]
    calls.clear()
    recording.activate_past_recording()
    step(model, recording, 5)
    assert calls == [False, True]
    for owner, name in ((gpt, "eager_attention_forward"), (gpt, "_apply_rotary_emb")):
        theirs = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, theirs=theirs, **more: theirs(*args, **more))
        calls.clear()
        decode(model, IDS[:, :10])
        assert not any(calls)
        monkeypatch.undo()
    monkeypatch.setitem(AttentionInterface._global_mapping, "eager", gpt.eager_attention_forward)
    decode(model, IDS[:, :10])
    assert not any(calls)


def wide():
    """With heads as wide as the kernels of a prompt's attention need."""
    return llama(head_dim=64)


def test_a_prompt_in_one_call_is_that_of_the_modules_close(patched, calls, monkeypatch):
    model = patched(wide, torch.bfloat16)
    ours, cache = decode(model)
    here = model.model.layers[0]._one_call.call.takes_prompts
    assert calls == [here] * 2 + [True] * 2 * (IDS.shape[1] - 9)
    # Keys and values of the prompt are the modules' own but for rounding, and so is what follows from them.
    by_modules(monkeypatch)
    theirs, want = decode(model)
    assert (ours - theirs).abs().max() < 0.15 * theirs.abs().max()
    for ours, theirs in zip(cache.layers, want.layers):
        assert ours.keys.shape == theirs.keys.shape == (1, 2, IDS.shape[1], 64)
        assert (ours.keys - theirs.keys).abs().max() < 0.15 * theirs.keys.abs().max()
    with torch.no_grad():
        calls.clear()
        model(IDS, use_cache=False)
        model(IDS.repeat(2, 1))
    model(IDS)
    assert not any(calls)


def test_a_prompt_attends_as_with_transformers_close(patched, monkeypatch):
    by_modules(monkeypatch)
    model, seen = patched(wide, torch.bfloat16), []
    attend = _attention.attend_prompt

    def watched(*args):
        out = attend(*args)
        seen.append(out is not None)
        return out

    monkeypatch.setattr(_attention, "attend_prompt", watched)
    ids = torch.arange(70)[None] * 7 % 95 + 1

    def logits(**how):
        with torch.no_grad():
            return model(ids, **how).logits.float()

    ours = logits()
    with torch.no_grad():
        probe = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)
        here = attend(probe, probe, probe, None) is not None
        cache = model(ids[:, :30], use_cache=True).cache
        seen.clear()
        # After a cache, in f32, of two sequences, and with a gradient, torch computes it.
        model(ids[:, 30:], cache=cache)
        model(ids.repeat(2, 1))
    assert not any(seen)
    logits()
    assert seen[-2:] == [here, here]
    seen.clear()
    model(ids)
    assert not any(seen)
    monkeypatch.setattr(_attention, "attend_prompt", lambda *args: None)
    theirs = logits()
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


@pytest.mark.parametrize("heads,kv_heads,rows,dim", [(9, 3, 512, 64), (4, 2, 37, 32), (8, 8, 33, 128), (2, 1, 129, 96)])
def test_attention_of_a_prompt_is_no_further_off_than_torchs(heads, kv_heads, rows, dim):
    torch.manual_seed(0)
    q = torch.randn(1, rows, heads, dim).bfloat16().transpose(1, 2)
    k, v = (torch.randn(1, kv_heads, rows, dim).bfloat16() for _ in range(2))
    with torch.no_grad():
        ours = _attention.attend_prompt(q, k, v, None)
        if ours is None:
            pytest.skip("this processor has no kernels of avx512bf16")
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        want, theirs = (
            torch.nn.functional.scaled_dot_product_attention(*args, is_causal=True).transpose(1, 2)
            for args in ((q.double(), k.double(), v.double()), (q, k, v))
        )
        assert (ours - want).abs().max() <= 1.5 * (theirs - want).abs().max()
        assert _attention.attend_prompt(q.float(), k.float(), v.float(), None) is None
