"""The functions that are subcommands of the command."""

import inspect
import pickle
import pydoc
import re
import subprocess
import sys

import pytest

import dualgemm


def test_inspect_and_validate(layer14):
    path = layer14 / "modelopt-nvfp4"
    report = dualgemm.inspect(path, tensors=True)
    assert report.right and report["convention"] == "modelopt"
    (entry,) = report["mlps"][0]["entries"]
    assert (entry["pair"]["gate"]["n"], entry["pair"]["gate"]["k"]) == (1536, 576)
    assert report["tensor_count"] == len(report["tensors"])
    report = dualgemm.validate(str(path))
    assert report.right and report["valid"] and report["errors"] == 0


def test_reports_travel_between_processes(layer14):
    for function in (dualgemm.inspect, dualgemm.validate):
        report = function(layer14 / "modelopt-nvfp4")
        copy = pickle.loads(pickle.dumps(report))
        assert copy == report and copy.right and copy._rows(copy) == report._rows(report)


def test_an_invalid_checkpoint_is_a_report_not_an_exception(tmp_path):
    broken = tmp_path / "model.safetensors"
    broken.write_bytes(b"\xff" * 64)
    report = dualgemm.validate(broken)
    assert not report.right and report["findings"]


def test_run_compares_with_the_reference(layer14):
    report = dualgemm.run(
        layer14 / "modelopt-nvfp4",
        0,
        input=layer14 / "hidden-states-f32.safetensors",
        check="all",
        repeat=1,
        no_roofline=True,
    )
    assert report.right and report["rel_l2"] < 1e-5 and report["rows_compared"] == 64


def test_bench_rows_become_a_table():
    report = dualgemm.bench(["1x64x64", "4x64x64"], a_format=["nvfp4", "bf16"], smoke=True, cache="warm")
    assert [(r["m"], r["a_format"]) for r in report["rows"]] == [
        (1, "nvfp4"),
        (1, "bf16"),
        (4, "nvfp4"),
        (4, "bf16"),
    ]
    assert all(r["rel_l2"] < 1e-3 for r in report["rows"])
    pandas = pytest.importorskip("pandas")
    table = report.to_pandas()
    assert isinstance(table, pandas.DataFrame) and len(table) == 4


def test_simulate_runs_the_hopper_kernel():
    report = dualgemm.simulate("sm_90a", (16, 64, 64))
    assert report.right and report["arch"] == "sm_90a" and report["rel_l2"] < 1e-3


def test_a_model_is_quantized_and_converted(layer14, tmp_path):
    report = dualgemm.quantize_model(layer14 / "mlp-bf16.safetensors", tmp_path / "q", skip=["down_proj"])
    assert len(report["tensors"]) == 2 and report["kept"][0]["why"] == "--skip down_proj"
    plain = dualgemm.quantize_model(layer14 / "mlp-bf16.safetensors", tmp_path / "plain", skip="down_proj", search="plain")
    assert plain["tensors"] == report["tensors"]
    better = dualgemm.quantize_model(
        layer14 / "mlp-bf16.safetensors", tmp_path / "mse.safetensors", producer="compressed-tensors", search="mse"
    )
    assert len(better["tensors"]) == 3 and all(t["rel_l2"] < t["rel_l2_plain"] for t in better["tensors"])
    again = dualgemm.convert(layer14 / "modelopt-nvfp4", tmp_path / "ct", "compressed-tensors")
    assert again["linears"] == 7 and dualgemm.Checkpoint(tmp_path / "ct").convention == "compressed-tensors"
    mse = (layer14 / "mlp-bf16.safetensors", tmp_path / "mse.safetensors")
    with pytest.raises(dualgemm.Error, match="mse.safetensors: exists already; give another name, or force to replace it"):
        dualgemm.quantize_model(*mse)
    assert len(dualgemm.quantize_model(*mse, force=True)["tensors"]) == 3
    with pytest.raises(dualgemm.Error, match="producer"):
        dualgemm.quantize_model(layer14 / "mlp-bf16.safetensors", tmp_path / "no", producer="nobody")


def test_the_command_is_a_module_of_the_package(layer14):
    def run(*args):
        return subprocess.run([sys.executable, "-m", "dualgemm", *args], capture_output=True, text=True, timeout=120)

    done = run("inspect", str(layer14 / "modelopt-nvfp4"))
    assert done.returncode == 0 and "modelopt" in done.stdout and done.stderr == ""
    done = run("inspect", "nowhere")
    assert done.returncode == 2 and done.stderr.startswith("error: nowhere") and done.stderr.count("\n") == 1
    assert "quantize" in run("--help").stdout


@pytest.mark.parametrize("function,subcommand", [
    (dualgemm.run, "run"), (dualgemm.bench, "bench"), (dualgemm.simulate, "sim"), (dualgemm.inspect, "inspect"),
    (dualgemm.validate, "validate"), (dualgemm.convert, "convert"), (dualgemm.quantize_model, "quantize"),
])  # fmt: skip
def test_help_shows_every_option_of_the_command(function, subcommand):
    command = [sys.executable, "-m", "dualgemm", subcommand, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    options = {name.replace("-", "_") for name in re.findall(r"^ +(?:-\w, )?--([\w-]+)", shown, re.MULTILINE)}
    options -= {"json", "verbose", "help"}
    parameters = inspect.signature(function).parameters
    assert len(options) > 4 and options <= parameters.keys()
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    text = pydoc.plain(pydoc.render_doc(function))
    # By itself where the function names it, with the command's words where it is handed on.
    assert [name for name in options if not re.search(rf"\b{name}\b", text)] == []
    handed_on = options - set(function.__code__.co_varnames)
    assert handed_on == set(re.findall(r"^ {8}(\w+): \S.+$", text, re.MULTILINE))
