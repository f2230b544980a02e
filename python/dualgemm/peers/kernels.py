"""The Triton kernels of this package and their launches.

Codes and block scales become float16 by their bits: three bits of e2m1 shifted to the top of a float16's mantissa are
its value times 2^-14, and the seven of e4m3 its value times 2^-8. Their product has six significant bits at most, so
it is exact.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _e2m1(code):
    magnitude = ((code & 7).to(tl.int16) << 9).to(tl.float16, bitcast=True) * 16384.0
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def _e4m3(bits):
    """Of a block scale, which is never negative."""
    return (bits.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _weights(codes, scales, rn, k, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Rows ``rn`` and elements ``k .. k + BK`` of a matrix, decoded."""
    rows = rn[:, None] < N
    half = k // 2 + tl.arange(0, BK // 2)
    packed = tl.load(codes + rn[:, None] * (K // 2) + half[None, :], mask=rows & (half[None, :] < K // 2), other=0)
    values = tl.interleave(_e2m1(packed), _e2m1(packed >> 4))
    block = k // 16 + tl.arange(0, BK // 16)
    bits = tl.load(scales + rn[:, None] * (K // 16) + block[None, :], mask=rows & (block[None, :] < K // 16), other=0)
    scale = tl.broadcast_to(_e4m3(bits)[:, :, None], (BN, BK // 16, 16)).reshape(BN, BK)
    return values * scale


@triton.jit
def expand_kernel(codes, scales, out, total, BLOCK: tl.constexpr):
    """``BLOCK`` bytes of codes as twice as many values, without the tensor scale."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.load(codes + i, mask=i < total, other=0)
    scale = _e4m3(tl.load(scales + i // 8, mask=i < total, other=0))
    tl.store(out + 2 * i, _e2m1(packed) * scale, mask=i < total)
    tl.store(out + 2 * i + 1, _e2m1(packed >> 4) * scale, mask=i < total)


@triton.jit
def fused_kernel(
    a, gate, gate_scales, up, up_scales, c, gate_scale, up_scale, M, N, row_stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of C: both products over all of K, the epilogue, the store."""
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    gate_sum = tl.zeros((BM, BN), tl.float32)
    up_sum = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        inside = (rm[:, None] < M) & (k + rk[None, :] < K)
        x = tl.load(a + rm[:, None] * row_stride + (k + rk)[None, :], mask=inside, other=0.0)
        g = _weights(gate, gate_scales, rn, k, N, K, BN, BK).to(x.dtype)
        u = _weights(up, up_scales, rn, k, N, K, BN, BK).to(x.dtype)
        gate_sum = tl.dot(x, tl.trans(g), gate_sum)
        up_sum = tl.dot(x, tl.trans(u), up_sum)
    g = gate_sum * gate_scale
    value = g / (1.0 + tl.exp(-g)) * (up_sum * up_scale)
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    tl.store(c + rm[:, None] * N + rn[None, :], value.to(c.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(x, out, N, total, BLOCK: tl.constexpr):
    """``BLOCK`` elements of silu(gate)·up, gate and up side by side in rows of ``2 N``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = i // N * (2 * N) + i % N
    g = tl.load(x + at, mask=i < total, other=0.0).to(tl.float32)
    u = tl.load(x + at + N, mask=i < total, other=0.0).to(tl.float32)
    tl.store(out + i, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=i < total)


def fused(a, gate, up, out=None):
    """See ``dualgemm.peers.fused``."""
    (m, k), n = a.shape, gate.codes.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    tile_m, tile_n, warps = (16, 64, 4) if m <= 16 else (64, 64, 8) if m <= 64 else (128, 64, 8)
    grid = (triton.cdiv(n, tile_n), triton.cdiv(m, tile_m))
    fused_kernel[grid](
        a, gate.codes.view(torch.uint8), gate.scales.view(torch.uint8),
        up.codes.view(torch.uint8), up.scales.view(torch.uint8), out,
        float(gate.global_scale), float(up.global_scale), m, n, a.stride(0),
        K=k, BM=tile_m, BN=tile_n, BK=64, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


def expand(q, out=None):
    """See ``dualgemm.peers.expand``."""
    rows, bytes_per_row = q.codes.shape
    if out is None:
        out = torch.empty(rows, 2 * bytes_per_row, dtype=torch.float16, device=q.codes.device)
    block, total = 1024, q.codes.numel()
    codes, scales = q.codes.view(torch.uint8), q.scales.view(torch.uint8)
    expand_kernel[(triton.cdiv(total, block),)](codes, scales, out, total, BLOCK=block)
    return out


def silu_mul(gate_up, out=None):
    """See ``dualgemm.peers.silu_mul``."""
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(m, n, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    silu_mul_kernel[(triton.cdiv(m * n, block),)](gate_up, out, n, m * n, BLOCK=block)
    return out
