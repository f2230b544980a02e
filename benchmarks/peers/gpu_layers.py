"""Times whole MLPs and mixtures of experts beside other libraries on one NVIDIA GPU, calls of the Python package.

    python3 benchmarks/peers/gpu_layers.py --vllm DIR        # DIR: where `pip install --no-deps --target DIR vllm` put it

A and Y in bf16, operands that take turns so that weights come from DRAM, launches in a graph, as gpu.py. Errors are against f64
over three rows. Of vLLM, which is not imported, two things are read: its copy of Triton's `triton_kernels`, and the source of its
Triton kernel for mixtures in 4-bit integers, `fused_moe_kernel_gptq_awq`. Both peers of mixtures are given choices that are sorted
by expert already; sorting is part of our call.

| what | peer | runs |
|---|---|---|
| MLP | cublas | bf16 weights (3.6 x the bytes): the product of gate and up, silu·mul in Triton, the product of down |
| gpt-oss-20b, mxfp4: 4 of 32 experts | triton_kernels | `matmul_ogs` with swiglu, `matmul_ogs` with the weighted sum |
| 64 of DeepSeek-V3's experts, 8 a token | vllm-wna16 | 4-bit integers with a scale per 128: two products, silu·mul, sum; the best of three tilings |
"""

import argparse
import ast
import functools
import importlib
import pathlib
import sys
import tempfile
import warnings

import dualgemm
import torch
from dualgemm import peers
from dualgemm.peers.bench import decoded
from dualgemm.peers.timing import copies, time_calls

DEVICE = "cuda:0"
TOKENS = (1, 16, 64, 256, 1024)
#: Choices of a router that take turns.
TURNS = 8


