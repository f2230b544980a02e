"""Times other libraries' NVFP4 gated MLP on one NVIDIA GPU, by the protocol of `dualgemm bench --device cuda`.

    python3 benchmarks/peers/gpu.py --shapes 256x4096x7168,1x4096x7168 --csv peers.csv

Needs torch with CUDA, Triton and, for the humming peers, `humming-kernels` (0.1.19 was measured).

C = silu(A·B1ᵀ) ∘ (A·B2ᵀ), A [M, K], B1 and B2 [N, K], full e2m1 code set, f16 C. One fused weight [2N, K] per set;
sets rotate so that weights come from DRAM; launches are recorded in a graph of about 2.5 ms, replayed after 8 ms of
rest, median of nine. Errors are against f64 over three rows.

| peer | what runs |
|---|---|
| cublas-f16 | weights kept in f16 (4x the bytes): one product of width 2N, then silu·mul |
| dequant-cublas | weights widened to f16 in every call, then as above |
| humming-f16 | humming's 4-bit product of width 2N on f16 A, then silu·mul |
| humming-fp4 | A widened from NVFP4 first |
"""

import argparse
import csv
import statistics
import subprocess
import sys
import time

import torch
import triton
import triton.language as tl

ROTATE = 220 << 20
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@triton.jit
def silu_mul_kernel(x, y, n, total, BLOCK: tl.constexpr):
    """y[m, n] = silu(x[m, :n]) · x[m, n:]"""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < total
    row = at // n
    gate = tl.load(x + row * 2 * n + at % n, mask=keep).to(tl.float32)
    up = tl.load(x + row * 2 * n + n + at % n, mask=keep).to(tl.float32)
    tl.store(y + at, (gate * tl.sigmoid(gate) * up).to(tl.float16), mask=keep)


