"""torch (fbgemm int8), ONNX Runtime (f32) and KTransformers' kt_kernel (mixtures) as workers; the protocol is in compare.py."""

import importlib.util
import json
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np


class Job:
    """Command line of a worker, and its operands."""

    def __init__(self, peer, folder, m, n, k, cold_bytes, threads, op, experts, top_k):
        self.peer, self.folder, self.op = peer, folder, op
        self.m, self.n, self.k, self.cold_bytes, self.threads = map(int, (m, n, k, cold_bytes, threads))
        self.experts, self.top_k = int(experts), int(top_k)
        self.a = self.read(f"{m}/a.f32", self.m, self.k)

    def read(self, name, *shape, dtype=np.float32):
        return np.fromfile(f"{self.folder}/{name}", dtype).reshape(shape)

    def gate_and_up(self):
        return (self.read(name, self.n, self.k) for name in ("b1.f32", "b2.f32"))


def torch_int8(job):
    """W8A8: per-channel int8 weights, A quantized per call. Gate and up as one product quantize A once."""
    import torch

    gate, up = job.gate_and_up()
    warnings.filterwarnings("ignore", "torch.quantize_per")  # deprecated, and what fbgemm takes
    torch.set_num_threads(job.threads)
    torch.backends.quantized.engine = "fbgemm"
    weights = torch.cat([torch.from_numpy(gate), torch.from_numpy(up)])
    step = weights.abs().amax(dim=1).double() / 127
    quantized = torch.quantize_per_channel(weights, step, torch.zeros(len(weights), dtype=torch.int64), 0, torch.qint8)
    a, n = torch.from_numpy(job.a), job.n

    def packed():
        # reduce_range: without it vpmaddubsw saturates on processors without VNNI.
        weights = torch.ops.quantized.linear_prepack(quantized, None)

        @torch.inference_mode()
        def run():
            c = torch.ops.quantized.linear_dynamic(a, weights, reduce_range=True)
            return torch.nn.functional.silu(c[:, :n]).mul_(c[:, n:])

        return run

    return quantized.numel(), packed, lambda c: c.numpy()


