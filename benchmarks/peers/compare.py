"""Times the CPU peers and dualgemm side by side: round-robin, one process at a time, same operands.

    python3 benchmarks/peers/compare.py [--op gate-up|linear|mlp|moe] [--shapes MxNxK,…] [--peers NAME,…] [--record FILE.csv] [--json]

Every peer is a worker, a process that packs its weights once and then takes turns:

    worker PEER FOLDER M N K COLD_BYTES THREADS OP EXPERTS TOP_K
    its first line of output    {"weights_bytes": …, "sets": …}, after writing C to FOLDER/M/PEER.c
    a line of input             seconds; the worker runs for at least that long
    a line of output            [µs, …], one per run; the first run of a turn counts only if it fills the turn

In a round each peer has a turn, with turns of dualgemm's kernels before and after it, and a ratio compares a turn with
those two. All workers but the one whose turn it is are stopped (SIGSTOP): no idle thread pool spins beside it. The
columns are explained in ../README.md.
"""

import argparse
import csv
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import install

if Path(sys.prefix).resolve() != (install.HOME / "venv").resolve():
    if not install.PYTHON.exists():
        sys.exit("the peers are not installed: run install.py first")
    os.execv(install.PYTHON, [install.PYTHON, *sys.argv])

import operands  # noqa: E402  needs numpy, which the venv has

GGML, IK = [install.BIN / "ggml-worker"], [install.BIN / "ik-worker"]
PYTHON = [install.PYTHON, install.HERE / "python_worker.py"]
RUST = install.HOME / "target/release"
# Worker, and the format of A that the kernel multiplies (of A that arrives as f32, bf16 and f32).
OURS = {
    "dualgemm-w4a4": ([RUST / "dualgemm"], "nvfp4"),
    "dualgemm-w4a16-bf16": ([RUST / "dualgemm"], "bf16"),
    "dualgemm-w4a16-f32": ([RUST / "dualgemm"], "f32"),
}
# Multiplications and additions of one M·N·K.
FLOPS = {"gate-up": 4, "linear": 2, "mlp": 6, "moe": 6 * operands.TOP_K}
# Worker, and what it can do.
PEERS = {
    "ggml-nvfp4": (GGML, FLOPS),
    "ggml-f16": (GGML, FLOPS),
    "ik-q4_0_r8": (IK, FLOPS),
    "ik-q4_k_r4-fused": (IK, FLOPS),
    "torch-fbgemm-int8": (PYTHON, ["gate-up"]),
    "onnxruntime-f32": (PYTHON, ["gate-up"]),
    "gemm-f32": ([RUST / "gemm_f32"], ["gate-up"]),
    "kt-nvfp4": (PYTHON, ["moe"]),
    "kt-mxfp4": (PYTHON, ["moe"]),
    "kt-int8": (PYTHON, ["moe"]),
}
SHAPES = "1x4096x7168,16x4096x7168,64x4096x7168,256x3072x4096,256x4096x7168,512x4096x7168"
MOE_SHAPES = "1x2048x7168,16x2048x7168,64x2048x7168,512x2048x7168"


