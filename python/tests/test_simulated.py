"""Weights on a GPU: the same path as on a card, on a simulated one with every check on."""

import numpy as np
import pytest
from conftest import rel_l2

import dualgemm
from dualgemm import Weights

M, N, K = 3, 32, 64


@pytest.fixture(scope="module")
def pair():
    x = np.random.default_rng(1).standard_normal((2, N, K)).astype(np.float32)
    return dualgemm.quantize(x[0]), dualgemm.quantize(2.14 * x[1])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"])
def test_a_simulated_gpu_equals_the_processor_close(pair, arch):
    gate, up = pair
    on_gpu = Weights.from_tensors(gate=gate, up=up, device=f"sim:{arch}")
    on_cpu = Weights.from_tensors(gate=gate, up=up)
    assert on_gpu.device == f"sim:{arch}" and on_cpu.device == "cpu"
    a = np.random.default_rng(2).standard_normal((M, K)).astype(np.float16)
    want = dualgemm.swiglu(a, on_cpu, out_dtype="float32")
    assert rel_l2(dualgemm.swiglu(a, on_gpu), want) < 1e-3
    q = dualgemm.quantize(a)
    assert rel_l2(dualgemm.swiglu(q, on_gpu, out_dtype="float16"), dualgemm.swiglu(q, on_cpu)) < 1e-3


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_blackwell_multiplies_mxfp4_by_mxfp4_close(arch):
    x = np.random.default_rng(1).standard_normal((2, N, K)).astype(np.float32)
    gate, up = (dualgemm.quantize(half, format="mxfp4") for half in x)
    on_gpu = Weights.from_tensors(gate=gate, up=up, device=f"sim:{arch}")
    on_cpu = Weights.from_tensors(gate=gate, up=up)
    a = np.random.default_rng(2).standard_normal((M, K)).astype(np.float16)
    for given in (dualgemm.quantize(a, format="mxfp4"), a):
        want = dualgemm.swiglu(given, on_cpu, out_dtype="float32")
        assert rel_l2(dualgemm.swiglu(given, on_gpu, out_dtype="float32"), want) < 1e-5


def test_what_a_gpu_does_not_take_says_why(pair):
    gate, up = pair
    w = Weights.from_tensors(gate=gate, up=up, device="sim:sm_90a")
    with pytest.raises(dualgemm.UnsupportedError, match="A is f32, which tensor cores do not multiply"):
        dualgemm.swiglu(np.ones((M, K), np.float32), w)


def matrices(expert=0):
    """An MLP of 32 features between, K = 64, 48 features out."""
    x = np.random.default_rng(10 + expert)
    of = lambda rows, k: dualgemm.quantize(x.standard_normal((rows, k)).astype(np.float32))
    return {"gate": of(N, K), "up": of(N, K), "down": of(48, N), "down_bias": x.standard_normal(48).astype(np.float32)}


def test_linear_layers_mlps_and_experts_equal_the_processors_close():
    a = np.random.default_rng(2).standard_normal((M, K)).astype(np.float16)
    ids, weights = np.array([[2, 0], [1, -1], [2, 2]]), np.array([[0.5, 2], [1, 0], [-1, 0.25]], np.float32)

    def results(device):
        one = matrices()
        linear = dualgemm.Linear.from_tensors(one["gate"], bias=np.arange(N, dtype=np.float32), device=device)
        mlp = dualgemm.Mlp.from_tensors(**one, device=device)
        experts = dualgemm.Experts.from_tensors([None, *map(matrices, (1, 2))], device=device)
        assert {w.device for w in (linear, mlp, experts)} == {device or "cpu"} and experts.nbytes > 0
        yield dualgemm.linear(a, linear, out_dtype="float32")
        yield dualgemm.mlp(a, mlp, out_dtype="float32")
        yield dualgemm.mlp(a, mlp, quantize_a="dynamic", out_dtype="float32")
        # What is between the products has no type of A to follow, and GPUs multiply no f32.
        yield dualgemm.mlp(dualgemm.quantize(a), mlp, out_dtype="float16")
        # Expert 0 is elsewhere, and a choice of it adds nothing.
        yield dualgemm.experts(a, ids, weights, experts, out_dtype="float32")
        yield dualgemm.experts(a, ids, weights, experts, quantize_a="dynamic", out_dtype="float32")
        yield dualgemm.experts(a, ids, weights, experts, quantize_a=0.01, quantize_hidden=0.1, out_dtype="float32")

    for on_gpu, on_cpu in zip(results("sim:sm_90a"), results(None)):
        assert rel_l2(on_gpu, on_cpu) < 2e-3


def test_what_a_gpu_does_not_take_of_a_mixture_says_why():
    experts = dualgemm.Experts.from_tensors([matrices()], device="sim:sm_90a")
    a, ids, weights = np.ones((M, K), np.float16), np.zeros((M, 1), np.int64), np.ones((M, 1), np.float32)
    with pytest.raises(dualgemm.UnsupportedError, match="A of a mixture is f32; on a GPU f16 or bf16 is needed"):
        dualgemm.experts(a.astype(np.float32), ids, weights, experts)
    with pytest.raises(dualgemm.OperandError, match=r"topk_ids\[0, 0\] is 1; .* numbers below 1"):
        dualgemm.experts(a, ids + 1, weights, experts)
    with pytest.raises(dualgemm.UnsupportedError, match="with a dynamic scale; on a GPU a static scale"):
        dualgemm.mlp(a, dualgemm.Mlp.from_tensors(**matrices(), device="sim:sm_90a"), quantize_hidden="dynamic")
    with pytest.raises(dualgemm.UnsupportedError, match="added to in the host's memory"):
        dualgemm.experts(a, ids, weights, experts, out=np.zeros((M, 48), np.float16), add=True)