@triton.jit
def widen_kernel(codes, scales, out, total, BLOCK: tl.constexpr):
    """out[2i], out[2i+1] = the codes of byte i times the scale of their block of 16."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < total
    byte = tl.load(codes + at, mask=keep).to(tl.int32)
    scale = tl.load(scales + at // 8, mask=keep).to(tl.float32)
    for half in tl.static_range(2):
        code = (byte >> (4 * half)) & 15
        magnitude = code & 7
        exponent, mantissa = magnitude >> 1, magnitude & 1
        normal = (1.0 + 0.5 * mantissa.to(tl.float32)) * tl.exp2(exponent.to(tl.float32) - 1.0)
        value = tl.where(exponent == 0, 0.5 * mantissa.to(tl.float32), normal)
        value = tl.where(code > 7, -value, value) * scale
        tl.store(out + 2 * at + half, value.to(tl.float16), mask=keep)


def silu_mul(x, y):
    block = 1024
    silu_mul_kernel[(triton.cdiv(y.numel(), block),)](x, y, y.shape[1], y.numel(), BLOCK=block)


def widen(codes, scales, out):
    block = 1024
    widen_kernel[(triton.cdiv(codes.numel(), block),)](codes, scales, out, codes.numel(), BLOCK=block)


def dequantize(codes, scales):
    """f64 values of NVFP4 codes with e4m3 block scales, on the CPU."""
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float64)
    codes = codes.cpu().to(torch.int64)
    values = torch.stack([table[codes & 15], table[codes >> 4]], dim=-1).flatten(-2)
    return values * scales.cpu().double().repeat_interleave(16, dim=-1)


def quantized(rows, k, generator):
    """Codes of all sixteen values and block scales in 2^-4 .. 2^4, so that products stay inside f16."""
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator, device="cuda")
    scales = torch.randint(0x18, 0x58, (rows, k // 16), dtype=torch.uint8, generator=generator, device="cuda")
    return codes, scales.view(torch.float8_e4m3fn)


class Set:
    """Operands and buffers of one call."""

    def __init__(self, m, n, k, generator):
        self.a_codes, self.a_scales = quantized(m, k, generator)
        self.codes, self.scales = quantized(2 * n, k, generator)
        self.alpha = (2.0 ** -10) / k**0.5
        self.a = torch.empty((m, k), dtype=torch.float16, device="cuda")
        widen(self.a_codes, self.a_scales, self.a)
        self.x = torch.empty((m, 2 * n), dtype=torch.float16, device="cuda")
        self.c = torch.empty((m, n), dtype=torch.float16, device="cuda")

    def reference(self, rows):
        a = dequantize(self.a_codes[rows], self.a_scales[rows]) * self.alpha
        gate, up = (a @ dequantize(self.codes, self.scales).T).chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up


def cublas(s, _):
    weight = torch.empty((s.codes.shape[0], s.a.shape[1]), dtype=torch.float16, device="cuda")
    widen(s.codes, s.scales, weight)
    s.weight = weight * s.alpha

    def call():
        torch.mm(s.a, s.weight.T, out=s.x)
        silu_mul(s.x, s.c)

    return call


def dequant_cublas(s, shared):
    shared.setdefault("weight", torch.empty((s.codes.shape[0], s.a.shape[1]), dtype=torch.float16, device="cuda"))
    # The tensor scale is a power of two times 1/sqrt(K); A carries it here, since the widening kernel has none.
    s.scaled = s.a * s.alpha

    def call():
        widen(s.codes, s.scales, shared["weight"])
        torch.mm(s.scaled, shared["weight"].T, out=s.x)
        silu_mul(s.x, s.c)

    return call


def humming_layer(s):
    from humming.layer import HummingLayer

    rows, k = s.codes.shape[0], s.a.shape[1]
    config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    layer = HummingLayer(shape_n=rows, shape_k=k, weight_config=config, torch_dtype=torch.float16).cuda()
    scale = torch.tensor([s.alpha], dtype=torch.float32, device="cuda")
    layer.load_from_tensors({"weight": s.codes, "weight_scale": s.scales, "weight_scale_2": scale})
    layer.transform()
    return layer


def humming_f16(s, _):
    s.layer = humming_layer(s)

    def call():
        silu_mul(s.layer(s.a), s.c)

    return call


def humming_fp4(s, _):
    s.layer = humming_layer(s)

    def call():
        widen(s.a_codes, s.a_scales, s.a)
        silu_mul(s.layer(s.a), s.c)

    return call


PEERS = {
    "cublas-f16": (cublas, "f16", 4),
    "dequant-cublas": (dequant_cublas, "f16", 1),
    "humming-f16": (humming_f16, "f16", 1),
    "humming-fp4": (humming_fp4, "nvfp4", 1),
}


def measure(peer, m, n, k):
    make, _, factor = PEERS[peer]
    generator = torch.Generator(device="cuda").manual_seed(1)
    weight_bytes = factor * 2 * n * k * 9 // 16
    sets = [Set(m, n, k, generator) for _ in range(max(2, ROTATE // weight_bytes + 1))]
    shared = {}
    calls = [make(s, shared) for s in sets]
    rows = sorted({0, m // 2, m - 1})
    calls[0]()
    torch.cuda.synchronize()
    want = sets[0].reference(rows)
    error = ((sets[0].c[rows].cpu().double() - want).norm() / want.norm()).item()

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for call in calls:
        call()
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    per_replay = max(8, min(200, int(2500 * len(calls) / (start.elapsed_time(end) * 1e3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(per_replay):
            calls[i % len(calls)]()
    times = []
    for _ in range(9):
        time.sleep(8e-3)
        graph.replay()
        torch.cuda.synchronize()
        time.sleep(8e-3)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / per_replay)
    times.sort()
    return statistics.median(times), times[0], times[-1], error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", required=True, help="MxNxK, comma-separated")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--csv", help="write the measurements here")
    args = parser.parse_args()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split("\n")[0]
    card = torch.cuda.get_device_name()
    columns = "card driver m n k a_format peer median_us min_us max_us rel_err".split()
    rows = []
    for shape in args.shapes.split(","):
        m, n, k = map(int, shape.split("x"))
        for peer in args.peers.split(","):
            try:
                median, low, high, error = measure(peer, m, n, k)
            except Exception as failure:  # a peer that does not run is reported, the others go on
                print(f"{shape:>16} {peer:<16} failed: {failure}", file=sys.stderr, flush=True)
                continue
            finally:
                torch.cuda.empty_cache()
            rows.append([card, driver, m, n, k, PEERS[peer][1], peer, f"{median:.2f}", f"{low:.2f}", f"{high:.2f}", f"{error:.2e}"])
            print(f"{shape:>16} {peer:<16} {median:9.2f} us ({low:.2f} .. {high:.2f})  rel {error:.1e}", flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])


if __name__ == "__main__":
    main()
