"""torch (fbgemm int8) and ONNX Runtime (f32) as workers; the protocol is in compare.py."""

import json
import os
import sys
import time
import warnings

import numpy as np


def torch_int8(a, gate, up, threads):
    """W8A8: per-channel int8 weights, A quantized per call. Gate and up as one product quantize A once."""
    import torch

    warnings.filterwarnings("ignore", "torch.quantize_per")  # deprecated, and what fbgemm takes
    torch.set_num_threads(threads)
    torch.backends.quantized.engine = "fbgemm"
    weights = torch.cat([torch.from_numpy(gate), torch.from_numpy(up)])
    step = weights.abs().amax(dim=1).double() / 127
    quantized = torch.quantize_per_channel(weights, step, torch.zeros(len(weights), dtype=torch.int64), 0, torch.qint8)
    a, n = torch.from_numpy(a), len(gate)

    def packed():
        # reduce_range: without it vpmaddubsw saturates on processors without VNNI.
        weights = torch.ops.quantized.linear_prepack(quantized, None)

        @torch.inference_mode()
        def run():
            c = torch.ops.quantized.linear_dynamic(a, weights, reduce_range=True)
            return torch.nn.functional.silu(c[:, :n]).mul_(c[:, n:])

        return run

    return quantized.numel(), packed, lambda c: c.numpy()


def onnxruntime_f32(a, gate, up, threads):
    """Two MatMul and silu*mul as one graph; the weights are constants, which the runtime packs at load."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

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
    options.intra_op_num_threads = threads

    def session():
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"a": a})[0]

    return gate.nbytes + up.nbytes, session, lambda c: c


PEERS = {"torch-fbgemm-int8": torch_int8, "onnxruntime-f32": onnxruntime_f32}


def main():
    peer, folder, m, n, k, cold_bytes, threads = sys.argv[1:]
    m, n, k, cold_bytes, threads = map(int, (m, n, k, cold_bytes, threads))
    a = np.fromfile(f"{folder}/{m}/a.f32", np.float32).reshape(m, k)
    gate, up = (np.fromfile(f"{folder}/{name}.f32", np.float32).reshape(n, k) for name in ("b1", "b2"))
    weights_bytes, make, to_numpy = PEERS[peer](a, gate, up, threads)
    sets = [make() for _ in range(1 + cold_bytes // weights_bytes)]
    del gate, up
    for run in sets:
        c = run()
    np.ascontiguousarray(to_numpy(c)).tofile(f"{folder}/{m}/{peer}.c")
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
