"""The product on a card. Skipped, visibly, where torch or a CUDA device is missing."""

import copy

import numpy as np
import pytest
from conftest import rel_l2

import dualgemm
from dualgemm import gpumode

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from dualgemm.nn import NVFP4GatedMLP  # noqa: E402


@pytest.fixture(scope="module")
def path(layer14):
    return layer14 / "modelopt-nvfp4"


@pytest.fixture(scope="module")
def weights(path):
    return dualgemm.Weights.from_checkpoint(path, device="cuda:0")


@pytest.fixture(scope="module")
def x(hidden):
    return torch.from_numpy(hidden.astype(np.float32)).cuda()


@pytest.mark.parametrize("dtype,limit", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str)
def test_the_layer_equals_the_processors_close(path, weights, x, dtype, limit):
    a = x.to(dtype)
    want = dualgemm.swiglu(a.cpu(), dualgemm.Weights.from_checkpoint(path), out_dtype="float32")
    c = dualgemm.swiglu(a, weights)
    assert c.is_cuda and c.dtype == dtype and rel_l2(c.float().cpu(), want) < limit
    wide = torch.zeros(64, 600, dtype=dtype, device="cuda")
    wide[:, 3:579] = a
    for view in (wide[:, 3:579], a.t().contiguous().t(), a.reshape(4, 16, 576)):
        assert torch.equal(dualgemm.swiglu(view, weights).reshape(64, 1536), c)
    out = torch.empty_like(c)
    assert dualgemm.swiglu(a, weights, out=out) is out and torch.equal(out, c)
    for rows in (1, 5, 33):
        assert rel_l2(dualgemm.swiglu(a[:rows], weights).float().cpu(), want[:rows]) < limit


def test_quantized_activations_and_results_close(path, weights, x):
    on_cpu = dualgemm.Weights.from_checkpoint(path)
    q = dualgemm.quantize(x.cpu())
    on_card = q._replace(codes=q.codes.cuda(), scales=q.scales.cuda())
    want = dualgemm.swiglu(q, on_cpu)
    c = dualgemm.swiglu(on_card, weights, out_dtype="float16")
    assert rel_l2(c.float().cpu(), want) < 1e-3
    static = dualgemm.swiglu(x.half(), weights, quantize_a="static")
    assert rel_l2(static.float().cpu(), dualgemm.swiglu(x.half().cpu(), on_cpu, quantize_a="static").float()) < 2e-3
    r = dualgemm.swiglu(x.half(), weights, out_dtype="nvfp4", out_scale=weights.output_scale)
    r = r._replace(codes=r.codes.cpu(), scales=r.scales.cpu())
    assert rel_l2(dualgemm.dequantize(r), dualgemm.swiglu(x.half().cpu(), on_cpu, out_dtype="float32")) < 0.15


def test_weights_that_are_on_the_card_are_packed_there_close(x):
    q = [dualgemm.quantize(torch.randn(96, 576) * scale) for scale in (1.0, 2.14)]
    card = [part._replace(codes=part.codes.cuda(), scales=part.scales.cuda()) for part in q]
    w = dualgemm.Weights.from_tensors(gate=card[0], up=card[1])
    assert w.device == "cuda:0"
    want = dualgemm.swiglu(x.half().cpu(), dualgemm.Weights.from_tensors(gate=q[0], up=q[1]), out_dtype="float32")
    assert rel_l2(dualgemm.swiglu(x.half(), w).float().cpu(), want) < 1e-3


