"""The Triton peers, in Triton's interpreter."""

import os

import numpy as np
import pytest
from conftest import rel_l2

import dualgemm

# Before Triton is imported by anybody.
os.environ.setdefault("TRITON_INTERPRET", "1")
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from dualgemm import peers  # noqa: E402


@pytest.mark.parametrize("m,n,k", [(3, 48, 64), (17, 80, 144)])
def test_the_fused_kernel_close(m, n, k):
    x = np.random.default_rng(1).standard_normal((2, n, k)).astype(np.float32)
    gate, up = (dualgemm.quantize(torch.from_numpy(half)) for half in (x[0], 2.14 * x[1]))
    a = torch.randn(m, k, dtype=torch.float16)
    want = dualgemm.swiglu(a, dualgemm.Weights.from_tensors(gate=gate, up=up), out_dtype="float32")
    assert rel_l2(peers.fused(a, gate, up).float(), want) < 1e-3


def test_every_code_and_scale_is_decoded_exact():
    # One column of K at a time would hide what the neighbours do: A is the identity.
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[: 127 * 4].reshape(127, 4).repeat(1, 2)
    scales = torch.arange(127, dtype=torch.uint8).reshape(127, 1)
    q = dualgemm.Quantized(codes, scales)
    a = torch.eye(16, dtype=torch.float16)
    got = peers.fused(a, q, q).double()
    w = dualgemm.dequantize(q).double().t()
    torch.testing.assert_close(got, (w * torch.sigmoid(w) * w).half().double(), rtol=2e-3, atol=1e-6)


def test_the_epilogue_close():
    x = torch.randn(5, 96)
    g, u = x.double().chunk(2, dim=1)
    assert rel_l2(peers.silu_mul(x), torch.nn.functional.silu(g) * u) < 1e-6


def test_without_a_cuda_device_nothing_is_measured():
    if not torch.cuda.is_available():
        assert peers.measure([(16, 64, 64)]) == []
