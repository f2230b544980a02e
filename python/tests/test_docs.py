"""The examples of docs/python.md and python/README.md, run in order as one program."""

import importlib.util
import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def blocks(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(r"^```python( torch| plot)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_documents_examples_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    found = blocks("docs/python.md")
    assert len(found) > 5
    for needs, code in found:
        if needs:
            continue
        exec(compile(code, "docs/python.md", "exec"), names)


def test_the_documents_torch_examples_run(monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.chdir(ROOT)
    for needs, code in blocks("docs/python.md"):
        if needs == " torch":
            exec(compile(code, "docs/python.md", "exec"), {})


def test_the_readmes_example_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    ((_, code),) = blocks("python/README.md")
    code = code.replace("model-nvfp4", "testdata/smollm2-135m-layer14/modelopt-nvfp4")
    names = {}
    exec(compile(code, "python/README.md", "exec"), names)
    assert names["c"].shape == (4, 1536)


def test_every_relative_link_leads_somewhere():
    for page in ("docs/python.md", "docs/model.md"):
        for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
            if "://" not in target:
                assert os.path.exists(ROOT / "docs" / target), (page, target)


def test_the_roofline_is_drawn(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("svg")
    import dualgemm

    monkeypatch.chdir(tmp_path)
    names = {"dualgemm": dualgemm}
    ((_, code),) = [block for block in blocks("docs/python.md") if block[0] == " plot"]
    # The same with less to do.
    exec(compile(code.replace("2048x2048", "64x64").replace("budget=0.3", "smoke=True"), "docs/python.md", "exec"), names)
    assert (tmp_path / "roofline.svg").stat().st_size > 1000
    ax, report = names["plot"].roofline(names["report"]), names["report"]
    groups = {(row["strategy"], row["a_format"]) for row in report["rows"]}
    assert len(ax.lines) == len(report["rooflines"]) + len(groups) == 4


def notebook():
    spec = importlib.util.spec_from_file_location("render", ROOT / "examples/notebook/render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    return render, list(render.cells(render.NOTEBOOK.read_text(encoding="utf-8")))


def test_the_tour_is_rendered_from_the_notebooks_cells():
    render, cells = notebook()
    page = render.PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert shown == [body for kind, body in cells if kind == "code"] and len(shown) > 6
    assert all(body in page for kind, body in cells if kind == "markdown")
    assert (render.PAGE.parent / render.PLOT_OF_PAGE).stat().st_size > 10_000 and render.PLOT_OF_PAGE in page


def stable(text):
    """Words of an output without what depends on the machine: the kernel, and the last places of sums in f32."""
    words = re.sub(r"\b\w+-(w4a\d+)-\w+", r"\1", text).split()
    return [re.sub(r"^\d\.\d+(e-\d+),?$", r"\1", word) for word in words]


def test_the_tour_shows_what_its_cells_print(monkeypatch):
    render, cells = notebook()
    page = render.PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(ROOT)
    names, compared = {}, 0
    for kind, body in cells:
        # Rates are those of the machine; test_the_roofline_is_drawn runs these cells with less to do.
        if kind == "code" and "bench" not in body and "plot" not in body:
            printed = render.run("tour.py", body, names)
            if printed:
                shown = page.split(f"```python\n{body}\n```\n\n```text\n")[1].split("\n```")[0]
                assert stable(printed) == stable(shown)
                compared += 1
    assert compared == 6


def test_the_way_of_a_model_runs(tmp_path, monkeypatch, capsys):
    """docs/model.md with a small model of the same name."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from test_model import llama, saved
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.quantizers import auto

    monkeypatch.chdir(tmp_path)
    for mapping in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        for method in ("modelopt", "compressed-tensors"):
            # Taken back afterwards.
            monkeypatch.setitem(mapping, method, mapping.get(method))
    saved(llama(vocab_size=256), tmp_path / "SmolLM2-135M")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    of_bytes.pre_tokenizer, of_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=of_bytes).save_pretrained("SmolLM2-135M")
    monkeypatch.setattr("dualgemm.hf._how", {})
    found, names = blocks("docs/model.md"), {}
    assert len(found) == 5
    for _, code in found:
        exec(compile(code, "docs/model.md", "exec"), names)
    assert "replaced 8 linear layers, 2 MLPs, 1 linear layers in 16 bits; attention by dualgemm" in capsys.readouterr().out
    assert isinstance(names["model"], torch.nn.Module)
