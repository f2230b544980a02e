"""Times whole MLPs and mixtures of experts beside other libraries on one NVIDIA GPU, calls of the Python package.

    python3 benchmarks/peers/gpu_layers.py --vllm DIR        # DIR: where `pip install --no-deps --target DIR vllm` put it

A and Y in bf16, operands that take turns so that weights come from DRAM, launches in a graph, as gpu.py. Errors are against f64
over three rows. Of vLLM, which is not imported, two things are read: its copy of Triton's `triton_kernels`, and the source of its
Triton kernel for mixtures in 4-bit integers, `fused_moe_kernel_gptq_awq`. Peers of mixtures are given choices that are sorted
by expert already; sorting is part of our call. `humming` is there if humming-kernels is.

| what | peer | runs |
|---|---|---|
| MLP | gate/up, down | our two products, each by itself; then the whole over the sum of their times |
| | cublas | bf16 weights (3.6 x the bytes): the product of gate and up, silu·mul in Triton, the product of down |
| | humming | the same of its 4-bit products |
| gpt-oss, mxfp4: 4 of 32 experts, or of 128 | triton_kernels | `matmul_ogs` with swiglu, `matmul_ogs` with the weighted sum |
| DeepSeek-V3: 8 of 256 experts | vllm-wna16 | 4-bit integers with a scale per 128: two products, silu·mul, sum; vLLM's tiling or another, whichever is faster |
| | humming | NVFP4: two of its indexed products, silu·mul, sum |
"""

import argparse
import ast
import functools
import importlib
import json
import pathlib
import sys
import tempfile
import warnings

import dualgemm
import gpu
import torch
from dualgemm import peers
from dualgemm.peers.bench import decoded
from dualgemm.peers.timing import copies, time_calls

DEVICE = "cuda:0"
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
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
    """A line of the table, whose median it gives. ``want`` are some rows of what the first call writes to ``y``."""
    try:
        for call in reversed(calls):
            call()
        error = ((y[picked(len(y))].double() - want).norm() / want.norm()).item()
        median, p10, p90 = time_calls(calls)
    except Exception as reason:  # noqa: BLE001 — whatever it is, the others are measured.
        warnings.warn(f"{name}, {what}, {len(y)} tokens: {reason}", RuntimeWarning, stacklevel=1)
        return float("nan")
    print(f"{what},{len(y)},{name},{median:.1f},{p10:.1f},{p90:.1f},{error:.1e}", flush=True)
    return median


def fastest(alternatives):
    """The label and the calls of those that one call takes the least time of, once what is compiled has been."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once(calls):
        calls[0]()
        start.record()
        calls[0]()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    return min(alternatives.items(), key=lambda item: once(item[1]))


def humming_layer(*tensors):
    """humming's layer of some tensors in bf16, none without humming."""
    try:
        return gpu.humming_layer(*tensors, torch.bfloat16)
    except ImportError:
        return None