class Worker:
    """A peer that has packed its weights and waits, stopped, for its turn."""

    def __init__(self, name, command, folder, shape, cold_bytes, options):
        self.name, self.turns, threads = name, [], options.threads
        mixture = (operands.EXPERTS, operands.TOP_K) if options.op == "moe" else (1, 1)
        arguments = [*command, name, folder, *shape, cold_bytes, threads, options.op, *mixture]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            list(map(str, arguments)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: ended with {self.process.wait()}")
        return json.loads(line)

    def ready(self):
        self.setup = self.answer()
        self.process.send_signal(signal.SIGSTOP)

    def turn(self, seconds):
        """Runs for a while; returns the times, µs."""
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        self.turns.append(self.answer())
        self.process.send_signal(signal.SIGSTOP)
        return self.turns[-1]

    def end(self):
        self.process.kill()
        self.process.wait()


def machine():
    """Processor, its threads and its last cache."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    field = dict(re.findall(r"^(vendor_id|cpu family|model|model name)\s*: (.*)$", cpuinfo, re.M))
    model = f"{field['model name']} (family {field['cpu family']}, model {field['model']})"
    cache = max(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    size = (cache / "size").read_text().strip()
    return {"cpu": model, "cpus": os.cpu_count(), "l3_bytes": int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]]}


def take_turns(ours, theirs, options):
    """Runs all rounds; returns the ratios theirs / ours of each round by pair of names."""

    def turn(worker):
        return statistics.median(worker.turn(options.seconds))

    ratios = {}
    before = [turn(kernel) for kernel in ours]
    for _ in range(options.rounds):
        for peer in theirs:
            time, after = turn(peer), [turn(kernel) for kernel in ours]
            for kernel, t0, t1 in zip(ours, before, after, strict=True):
                ratios.setdefault((peer.name, kernel.name), []).append(time / ((t0 + t1) / 2))
            before = after
    return ratios


def compare(shape, cold, peers, here, options):
    """Rows of the table for one shape."""
    m, n, k = shape
    folder = install.HOME / f"operands/{n}x{k}{f'x{operands.EXPERTS}' if options.op == 'moe' else ''}"
    operands.make(folder, m, n, k, options.op)
    # Four times the last cache: what a set of weights left there is gone when its next turn comes.
    cold_bytes = 4 * here["l3_bytes"] if cold else 0
    commands = {name: command for name, (command, _) in OURS.items()} | peers
    workers = [Worker(name, command, folder, shape, cold_bytes, options) for name, command in commands.items()]
    try:
        for worker in workers:
            worker.ready()
        ratios = take_turns(workers[: len(OURS)], workers[len(OURS) :], options)
    finally:
        for worker in workers:
            worker.end()
    for worker in workers:
        times = sorted(time for turn in worker.turns for time in turn)
        median, p10, p90 = (times[round(q * (len(times) - 1))] for q in (0.5, 0.1, 0.9))
        row = {"op": options.op, "m": m, "n": n, "k": k, "weights": "cold" if cold else "warm", "peer": worker.name}
        row |= {"median_us": median, "p10_us": p10, "p90_us": p90, "runs": len(times)}
        row |= {"gflops": FLOPS[options.op] * m * n * k / median / 1e3, "weights_mb": worker.setup["weights_bytes"] / 1e6}
        _, a_format = OURS.get(worker.name, (None, "f32"))
        row["rel_l2"] = operands.relative_error(folder, worker.name, "f32", shape, options.op)
        row["rel_l2_of_kernel"] = operands.relative_error(folder, worker.name, a_format, shape, options.op)
        for kernel in OURS:
            rounds = ratios.get((worker.name, kernel), [])
            for key, pick in ("", statistics.median), ("_min", min), ("_max", max):
                row[ratio_key(kernel) + key] = pick(rounds) if rounds else None
        yield row


def ratio_key(kernel):
    return "x_" + kernel.removeprefix("dualgemm-").replace("-", "_")


def show(rows):
    """Prints the rows of one shape."""
    heads = [f"x {kernel.removeprefix('dualgemm-')}" for kernel in OURS]
    print(
        f"{'shape':>13} {'weights':7} {'peer':20}{'median ms':>10}{'p10':>9}{'p90':>9}{'GFLOP/s':>8}{'MB':>6}"
        f"{'rel L2':>8}{'of kernel':>10}" + "".join(f"  {head:22}" for head in heads)
    )
    for r in rows:
        ms = f"{r['median_us'] / 1e3:10.3f}{r['p10_us'] / 1e3:9.3f}{r['p90_us'] / 1e3:9.3f}"
        line = f"{r['m']}x{r['n']}x{r['k']}".rjust(13) + f" {r['weights']:7} {r['peer']:20}{ms}{r['gflops']:8.1f}"
        line += f"{r['weights_mb']:6.0f}{r['rel_l2']:8.0e}{r['rel_l2_of_kernel']:10.0e}"
        for key in map(ratio_key, OURS):
            if r[key]:
                spread = f"{r[key + '_min']:.2f} to {r[key + '_max']:.2f}"
                line += f"  {f'{r[key]:.2f} ({spread})':22}"
        print(line.rstrip(), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", help="MxNxK, comma-separated; M = 1 is measured cold and, but for moe, warm")
    operations = f"mlp has a down projection back to K; moe is {operands.EXPERTS} of them, {operands.TOP_K} for each token"
    parser.add_argument("--op", choices=FLOPS, default="gate-up", help=operations)
    parser.add_argument("--peers", help="comma-separated; without it, all that know the operation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.15, help="length of a turn, at least one run")
    parser.add_argument("--record", type=Path, metavar="FILE.csv", help="append the rows")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    known = [name for name, (_, can) in PEERS.items() if options.op in can]
    names = options.peers.split(",") if options.peers else known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no peer for {options.op} is called {unknown[0]}; there are: {', '.join(known)}")
    here, rows = machine(), []
    about = {"date": datetime.date.today().isoformat(), "commit": install.COMMIT.read_text().strip(), **here}
    about["threads"] = options.threads
    for text in (options.shapes or (MOE_SHAPES if options.op == "moe" else SHAPES)).split(","):
        shape = tuple(map(int, text.split("x")))
        for cold in (True, False) if shape[0] == 1 and options.op != "moe" else (True,):
            case = list(compare(shape, cold, {name: PEERS[name][0] for name in names}, here, options))
            rows += case
            if not options.json:
                show(case)
    if options.json:
        json.dump({**about, "rows": rows}, sys.stdout, indent=1)
        print()
    if options.record:
        new = not options.record.exists()
        with options.record.open("a", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            if new:
                out.writerow([*about, *rows[0]])
            for row in rows:
                cells = ("" if x is None else f"{x:.4g}" if isinstance(x, float) else x for x in row.values())
                out.writerow([*about.values(), *cells])


main()
