"""What is replaced by what: modules whose forward does more than their weights say, names that transformers changes, several
layers of one number, biases on one side. Skipped, visibly, where torch or transformers is missing."""

import json
import re

import pytest
from conftest import dequantized, rel_l2
from test_model import SMALL, llama, load, log_probabilities, on_dequantized, qwen3_moe, saved

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
nn = pytest.importorskip("dualgemm.nn")

from safetensors.torch import load_file, save_file  # noqa: E402

IDS = torch.arange(24).reshape(2, 12) * 7 % 96


def quantized(config, tmp_path, **how):
    floats = saved(config, tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q", **how)
    return floats, tmp_path / "q"


def changed(path, change):
    """Rewrites the tensors of a checkpoint."""
    file = path / "model.safetensors"
    tensors = change({name: t.clone() for name, t in load_file(file).items()})
    save_file(tensors, file, metadata={"format": "pt"})


def bitnet():
    """With a norm between the products, ``ffn_sub_norm``."""
    return transformers.BitNetConfig(**SMALL, intermediate_size=96)


def doge():
    """With a mixture of small experts beside the MLP, in one module."""
    more = {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 4}
    return transformers.DogeConfig(**SMALL, intermediate_size=96, **more)


@pytest.mark.parametrize("config", [bitnet, doge])
def test_an_mlp_that_does_more_is_replaced_layer_by_layer_close(tmp_path, config):
    floats, path = quantized(config(), tmp_path)
    model = load(floats)
    report = nn.patch_model(model, path)
    assert set(report.replaced.values()) == {"linear layers"} and not report.unused
    assert re.match("its linear layers are replaced one by one: computes something else", report.left["model.layers.0.mlp"])
    want = on_dequantized(load(floats), dequantized(path / "model.safetensors"))
    assert (log_probabilities(model, IDS) - log_probabilities(want, IDS)).abs().max() < 1e-3
    with pytest.raises(dualgemm.OperandError, match=r"layers.0.mlp: computes something else .*; patch_model replaces"):
        nn.patch_mlp(load(floats), path)


class Scaled(torch.nn.Module):
    """An MLP in which a number that is no parameter has its say, as in Falcon H1."""

    def __init__(self, act, scale=1.0, limit=None):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(48, 32, bias=False)
        self.act, self.scale, self.limit = act, scale, limit

    def forward(self, x):
        hidden = self.act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden if self.limit is None else hidden.clamp(max=self.limit)) * self.scale


def test_a_module_is_run_to_see_what_it_computes():
    from dualgemm._plain import is_plain_mlp

    silu, tanh = torch.nn.SiLU(), torch.nn.GELU(approximate="tanh")
    gates = ("gate_proj", "up_proj")
    for module, activation, plain in [
        (Scaled(silu), "silu", True),
        (Scaled(silu).bfloat16(), "silu", True),
        (Scaled(silu).to("meta"), "silu", True),
        (Scaled(tanh), "gelu-tanh", True),
        (Scaled(torch.nn.GELU()), "gelu-tanh", False),
        (Scaled(silu), "relu2", False),
        (Scaled(silu, scale=0.9), "silu", False),
        (Scaled(silu, limit=200.0), "silu", False),
    ]:
        assert is_plain_mlp(module, gates, "down_proj", activation) == plain, (module, activation)


def in_formats(floats, path, formats):
    """Quantizes a model whose MLPs have their matrices in these formats, and returns the values of what is in 4 bits."""
    dualgemm.quantize_model(floats, path, skip=[part for part, format in formats.items() if format == "floats"])
    held, values, algorithms = load_file(floats / "model.safetensors"), {}, {}

    def change(t):
        for module in [name.removesuffix(".weight_scale") for name in t if name.endswith(".weight_scale")]:
            q = dualgemm.Quantized(t[f"{module}.weight"], t[f"{module}.weight_scale"], float(t[f"{module}.weight_scale_2"]))
            format = formats.get(module.rpartition(".")[2], "nvfp4")
            if format == "mxfp4":
                q = dualgemm.quantize(held[f"{module}.weight"].float(), format=format)
                t |= {f"{module}.weight": q.codes, f"{module}.weight_scale": q.scales.view(torch.uint8)}
                del t[f"{module}.weight_scale_2"]
            values[f"{module}.weight"], algorithms[module] = dualgemm.dequantize(q), {"quant_algo": format.upper()}
        return t

    changed(path, change)
    config = json.loads((path / "config.json").read_text())
    how = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    (path / "hf_quant_config.json").unlink()
    return values


