"""Functions over the subcommands of the ``dualgemm`` command: the same arguments, the same reports."""

import json
import os
import tempfile

from . import _dualgemm
from .errors import Error


class Report(dict):
    """The ``--json`` document of a subcommand. ``right`` is False where the thing checked is wrong."""

    def __init__(self, document, right=True, rows=None):
        super().__init__(document)
        self.right = right
        self._rows = rows

    def to_pandas(self):
        """The rows of the report as a DataFrame; pandas is needed."""
        import pandas

        if self._rows is None:
            return pandas.json_normalize([self])
        return pandas.json_normalize(self._rows(self))


def _run(command, *positional, rows=None, more=(), **options):
    args = [command, *more]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            args.append(flag)
        else:
            if isinstance(value, (list, tuple)):
                value = ",".join(map(str, value))
            args.append(f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    args += ["--", *(os.fspath(p) for p in positional)] if positional else []
    document, right = _dualgemm.command(args)
    return Report(json.loads(document), right, rows)


# Functions of the module, which a report needs to be pickled.
def _entries(report):
    return [{**{k: v for k, v in mlp.items() if k != "entries"}, **e} for mlp in report["mlps"] for e in mlp["entries"]]


def _tensors(report):
    return report["tensors"]


def _findings(report):
    return report["findings"]


def _rows(report):
    return report["rows"]


def inspect(checkpoint, *, tensors=False, **reading):
    """The gated MLPs of a checkpoint with the scales of gate and up side by side, as ``dualgemm inspect``.

    ``reading`` says how to read what does not describe itself: convention, gate_up_order, nibble_order, scale_layout,
    within, unusable_input_scale_is_one.
    """

    return _run("inspect", checkpoint, rows=_entries, tensors=tensors, **reading)


def validate(checkpoint, **reading):
    """Every rule that a checkpoint breaks, as ``dualgemm validate``; ``report.right`` is False if one is an error."""
    return _run("validate", checkpoint, rows=_findings, **reading)


def quantize_model(
    model, out, *, producer="modelopt", search=None, separate_scales=False, skip=(), calibration=None, force=False
):
    """Quantizes the linear layers of a model, a directory or file of safetensors, to nvfp4 and writes it to ``out``, a new
    directory or a .safetensors file, as ``dualgemm quantize``: bit for bit as ``producer`` does, modelopt,
    compressed-tensors, torchao, te or ggml. ``search="mse"`` chooses block scales of least squared error (None or
    "plain": as the producer does); ``separate_scales`` gives each tensor a scale of its own, where engines read several as
    one; ``skip`` are parts of names whose tensors stay in floats. ``calibration``, a path or what :func:`calibrate` returned, adds input scales, by which
    activations can be quantized too (W4A4). A file that is there is replaced only with ``force``. The report lists tensors with
    their errors."""
    if hasattr(calibration, "save"):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "calibration.json")
            calibration.save(path)
            try:
                return quantize_model(
                    model,
                    out,
                    producer=producer,
                    search=search,
                    separate_scales=separate_scales,
                    skip=skip,
                    calibration=path,
                    force=force,
                )
            except Error as error:
                # The file is gone when this is read.
                raise type(error)(str(error).replace(path, "calibration")) from None
    search = None if search == "plain" else search
    more = [f"--skip={text}" for text in ([skip] if isinstance(skip, str) else skip)]
    options = {"producer": producer, "search": search, "separate_scales": separate_scales, "calibration": calibration}
    return _run("quantize", model, out, rows=_tensors, more=more, force=force, **options)


def convert(checkpoint, out, to, *, mlp_only=False, force=False, **reading):
    """Rewrites a checkpoint in another convention, ``"modelopt"``, ``"compressed-tensors"`` or ``"gguf"``, without touching a
    code, as ``dualgemm convert``. A file that is there is replaced only with ``force``."""
    return _run("convert", checkpoint, out, to=to, mlp_only=mlp_only, force=force, **reading)


def run(checkpoint, layer=None, **options):
    """Computes a layer, times it and compares it with the f64 reference, as ``dualgemm run``; options are those of the
    command with underscores, such as ``a_format="nvfp4"``, ``threads=4``, ``no_roofline=True``."""
    return _run("run", checkpoint, layer=layer, **options)


def bench(shapes="challenge", **options):
    """Times the kernels on sets of shapes or shapes such as ``"16x4096x7168"``, as ``dualgemm bench``; options are
    those of the command with underscores, such as ``a_format="bf16"``, ``budget=0.2``, ``cache="warm"``.

    With ``peers=True`` the Triton kernels of ``dualgemm.peers`` are timed beside, on float16 and nvfp4 A as the report has
    them, on the CUDA device, where Triton and one are there; their rows come last.
    """
    peers = options.pop("peers", False)
    report = _run("bench", rows=_rows, shapes=shapes, **options)
    if peers:
        from . import peers as triton_peers

        rows = report["rows"]
        problems = dict.fromkeys((row["m"], row["n"], row["k"]) for row in rows)
        formats = [a for a in triton_peers.A_FORMATS if any(row["a_format"] == a for row in rows)]
        # Limits and driver are in reports of cards alone: a processor's say nothing of a card.
        limits, machine = report.get("limits"), {name: rows[0][name] for name in ("driver", "commit")}
        report["rows"] += triton_peers.measure(problems, formats or ["f16"], limits, machine)
    return report


def simulate(arch, shape, **options):
    """Runs the GPU kernel of an architecture in the simulator with every check on, as ``dualgemm sim``: ``arch`` such as
    ``"sm_90a"``, ``shape`` ``(m, n, k)``. ``report.right`` is False if a check fails or C is wrong."""
    if not isinstance(shape, str):
        shape = "x".join(map(str, shape))
    return _run("sim", arch=arch, shape=shape, **options)
