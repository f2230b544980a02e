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


def test_expanded_codes_are_their_values_exact():
    q = dualgemm.quantize(torch.from_numpy(np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32)))
    q = q._replace(global_scale=1.0)
    assert torch.equal(peers.expand(q).double(), dualgemm.dequantize(q).double())


@pytest.mark.parametrize("a_format", peers.A_FORMATS)
@pytest.mark.parametrize("name", peers.peers())
def test_every_peer_computes_the_operation_close(name, a_format):
    from dualgemm.peers.bench import Operands, error

    operands = Operands(5, 48, 64, a_format, torch.Generator().manual_seed(1))
    peers.peers()[name].prepare(operands)()
    assert error(operands) < 1e-3
    # The reference is the library's.
    gate, up = (q._replace(scales=q.scales.contiguous()) for q in (operands.gate, operands.up))
    a = operands.a_quantized if a_format == "nvfp4" else operands.a
    c = dualgemm.swiglu(a, dualgemm.Weights.from_tensors(gate=gate, up=up), out_dtype="float32")
    assert rel_l2(c[[0, 2, 4]], operands.want([0, 2, 4])) < 1e-5


def test_rows_have_what_reports_of_cards_have():
    from dualgemm.peers.bench import row

    subject = {"device": "card", "driver": "1", "commit": "x", "strategy": "s", "kernel": "t"}
    limits = {"flops_per_s": 868e12, "bytes_per_s": 3145e9}
    measured = row(subject, (256, 4096, 7168), "nvfp4", limits, (50.0, 49.0, 51.0), 1e-4)
    reported = dualgemm.bench("2x64x64", smoke=True)["rows"][0]
    assert set(reported) - set(measured) == {"runs"}
    assert measured["bound"] == "compute" and abs(measured["floor_us"] - 34.64) < 0.01
    memory = row(subject, (1, 4096, 7168), "f16", limits, (20.0, 19.0, 21.0), 1e-4)
    assert memory["bound"] == "memory" and abs(memory["floor_us"] - 10.51) < 0.01


def test_without_a_cuda_device_nothing_is_measured():
    if not torch.cuda.is_available():
        assert peers.measure([(16, 64, 64)]) == []
