"""The stopwatch for CUDA launches of torch, as ``dualgemm bench --device cuda`` has it: operands in rotation so that weights
come from memory, calls in a graph of about 2.5 ms, one untimed and one timed replay after 8 ms of rest each, nine times."""

import time

import numpy as np
import torch

#: Bytes of weights that take turns: several times the L2 cache of any card.
ROTATE = 220 << 20
REPLAYS = 9
REST_S = 8e-3
REPLAY_US = 2500.0


def copies(weight_bytes):
    """How many copies of a weight do not stay in a card's cache."""
    return min(max(2, -(-ROTATE // weight_bytes)), 64)


def time_calls(calls):
    """Median, 10th and 90th percentile of one call in µs. The calls, one per copy of the operands, have run before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # Calls of dualgemm are recorded on a stream that has seen them.
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):
            start.record()
            for call in calls:
                call()
            end.record()
    torch.cuda.synchronize()
    each_us = start.elapsed_time(end) * 1e3 / len(calls)
    count = int(min(max(8, REPLAY_US / each_us), 400))
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            calls[i % len(calls)]()
    times = []
    for _ in range(REPLAYS):
        time.sleep(REST_S)
        graph.replay()
        torch.cuda.synchronize()
        time.sleep(REST_S)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return tuple(float(x) for x in np.percentile(times, [50, 10, 90]))