def quantized(rows, k, seed, mxfp4=False):
    """A matrix whose products with rows of size one are of about that size."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=random)
    if mxfp4:
        scales = torch.randint(118, 121, (rows, k // 32), dtype=torch.uint8, generator=random)
        return dualgemm.Quantized(codes, scales, 1.0, "linear", "mxfp4")
    scales = torch.randint(0x30, 0x40, (rows, k // 16), dtype=torch.uint8, generator=random)
    return dualgemm.Quantized(codes, scales, 0.35 / k**0.5)


def values(q):
    """Of a quantized matrix, in f64 on the card."""
    if q.format == "nvfp4":
        return decoded(q._replace(codes=q.codes.to(DEVICE), scales=q.scales.to(DEVICE)))
    return dualgemm.dequantize(q).to(DEVICE).double()


def picked(tokens):
    """The rows that are compared with f64."""
    return sorted({0, tokens // 2, tokens - 1})


def report(what, name, calls, y, want):
    """A line of the table. ``want`` are some rows of what the first call writes to ``y``."""
    for call in reversed(calls):
        call()
    error = ((y[picked(len(y))].double() - want).norm() / want.norm()).item()
    median, p10, p90 = time_calls(calls)
    print(f"{what},{len(y)},{name},{median:.1f},{p10:.1f},{p90:.1f},{error:.1e}", flush=True)


def mlps(n, k):
    parts = dict(zip(("gate", "up", "down"), (quantized(n, k, 1), quantized(n, k, 2), quantized(k, n, 3))))
    ours = [dualgemm.Mlp.from_tensors(**parts, device=DEVICE) for _ in range(copies(3 * n * k * 9 // 16))]
    gate, up, down = map(values, parts.values())
    theirs = [(torch.cat([gate, up]).bfloat16(), down.bfloat16()) for _ in range(2)]
    for tokens in TOKENS:
        a = torch.randn(tokens, k, device=DEVICE).bfloat16()
        rows = a[picked(tokens)].double()
        want = (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
        y, x, c = (torch.empty(tokens, size, dtype=a.dtype, device=DEVICE) for size in (k, 2 * n, n))

        def cublas(both, last):
            torch.mm(a, both.T, out=x)
            torch.mm(peers.silu_mul(x, c), last.T, out=y)

        report(f"mlp {n}x{k}", "dualgemm", [functools.partial(dualgemm.mlp, a, w, y) for w in ours], y, want)
        report(f"mlp {n}x{k}", "cublas", [functools.partial(cublas, *w) for w in theirs], y, want)


def choices(tokens, experts, top_k):
    """A router's logits, and whom it chooses with which weights, in turns."""
    logits = torch.randn(TURNS, tokens, experts, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
    weights, ids = logits.topk(top_k)
    return logits, ids.int(), weights.softmax(-1)


def mixture(what, experts, top_k, k, expert, w, peers_of):
    """Ours and peers; ``expert`` computes one in f64, ``peers_of`` gives the names and calls of peers."""
    for tokens in TOKENS:
        a = torch.randn(tokens, k, device=DEVICE).bfloat16()
        logits, ids, weights = choices(tokens, experts, top_k)
        of = [(a[t].double(), ids[0, t].tolist(), weights[0, t].double()) for t in picked(tokens)]
        want = lambda expert: torch.stack([sum(g * expert(e, x) for e, g in zip(es, gates)) for x, es, gates in of])
        y = torch.empty_like(a)
        ours = [functools.partial(dualgemm.experts, a, i, g, w, y) for i, g in zip(ids, weights)]
        report(what, "dualgemm", ours, y, want(expert))
        for name, calls, theirs in peers_of(a, logits, ids, weights, y):
            try:
                report(what, name, calls, y, want(theirs))
            except Exception as error:  # noqa: BLE001 — whatever it is, the others are measured.
                warnings.warn(f"{name}, {what}, {tokens} tokens: {error}", RuntimeWarning, stacklevel=1)


def gpt_oss(vllm):
    """gpt-oss-20b's experts."""
    experts, top_k, size = 32, 4, 2880
    sys.path.insert(0, str(vllm / "third_party"))
    from triton_kernels import matmul_ogs as ogs
    from triton_kernels import routing
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    parts = [{p: quantized(size, size, 3 * e + i, True) for i, p in enumerate(("gate", "up", "down"))} for e in range(experts)]
    bias = {p: torch.randn(experts, size) for p in ("gate", "up", "down")}
    for e, of in enumerate(parts):
        of.update({f"{p}_bias": bias[p][e] for p in bias})
    w = dualgemm.Experts.from_tensors(parts, activation="swigluoai", device=DEVICE)

    def expert(e, x):
        product = lambda p, x: values(parts[e][p]) @ x + bias[p][e].to(DEVICE).double()
        gate, up = product("gate", x).clamp(max=7), product("up", x).clamp(-7, 7)
        return product("down", gate * torch.sigmoid(1.702 * gate) * (up + 1))

    def swizzled(codes, scales):
        """As vLLM brings mxfp4 into Hopper's layout; groups of scales are padded to fours."""
        scales = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))
        kind, how = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        codes = convert_layout(wrap_torch_tensor(codes.to(DEVICE).mT, dtype=FP4), kind, **how)
        kind, how = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        scales = convert_layout(wrap_torch_tensor(scales.to(DEVICE).mT), kind, **how)
        return codes, ogs.PrecisionConfig(weight_scale=scales)

    opt_flags.update_opt_flags_constraints({"split_k": 1})
    # Gate and up take turns, row by row.
    both = lambda part: torch.stack([torch.stack([getattr(of[p], part) for p in ("gate", "up")], 1).flatten(0, 1) for of in parts])
    first = swizzled(both("codes"), both("scales"))
    last = swizzled(*(torch.stack([getattr(of["down"], part) for of in parts]) for part in ("codes", "scales")))
    first_bias = torch.stack([bias["gate"], bias["up"]], 2).flatten(1).to(DEVICE)
    last_bias = bias["down"].to(DEVICE)
    swiglu = ogs.FusedActivation(ogs.FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (1.702, 7.0), 2)

    def peers_of(a, logits, ids, weights, y):
        between = torch.empty(1, len(a) * top_k, size, dtype=a.dtype, device=DEVICE)

        def call(routing_data, gather, scatter):
            more = {"precision_config": first[1], "fused_activation": swiglu, "y": between}
            ogs.matmul_ogs(a, first[0], first_bias, routing_data, gather_indx=gather, **more)
            more = {"precision_config": last[1], "gammas": routing_data.gate_scal, "y": y[None]}
            ogs.matmul_ogs(between[0], last[0], last_bias, routing_data, scatter_indx=scatter, **more)

        yield "triton_kernels", [functools.partial(call, *routing.routing(of, top_k)) for of in logits], expert

    mixture("gpt-oss-20b", experts, top_k, size, expert, w, peers_of)


def wna16_kernel(vllm):
    """vLLM's Triton kernel. Its module imports half of vLLM; the function needs nothing of it."""
    source = (vllm / "model_executor/layers/fused_moe/fused_moe.py").read_text()
    wanted = ("write_zeros_to_output", "fused_moe_kernel_gptq_awq")
    functions = [node for node in ast.parse(source).body if getattr(node, "name", None) in wanted]
    text = "\n\n".join("@triton.jit\n" + ast.get_source_segment(source, node) for node in functions)
    path = pathlib.Path(tempfile.mkdtemp()) / "wna16.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n\n{text}\n")
    sys.path.insert(0, str(path.parent))
    return importlib.import_module("wna16").fused_moe_kernel_gptq_awq


