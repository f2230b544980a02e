"""Triton kernels of the same operation, to be compared with: a fused dual GEMM that decodes in the kernel, and the
epilogue alone, as unfused pipelines launch it.

They are what a good Triton programmer would write first, no more. ``measure`` times them; ``dualgemm.bench(peers=True)``
adds their rows. Needs torch, Triton and a CUDA device.
"""

__all__ = ["fused", "measure", "silu_mul"]


def fused(a, gate, up, out=None):
    """``silu(a·gateᵀ) ∘ (a·upᵀ)`` for a float16 or bfloat16 ``a`` ``[M, K]`` and two nvfp4 :class:`dualgemm.Quantized`
    with linear scales, all torch tensors."""
    from . import kernels

    return kernels.fused(a, gate, up, out)


def silu_mul(gate_up, out=None):
    """``silu(x[:, :n]) ∘ x[:, n:]``."""
    from . import kernels

    return kernels.silu_mul(gate_up, out)


def measure(shapes):
    """Rows like those of ``dualgemm.bench`` for shapes ``(m, n, k)``, float16 activations; none without Triton or a CUDA
    device."""
    try:
        import torch
        import triton
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    from .. import _dualgemm
    from .._arrays import Quantized

    device = torch.cuda.get_device_name()
    rows = []
    for m, n, k in shapes:
        operands = _dualgemm.challenge_operands(m, n, k, 1, True)
        tensor = lambda data, rows: torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(rows, -1).cuda()
        gate, up = (Quantized(tensor(codes, n), tensor(scales, n)) for codes, scales in operands[1:])
        a = torch.randn(m, k, device="cuda", dtype=torch.float16)
        c = torch.empty(m, n, device="cuda", dtype=torch.float16)
        # do_bench clears the L2 cache before each run, so weights come from memory.
        median, low, high = triton.testing.do_bench(
            lambda: fused(a, gate, up, c), quantiles=[0.5, 0.1, 0.9], return_mode="median"
        )
        flops = 4.0 * m * n * k
        rows.append(
            {
                "device": device,
                "m": m,
                "n": n,
                "k": k,
                "a_format": "f16",
                "out_dtype": "f16",
                "strategy": "triton_fused",
                "kernel": "triton",
                "median_us": median * 1e3,
                "p10_us": low * 1e3,
                "p90_us": high * 1e3,
                "gflops": flops / (median * 1e6),
            }
        )
    return rows
