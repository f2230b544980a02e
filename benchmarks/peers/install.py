"""Installs the CPU peers from PyPI and crates.io and builds their workers. Nothing of it enters the product.

    python3 benchmarks/peers/install.py [python] [ggml] [workers] [rust]     (all four without arguments)

Everything lands in $DUALGEMM_PEERS (default ~/.cache/dualgemm-peers); a step that is done is quick to repeat.
Needs a C++ compiler, Cargo, 5 GB of disk (nearly all of it torch) and about ten minutes.
"""

import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
HOME = Path(os.environ.get("DUALGEMM_PEERS") or CACHE / "dualgemm-peers")
PYTHON = HOME / "venv/bin/python"
BIN = HOME / "bin"
COMMIT = HOME / "dualgemm-commit"
# The sdist carries llama.cpp, and that carries ggml; the wheel on PyPI has no headers.
GGML_SDIST = "llama-cpp-python==0.3.36"
LLAMA = "llama_cpp_python-*/vendor/llama.cpp"
GGML = HOME / "build-ggml"


def run(*command, **options):
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **options)


def python():
    """The venv with every peer that has a wheel, and the tools that build the others."""
    if not PYTHON.exists():
        venv.create(HOME / "venv", with_pip=True)
    run(PYTHON, "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt")


def ggml():
    """ggml alone, for this processor, with the options that llama.cpp has by default."""
    source = HOME / "src"
    source.mkdir(parents=True, exist_ok=True)
    if not any(source.glob("*.tar.gz")):
        run(PYTHON, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", source, GGML_SDIST)
    with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    cmake = HOME / "venv/bin/cmake"
    tools = {**os.environ, "PATH": f"{cmake.parent}:{os.environ['PATH']}"}
    options = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")]
    run(
        cmake,
        "-S",
        next(source.glob(LLAMA)),
        "-B",
        GGML,
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
        *options,
        env=tools,
    )
    run(cmake, "--build", GGML, "--target", "ggml", "-j", os.cpu_count(), env=tools)


def workers():
    """The C++ worker, once against ggml and once against ik_llama.cpp."""
    BIN.mkdir(exist_ok=True)
    site = next((HOME / "venv/lib").glob("python3*/site-packages"))
    for name, include, library, link in [
        ("ggml", next((HOME / "src").glob(f"{LLAMA}/ggml/include")), GGML / "bin", ["-lggml-cpu", "-lggml-base"]),
        ("ik", site / "include", site / "ik_llama_cpp/lib", ["-lggml"]),
    ]:
        # The wheel's own OpenMP library is found by its run path, which the linker does not follow.
        flags = ["-O2", "-std=c++17", f"-I{include}", f"-L{library}", f"-Wl,-rpath,{library}"]
        flags += ["-Wl,--allow-shlib-undefined"]
        run("c++", HERE / "ggml_worker.cpp", "-o", BIN / f"{name}-worker", *flags, *link)


def rust():
    """The `gemm` crate's worker and ours."""
    command = ["cargo", "build", "--release", "--manifest-path", HERE / "rust/Cargo.toml"]
    run(*command, "--target-dir", HOME / "target")
    commit = subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], capture_output=True, check=False)
    COMMIT.write_bytes(commit.stdout)


if __name__ == "__main__":
    steps = {step.__name__: step for step in (python, ggml, workers, rust)}
    for name in sys.argv[1:] or steps:
        if name not in steps:
            sys.exit(f"no step is called {name}; there are: {', '.join(steps)}")
        steps[name]()