def mlps(n, k):
    what = f"mlp {n}x{k}"
    parts = dict(zip(("gate", "up", "down"), (quantized(n, k, 1), quantized(n, k, 2), quantized(k, n, 3))))
    count = copies(3 * n * k * 9 // 16)
    ours = [dualgemm.Mlp.from_tensors(**parts, device=DEVICE) for _ in range(count)]
    both = {name: parts[name] for name in ("gate", "up")}
    firsts = [dualgemm.Weights.from_tensors(**both, device=DEVICE) for _ in range(copies(2 * n * k * 9 // 16))]
    lasts = [dualgemm.Linear.from_tensors(parts["down"], device=DEVICE) for _ in range(copies(n * k * 9 // 16))]
    gate, up, down = map(values, parts.values())
    wide = [(torch.cat([gate, up]).bfloat16(), down.bfloat16()) for _ in range(2)]
    as_given = [tuple(torch.cat([getattr(parts[p], part) for p in ps]).to(DEVICE) for part in ("codes", "scales"))
                for ps in (("gate", "up"), ("down",))]  # fmt: skip
    scales = [parts[p].global_scale for p in ("gate", "down")]
    theirs = [[humming_layer(*matrix, scale) for matrix, scale in zip(as_given, scales)] for _ in range(count)]
    for tokens in TOKENS:
        a = torch.randn(tokens, k, device=DEVICE).bfloat16()
        rows = a[picked(tokens)].double()
        between = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
        want = between @ down.T
        y, x, c = (torch.empty(tokens, size, dtype=a.dtype, device=DEVICE) for size in (k, 2 * n, n))

        def cublas(both, last):
            torch.mm(a, both.T, out=x)
            torch.mm(peers.silu_mul(x, c), last.T, out=y)

        def humming(both, last):
            both(a, outputs=x)
            last(peers.silu_mul(x, c), outputs=y)

        whole = report(what, "dualgemm", [functools.partial(dualgemm.mlp, a, w, y) for w in ours], y, want)
        first = report(what, "gate/up", [functools.partial(dualgemm.swiglu, a, w, c) for w in firsts], c, between)
        of_c = c[picked(tokens)].double() @ down.T
        last = report(what, "down", [functools.partial(dualgemm.linear, c, w, y) for w in lasts], y, of_c)
        print(f"{what},{tokens},dualgemm over its parts,{whole / (first + last):.3f}", flush=True)
        report(what, "cublas", [functools.partial(cublas, *w) for w in wide], y, want)
        if theirs[0][0] is not None:
            report(what, "humming", [functools.partial(humming, *w) for w in theirs], y, want)


def choices(tokens, experts, top_k):
    """A router's logits, and whom it chooses with which weights, in turns."""
    logits = torch.randn(TURNS, tokens, experts, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
    weights, ids = logits.topk(top_k)
    return logits, ids.int(), weights.softmax(-1)


def mixture(what, experts, top_k, k, expert, w, peers_of):
    """Ours and peers; ``expert`` computes one in f64, ``peers_of`` gives of each peer alternatives by name, and its ``expert``."""
    for tokens in TOKENS:
        a = torch.randn(tokens, k, device=DEVICE).bfloat16()
        logits, ids, weights = choices(tokens, experts, top_k)
        of = [(a[t].double(), ids[0, t].tolist(), weights[0, t].double()) for t in picked(tokens)]
        want = lambda expert: torch.stack([sum(g * expert(e, x) for e, g in zip(es, gates)) for x, es, gates in of])
        y = torch.empty_like(a)
        ours = [functools.partial(dualgemm.experts, a, i, g, w, y) for i, g in zip(ids, weights)]
        report(what, "dualgemm", ours, y, want(expert))
        for alternatives, theirs in peers_of(a, logits, ids, weights, y):
            report(what, *fastest(alternatives), y, want(theirs))


def gpt_oss(vllm, model, experts):
    """gpt-oss's experts."""
    top_k, size = 4, 2880
    sys.path.insert(0, str(vllm / "third_party"))
    from triton_kernels import matmul_ogs as ogs
    from triton_kernels import routing
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    # Which numbers are in them, no time depends on.
    few = [{p: quantized(size, size, 3 * e + i, True) for i, p in enumerate(("gate", "up", "down"))} for e in range(16)]
    parts = [dict(few[e % len(few)]) for e in range(experts)]
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

        yield {"triton_kernels": [functools.partial(call, *routing.routing(of, top_k)) for of in logits]}, expert

    mixture(model, experts, top_k, size, expert, w, peers_of)


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
    flat = ids.flatten().long()
    rows = flat.bincount(minlength=experts)
    padded = -(-rows // block) * block
    order = flat.argsort(stable=True)
    # Behind the ends of those before, as far as it is behind their rows.
    shift = (padded.cumsum(0) - padded) - (rows.cumsum(0) - rows)
    places = torch.full((int(padded.sum()),), len(flat), device=DEVICE)
    places[torch.arange(len(flat), device=DEVICE) + shift[flat[order]]] = order
    owners = torch.arange(experts, device=DEVICE).repeat_interleave(padded // block)
    return [x.int() for x in (places, owners, padded.sum()[None])]


def of_humming(layers, rooms, ids, weights):
    """Calls of a mixture of humming's, as vLLM makes them."""
    from humming.tune import get_heuristics_config

    (a, x, c, z, y), (experts, top_k) = rooms, (layers[0].num_experts, ids.shape[-1])
    rows, how = len(a) * top_k, {"gemm_type": "indexed"}

    def product(layer, a, out, tuning, order, top_k):
        places, owners, padded = order
        more = {"sorted_ids": places, "expert_ids": owners, "num_tokens_padded": padded, "valid_shape_m": rows}
        layer(a, outputs=out, top_k=top_k, compute_config=how, tuning_config=tuning, **more)

    tunings = [get_heuristics_config(layer.humming_config, **how) for layer in layers]
    blocks = [next(config["block_shape"][0] for low, high, config in of if low < rows <= high) for of in tunings]
    tunings = [json.dumps(tuning) for tuning in tunings]

    def call(orders, gates):
        product(layers[0], a, x, tunings[0], orders[0], top_k)
        product(layers[1], peers.silu_mul(x, c), z, tunings[1], orders[1], 1)
        torch.sum(z.view(len(a), top_k, -1) * gates[..., None].to(z.dtype), 1, out=y)

    orders = [[aligned(of, experts, block) for block in blocks] for of in ids]
    return [functools.partial(call, *of) for of in zip(orders, weights)]


def deepseek(vllm):
    """DeepSeek-V3's experts, all of them."""
    import triton
    import triton.language as tl

    experts, top_k, n, k, group = 256, 8, 2048, 7168, 128
    kernel = wna16_kernel(vllm)
    # Which numbers are in it, no time depends on.
    one = {p: quantized(n if p != "down" else k, k if p != "down" else n, i) for i, p in enumerate(("gate", "up", "down"))}
    w = dualgemm.Experts.from_tensors([one] * experts, device=DEVICE)
    gate, up, down = (values(one[p]) for p in ("gate", "up", "down"))
    expert = lambda e, x: down @ (torch.nn.functional.silu(gate @ x) * (up @ x))
    ints = lambda rows, k: torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, device=DEVICE)
    scales = lambda rows, k: torch.rand(experts, rows, k // group, device=DEVICE).mul(0.2 / k**0.5).bfloat16()
    first, last = (ints(2 * n, k), scales(2 * n, k)), (ints(k, n), scales(k, n))

    of_all = lambda ps: [torch.cat([getattr(one[p], part) for p in ps]).to(DEVICE).repeat(experts, 1, 1) for part in ("codes", "scales")]
    theirs = [humming_layer(*of_all(ps), one[ps[0]].global_scale) for ps in (("gate", "up"), ("down",))]
    torch.cuda.empty_cache()

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

        # vLLM's, and two wider ones.
        m = 16 if len(a) <= 20 else 32 if len(a) <= 40 else 64
        tiles = [(m, 32, 64, 4) if len(a) == 1 else (m, 64, 32, 4)]
        tiles += [(m, *wide) for m in (16, 64) for wide in ((64, 64, 4), (128, 64, 4), (64, 128, 4))]
        orders = {m: [aligned(of, experts, m) for of in ids] for m in {tile[0] for tile in tiles}}
        calls = lambda tile: [functools.partial(call, tile, *of) for of in zip(orders[tile[0]], weights)]
        yield {f"vllm-wna16 {'x'.join(map(str, tile[:3]))}": calls(tile) for tile in tiles}, of_integers
        if theirs[0] is not None:
            yield {"humming": of_humming(theirs, (a, x, c, z, y), ids, weights)}, expert

    mixture("deepseek-v3", experts, top_k, k, expert, w, peers_of)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=pathlib.Path, help="a folder with vLLM's package; without it, MLPs alone")
    parser.add_argument("--only", help="mlp, gpt-oss-20b, gpt-oss-120b or deepseek")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("what,tokens,library,median_us,p10_us,p90_us,rel_l2")
    vllm = args.vllm and args.vllm / "vllm"
    work = {"mlp": lambda: [mlps(14336, 4096), mlps(4096, 7168)]}
    if vllm:
        work.update({f"gpt-oss-{size}": functools.partial(gpt_oss, vllm, f"gpt-oss-{size}", experts)
                     for size, experts in (("20b", 32), ("120b", 128))})  # fmt: skip
        work["deepseek"] = lambda: deepseek(vllm)
    with torch.no_grad():
        for name in [args.only] if args.only else work:
            work[name]()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
