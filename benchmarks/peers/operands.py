"""Operands that every peer gets, and the f64 reference that every result is compared with.

A and the weights are normally distributed; weights are rounded to NVFP4 with a tensor scale of 1, A is f32. B1 and B2 are
gate and up, B1 alone a linear layer, B3 [K, N] the down projection of an MLP. The matrices of a mixture's experts lie one
after the other. Files, in one folder per N x K (and number of experts), all little-endian and row-major:

    b1.codes  b2.codes    [N, K/2]   two e2m1 codes a byte, the even element in the low nibble
    b1.scales b2.scales   [N, K/16]  e4m3
    b1.f32    b2.f32      [N, K]     the same numbers
    b3.…                  [K, …]     likewise
    M/a.f32               [M, K]
    M/ids.i32             [M, 8]     experts of each token, all different
    M/router.f32          [M, 8]     their weights, 1 in sum
    M/PEER.c              [M, N]     f32, written by each peer; [M, K] of an MLP and of a mixture
"""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = np.array([2.0**-9 * i for i in range(8)] + [(1 + i % 8 / 8) * 2.0 ** (i // 8 - 7) for i in range(8, 127)])
E4M3 = E4M3.astype(np.float32)
REFERENCE_ROWS = 4
# Of a mixture: experts, and those of each token.
EXPERTS, TOP_K = 32, 8


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


def write(path, *arrays):
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        for array in arrays:
            array.tofile(file)
    part.rename(path)


def read(path, *shape):
    return np.memmap(path, np.float32, "r").reshape(shape)


MATRICES = {"gate-up": ["b1", "b2"], "linear": ["b1"], "mlp": ["b1", "b2", "b3"], "moe": ["b1", "b2", "b3"]}


def make(folder, m, n, k, op):
    """Writes what is not there yet."""
    (folder / str(m)).mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(MATRICES[op]):
        if not (folder / f"{name}.f32").exists():
            shape = (k, n) if name == "b3" else (n, k)
            x = np.random.default_rng(index).standard_normal(shape, np.float32)
            for kind, array in zip(["codes", "scales", "f32"], quantize(x, 1), strict=True):
                # Each expert has the first one's rows, in another order.
                experts = range(EXPERTS if op == "moe" else 1)
                write(folder / f"{name}.{kind}", *(np.roll(array, 64 * e, axis=0) for e in experts))
    if op == "moe" and not (folder / f"{m}/router.f32").exists():
        rng = np.random.default_rng(3)
        write(folder / f"{m}/ids.i32", rng.random((m, EXPERTS)).argsort(axis=1)[:, :TOP_K].astype(np.int32))
        x = rng.random((m, TOP_K), np.float32)
        write(folder / f"{m}/router.f32", x / x.sum(axis=1, keepdims=True))
    if not (folder / f"{m}/a.f32").exists():
        # Products of this size have unit variance, where silu is neither linear nor zero.
        x = np.random.default_rng(2).standard_normal((m, k), np.float32) / np.float32(k**0.5)
        write(folder / f"{m}/a.f32", x)


def reference(folder, a, n, k, op, expert=0):
    """C of some rows in f64."""

    def product(x, name, features):
        parts = np.array_split(read(folder / f"{name}.f32", -1, features, x.shape[-1])[expert], 16)
        return np.concatenate([x @ part.astype(np.float64).T for part in parts], axis=-1)

    first = product(a, "b1", n)
    if op == "linear":
        return first
    c = first / (1 + np.exp(-first)) * product(a, "b2", n)
    return c if op == "gate-up" else product(c, "b3", k)


def mixture(folder, a, rows, m, n, k):
    """C of some rows in f64: the sum over the experts of each."""
    ids = np.fromfile(folder / f"{m}/ids.i32", np.int32).reshape(m, TOP_K)[rows]
    weights = read(folder / f"{m}/router.f32", m, TOP_K)[rows]
    terms = [
        [weight * reference(folder, x, n, k, "mlp", expert) for expert, weight in zip(*choice, strict=True)]
        for x, *choice in zip(a, ids, weights, strict=True)
    ]
    return np.sum(terms, axis=1)


def relative_error(folder, peer, a_format, shape, op):
    """Relative L2 error of a peer's C against f64 with A rounded to `a_format`, over four rows, first to last. What is
    between the products of an MLP is not rounded there."""
    m, n, k = shape
    rows = np.unique(np.linspace(0, m - 1, REFERENCE_ROWS).astype(int))
    cached = folder / f"{m}/reference-{op}-{a_format}.f64"
    if not cached.exists():
        a = rounded(read(folder / f"{m}/a.f32", m, k), a_format)[rows].astype(np.float64)
        write(cached, mixture(folder, a, rows, m, n, k) if op == "moe" else reference(folder, a, n, k, op))
    want = np.fromfile(cached).reshape(len(rows), -1)
    got = read(folder / f"{m}/{peer}.c", m, -1)[rows]
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
