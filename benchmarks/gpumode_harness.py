"""Runs a submission to the GPU MODE task "NVFP4 dual GEMM" under the task's own evaluation program.

    git clone https://github.com/gpu-mode/reference-kernels
    python3 benchmarks/gpumode_harness.py --harness reference-kernels/problems/nvidia/nvfp4_dual_gemm

The submission is a file with ``custom_kernel``; without ``--submission``, ``from dualgemm.gpumode import custom_kernel``.
Modes are those of the program: ``test`` (ten shapes), ``benchmark`` and ``leaderboard`` (the four ranked shapes; its cache
flush takes 63 GiB of the card's memory). Generator, reference, checker, timing and tolerances are the task's files, which
are read from its folder as task.yml says. Three things are put under them, each only where it is missing:

- ``torch._scaled_mm`` on cards before Blackwell, which have no product of 4-bit operands: a product in f64 of the decoded
  operands, rounded to f32;
- the exception class that the program imports from the CUTLASS DSL, which needs no more of it;
- with ``--device cpu``, the processor in the place of the card, for ``--mode test`` alone.

Needs torch 2.9 or newer.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SUBMISSION = "from dualgemm.gpumode import custom_kernel  # noqa: F401\n"
# The task's reference.py under another name, after what is missing below it has been put there.
REFERENCE = """import sys
sys.path.append({here!r})
import gpumode_harness
gpumode_harness.prepare({device!r})
from task_reference import *  # noqa: E402, F403
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", required=True, type=pathlib.Path, help="folder of the task, with task.yml")
    parser.add_argument("--submission", type=pathlib.Path, help="file with custom_kernel")
    parser.add_argument("--mode", default="test", choices=["test", "benchmark", "leaderboard"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", help="indices of the mode's shapes, comma-separated")
    parser.add_argument("--json", type=pathlib.Path, help="write what the program reported here")
    args = parser.parse_args()
    if args.device == "cpu" and args.mode != "test":
        parser.error("the program's stopwatch is the card's: --device cpu is for --mode test")

    task = (args.harness / "task.yml").read_text(encoding="utf-8")
    cases = listed(task, "tests" if args.mode == "test" else "benchmarks")
    if args.only:
        cases = [cases[int(i)] for i in args.only.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for file in listed(task, "files"):
            target = folder / ("task_reference.py" if file["name"] == "reference.py" else file["name"])
            if file["source"] != "@SUBMISSION@":
                shutil.copyfile(args.harness / file["source"], target)
            elif args.submission:
                shutil.copyfile(args.submission, target)
            else:
                target.write_text(SUBMISSION)
        here = str(pathlib.Path(__file__).resolve().parent)
        (folder / "reference.py").write_text(REFERENCE.format(here=here, device=args.device))
        stand_in_for_cutlass(folder)
        (folder / "cases.txt").write_text("\n".join("; ".join(f"{k}: {v}" for k, v in case.items()) for case in cases))
        report, status = evaluate(folder, args.mode)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    sys.exit(status if status else report.get("check") != "pass")


def listed(task, key):
    """A list of task.yml, whose items are written as JSON."""
    block = re.search(rf"^{key}:\n((?:[ \t]*(?:-.*)?\n)*)", task + "\n", re.MULTILINE)
    return [json.loads(line.strip()[1:]) for line in block[1].splitlines() if line.strip()]


def stand_in_for_cutlass(folder):
    try:
        import cutlass.cute.nvgpu.common  # noqa: F401
    except ImportError:
        package = folder / "cutlass"
        for part in ("", "cute", "cute/nvgpu"):
            (package / part).mkdir()
            (package / part / "__init__.py").touch()
        (package / "cute/nvgpu/common.py").write_text("class OpError(Exception):\n    pass\n")


def evaluate(folder, mode):
    """Runs the program, which reports lines of ``key: value`` to a file descriptor."""
    read, write = os.pipe()
    environment = {**os.environ, "POPCORN_FD": str(write)}
    command = [sys.executable, "eval.py", mode, "cases.txt"]
    program = subprocess.Popen(command, cwd=folder, env=environment, pass_fds=[write])
    os.close(write)
    report = {}
    with open(read, encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.rstrip("\n").partition(": ")
            report[key] = value
            if key.endswith((".status", ".error")):
                print(line, end="", flush=True)
    return report, program.wait()


def show(report):
    for i in range(int(report.get("benchmark-count", 0))):
        get = lambda name: report.get(f"benchmark.{i}.{name}")  # noqa: E731
        if get("mean"):
            mean, best, worst = (float(get(name)) * 1e-3 for name in ("mean", "best", "worst"))
            print(f"{get('spec')}: {mean:.2f} us, best {best:.2f}, worst {worst:.2f}, {get('runs')} runs")
    print(f"check: {report.get('check', 'the program did not finish')}")


def prepare(device):
    """Called in the process that computes, before the task's reference is imported."""
    import torch

    if device == "cpu":
        OnProcessor.start()
    if device == "cpu" or torch.cuda.get_device_capability() < (10, 0):
        torch._scaled_mm = scaled_mm


def scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None):
    """``a`` ``[m, k/2]`` times ``b`` ``[k/2, n]``, two e2m1 a byte, block scales in the 128x4 layout."""
    assert bias is None
    return (decoded(a, scale_a) @ decoded(b.transpose(0, 1), scale_b).T).to(out_dtype)


def decoded(codes, scales):
    import torch

    codes = codes.view(torch.uint8).contiguous()
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(magnitudes + [-x for x in magnitudes], dtype=torch.float64, device=codes.device)
    values = torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], dim=-1).flatten(-2)
    rows, blocks = values.shape[0], values.shape[1] // 16
    scales = scales.double().reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    scales = scales.reshape(-(-rows // 128) * 128, -1)[:rows, :blocks]
    return values * scales.repeat_interleave(16, dim=1)


class OnProcessor:
    """Torch with its CUDA device on the processor, as far as the generator and the reference use it."""

    @staticmethod
    def start():
        import torch
        from torch.overrides import TorchFunctionMode

        class Mode(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if function is torch.Tensor.cuda:
                    return args[0]
                args = ["cpu" if isinstance(x, str) and x == "cuda" else x for x in args]
                kwargs = {k: "cpu" if k == "device" else x for k, x in (kwargs or {}).items()}
                return function(*args, **kwargs)

        torch.cuda.synchronize = lambda: None
        Mode().__enter__()


if __name__ == "__main__":
    main()
