"""Triton kernels of the same operation, to be compared with: a fused dual GEMM that decodes in the kernel, and the
epilogue alone, as unfused pipelines launch it.

They are what a good Triton programmer would write first, no more. ``measure`` times them; ``dualgemm.bench(peers=True)``
adds their rows. Needs torch, Triton and a CUDA device.
"""

__all__ = ["A_FORMATS", "expand", "fused", "measure", "peers", "silu_mul"]

#: Formats of A that the peers take.
A_FORMATS = ("f16", "nvfp4")


def fused(a, gate, up, out=None):
    """``silu(a·gateᵀ) ∘ (a·upᵀ)`` for a float16 or bfloat16 ``a`` ``[M, K]`` and two nvfp4 :class:`dualgemm.Quantized`
    with linear scales, all torch tensors."""
    from . import kernels

    return kernels.fused(a, gate, up, out)


def silu_mul(gate_up, out=None):
    """``silu(x[:, :n]) ∘ x[:, n:]``."""
    from . import kernels

    return kernels.silu_mul(gate_up, out)


def expand(q, out=None):
    """The float16 values of an nvfp4 :class:`dualgemm.Quantized` with linear scales, without its tensor scale."""
    from . import kernels

    return kernels.expand(q, out)


def peers():
    """The peers by the names of their strategies.

    ``triton-fused`` is :func:`fused`; ``triton-epilogue`` the library's product with weights kept in float16, gate above
    up, then :func:`silu_mul`. An nvfp4 A is expanded first, by a kernel of its own.
    """
    import torch

    from .bench import Peer

    def prepare_fused(o):
        return lambda: fused(o.read_a(), o.gate, o.up, o.c)

    def prepare_epilogue(o):
        weights = (expand(o.gate_up) * o.alpha).T

        def call():
            torch.mm(o.read_a(), weights, out=o.x)
            silu_mul(o.x, o.c)

        return call

    return {
        "triton-fused": Peer(prepare_fused, "triton"),
        "triton-epilogue": Peer(prepare_epilogue, "cublas+triton", 16),
    }


def measure(shapes, a_formats=("f16",), limits=None, machine=None, which=None):
    """Rows like those of ``dualgemm.bench`` for shapes ``(m, n, k)``, of :func:`peers` or others of that form; none without
    Triton or a CUDA device, a warning for what does not run. ``limits`` are those of a report on that device, ``machine`` its
    driver and commit."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    from . import bench

    return bench.measure(shapes, a_formats, which or peers(), limits, machine or {})
