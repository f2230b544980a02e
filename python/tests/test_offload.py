"""The example of experts on the processor beside a model on a GPU, with all on the processor. Skipped, visibly, where torch,
transformers or accelerate is missing."""

import ast
import pathlib
import subprocess
import sys

import pytest

import dualgemm

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
nn = pytest.importorskip("dualgemm.nn")

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "offload" / "experts.py"
SHAPES = (
    '{"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,'
    ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96}'
)


def example(*args):
    done = subprocess.run([sys.executable, EXAMPLE, *args], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_writes_what_the_model_writes(tmp_path):
    path = tmp_path / "q"
    assert example("make", path, "--shapes", SHAPES) == [f"{2 * (4 + 3 * 8)} layers in 4 bits in {path}"]
    assert not (tmp_path / "q.floats").exists()
    report, where, speed, tokens = example("run", path, "--device", "cpu", "--prompt", "9", "--tokens", "5")
    assert "8 linear layers, 2 blocks of 8 experts" in report
    # With accelerate's hooks, which one device needs nowhere, no layer would.
    assert "2 layers take a token in one call" in report
    assert where.startswith("2 blocks of experts, 0.00 GiB on cpu") and "decode:" in speed
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    nn.patch_model(model, path)
    from safetensors.torch import load_file

    floats = {n: x for n, x in load_file(path / "model.safetensors").items() if x.dtype == torch.bfloat16}
    names = {n for n, _ in model.named_parameters()}
    assert names == floats.keys()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(floats[name])
    prompt = torch.randint(96, (1, 9), generator=torch.Generator().manual_seed(1))
    want = model.eval().generate(prompt, min_new_tokens=5, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert ast.literal_eval(tokens) == want[0, 9:].tolist()


Q = lambda rows, k: dualgemm.quantize(torch.randn(rows, k))
MLP = lambda: {"gate": Q(32, 64), "up": Q(32, 64), "down": Q(64, 32)}
BLOCKS = {
    "linear": lambda: nn.NVFP4Linear(dualgemm.Linear.from_tensors(Q(64, 64))),
    "mlp": lambda: nn.NVFP4GatedMLP(dualgemm.Mlp.from_tensors(**MLP())),
    "experts": lambda: nn.NVFP4Experts(dualgemm.Experts.from_tensors([MLP() for _ in range(3)])),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_tokens_come_to_the_weights_and_results_go_back(monkeypatch, block):
    """Which device each tensor was sent to, of a block on the processor that is given tensors of another."""
    module = BLOCKS[block]()
    args = torch.randn(4, 64), torch.tensor([[0, 2]] * 4), torch.rand(4, 2)
    args = args if block == "experts" else args[:1]
    want, sent = module(*args), []
    to = torch.Tensor.to

    def recorded(self, where, *more):
        if isinstance(where, torch.device):
            sent.append((tuple(self.shape), str(where)))
        return to(self, where, *more)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    module._place, module._is_on_cpu = torch.device("cpu", 0), False
    assert torch.equal(module(*args), want)
    assert sent == [*((tuple(t.shape), "cpu:0") for t in args), ((4, 64), "cpu")]


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_hooks_stay_where_what_is_not_packed_has_several_places(place):
    """The model's own brings tokens to it; the others are for weights that accelerate moves."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from dualgemm import hf

    inner = torch.nn.Sequential(torch.nn.Linear(4, 4, device=place))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), inner)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook())
    hf.without_hooks(model)
    hooked = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    assert hooked == ([""] if place == "cpu" else ["", "0", "1", "1.0"])
    if place == "cpu":
        x = torch.randn(3, 4)
        assert torch.equal(model(x), inner[0](model[0](x)))
