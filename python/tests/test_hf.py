"""transformers' from_pretrained of directories in NVFP4. Skipped, visibly, where torch or transformers is missing."""

import copy
import json
import re

import pytest
from conftest import dequantized
from test_fit import changed, mixtral
from test_model import SMALL, llama, load, log_probabilities, on_dequantized, qwen3_moe, saved
from test_model_experts import gpt_oss

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file  # noqa: E402

from dualgemm import hf, nn  # noqa: E402

IDS = torch.arange(24).reshape(2, 12) * 7 % 96


pytestmark = pytest.mark.usefixtures("registered")


def made(tmp_path, config, producer):
    floats = saved(config, tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", producer=producer)
    return tmp_path / "floats", tmp_path / "q"


@pytest.mark.parametrize("producer", hf.METHODS)
@pytest.mark.parametrize("config", [llama, qwen3_moe])
def test_a_directory_loads_as_transformers_load_theirs_close(tmp_path, config, producer, caplog):
    floats, path = made(tmp_path, config(), producer)
    model = load(path)
    assert isinstance(model.model.layers[0].self_attn.q_proj, nn.NVFP4Linear)
    assert not model.dualgemm_report.unused
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    want = on_dequantized(load(floats), dequantized(path / "model.safetensors"))
    assert (log_probabilities(model, IDS) - log_probabilities(want, IDS)).abs().max() < 1e-3
    greedy = [m.generate(IDS[:1], max_new_tokens=8, do_sample=False, pad_token_id=0) for m in (model, want)]
    assert torch.equal(*greedy)
    # transformers warns of what is missing or has no place.
    assert not [r.getMessage() for r in caplog.records if "LOAD REPORT" in r.getMessage()]


@pytest.mark.parametrize("producer", hf.METHODS)
def test_what_was_read_is_saved_exact(tmp_path, producer):
    _, path = made(tmp_path, qwen3_moe(), producer)
    load(path).save_pretrained(tmp_path / "again")
    before, after = (load_file(p / "model.safetensors") for p in (path, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].reshape(-1).view(torch.uint8), after[n].reshape(-1).view(torch.uint8)) for n in before)
    kept = [json.loads((p / "config.json").read_text())["quantization_config"] for p in (path, tmp_path / "again")]
    assert kept[0] == kept[1]
    assert torch.equal(load(tmp_path / "again")(IDS).logits, load(path)(IDS).logits)


