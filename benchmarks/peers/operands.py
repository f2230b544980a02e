"""Operands that every peer gets, and the f64 reference that every result is compared with.

A and the weights are normally distributed; weights are rounded to NVFP4 with a tensor scale of 1, A is f32. B1 and B2 are
gate and up, B1 alone a linear layer, B3 [K, N] the down projection of an MLP. Files, in one folder per N x K, all
little-endian and row-major:

    b1.codes  b2.codes    [N, K/2]   two e2m1 codes a byte, the even element in the low nibble
    b1.scales b2.scales   [N, K/16]  e4m3
    b1.f32    b2.f32      [N, K]     the same numbers
    b3.…                  [K, …]     likewise
    M/a.f32               [M, K]
    M/PEER.c              [M, N]     f32, written by each peer; [M, K] of an MLP
"""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = np.array([2.0**-9 * i for i in range(8)] + [(1 + i % 8 / 8) * 2.0 ** (i // 8 - 7) for i in range(8, 127)])
E4M3 = E4M3.astype(np.float32)
REFERENCE_ROWS = 4


def nearest(table, x):
    """Index of the nearest entry of an ascending table."""
    return np.searchsorted((table[1:] + table[:-1]) / 2, x).astype(np.uint8)


def quantize(x, divisor):
    """Codes, scale bytes and the numbers they stand for, as Transformer Engine rounds (in f32, step by step)."""
    divisor, one = np.float32(divisor), np.float32(1)
    blocks = x.reshape(len(x), -1, 16)
    scales = nearest(E4M3, np.abs(blocks).max(axis=2) * (divisor * (one / 6)))
    step = (E4M3[scales] * (one / divisor))[..., None]
    codes = nearest(E2M1, np.abs(blocks) * (one / step))
    values = np.copysign(E2M1[codes] * step, blocks).reshape(x.shape)
    codes |= np.signbit(blocks).astype(np.uint8) << 3
    codes = codes.reshape(x.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, values


def rounded(a, how):
    """A as a kernel gets it."""
    if how == "nvfp4":
        return quantize(a, np.float32(6 * 448) / np.abs(a).max())[2]
    if how == "bf16":
        bits = a.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return a


def write(path, array):
    part = path.with_suffix(".part")
    array.tofile(part)
    part.rename(path)


def read(path, rows):
    return np.memmap(path, np.float32, "r").reshape(rows, -1)


WEIGHTS = {"gate-up": ["b1", "b2"], "linear": ["b1"], "mlp": ["b1", "b2", "b3"]}


def make(folder, m, n, k, op):
    """Writes what is not there yet."""
    (folder / str(m)).mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(WEIGHTS[op]):
        if not (folder / f"{name}.f32").exists():
            shape = (k, n) if name == "b3" else (n, k)
            x = np.random.default_rng(index).standard_normal(shape, np.float32)
            for kind, array in zip(["codes", "scales", "f32"], quantize(x, 1), strict=True):
                write(folder / f"{name}.{kind}", array)
    if not (folder / f"{m}/a.f32").exists():
        # Products of this size have unit variance, where silu is neither linear nor zero.
        x = np.random.default_rng(2).standard_normal((m, k), np.float32) / np.float32(k**0.5)
        write(folder / f"{m}/a.f32", x)


def reference(folder, a, n, k, op):
    """C of some rows in f64."""

    def product(x, name, features):
        parts = np.array_split(read(folder / f"{name}.f32", features), 16)
        return np.concatenate([x @ part.astype(np.float64).T for part in parts], axis=1)

    first = product(a, "b1", n)
    if op == "linear":
        return first
    c = first / (1 + np.exp(-first)) * product(a, "b2", n)
    return product(c, "b3", k) if op == "mlp" else c


def relative_error(folder, peer, a_format, shape, op):
    """Relative L2 error of a peer's C against f64 with A rounded to `a_format`, over four rows, first to last. What is
    between the products of an MLP is not rounded there."""
    m, n, k = shape
    rows = np.unique(np.linspace(0, m - 1, REFERENCE_ROWS).astype(int))
    cached = folder / f"{m}/reference-{op}-{a_format}.f64"
    if not cached.exists():
        a = rounded(read(folder / f"{m}/a.f32", m), a_format)[rows].astype(np.float64)
        write(cached, reference(folder, a, n, k, op))
    want = np.fromfile(cached).reshape(len(rows), -1)
    got = read(folder / f"{m}/{peer}.c", m)[rows]
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
