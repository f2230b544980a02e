"""What ModelOpt and llm-compressor themselves make of a model, against `dualgemm quantize`: tensors, calibrated scales and
configuration; and what they and we wrote, loaded by us and by them. Tests are skipped, visibly, where a package is missing:

    pip install nvidia-modelopt llmcompressor
    pytest python/tests/test_producers.py

`python python/tests/test_producers.py` writes `testdata/producers/llama`, which test_quantize.py compares with.
"""

import copy
import importlib.util
import pathlib
import tempfile

import pytest
from conftest import dequantized, rel_l2, same_files
from test_model import SMALL, load, log_probabilities, on_dequantized, saved

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from dualgemm import hf, nn  # noqa: E402

IDS = torch.arange(24).reshape(2, 12) * 7 % 96
PACKAGES = {"modelopt": "modelopt", "compressed-tensors": "llmcompressor"}
#: What llm-compressor attends with while it calibrates, whatever the model has. ModelOpt runs the model as it is.
ATTENTION = {"modelopt": "sdpa", "compressed-tensors": "eager"}


def by_modelopt(model, batches, out):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = mtq.NVFP4_DEFAULT_CFG if batches else mtq.W4A16_NVFP4_CFG
    mtq.quantize(model, copy.deepcopy(config), (lambda model: [model(batch) for batch in batches]) if batches else None)
    export_hf_checkpoint(model, export_dir=out)


def by_llmcompressor(model, batches, out):
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    recipe = QuantizationModifier(targets="Linear", scheme="NVFP4" if batches else "NVFP4A16", ignore=["lm_head"])
    batches = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in batches]
    # A loader of data that is there needs no tokenizer, but a processor is asked for.
    data = {"dataset": torch.utils.data.DataLoader(batches, batch_size=None), "processor": object()} if batches else {}
    oneshot(model=model, recipe=recipe, **data)
    model.save_pretrained(out)


BY = {"modelopt": by_modelopt, "compressed-tensors": by_llmcompressor}


def both(floats, batches, producer, theirs, ours):
    """A directory of floats in 4 bits by the producer and by us, with input scales if there are batches."""
    BY[producer](load(floats, torch.bfloat16), batches, theirs)
    calibration = None
    if batches:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            floats, dtype=torch.bfloat16, attn_implementation=ATTENTION[producer]
        )
        calibration = dualgemm.calibrate(model.eval(), batches)
        calibration.save(theirs / "calibration.json")
    dualgemm.quantize_model(floats, ours, producer=producer, calibration=calibration)


@pytest.mark.parametrize("producer", BY)
@pytest.mark.parametrize("batches", [[], [IDS[:1], IDS[1:]]], ids=["weights", "calibrated"])
def test_a_producers_model_is_ours_exact_and_loads_close(tmp_path, producer, batches, registered):
    pytest.importorskip(PACKAGES[producer], reason=f"{PACKAGES[producer]} is not installed")
    floats, theirs, ours = (tmp_path / name for name in ("floats", "theirs", "ours"))
    both(saved(transformers.LlamaConfig(**SMALL, intermediate_size=96), floats), batches, producer, theirs, ours)
    same_files(theirs, ours)
    model = load(theirs)
    assert isinstance(model.model.layers[1].self_attn.q_proj, nn.NVFP4Linear) and not model.dualgemm_report.unused
    want = on_dequantized(load(floats), dequantized(theirs / "model.safetensors"))
    assert (log_probabilities(model, IDS) - log_probabilities(want, IDS)).abs().max() < 1e-3
    greedy = [m.generate(IDS[:1], max_new_tokens=8, do_sample=False, pad_token_id=0) for m in (model, want)]
    assert torch.equal(*greedy)


@pytest.mark.parametrize("batches", [[], [IDS]], ids=["weights", "calibrated"])
def test_transformers_load_ours_with_compressed_tensors_close(tmp_path, batches):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers.quantizers import auto

    assert not isinstance(auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"], hf._Choice)
    floats, path = saved(transformers.LlamaConfig(**SMALL, intermediate_size=96), tmp_path / "floats"), tmp_path / "q"
    calibration = dualgemm.calibrate(load(floats, torch.bfloat16), batches) if batches else None
    dualgemm.quantize_model(floats, path, producer="compressed-tensors", calibration=calibration)
    # It decodes to bf16, whatever the model is in.
    model, seen = load(path, torch.bfloat16), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_hook(lambda module, args, out, name=name: seen.__setitem__(name, (*args, out)))
    theirs = log_probabilities(model, IDS)
    assert len(seen) == 14
    for name, (x, y) in seen.items():
        weights = dualgemm.Linear.from_checkpoint(path, name)
        off = rel_l2(dualgemm.linear(x, weights, quantize_a="static" if batches else None).float(), y.float())
        # As bf16 rounds, and the scales of activations with it; 0.09 if one of both took activations as they are.
        assert off < (0.04 if batches else 0.01), name
    if not batches:
        ours = load(floats, torch.bfloat16)
        nn.patch_model(ours, path)
        assert (log_probabilities(ours, IDS) - theirs).abs().max() < 0.05 * theirs.abs().max()


def main():
    """Writes what the packages that are here make of a tiny model."""
    root = pathlib.Path(__file__).parents[2] / "testdata" / "producers" / "llama"
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    if not root.exists():
        saved(transformers.LlamaConfig(**SMALL | tiny, intermediate_size=48), root / "floats")
    for producer, package in PACKAGES.items():
        if importlib.util.find_spec(package):
            with tempfile.TemporaryDirectory() as ours:
                both(root / "floats", [IDS % 32], producer, root / producer, pathlib.Path(ours) / "q")
    for file in root.rglob("generation_config.json"):
        file.unlink()


if __name__ == "__main__":
    main()
