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


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
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
