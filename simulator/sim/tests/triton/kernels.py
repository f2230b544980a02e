"""The Triton kernels beside this file: `python kernels.py` (Triton 3.9, no GPU) writes their PTX here.

Per kernel, the first line of the PTX says what a launch needs: entry, dynamic shared memory, warps, bytes of
global scratch per CTA. Two pointers follow the kernel's own parameters: scratch memory, and memory for profiling.
"""
import pathlib, sys
import triton, triton.language as tl
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget

OUT = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * K + (k + rk)[None, :], mask=(rm[:, None] < M) & ((k + rk)[None, :] < K), other=0.0)
        y = tl.load(b + (k + rk)[:, None] * N + rn[None, :], mask=((k + rk)[:, None] < K) & (rn[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc.to(c.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def matmul_int8(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.int32)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * K + (k + rk)[None, :])
        y = tl.load(b + rn[None, :] * K + (k + rk)[:, None])
        acc = tl.dot(x, y, acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc)


@triton.jit
def matmul_tma(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    da = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    db = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    dc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    pm = tl.program_id(0) * BM
    pn = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(da.load([pm, k]), db.load([pn, k]).T, acc)
    dc.store([pm, pn], acc.to(tl.float16))


@triton.jit
def matmul_persistent(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WS: tl.constexpr):
    da = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    db = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    dc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, tl.num_programs(0), flatten=not WS, warp_specialize=WS):
        pm = tile // tiles_n * BM
        pn = tile % tiles_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(da.load([pm, k]), db.load([pn, k]).T, acc)
        dc.store([pm, pn], acc.to(tl.float16))


@triton.jit
def layernorm(x, w, b, o, n, eps, B: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, B)
    m = c < n
    v = tl.load(x + r * n + c, mask=m, other=0.0).to(tl.float32)
    mean = tl.sum(v, 0) / n
    d = tl.where(m, v - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(d * d, 0) / n + eps)
    tl.store(o + r * n + c, (d * rstd * tl.load(w + c, mask=m) + tl.load(b + c, mask=m)).to(tl.bfloat16), mask=m)


@triton.jit
def attention(q, k, v, o, N, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    head = tl.program_id(1) * N * D
    x = tl.load(q + head + rm[:, None] * D + rd[None, :])
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BM, BN):
        y = tl.load(k + head + (start + rn)[None, :] * D + rd[:, None])
        z = tl.load(v + head + (start + rn)[:, None] * D + rd[None, :])
        s = tl.dot(x, y) * (scale * 1.44269504)
        s = tl.where(rm[:, None] >= (start + rn)[None, :], s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        fix = tl.exp2(top - new)
        total = total * fix + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), z, acc * fix[:, None])
        top = new
    tl.store(o + head + rm[:, None] * D + rd[None, :], (acc / total[:, None]).to(tl.float16))


@triton.jit
def scan(x, sums, order, B: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, B)
    v = tl.load(x + r * B + c)
    tl.store(sums + r * B + c, tl.cumsum(v, 0))
    tl.store(order + r * B + c, tl.sort(v))


@triton.jit
def gather_scatter(x, idx, hist, o, n, B: tl.constexpr):
    c = tl.program_id(0) * B + tl.arange(0, B)
    m = c < n
    i = tl.load(idx + c, mask=m, other=0)
    local = tl.gather(tl.load(x + c, mask=m, other=0), tl.arange(0, B) ^ 5, 0)
    tl.atomic_add(hist + i, local, mask=m)
    old = tl.atomic_max(o, tl.max(local, 0))
    tl.store(o + 1 + tl.program_id(0), (old <= tl.max(local, 0)).to(tl.int32))


POINTER = {"f16": "*fp16", "f32": "*fp32", "bf16": "*bf16", "i8": "*i8", "i32": "*i32", "e4m3": "*fp8e4nv", "int": "i32", "float": "fp32"}


def emit(name, fn, types, constants, arch=90, warps=4, stages=3):
    """`types` in order: a pointer by its element, or `int` / `float`."""
    signature, names = {}, [p.name for p in fn.params]
    for param in names:
        signature[param] = "constexpr" if param in constants else types[len(signature)]
    signature = {k: POINTER.get(v, v) for k, v in signature.items()}
    kernel = triton.compile(
        ASTSource(fn, signature, constexprs=constants),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    meta = kernel.metadata
    lines = kernel.asm["ptx"].split("\n")
    # Line numbers of this file, and what debuggers read, are left out.
    end = next((i for i, l in enumerate(lines) if l.strip().startswith((".file", ".section"))), len(lines))
    lines = [l for l in lines[:end] if not l.strip().startswith((".loc", "//", ".file"))]
    scratch = getattr(meta, "global_scratch_size", 0)
    head = f"// entry={meta.name} shared={meta.shared} warps={meta.num_warps} scratch={scratch}"
    (OUT / f"{name}.ptx").write_text("\n".join([head] + [l for l in lines if l.strip()]) + "\n")


def main():
    i, f = "int", "float"
    mat = lambda t, o: [t, t, o, i, i, i]
    tile = lambda m, n, k: {"BM": m, "BN": n, "BK": k}
    todo = [
        ("matmul_f16", matmul, mat("f16", "f16"), tile(128, 64, 32), dict(warps=8, stages=4)),
        ("matmul_bf16_sm80", matmul, mat("bf16", "f32"), tile(64, 64, 32), dict(arch=80)),
        ("matmul_fp8_sm89", matmul, mat("e4m3", "f32"), tile(64, 64, 64), dict(arch=89)),
        ("matmul_int8", matmul_int8, mat("i8", "i32"), tile(64, 64, 64), dict()),
        ("matmul_tma", matmul_tma, mat("f16", "f16"), tile(128, 128, 64), dict()),
        ("warp_specialized", matmul_persistent, mat("f16", "f16"), tile(128, 64, 64) | {"WS": True}, dict()),
        ("layernorm", layernorm, ["bf16", "bf16", "bf16", "bf16", i, f], {"B": 512}, dict(warps=2)),
        ("attention", attention, ["f16", "f16", "f16", "f16", i, f], {"BM": 64, "BN": 32, "D": 64}, dict()),
        ("scan", scan, ["i32", "i32", "i32"], {"B": 256}, dict(warps=2)),
        ("gather_scatter", gather_scatter, ["i32", "i32", "i32", "i32", i], {"B": 128}, dict(warps=2)),
        ("warp_specialized_sm100", matmul_persistent, mat("f16", "f16"), tile(128, 64, 64) | {"WS": True}, dict(arch=100)),
        ("attention_sm100", attention, ["f16", "f16", "f16", "f16", i, f], {"BM": 64, "BN": 64, "D": 64}, dict(arch=100)),
        ("tma_sm100", matmul_tma, mat("f16", "f16"), tile(128, 64, 64), dict(arch=100)),
        ("tma_sm120", matmul_tma, mat("f16", "f16"), tile(64, 64, 64), dict(arch=120)),
    ]
    for name, fn, types, constants, options in todo:
        emit(name, fn, types, constants, **options)


main()