def onnxruntime_f32(job):
    """Two MatMul and silu*mul as one graph; the weights are constants, which the runtime packs at load."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    a, (gate, up) = job.a, job.gate_and_up()
    f32 = TensorProto.FLOAT
    nodes = [("MatMul", ["a", "gate"], "g"), ("MatMul", ["a", "up"], "u"), ("Sigmoid", ["g"], "s")]
    nodes += [("Mul", ["g", "s"], "silu"), ("Mul", ["silu", "u"], "c")]
    constants = [numpy_helper.from_array(np.ascontiguousarray(w.T), name) for w, name in ((gate, "gate"), (up, "up"))]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output]) for op, inputs, output in nodes],
        "dual_gemm",
        [helper.make_tensor_value_info("a", f32, a.shape)],
        [helper.make_tensor_value_info("c", f32, [len(a), len(gate)])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads

    def session():
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"a": a})[0]

    return gate.nbytes + up.nbytes, session, lambda c: c


def kt_extension():
    """kt_kernel's compiled part for this processor, alone: the package's own import wants much more."""
    package = Path(importlib.util.find_spec("kt_kernel").origin).parent

    def load(name, path):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    variant = load("detect", package / "_cpu_detect.py").detect_cpu_features()
    return load("kt_kernel_ext", next(package.glob(f"_kt_kernel_ext_{variant}.*")))


def mxfp4(x):
    """Codes, and scales of 32 elements: the least powers of two that hold all."""
    import torch

    blocks = x.reshape(len(x), -1, 32)
    step = (blocks.abs().amax(dim=2, keepdim=True) / 6).log2().ceil().exp2()
    codes = torch.bucketize((blocks / step).abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    codes = (codes + blocks.signbit() * 8).to(torch.uint8).reshape(x.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, step.squeeze(2).bfloat16()


def kt_moe(job):
    """A mixture: A and C in bf16, weights as NVFP4 (AVX2), as MXFP4 (AVX-512), or in int8 (AMX), which it quantizes itself."""
    import torch

    # It greets on the output that the protocol has.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    ext, experts = kt_extension(), job.experts
    pool = ext.WorkerPoolConfig()
    pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [job.threads]
    infer = ext.CPUInfer(pool)
    kernel, block = {
        "kt-nvfp4": ("AVX2MXFP4_MOE", 16),
        "kt-mxfp4": ("AMXFP4_KGroup_MOE", 32),
        "kt-int8": ("AMXInt8_MOE", None),
    }[job.peer]

    def matrices(name, rows, columns):
        """Codes and scales of each expert, or all in bf16."""
        if block == 16:
            codes = job.read(f"{name}.codes", experts, rows, columns // 2, dtype=np.uint8)
            scales = job.read(f"{name}.scales", experts, rows, columns // 16, dtype=np.uint8)
            scales = torch.from_numpy(scales).view(torch.float8_e4m3fn).bfloat16()
            return list(torch.from_numpy(codes)), list(scales)
        numbers = np.memmap(f"{job.folder}/{name}.f32", np.float32, "r").reshape(experts, rows, columns)
        if block == 32:
            return list(zip(*(mxfp4(torch.tensor(x)) for x in numbers), strict=True))
        return torch.stack([torch.tensor(x).bfloat16() for x in numbers])

    shapes = {"gate": ("b1", job.n, job.k), "up": ("b2", job.n, job.k), "down": ("b3", job.k, job.n)}
    a, c = torch.from_numpy(job.a).bfloat16(), torch.empty(job.m, job.k, dtype=torch.bfloat16)
    ids = torch.from_numpy(job.read(f"{job.m}/ids.i32", job.m, job.top_k, dtype=np.int32)).long()
    router = torch.from_numpy(job.read(f"{job.m}/router.f32", job.m, job.top_k))
    tokens, nowhere_else = torch.tensor([job.m], dtype=torch.int32), torch.zeros(experts, dtype=torch.bool)

    def moe():
        config = ext.moe.MOEConfig(experts, job.top_k, job.k, job.n, nowhere_else.data_ptr())
        config.pool, config.max_len = infer.backend_, -(-job.m // 32) * 32
        weights = {part: matrices(*shape) for part, shape in shapes.items()}
        for part, tensors in weights.items():
            if block is None:
                setattr(config, f"{part}_proj", tensors.data_ptr())
                continue
            for kind, each in zip(("projs", "scales"), tensors, strict=True):
                setattr(config, f"{part}_{kind}", [[x.data_ptr() for x in each]])
        if block:
            quantization = config.quant_config
            quantization.bits, quantization.group_size, quantization.zero_point = 4, block, False
        moe = getattr(ext.moe, kernel)(config)
        numbers = torch.arange(experts)
        infer.submit(moe.load_weights_task(numbers.data_ptr()))
        infer.sync()
        addresses = [x.data_ptr() for x in (ids, router, a, c)]

        def run():
            infer.submit(moe.forward_task(tokens.data_ptr(), job.top_k, *addresses, False))
            infer.sync()
            return c

        return run

    size = 1 if block is None else 1 / 2 + 4 / block
    return round(3 * experts * job.n * job.k * size), moe, lambda c: c.float().numpy()


PEERS = {"torch-fbgemm-int8": torch_int8, "onnxruntime-f32": onnxruntime_f32}
PEERS |= dict.fromkeys(["kt-nvfp4", "kt-mxfp4", "kt-int8"], kt_moe)


def main():
    job = Job(*sys.argv[1:])
    weights_bytes, make, to_numpy = PEERS[job.peer](job)
    sets = [make() for _ in range(1 + job.cold_bytes // weights_bytes)]
    for run in sets:
        c = run()
    np.ascontiguousarray(to_numpy(c)).tofile(f"{job.folder}/{job.m}/{job.peer}.c")
    print(json.dumps({"weights_bytes": weights_bytes, "sets": len(sets)}), flush=True)
    runs = 0

    def timed():
        nonlocal runs
        run = sets[runs % len(sets)]
        runs += 1
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    for line in sys.stdin:
        seconds = float(line)
        last = timed()
        times = [last] if last >= seconds else []
        while sum(times) < seconds:
            times.append(timed())
        print([round(t * 1e6, 3) for t in times], flush=True)
    os._exit(0)  # without waiting for thread pools


main()
