"""Times other libraries' NVFP4 gated MLP on one NVIDIA GPU, by the protocol of `dualgemm bench --device cuda`.

    python3 benchmarks/peers/gpu.py --shapes 256x4096x7168,1x4096x7168 --csv peers.csv

Needs the Python package, torch with CUDA, Triton and, for humming, `humming-kernels` (0.1.19 was measured).

C = silu(A·B1ᵀ) ∘ (A·B2ᵀ), A [M, K] in f16 or NVFP4, B1 and B2 [N, K] in NVFP4, f16 C. Sets of operands rotate so that
weights come from DRAM; launches are recorded in a graph of about 2.5 ms, replayed after 8 ms of rest, median of nine with
10th and 90th percentile. Errors are against f64 over three rows. The floor is of the limits that `dualgemm bench` measures
at the start.

| strategy | what runs |
|---|---|
| triton-fused | one Triton kernel that decodes, multiplies and applies the epilogue (python/dualgemm/peers) |
| triton-epilogue | weights kept in f16 (4x the bytes): one cuBLAS product of width 2N, then a Triton kernel of silu·mul |
| dequant-cublas | weights widened to f16 in every call, then as above |
| humming | humming's 4-bit product of width 2N, then silu·mul |

An NVFP4 A is widened to f16 first, by a kernel of its own, in every call.
"""

import argparse
import contextlib
import csv
import sys

import dualgemm
import torch
from dualgemm import peers
from dualgemm.peers.bench import Peer

COLUMNS = (
    "card driver commit m n k a_format out_dtype strategy kernel median_us p10_us p90_us floor_us bound rel_err".split()
)


def dequant_cublas(o):
    wide = torch.empty((o.gate_up.codes.shape[0], o.a.shape[1]), dtype=torch.float16, device=o.device)
    # Widening leaves the tensor scale out; products with it are brought to C's range by a smaller A.
    a = torch.empty_like(o.a)

    def call():
        torch.mul(o.read_a(), o.alpha, out=a)
        torch.mm(a, peers.expand(o.gate_up, wide).T, out=o.x)
        peers.silu_mul(o.x, o.c)

    return call


def humming_layer(codes, scales, scale, dtype):
    """humming's layer of a matrix ``[rows, k]``, or of experts ``[experts, rows, k]``."""
    from humming.layer import HummingLayer

    *experts, rows, half_k = codes.shape
    config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    layer = HummingLayer(
        shape_n=rows, shape_k=2 * half_k, weight_config=config, torch_dtype=dtype, num_experts=experts[0] if experts else None
    ).cuda()
    of_all = torch.full(experts or (1,), scale, dtype=torch.float32, device=codes.device)
    tensors = {"weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn), "weight_scale_2": of_all}
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer


def humming(o):
    layer = humming_layer(o.gate_up.codes, o.gate_up.scales, o.alpha, torch.float16)
    return lambda: peers.silu_mul(layer(o.read_a()), o.c)


MORE = {"dequant-cublas": Peer(dequant_cublas, "cublas"), "humming": Peer(humming, "humming")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", required=True, help="MxNxK, comma-separated")
    parser.add_argument("--a-format", default="f16,nvfp4", help="comma-separated")
    parser.add_argument("--strategy", help="of the table, comma-separated; all by default")
    parser.add_argument("--csv", help="write the measurements here")
    args = parser.parse_args()
    known = {**peers.peers(), **MORE}
    wanted = args.strategy.split(",") if args.strategy else list(known)
    if unknown := set(wanted) - set(known):
        parser.error(f"no strategy is called {', '.join(unknown)}")
    which = {name: known[name] for name in wanted}

    report = dualgemm.bench("16x1024x1024", device="cuda", a_format="f16")
    limits, machine = report["limits"], {name: report["rows"][0][name] for name in ("driver", "commit")}
    print(f"{limits['bytes_per_s'] * 1e-9:.0f} GB/s, {limits['flops_per_s'] * 1e-12:.0f} TFLOP/s", flush=True)
    with contextlib.ExitStack() as stack:
        files = [sys.stdout]
        if args.csv:
            files.append(stack.enter_context(open(args.csv, "w", newline="", encoding="utf-8")))
        writers = [csv.writer(file, lineterminator="\n") for file in files]
        for line in measurements(args, which, limits, machine):
            for writer, file in zip(writers, files):
                writer.writerow(line)
                file.flush()


def measurements(args, which, limits, machine):
    """Lines of the table, its head first, each as soon as it is there."""
    yield COLUMNS
    for shape in args.shapes.split(","):
        problem = tuple(map(int, shape.split("x")))
        for row in peers.measure([problem], args.a_format.split(","), limits, machine, which):
            line = {**row, "card": row["device"], "rel_err": f"{row['rel_l2']:.3e}"}
            for name in ("median_us", "p10_us", "p90_us", "floor_us"):
                line[name] = f"{row[name]:.3f}"
            yield [line[name] for name in COLUMNS]


if __name__ == "__main__":
    main()
