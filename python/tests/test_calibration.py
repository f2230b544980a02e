"""Calibration against what compressed-tensors computes and against hand-made hooks. Skipped, visibly, where torch or
transformers is missing."""

import json
import os
import shutil
import subprocess
import sys
import unittest.mock

import numpy as np
import pytest
from conftest import tensors
from test_fit import mixtral
from test_model import SMALL, llama, load, log_probabilities, qwen3_moe, saved

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from dualgemm import _threads, nn  # noqa: E402

BATCHES = [torch.arange(12)[None] * 7 % 96, {"input_ids": torch.arange(20)[None] * 5 % 96}, (torch.arange(3)[None],)]


def seen(model, batches):
    """The inputs of every linear layer, kept whole."""
    inputs, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            handles.append(module.register_forward_pre_hook(lambda m, args, name=name: inputs.setdefault(name, []).append(args[0])))
    with torch.no_grad():
        for batch in batches:
            model(**(batch if isinstance(batch, dict) else {"input_ids": batch if torch.is_tensor(batch) else batch[0]}))
    for handle in handles:
        handle.remove()
    return inputs


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return saved(llama(), tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_magnitudes_are_those_of_all_batches_exact(dense, dtype):
    model = load(dense, dtype)
    calibration = dualgemm.calibrate(model, iter(BATCHES))
    want = {n: max(x.abs().max().item() for x in xs) for n, xs in seen(model, BATCHES).items()}
    assert dict(calibration) == want and not calibration.unseen
    assert calibration.dtype == ("f32" if dtype == torch.float32 else "bf16")
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert repr(calibration).startswith("<Calibration of 15 modules in ")


def test_what_is_no_list_of_batches_is_told_so(dense):
    model = load(dense)
    for batches in ("text", BATCHES[0], {"input_ids": BATCHES[0]}):
        with pytest.raises(TypeError, match=rf"batches is a {type(batches).__name__}; several are needed, as in \[batch\]"):
            dualgemm.calibrate(model, batches)
    with pytest.raises(TypeError, match="a batch is a str; a tensor, a dictionary or a tuple is needed"):
        dualgemm.calibrate(model, ["a text"])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_files_hold_the_producers_scales_exact(dense, tmp_path):
    model = load(dense, torch.bfloat16)
    calibration = dualgemm.calibrate(model, BATCHES)
    calibration.save(tmp_path / "calibration.json")
    assert json.loads((tmp_path / "calibration.json").read_text())["amax"] == dict(calibration)
    dualgemm.quantize_model(dense, tmp_path / "mo", calibration=calibration)
    dualgemm.quantize_model(dense, tmp_path / "ct", producer="compressed-tensors", calibration=tmp_path / "calibration.json")
    mo, ct = (tensors(tmp_path / p / "model.safetensors") for p in ("mo", "ct"))
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    for name, xs in seen(model, BATCHES).items():
        if name == "lm_head":
            continue
        # As ModelOpt: amax / (6 * 448) in f32.
        assert mo[f"{name}.input_scale"] == np.float32(calibration[name]) / np.float32(2688)
        # As llm-compressor: the function that it calls, on what its observer saw.
        x = torch.cat([x.flatten() for x in xs])
        assert ct[f"{name}.input_global_scale"] == helpers.generate_gparam(x.min(), x.max()).numpy()
    config = json.loads((tmp_path / "mo" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4"


def test_a_calibrated_model_computes_with_static_scales_close(dense, tmp_path):
    model = load(dense)
    dualgemm.quantize_model(dense, tmp_path / "q", calibration=dualgemm.calibrate(model, BATCHES))
    p = {}
    for how in (None, "static", "dynamic"):
        model = load(dense)
        nn.patch_model(model, tmp_path / "q", quantize_a=how)
        p[how] = log_probabilities(model, BATCHES[0])
    kl = {how: (p[None].exp() * (p[None] - p[how])).sum(-1).mean() for how in ("static", "dynamic")}
    # Four bits cost something, a wrong scale far more.
    assert 1e-4 < kl["static"] < 2 * kl["dynamic"] < 2


def test_experts_are_seen_one_by_one_close(tmp_path):
    floats = saved(qwen3_moe(), tmp_path / "floats")
    model = load(floats)
    with pytest.warns(UserWarning, match="largest magnitude of its block") as warned:
        calibration = dualgemm.calibrate(model, BATCHES[:1])
    assert str(warned[0].message).startswith(f"no token reached {len(calibration.unseen)} of 8 experts: each gets")
    assert len(warned) == 1 and warned[0].filename == __file__
    block, taken = model.model.layers[0].mlp.experts, []
    handle = block.register_forward_pre_hook(lambda m, args: taken.append(args))
    log_probabilities(model, BATCHES[0])
    handle.remove()
    ((x, ids, _),) = taken
    name, here = "model.layers.0.mlp.experts", set(ids.flatten().tolist())
    for e in range(8):
        if e not in here:
            assert f"{name}.{e}" in calibration.unseen
            continue
        rows = x[(ids == e).any(1)]
        gate, up = (rows @ block.gate_up_proj[e].T).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        assert calibration[f"{name}.{e}.gate_proj"] == calibration[f"{name}.{e}.up_proj"] == rows.abs().max().item()
        assert calibration[f"{name}.{e}.down_proj"] == pytest.approx(hidden.abs().max().item(), rel=1e-5)
    most = max(calibration[f"{name}.{e}.down_proj"] for e in here)
    assert all(calibration[f"{expert}.down_proj"] == most for expert in calibration.unseen)
    dualgemm.quantize_model(floats, tmp_path / "q", calibration=calibration)
    experts = dualgemm.Experts.from_checkpoint(tmp_path / "q", 0)
    want = max(calibration[f"{name}.{e}.down_proj"] for e in range(8)) / 2688
    assert experts.input_scales[1] == pytest.approx(want, rel=1e-6)


def test_names_are_those_of_the_files(tmp_path):
    """Mixtral's files call the mixture block_sparse_moe and its matrices w1, w2 and w3."""
    floats = saved(mixtral(), tmp_path / "floats")
    model = load(floats)
    calibration = dualgemm.calibrate(model, BATCHES[:1])
    of_expert = [calibration[f"model.layers.0.block_sparse_moe.experts.0.{w}"] for w in ("w1", "w3", "w2")]
    assert of_expert[0] == of_expert[1] != of_expert[2]
    assert all(f"{expert}.w2" in calibration for expert in calibration.unseen)
    dualgemm.quantize_model(floats, tmp_path / "q", calibration=calibration)
    scales = dualgemm.Experts.from_checkpoint(tmp_path / "q", 0).input_scales
    most = [max(calibration[f"model.layers.0.block_sparse_moe.experts.{e}.{w}"] for e in range(4)) for w in ("w1", "w2")]
    assert scales == pytest.approx([m / 2688 for m in most], rel=1e-6)


def test_experts_that_take_all_tokens_at_once_are_seen_exact():
    """Llama 4: a copy of the tokens for each expert, times the router's weight, which is 0 where it chose others."""
    config = transformers.Llama4TextConfig(
        **SMALL, intermediate_size=32, intermediate_size_mlp=96, num_local_experts=4, interleave_moe_layer_step=1
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    block, taken = model.model.layers[0].feed_forward.experts, []
    handle = block.register_forward_pre_hook(lambda m, args: taken.append(args[0]))
    calibration = dualgemm.calibrate(model, BATCHES[:1])
    handle.remove()
    for expert, x in enumerate(taken[0].reshape(4, -1, 64)):
        name = f"model.layers.0.feed_forward.experts.{expert}"
        assert name in calibration.unseen or calibration[f"{name}.gate_proj"] == x.abs().max().item()


def test_what_cannot_be_calibrated_is_said(dense, tmp_path):
    with pytest.raises(dualgemm.OperandError, match="batches: there is none"):
        dualgemm.calibrate(load(dense), [])
    dualgemm.quantize_model(dense, tmp_path / "plain")
    model = load(dense)
    nn.patch_model(model, tmp_path / "plain")
    with pytest.raises(dualgemm.OperandError, match="^the model is already patched; calibrate the model in floats$"):
        dualgemm.calibrate(model, BATCHES)
    model = load(dense)
    model.model.embed_tokens.weight.data[5] = float("nan")
    with pytest.raises(dualgemm.OperandError, match="q_proj: what went in has a largest magnitude of nan"):
        dualgemm.calibrate(model, [torch.tensor([[5, 6]])])
    calibration = dualgemm.calibrate(load(dense), BATCHES)
    del calibration["model.layers.1.mlp.up_proj"]
    with pytest.raises(dualgemm.Error, match="^calibration: has no amax of model.layers.1.mlp.up_proj, which"):
        dualgemm.quantize_model(dense, tmp_path / "q", calibration=calibration)
    assert not (tmp_path / "q").exists()


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler")
def test_a_preloaded_openmp_is_that_of_torch(tmp_path):
    source, library = tmp_path / "openmp.c", tmp_path / "openmp.so"
    source.write_text("void GOMP_parallel(void (*work)(void *), void *data, unsigned n, unsigned flags) { work(data); }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = "import ctypes, sys, torch; from dualgemm import _threads; preloaded = ctypes.CDLL(sys.argv[1]).GOMP_parallel; "
    code += "sys.exit(_threads._parallel(torch) != ctypes.cast(preloaded, ctypes.c_void_p).value)"
    subprocess.run([sys.executable, "-c", code, library], env={**os.environ, "LD_PRELOAD": str(library)}, check=True)


def test_torchs_number_of_threads_is_taken_over():
    before = torch.get_num_threads()
    w = dualgemm.Linear.from_tensors(dualgemm.quantize(np.ones((32, 32), np.float32)))
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            dualgemm.linear(torch.ones(1, 32), w)
            assert dualgemm.get_num_threads() == threads
        if sys.platform == "linux" and "OpenMP" in torch.__config__.parallel_info():
            assert _threads._parallel(torch)
        with unittest.mock.patch.object(_threads._dualgemm, "set_num_threads") as set_num_threads:
            torch.set_num_threads(5000)
            _threads.follow(torch)
        assert set_num_threads.call_args.args[0] == 4096
        dualgemm.set_num_threads(2)
        torch.set_num_threads(1)
        assert dualgemm.get_num_threads() == 2
        dualgemm.set_num_threads(0)
        assert dualgemm.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
        dualgemm.set_num_threads(0)
