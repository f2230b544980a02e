"""Installs the CPU peers from PyPI and crates.io and builds their workers. Nothing of it enters the product.

    python3 benchmarks/peers/install.py [python] [ggml] [workers] [rust]     (all four without arguments)

Everything lands in $DUALGEMM_PEERS (default ~/.cache/dualgemm-peers); a step that is done is quick to repeat.
Needs a C++ compiler, Cargo, 6 GB of disk (nearly all of it torch) and about a quarter of an hour.
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
# These carry llama.cpp and ik_llama.cpp, and those carry ggml. Wheels are not for this processor alone, or have no headers.
SDISTS = {
    "ggml": ("llama-cpp-python==0.3.36", "llama_cpp_python-*/vendor/llama.cpp"),
    "ik": ("ik-llama-cpp-python==0.1.5", "ik_llama_cpp_python-*/vendor/ik_llama.cpp"),
}
# Without the GPU libraries that it asks for: its extension modules load alone.
KT = "kt-kernel==0.7.2"


def run(*command, **options):
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **options)


def python():
    """The venv with every peer that has a wheel, and the tools that build the others."""
    if not PYTHON.exists():
        venv.create(HOME / "venv", with_pip=True)
    run(PYTHON, "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt")
    run(PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", KT)


def ggml():
    """ggml alone, once llama.cpp's and once ik_llama.cpp's, for this processor, with the options that they have by default."""
    cmake = HOME / "venv/bin/cmake"
    tools = {**os.environ, "PATH": f"{cmake.parent}:{os.environ['PATH']}"}
    for name, (sdist, folder) in SDISTS.items():
        source, build = HOME / f"src/{name}", HOME / f"build-{name}"
        source.mkdir(parents=True, exist_ok=True)
        if not any(source.glob("*.tar.gz")):
            package = sdist.split("==")[0]
            run(PYTHON, "-m", "pip", "download", "--no-deps", "--no-binary", package, "-d", source, sdist)
        with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
            archive.extractall(source, filter="data")
        options = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")]
        # Attention, which nothing here computes, would be most of ik_llama.cpp's build.
        options += ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_IQK_FLASH_ATTENTION=OFF"]
        run(cmake, "-S", next(source.glob(folder)), "-B", build, "-G", "Ninja", *options, env=tools)
        run(cmake, "--build", build, "--target", "ggml", "-j", os.cpu_count(), env=tools)


def workers():
    """The C++ worker, once against each ggml."""
    BIN.mkdir(exist_ok=True)
    for name, (_, folder) in SDISTS.items():
        include = next((HOME / f"src/{name}").glob(f"{folder}/ggml/include"))
        libraries = sorted((HOME / f"build-{name}").rglob("libggml*.so"))
        paths = {library.parent for library in libraries}
        flags = ["-O2", "-std=c++17", f"-I{include}", *(f"-Wl,-rpath,{path}" for path in paths)]
        # ik_llama.cpp's names functions of the attention that is not in it.
        flags += ["-Wl,--allow-shlib-undefined"]
        run("c++", HERE / "ggml_worker.cpp", "-o", BIN / f"{name}-worker", *flags, *libraries)


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