def test_streams_and_graphs_see_what_is_there_when_they_run_exact(weights, x):
    a = x.half()
    want = [dualgemm.swiglu(a, weights), dualgemm.swiglu(-a, weights)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    out = torch.empty_like(want[0])
    with torch.cuda.stream(side):
        dualgemm.swiglu(a, weights, out=out)
    side.synchronize()
    assert torch.equal(out, want[0])
    dualgemm.swiglu(a, weights, out=out, stream=side)

    static = a.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The capture has a stream of its own, on which the shape has to be known before.
    capture = torch.cuda.Stream()
    with torch.cuda.stream(capture):
        dualgemm.swiglu(static, weights, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=capture):
        dualgemm.swiglu(static, weights, out=out)
    for i in range(100):
        static.copy_(a if i % 2 == 0 else -a)
        graph.replay()
        assert torch.equal(out, want[i % 2])


def test_the_module_compiles_close(path, x):
    mlp = NVFP4GatedMLP.from_checkpoint(path, 0, device="cuda")
    a = x.bfloat16()
    with torch.no_grad():
        want = NVFP4GatedMLP.from_checkpoint(path, 0)(a.cpu())
        assert rel_l2(mlp(a).float().cpu(), want.float()) < 2e-2
        compiled = torch.compile(mlp, fullgraph=True)
        assert rel_l2(compiled(a).float().cpu(), want.float()) < 2e-2


@pytest.mark.parametrize("m,n,k,l", [(256, 512, 256, 1), (130, 96, 512, 2)])
def test_the_task_passes_its_checker(m, n, k, l):
    # The second call's weights overwrite those of the first.
    for data in [gpumode.generate_input(m, n, k, l, seed, device="cuda") for seed in (1, 2)]:
        c = gpumode.custom_kernel(data)
        torch.cuda.synchronize()
        assert c is data[9] and gpumode.check_implementation(data, c) == (True, "")


def test_misplaced_operands_are_refused(path, weights, x):
    with pytest.raises(dualgemm.OperandError, match="the weights are on cpu"):
        dualgemm.swiglu(x.half(), dualgemm.Weights.from_checkpoint(path))
    with pytest.raises(dualgemm.OperandError, match="out: is on the processor"):
        dualgemm.swiglu(x.half(), weights, out=torch.empty(64, 1536, dtype=torch.float16))
    with pytest.raises(dualgemm.UnsupportedError, match="A is f32, which tensor cores do not multiply"):
        dualgemm.swiglu(x, weights)


def test_whole_mlps_in_4_bits_equal_the_processors_close(path, x):
    w, on_cpu = dualgemm.Mlp.from_checkpoint(path, device="cuda:0"), dualgemm.Mlp.from_checkpoint(path)
    for dtype, limit in ((torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        a = x.to(dtype)
        y, want = dualgemm.mlp(a, w), dualgemm.mlp(a.cpu(), on_cpu, out_dtype="float32")
        assert y.is_cuda and y.dtype == dtype and rel_l2(y.float().cpu(), want) < limit
    both = {"quantize_a": "static", "quantize_hidden": "static"}
    y, want = dualgemm.mlp(x.half(), w, **both), dualgemm.mlp(x.half().cpu(), on_cpu, **both)
    assert rel_l2(y.float().cpu(), want.float()) < 2e-2


def test_linear_layers_equal_the_processors_close(path, x):
    name = "model.layers.0.self_attn.k_proj"
    w, on_cpu = dualgemm.Linear.from_checkpoint(path, name, device="cuda:0"), dualgemm.Linear.from_checkpoint(path, name)
    y = dualgemm.linear(x.half(), w)
    assert rel_l2(y.float().cpu(), dualgemm.linear(x.half().cpu(), on_cpu, out_dtype="float32")) < 1e-3
    out = torch.full((64, 192), 7.0, dtype=torch.float32, device="cuda")
    assert dualgemm.linear(x.half()[:5], w, out=out[:5]) is not None and (out[5:] == 7).all()
    assert rel_l2(out[:5].cpu(), y[:5].float().cpu()) < 1e-3


def an_expert(seed, n=64, k=128):
    values = torch.Generator().manual_seed(seed)
    q = lambda rows, cols: dualgemm.quantize(torch.randn(rows, cols, generator=values) / cols**0.5)
    return {"gate": q(n, k), "up": q(n, k), "down": q(k, n), "down_bias": torch.randn(k, generator=values)}


@pytest.mark.parametrize("here", [range(6), (1, 2, 5)], ids=["all", "some"])
def test_mixtures_equal_the_processors_close_and_are_captured(here):
    tensors = [an_expert(e) if e in here else None for e in range(6)]
    w, on_cpu = (dualgemm.Experts.from_tensors(tensors, device=device) for device in ("cuda:0", "cpu"))
    a = torch.randn(9, 128, dtype=torch.float16, device="cuda")
    ids = torch.randint(-1, 6, (9, 3), device="cuda")
    weights = torch.rand(9, 3, device="cuda", dtype=torch.float16)
    want = dualgemm.experts(a.cpu(), ids.cpu(), weights.float().cpu(), on_cpu, out_dtype="float32")
    assert rel_l2(dualgemm.experts(a, ids, weights, w).float().cpu(), want) < 2e-3
    in_4_bits = {"quantize_a": 0.01, "quantize_hidden": 0.01, "out_dtype": "float32"}
    y, exact = dualgemm.experts(a, ids, weights, w, **in_4_bits), (a.cpu(), ids.cpu(), weights.float().cpu(), on_cpu)
    assert rel_l2(y.cpu(), dualgemm.experts(*exact, **in_4_bits)) < 2e-2
    out = torch.ones(9, 128, dtype=torch.float32, device="cuda")
    dualgemm.experts(a, ids, weights, w, out=out, add=True)
    assert rel_l2(out.cpu() - 1, want) < 2e-3
    # Recorded: what the router chose is read when the graph runs.
    capture, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(capture):
        dualgemm.experts(a, ids, weights, w, out=out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=capture):
        dualgemm.experts(a, ids, weights, w, out=out)
    for seed in range(4):
        ids.copy_(torch.randint(-1, 6, (9, 3), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        again = dualgemm.experts(a.cpu(), ids.cpu(), weights.float().cpu(), on_cpu, out_dtype="float32")
        assert rel_l2(out.cpu(), again) < 2e-3


class Block(torch.nn.Module):
    """A layer with the names of the checkpoint in the tree."""

    def __init__(self):
        super().__init__()
        self.self_attn = torch.nn.ModuleDict({"k_proj": torch.nn.Linear(576, 192, bias=False)})
        linear = lambda k, n: torch.nn.Linear(k, n, bias=False)
        self.mlp = GatedMlp(linear)


class GatedMlp(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(576, 1536), linear(576, 1536), linear(1536, 576)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def test_models_on_a_card_are_patched_whole_and_compile(path, x):
    from dualgemm import nn

    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([Block()])
    in_floats = nn.patch_model(copy.deepcopy(model).cuda(), path).left
    assert len(in_floats) == 4
    assert all("float32 on cuda:0, where float16 and bfloat16 are multiplied" in why for why in in_floats.values())
    report = nn.patch_model(model.cuda().bfloat16(), path)
    assert set(report.replaced.values()) == {"linear layers", "MLPs"} and not report.left
    layer = model.model.layers[0]
    assert layer.mlp.weights.device == "cuda:0" and isinstance(layer.mlp.weights, dualgemm.Mlp)
    on_cpu = nn.NVFP4GatedMLP.from_checkpoint(path, 0)
    a = x.bfloat16()
    with torch.no_grad():
        want = on_cpu(a.cpu()).float()
        assert rel_l2(layer.mlp(a).float().cpu(), want) < 2e-2
        assert rel_l2(torch.compile(layer.mlp, fullgraph=True)(a).float().cpu(), want) < 2e-2


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_transformers_loads_a_model_to_the_card_close(tmp_path, registered, family):
    import test_model

    floats = test_model.saved(getattr(test_model, family)(), tmp_path / "floats")
    dualgemm.quantize_model(floats, tmp_path / "q")
    load = test_model.transformers.AutoModelForCausalLM.from_pretrained
    on_card, on_cpu = (load(tmp_path / "q", dtype=torch.bfloat16, device_map=where).eval() for where in ("cuda", "cpu"))
    assert {p.device.type for p in on_card.parameters()} == {"cuda"} and list(on_card.dualgemm_report.left) == ["lm_head"]
    ids = torch.arange(24, device="cuda").reshape(2, 12) * 7 % 96
    with torch.no_grad():
        want = on_cpu(ids.cpu()).logits.float()
        for model in (on_card, torch.compile(on_card)):
            off = (model(ids).logits.float().cpu() - want).norm(dim=-1) / want.norm(dim=-1)
            # Not of each token: torch's compiler rounds less often, and a router may then choose another of two equal experts.
            assert off.median() < 3e-2
    text = on_card.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert text.shape == (2, 20) and torch.equal(text[:, :12], ids)
    on_card.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", dtype=torch.bfloat16, device_map="auto").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, on_card(ids).logits)