def aligned(ids, experts, block):
    """Places of choices by expert, each expert's padded to blocks, and the expert of each block, as vLLM's kernel wants them."""
    flat, places, owners = ids.flatten().tolist(), [], []
    for e in range(experts):
        of = [place for place, chosen in enumerate(flat) if chosen == e]
        of += [len(flat)] * (-len(of) % block)
        places += of
        owners += [e] * (len(of) // block)
    return [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (places, owners, [len(places)])]


def deepseek(vllm):
    """A quarter of DeepSeek-V3's experts, as one of four ranks has them."""
    import triton
    import triton.language as tl

    experts, top_k, n, k, group = 64, 8, 2048, 7168, 128
    kernel = wna16_kernel(vllm)
    # Which numbers are in it, no time depends on.
    one = {p: quantized(n if p != "down" else k, k if p != "down" else n, i) for i, p in enumerate(("gate", "up", "down"))}
    w = dualgemm.Experts.from_tensors([one] * experts, device=DEVICE)
    gate, up, down = (values(one[p]) for p in ("gate", "up", "down"))
    expert = lambda e, x: down @ (torch.nn.functional.silu(gate @ x) * (up @ x))
    ints = lambda rows, k: torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, device=DEVICE)
    scales = lambda rows, k: torch.rand(experts, rows, k // group, device=DEVICE).mul(0.2 / k**0.5).bfloat16()
    first, last = (ints(2 * n, k), scales(2 * n, k)), (ints(k, n), scales(k, n))

    def of_integers(e, x):
        def wide(codes, scales):
            values = torch.stack([codes[e] & 15, codes[e] >> 4], -1).flatten(-2).double() - 8
            return values * scales[e].double().repeat_interleave(group, -1)

        gate, up = (wide(*first) @ x).chunk(2)
        return wide(*last) @ (torch.nn.functional.silu(gate) * up)

    def product(a, by, c, weights, order, tile, top_k):
        (codes, scales), (places, owners, padded), (block_m, block_n, block_k, warps) = by, order, tile
        rows, size = codes.shape[1], a.shape[1]
        grid = (len(owners) * triton.cdiv(rows, block_n),)
        kernel[grid](
            a, codes, c, scales, None, weights, places, owners, padded, rows, size, len(places), c.numel() // rows,
            a.stride(0), 1, codes.stride(0), 1, codes.stride(1), rows, 1, scales.stride(0), 1, scales.stride(1), 0, 0, 0,
            block_k_diviable=True, group_size=group, MUL_ROUTED_WEIGHT=weights is not None, top_k=top_k,
            compute_type=tl.bfloat16, has_zp=False, use_int4_w4a16=True, use_int8_w8a16=False, BLOCK_SIZE_M=block_m,
            BLOCK_SIZE_N=block_n, BLOCK_SIZE_K=block_k, GROUP_SIZE_M=1, SPLIT_K=1, num_warps=warps, num_stages=3,
        )  # fmt: skip

    def peers_of(a, logits, ids, weights, y):
        rows = len(a) * top_k
        x, c, z = (torch.empty(rows, size, dtype=a.dtype, device=DEVICE) for size in (2 * n, n, k))

        def call(tile, order, gates):
            product(a, first, x, None, order, tile, top_k)
            product(peers.silu_mul(x, c), last, z, gates.flatten(), order, tile, 1)
            torch.sum(z.view(len(a), top_k, k), 1, out=y)

        block = 16 if len(a) <= 64 else 32 if len(a) <= 256 else 64
        orders = [aligned(of, experts, block) for of in ids]
        for tile in ((block, 64, 64, 4), (block, 128, 64, 4), (block, 64, 128, 4)):
            name = f"vllm-wna16 {'x'.join(map(str, tile[:3]))}"
            yield name, [functools.partial(call, tile, order, gates) for order, gates in zip(orders, weights)], of_integers

    mixture("64 of deepseek-v3", experts, top_k, k, expert, w, peers_of)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=pathlib.Path, help="a folder with vLLM's package; without it, MLPs alone")
    parser.add_argument("--only", help="mlp, gpt-oss or deepseek")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("what,tokens,library,median_us,p10_us,p90_us,rel_l2")
    vllm = args.vllm and args.vllm / "vllm"
    work = {"mlp": lambda: [mlps(14336, 4096), mlps(4096, 7168)]}
    if vllm:
        work.update({"gpt-oss": lambda: gpt_oss(vllm), "deepseek": lambda: deepseek(vllm)})
    with torch.no_grad():
        for name in [args.only] if args.only else work:
            work[name]()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
