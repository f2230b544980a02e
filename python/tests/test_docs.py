"""The examples of docs/python.md and python/README.md, run in order as one program."""

import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def blocks(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(r"^```python( torch)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_documents_examples_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    found = blocks("docs/python.md")
    assert len(found) > 5
    for torch, code in found:
        if torch:
            continue
        exec(compile(code, "docs/python.md", "exec"), names)


def test_the_documents_torch_examples_run(monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.chdir(ROOT)
    for torch, code in blocks("docs/python.md"):
        if torch:
            exec(compile(code, "docs/python.md", "exec"), {})


def test_the_readmes_example_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    ((_, code),) = blocks("python/README.md")
    code = code.replace("model-nvfp4", "testdata/smollm2-135m-layer14/modelopt-nvfp4")
    names = {}
    exec(compile(code, "python/README.md", "exec"), names)
    assert names["c"].shape == (4, 1536)


def test_every_relative_link_leads_somewhere():
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in target:
            assert os.path.exists(ROOT / "docs" / target), target


def test_the_roofline_is_drawn(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("svg")
    import dualgemm
    from dualgemm import plot

    report = dualgemm.bench(["1x64x64", "16x64x64"], smoke=True, cache="warm")
    ax = plot.roofline(report)
    assert len(ax.lines) == len(report["rooflines"]) + len({row["kernel"] for row in report["rows"]})
    ax.figure.savefig(tmp_path / "roofline.svg")