def test_layers_whose_attention_stays_in_16_bits_take_a_token_in_one_call_close(tmp_path):
    floats = saved(transformers.Qwen3Config(**SMALL, intermediate_size=96), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", skip=["self_attn"])
    model = load(tmp_path / "q", torch.bfloat16)
    assert model.dualgemm_report.layers == 2
    with torch.no_grad():
        cache = model(IDS[:1, :8], use_cache=True).cache
        got = model(IDS[:1, 8:9], cache=cache).logits
        assert "_one_call" in vars(model.model.layers[1])
        want = model(IDS[:1, :9]).logits[:, -1:]
    assert (got - want).abs().max() < 0.15 * want.abs().max()


def laguna():
    """Whose files call the shared experts shared_expert."""
    return transformers.LagunaConfig(
        **SMALL, intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, layer_types=["full_attention"] * 2,
    )  # fmt: skip


def recurrent_gemma():
    """Whose blocks initialize the biases of their layers."""
    more = {"tie_word_embeddings": True, "num_hidden_layers": 3, "intermediate_size": 192, "lru_width": 64}
    return transformers.RecurrentGemmaConfig(**SMALL | more)


@pytest.mark.parametrize("config,skip", [
    (recurrent_gemma, []), (laguna, ["shared_expert"]), (laguna, []), (mixtral, []), (llama, ["down_proj"]),
    (llama, ["up_proj", "down_proj"]),
])  # fmt: skip
def test_what_stays_in_floats_is_read_from_the_file_close(tmp_path, config, skip):
    floats = saved(config(), tmp_path / "floats")
    path = tmp_path / "q"
    dualgemm.quantize_model(floats, path, skip=skip)
    model, patched = load(path), load(floats)
    nn.patch_model(patched, path)
    assert torch.equal(log_probabilities(model, IDS), log_probabilities(patched, IDS))
    assert torch.equal(log_probabilities(copy.deepcopy(model), IDS), log_probabilities(patched, IDS))
    model.save_pretrained(tmp_path / "again")
    assert load_file(path / "model.safetensors").keys() == load_file(tmp_path / "again" / "model.safetensors").keys()


def test_a_down_projection_in_16_bits_is_read_where_it_lies(tmp_path):
    floats = saved(llama(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", skip=["down_proj"])
    model, patched = load(tmp_path / "q", torch.bfloat16), load(floats, torch.bfloat16)
    nn.patch_model(patched, tmp_path / "q")
    assert {type(m.model.layers[1].mlp.down_proj) for m in (model, patched)} == {nn.FloatLinear}
    assert torch.equal(log_probabilities(model, IDS), log_probabilities(patched, IDS))
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(log_probabilities(load(tmp_path / "again", torch.bfloat16), IDS), log_probabilities(model, IDS))


def test_a_head_in_16_bits_stays_tied(tmp_path):
    _, path = made(tmp_path, llama(tie_word_embeddings=True), "modelopt")
    model = load(path, torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_head_in_4_bits_is_tied_to_nothing(tmp_path):
    floats = saved(llama(tie_word_embeddings=True), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    head = dualgemm.quantize(torch.randn(96, 64))

    def with_head(t):
        codes, scales, scale = head.codes, head.scales.view(torch.float8_e4m3fn), torch.tensor(head.global_scale)
        return {**t, "lm_head.weight": codes, "lm_head.weight_scale": scales, "lm_head.weight_scale_2": scale}

    changed(tmp_path / "q", with_head)
    config = tmp_path / "q" / "config.json"
    config.write_text(config.read_text().replace('"lm_head"', '"another"'))
    (tmp_path / "q" / "hf_quant_config.json").unlink()
    model = load(tmp_path / "q")
    assert isinstance(model.lm_head, nn.NVFP4Linear) and model.model.embed_tokens.weight.shape == (96, 64)
    assert model.dualgemm_report.replaced["lm_head"] == "linear layers no longer tied to model.embed_tokens"
    x = torch.randn(3, 64)
    torch.testing.assert_close(model.lm_head(x), x @ torch.as_tensor(dualgemm.dequantize(head)).T, rtol=1e-5, atol=1e-4)


def fp8(t):
    name = "model.layers.0.self_attn.q_proj.weight"
    return {**{n: x for n, x in t.items() if not n.startswith(name)}, name: torch.zeros(64, 64).to(torch.float8_e4m3fn)}


@pytest.mark.parametrize("change,message", [
    (lambda t: {n: x for n, x in t.items() if n != "model.norm.weight"}, "has nothing for 1 tensors of Llama.*: model.norm.weight"),
    (fp8, r"q_proj.weight is F8_E4M3; dualgemm.hf loads layers in NVFP4 and floats"),
])  # fmt: skip
def test_nothing_is_left_that_was_not_read(tmp_path, change, message):
    _, path = made(tmp_path, llama(), "modelopt")
    changed(path, change)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(dualgemm.CheckpointError, match=message):
            load(path, dtype)


def test_files_of_two_models_are_refused(tmp_path):
    _, path = made(tmp_path, llama(), "modelopt")
    load(path).save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    (tmp_path / "shards" / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    with pytest.raises(dualgemm.CheckpointError, match="transformers reads model.safetensors, and the tensors in 4 bits would"):
        load(tmp_path / "shards")


def test_a_change_that_would_not_be_saved_is_refused(tmp_path):
    _, path = made(tmp_path, llama(), "modelopt")
    model = load(path)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.raises(dualgemm.UnsupportedError, match="model.norm.weight: is no longer what was read"):
        model.save_pretrained(tmp_path / "again")
    model = load(path)
    model.resize_token_embeddings(112)
    with pytest.raises(dualgemm.UnsupportedError, match="weight: is no longer what was read"):
        model.save_pretrained(tmp_path / "again")


def test_files_that_changed_since_are_not_saved_as_what_was_read(tmp_path, monkeypatch):
    _, path = made(tmp_path, llama(), "modelopt")
    monkeypatch.chdir(path.parent)
    model = load(path.name)
    monkeypatch.chdir("/")
    model.save_pretrained(tmp_path / "again")
    (path / "new").write_bytes((path / "model.safetensors").read_bytes())
    (path / "new").rename(path / "model.safetensors")
    with pytest.raises(dualgemm.UnsupportedError, match="model.safetensors: has changed since it was read"):
        model.save_pretrained(tmp_path / "third")


def falcon():
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.FalconConfig(**sizes, ffn_hidden_size=128, new_decoder_architecture=True, num_kv_heads=2, bias=True)


@pytest.mark.parametrize("config,skip,parameter", [
    (gpt_oss, [], "model.layers.0.self_attn.sinks"),
    (mixtral, ["experts"], "model.layers.1.mlp.experts.down_proj"),
])  # fmt: skip
def test_a_changed_parameter_of_any_name_is_not_saved_as_it_was(tmp_path, config, skip, parameter):
    floats = saved(config(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", skip=skip)
    model = load(tmp_path / "q")
    value = model.get_parameter(parameter)
    with torch.no_grad():
        first = value.flatten()[0].clone()
        value.flatten()[0] += 1
    with pytest.raises(dualgemm.UnsupportedError, match=f"{re.escape(parameter)}: is no longer what was read"):
        model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        value.flatten()[0] = first
    model.save_pretrained(tmp_path / "again")


def test_falcons_own_linear_layer_is_one_and_others_are_refused_by_name_close(tmp_path, monkeypatch):
    floats, path = made(tmp_path, falcon(), "modelopt")
    model = load(path)
    layer = model.transformer.h[0].self_attention.dense
    assert isinstance(layer, nn.NVFP4Linear) and layer.bias.shape == (64,) and layer.bias.any()
    want = on_dequantized(load(floats), dequantized(path / "model.safetensors"))
    assert (log_probabilities(model, IDS) - log_probabilities(want, IDS)).abs().max() < 1e-3
    monkeypatch.setattr("dualgemm._plain.PLAIN", set())
    with pytest.raises(dualgemm.CheckpointError, match="weight is in 4 bits, and is a FalconLinear, which may do more"):
        load(path)


FOUR, EIGHT = ({"weights": {"num_bits": bits, "type": "float"}} for bits in (4, 8))


@pytest.mark.parametrize("config,nvfp4", [
    ({"quant_algo": "NVFP4"}, True),
    ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A16_NVFP4"}}}, True),
    ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}}, False),
    ({"quant_algo": "MIXED_PRECISION", "config_groups": {"a": FOUR}}, True),
    ({"quant_algo": "MIXED_PRECISION", "config_groups": {"a": FOUR, "b": EIGHT}}, False),
    ({"quant_algo": "MIXED_PRECISION"}, False),
])  # fmt: skip
def test_a_configuration_is_of_nvfp4_alone(config, nvfp4):
    assert hf.is_nvfp4({"quant_method": "modelopt", **config}) == nvfp4


def test_activations_in_4_bits_are_asked_for_where_it_is_registered(tmp_path):
    _, path = made(tmp_path, llama(), "modelopt")
    hf.register(quantize_a="dynamic")
    assert load(path).model.layers[0].mlp.quantize_a == "dynamic"


def test_what_it_cannot_do_is_said(tmp_path):
    _, path = made(tmp_path, llama(), "modelopt")
    with pytest.raises(dualgemm.UnsupportedError, match=r"device_map: names disk; .*CUDA devices"):
        transformers.AutoModelForCausalLM.from_pretrained(path, device_map={"": "disk"})
    if not torch.cuda.is_available():
        with pytest.raises(dualgemm.UnsupportedError, match='"" cannot go to cuda:0; torch has cpu and 0 CUDA'):
            transformers.AutoModelForCausalLM.from_pretrained(path, device_map={"": "cuda:0"})
    with pytest.raises(dualgemm.OperandError, match="^the model is in float64"):
        load(path, torch.float64)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(dualgemm.UnsupportedError, match="'modelopt' with 'FP8'; dualgemm.hf loads NVFP4"):
        load(path)


def test_formats_of_others_stay_with_them():
    from transformers.quantizers import auto

    theirs = auto.AutoQuantizationConfig.from_dict({"quant_method": "fp8"})
    assert type(theirs).__name__ == "FineGrainedFP8Config"
    mine = auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"]
    hf.register()
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] is mine


def test_experts_of_llama_4_take_all_tokens_for_each_close(tmp_path):
    """ModelOpt keeps them in two tensors, in and out the other way round."""
    more = {"intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    floats, path = made(tmp_path, transformers.Llama4TextConfig(**SMALL, **more), "modelopt")
    model, file = load(path), load_file(path / "model.safetensors")
    assert "1 blocks of 4 experts" in repr(model.dualgemm_report) and not model.dualgemm_report.unused
    block, theirs = (m.model.layers[1].feed_forward.experts for m in (model, load(floats)))
    assert type(block) is nn.NVFP4SortedExperts
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.feed_forward.experts.{part}"
        codes, scales = (file[n].mT.contiguous() for n in (name, f"{name}_weight_scale"))
        scale = float(file[f"{name}_weight_scale_2"])
        each = [dualgemm.dequantize(dualgemm.Quantized(c, s, scale)) for c, s in zip(codes, scales)]
        getattr(theirs, part).data = torch.stack(each).mT
    x = torch.randn(4 * 6, 64)
    x[::2] = 0
    with torch.no_grad():
        got, want = block(x), theirs(x)
        assert (got - want).norm() < 1e-5 * want.norm() and not got[::2].any()
    patched = load(floats)
    nn.patch_model(patched, path)
    assert torch.equal(patched(IDS).logits, model(IDS).logits)
    # Converted, each expert has tensors of its own.
    dualgemm.convert(path, tmp_path / "apart", to="modelopt")
    apart = load(tmp_path / "apart")
    assert type(apart.model.layers[1].feed_forward.experts) is nn.NVFP4SortedExperts
    assert torch.equal(apart(IDS).logits, model(IDS).logits)


def test_a_state_that_fails_leaves_the_model_as_it_was(tmp_path):
    _, path = made(tmp_path, llama(), "modelopt")
    model = load(path)
    model.lm_head._register_state_dict_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.save_pretrained(tmp_path / "again")
    with pytest.raises(dualgemm.UnsupportedError, match="packed for kernels, cannot be saved"):
        model.model.state_dict()
