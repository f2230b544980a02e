"""transformers' from_pretrained of directories in NVFP4. Skipped, visibly, where torch or transformers is missing."""

import json

import pytest
from conftest import dequantized
from test_model import llama, load, log_probabilities, on_dequantized, qwen3_moe, saved

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file  # noqa: E402

from dualgemm import hf, nn  # noqa: E402

IDS = torch.arange(24).reshape(2, 12) * 7 % 96


@pytest.fixture(autouse=True)
def registered():
    from transformers.quantizers import auto

    mappings = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    before = [dict(mapping) for mapping in mappings]
    hf.register()
    yield
    for mapping, old in zip(mappings, before):
        mapping.clear()
        mapping.update(old)


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


def test_activations_in_4_bits_are_asked_for_where_it_is_registered(tmp_path):
    _, path = made(tmp_path, llama(), "modelopt")
    hf.register(quantize_a="dynamic")
    assert load(path).model.layers[0].mlp.quantize_a == "dynamic"


def test_what_it_cannot_do_is_said(tmp_path):
    _, path = made(tmp_path, llama(), "modelopt")
    with pytest.raises(dualgemm.UnsupportedError, match=r"device_map: names disk; .*CUDA devices"):
        transformers.AutoModelForCausalLM.from_pretrained(path, device_map={"": "disk"})
    if not torch.cuda.is_available():
        with pytest.raises(dualgemm.UnsupportedError, match="CUDA driver"):
            transformers.AutoModelForCausalLM.from_pretrained(path, device_map={"": "cuda:0"})
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