@pytest.mark.parametrize("gate,up,down,replaced", [
    ("nvfp4", "nvfp4", "floats", {"": "MLPs with down projections in 16 bits"}),
    ("mxfp4", "mxfp4", "floats", {"": "MLPs with down projections in 16 bits"}),
    ("nvfp4", "nvfp4", "mxfp4", {"": "MLPs"}),
    ("mxfp4", "mxfp4", "nvfp4", {"": "MLPs"}),
    ("floats", "floats", "nvfp4", {"gate": "linear layers in 16 bits", "up": "linear layers in 16 bits", "down": "linear layers"}),
    ("nvfp4", "floats", "mxfp4", {"gate": "linear layers", "up": "linear layers in 16 bits", "down": "linear layers"}),
    ("floats", "mxfp4", "floats", {"gate": "linear layers in 16 bits", "up": "linear layers", "down": "linear layers in 16 bits"}),
])  # fmt: skip
def test_nothing_of_an_mlp_in_several_formats_is_left_to_torch_close(tmp_path, gate, up, down, replaced):
    floats = saved(llama(), tmp_path / "floats")
    values = in_formats(floats, tmp_path / "q", {"gate_proj": gate, "up_proj": up, "down_proj": down})
    model, want = load(floats, torch.bfloat16), load(floats)
    want.load_state_dict(want.state_dict() | values)
    report, mlp = nn.patch_model(model, tmp_path / "q"), "model.layers.0.mlp"
    of_mlp = {name: what for name, what in report.replaced.items() if name.startswith(mlp)}
    assert of_mlp == {f"{mlp}.{part}_proj" if part else mlp: what for part, what in replaced.items()}
    assert not report.left and not report.unused
    assert not [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert rel_l2(model.get_submodule(mlp)(x).float(), want.get_submodule(mlp)(x.float())) < 1e-2
    in_f32 = load(floats)
    nn.patch_model(in_f32, tmp_path / "q")
    assert (log_probabilities(in_f32, IDS) - log_probabilities(want, IDS)).abs().max() < 1e-3


def test_gate_and_up_in_two_formats_are_named_and_leave_the_model_as_it_was(tmp_path):
    floats = saved(llama(), tmp_path / "floats")
    in_formats(floats, tmp_path / "q", {"up_proj": "mxfp4"})
    model = load(floats)
    before = [id(m) for m in model.modules()]
    message = r"layers.0.mlp.gate_proj.weight is nvfp4 .*up_proj.weight is mxfp4 .*; gate and up must have one shape and format$"
    with pytest.raises(dualgemm.CheckpointError, match=message):
        nn.patch_model(model, tmp_path / "q")
    assert [id(m) for m in model.modules()] == before


def mixtral():
    return transformers.MixtralConfig(**SMALL, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)


def test_names_that_transformers_changes_are_found_close(tmp_path):
    """Mixtral's files call the mixture block_sparse_moe and its matrices w1, w2 and w3."""
    floats, path = quantized(mixtral(), tmp_path)
    assert any(".block_sparse_moe.experts.3.w2.weight_scale" in name for name in load_file(path / "model.safetensors"))
    model = load(floats)
    report = nn.patch_model(model, path)
    assert report.replaced["model.layers.1.mlp.experts"] == "blocks of 4 experts" and not report.unused
    # The same weights, dequantized, under the same names.
    state = {n: torch.from_numpy(t.copy()) for n, t in dequantized(path / "model.safetensors").items()}
    state["lm_head.weight"] = load_file(floats / "model.safetensors")["lm_head.weight"]
    save_file(state, floats / "model.safetensors", metadata={"format": "pt"})
    assert (log_probabilities(model, IDS) - log_probabilities(load(floats), IDS)).abs().max() < 1e-3


def test_layers_that_the_model_has_in_other_pieces_stay(tmp_path):
    """One matrix of a file, gqkv_proj, is four layers of transformers' HRM, two parts of which number their layers from 0."""
    floats, path = quantized(transformers.HrmTextConfig(**SMALL, intermediate_size=96, pad_token_id=0), tmp_path)
    model = load(floats)
    report = nn.patch_model(model, path, gate_up_order="gate-up")
    name = "model.L_module.layers.0.self_attn.q_proj"
    assert report.left[name] == "in 4 bits in the checkpoint, in other tensors than the model has"
    assert "model.L_module.layers.0.attn.gqkv_proj" in report.unused
    values = dequantized(path / "model.safetensors")
    for part in ("L_module", "H_module"):
        mlp = f"model.{part}.layers.0.mlp"
        assert report.replaced[mlp] == "MLPs"
        gate, up = torch.from_numpy(values[f"{mlp}.gate_up_proj.weight"]).chunk(2)
        x = torch.randn(3, 64)
        want = torch.nn.functional.silu(x @ gate.T) * (x @ up.T) @ torch.from_numpy(values[f"{mlp}.down_proj.weight"]).T
        torch.testing.assert_close(model.get_submodule(mlp)(x), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("config", [llama, qwen3_moe])
def test_layers_that_predict_further_tokens_hide_none_of_the_same_number(tmp_path, config):
    floats, path = quantized(config(), tmp_path)
    plain = load(floats)
    nn.patch_model(plain, path)
    first = "model.layers.0."
    copies = lambda t: {n.replace(first, "mtp.layers.0."): x.clone() for n, x in t.items() if n.startswith(first)}
    changed(path, lambda t: {**t, **copies(t)})
    model = load(floats)
    report = nn.patch_model(model, path)
    assert len(report.replaced) == 10 and report.unused and all(m.startswith("mtp.") for m in report.unused)
    assert torch.equal(log_probabilities(model, IDS), log_probabilities(plain, IDS))


@pytest.mark.parametrize("dropped,message", [
    ("gate_proj|up_proj", "gate_proj and up_proj with a bias; the checkpoint has it without a bias"),
    ("down_proj", "down_proj with a bias; the checkpoint has it without a bias"),
])  # fmt: skip
def test_biases_of_one_side_are_refused(tmp_path, dropped, message):
    floats, path = quantized(llama(mlp_bias=True), tmp_path)
    with pytest.raises(dualgemm.OperandError, match="the model has gate_proj and up_proj without a bias; .* with a bias"):
        nn.patch_model(transformers.AutoModelForCausalLM.from_config(llama()), path)
    changed(path, lambda t: {n: x for n, x in t.items() if not re.search(rf"({dropped})\.bias", n)})
    # With it, the checkpoint alone is wrong.
    config = json.loads((path / "config.json").read_text())
    del config["mlp_bias"]
    (path / "config.json").write_text(json.dumps(config))
    for patch in (nn.patch_model, lambda *args: nn.patch_mlp(*args, down="checkpoint")):
        with pytest.raises(dualgemm.OperandError, match=f"layers.0.mlp: the model has {message}"):
            patch(load(floats), path)


def test_scales_that_static_needs_are_looked_for_before_anything_is_replaced(tmp_path):
    floats, path = quantized(qwen3_moe(), tmp_path)
    model = load(floats)
    before = [id(m) for m in model.modules()]
    with pytest.raises(dualgemm.OperandError, match=r'has no input scale; quantize_a="dynamic"'):
        nn.patch_model(model, path, quantize_a="static")
    assert [id(m) for m in model.modules()] == before


def test_what_a_gguf_file_holds_beside_its_mlps_is_reported(tmp_path):
    floats, path = quantized(llama(intermediate_size=128), tmp_path)
    dualgemm.convert(path, tmp_path / "q.gguf", "gguf")
    report = nn.patch_model(load(floats), tmp_path / "q.gguf")
    assert report.replaced == {"model.layers.0.mlp": "MLPs", "model.layers.1.mlp": "MLPs"}
    assert sorted(report.unused)[:2] == ["blk.0.attn_k", "blk.0.attn_output"] and len(report.unused) == 8
    assert report.left["model.layers.0.self_attn.q_proj"].startswith("GGUF has names and orders of rows of its own")
