"""The GPU MODE task "NVFP4 dual GEMM": its generator, reference, checker, and ``custom_kernel``.

The ten-tuple of the task, K as packed bytes, ``x`` for the batch index last:

| index | what | type | shape |
|---|---|---|---|
| 0, 1, 2 | a, b1, b2 | float4_e2m1fn_x2 | ``[m, k/2, l]``, ``[n, k/2, l]`` |
| 3, 4, 5 | sfa, sfb1, sfb2 | float8_e4m3fn | ``[m, k/16, l]``, ``[n, k/16, l]`` |
| 6, 7, 8 | the same scales as CuTe prints the 128x4 layout | float8_e4m3fn | ``[32, 4, m/128, 4, k/64, l]`` |
| 9 | c, overwritten | float16 | ``[m, n, l]`` |

Source: https://github.com/gpu-mode/reference-kernels, problems/nvidia/nvfp4_dual_gemm. A submission is two lines::

    from dualgemm.gpumode import custom_kernel
"""

import numpy as np

from . import _dualgemm
from ._arrays import Quantized, is_on_gpu, numpy_dtype, stream_number, torch_of
from ._ops import Weights, swiglu
from .errors import OperandError

#: Shapes that count for the ranking: (m, n, k, l).
RANKED = [(256, 4096, 7168, 1), (512, 4096, 7168, 1), (256, 3072, 4096, 1), (512, 3072, 7168, 1)]
#: Seed of every test and benchmark of the task.
SEED = 1111
#: Elementwise tolerance, relative and absolute.
TOLERANCE = 1e-3


def generate_input(m, n, k, l=1, seed=SEED, *, device=None, full=False):
    """The ten-tuple of a test. Codes are those that the task's generator leaves, or all sixteen if ``full``; the same
    seed gives the same bytes as ``dualgemm_bench::challenge``, entry ``i`` of the batch those of ``seed + i``.

    ``device`` is a torch device, by default cuda where there is one, or ``"numpy"`` for numpy arrays.
    """
    if l < 1:
        raise OperandError(f"l is {l}; at least 1 is needed")
    entries = [_dualgemm.challenge_operands(m, n, k, seed + i, full) for i in range(l)]
    rows = (m, n, n)
    codes = [_stack(entries, i, 0, (rows[i], k // 2)) for i in range(3)]
    scales = [_stack(entries, i, 1, (rows[i], k // 16)) for i in range(3)]
    permuted = [_permuted(s) for s in scales]
    c = np.full((l, m, n), np.nan, np.float16)
    arrays = [codes, [s.transpose(1, 2, 0) for s in scales], permuted]
    last = (1, 2, 0)
    if device == "numpy":
        e4m3 = numpy_dtype("float8_e4m3fn")
        return (
            *(x.transpose(last) for x in codes),
            *(x.view(e4m3) for x in arrays[1]),
            *(x.view(e4m3) for x in permuted),
            c.transpose(last),
        )
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def tensor(x, dtype):
        # Views keep the strides that the task gives its tensors: the batch index is outermost in memory.
        return torch.from_numpy(x).to(device).view(dtype)

    return (
        *(tensor(x, torch.float4_e2m1fn_x2).permute(last) for x in codes),
        *(tensor(x, torch.float8_e4m3fn).permute(last) for x in scales),
        *(tensor(x.base_order, torch.float8_e4m3fn).permute(x.order) for x in map(_Permuted, scales)),
        tensor(c, torch.float16).permute(last),
    )


class _Permuted:
    """Scales in the 128x4 layout: the bytes in memory order and the permutation to the six dimensions."""

    order = (3, 4, 1, 5, 2, 0)

    def __init__(self, linear):
        batch, rows, blocks = linear.shape
        shape = (batch, -(-rows // 128), -(-blocks // 4), 32, 4, 4)
        self.base_order = np.frombuffer(bytearray(_dualgemm.challenge_scales(linear)), np.uint8).reshape(shape)


def _permuted(linear):
    scales = _Permuted(linear)
    return scales.base_order.transpose(scales.order)


def _stack(entries, operand, part, shape):
    return np.stack([np.frombuffer(e[operand][part], np.uint8).reshape(shape) for e in entries])


def _entry(data, i):
    a, b1, b2, sfa, sfb1, sfb2, *_ = data
    return [Quantized(x[:, :, i], s[:, :, i]) for x, s in ((a, sfa), (b1, sfb1), (b2, sfb2))]


# Weights by shape, device and stream. Every call brings others, and taking memory on a GPU waits for it: 3.5 ms of a call's
# 3.6 on an H200.
_kept = {}


def custom_kernel(data):
    """Computes C of the ten-tuple into its last member and returns that. On a GPU it waits for nothing, and memory for the
    packed weights of the last sixteen shapes is kept."""
    c = data[9]
    for i in range(c.shape[2]):
        a, b1, b2 = _entry(data, i)
        if not is_on_gpu(c):
            swiglu(a, Weights.from_tensors(gate=b1, up=b2), out=c[:, :, i])
            continue
        stream = stream_number(c, None)
        key = (b1.shape, c.device, stream)
        if key in _kept:
            _kept[key]._refill(b1, b2, stream)
        else:
            if len(_kept) == 16:
                _kept.pop(next(iter(_kept)))
            _kept[key] = Weights.from_tensors(gate=b1, up=b2, stream=stream)
        _kept[key]._run(a, c[:, :, i], None, None, False, stream)
    return c


def reference(data):
    """C of the ten-tuple in f64, rounded once: a float16 numpy array ``[m, n, l]``."""
    m, n, l = data[9].shape
    c = np.empty((l, m, n))
    for i in range(l):
        a, b1, b2 = (_on_cpu(x) for x in _entry(data, i))
        _dualgemm.reference(a, b1, b2, c[i], "silu")
    with np.errstate(over="ignore"):
        return c.astype(np.float16).transpose(1, 2, 0)


def _on_cpu(q):
    if torch_of(q.codes) is None:
        return q
    return q._replace(codes=q.codes.cpu(), scales=q.scales.cpu())


def check_implementation(data, output):
    """Whether ``output`` is C of the ten-tuple within the task's tolerance, and the first mismatch in words."""
    want = reference(data).astype(np.float32)
    torch = torch_of(output)
    got = (output.cpu().numpy() if torch is not None else np.asarray(output)).astype(np.float32)
    if got.shape != want.shape:
        return False, f"shape {list(got.shape)}; {list(want.shape)} is needed"
    close = (np.abs(got - want) <= TOLERANCE + TOLERANCE * np.abs(want)) | (got == want)
    wrong = np.argwhere(~close)
    if not len(wrong):
        return True, ""
    at = tuple(int(i) for i in wrong[0])
    return False, f"{len(wrong)} elements differ; the first is C{list(at)}: {got[at]} where {want[at]} is right"
