"""Functions over the subcommands of the ``dualgemm`` command: the same arguments, the same reports."""

import json
import os
import tempfile
import textwrap
from inspect import Parameter, cleandoc, signature

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


def _over(subcommand):
    """Shows in the signature and the text of a function what options its subcommand takes beside those that it names."""

    def shown(function):
        own = [p for p in signature(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        options = [option for option in _dualgemm.options(subcommand) if option[0] not in {p.name for p in own}]
        more = [Parameter(name, Parameter.KEYWORD_ONLY, default=False if flag else None) for name, flag, _ in options]
        function.__signature__ = signature(function).replace(parameters=[*own, *more])
        lines = (textwrap.fill(f"    {name}: {help}", 110, subsequent_indent=" " * 8) for name, _, help in options)
        function.__doc__ = "\n".join([cleandoc(function.__doc__), "", "Options:", "", *lines])
        return function

    return shown


# Functions of the module, which a report needs to be pickled.
def _entries(report):
    return [{**{k: v for k, v in mlp.items() if k != "entries"}, **e} for mlp in report["mlps"] for e in mlp["entries"]]


def _tensors(report):
    return report["tensors"]


def _findings(report):
    return report["findings"]


def _rows(report):
    return report["rows"]


@_over("inspect")
def inspect(checkpoint, *, tensors=False, **reading):
    """The gated MLPs of a checkpoint with the scales of gate and up side by side, as ``dualgemm inspect``; ``tensors`` lists
    all tensors. The options say how to read what does not describe itself."""
    return _run("inspect", checkpoint, rows=_entries, tensors=tensors, **reading)


@_over("validate")
def validate(checkpoint, **options):
    """Every rule that a checkpoint breaks, as ``dualgemm validate``; ``report.right`` is False if one is an error."""
    return _run("validate", checkpoint, rows=_findings, **options)


@_over("quantize")
def quantize_model(
    model, out, *, producer="modelopt", search=None, separate_scales=False, skip=(), calibration=None, force=False, **options
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
                    **options,
                )
            except Error as error:
                # The file is gone when this is read.
                raise type(error)(str(error).replace(path, "calibration")) from None
    search = None if search == "plain" else search
    more = [f"--skip={text}" for text in ([skip] if isinstance(skip, str) else skip)]
    options |= {"producer": producer, "search": search, "separate_scales": separate_scales, "calibration": calibration}
    return _run("quantize", model, out, rows=_tensors, more=more, force=force, **options)


@_over("convert")
def convert(checkpoint, out, to, *, mlp_only=False, force=False, **reading):
    """Rewrites a checkpoint in another convention, ``"modelopt"``, ``"compressed-tensors"`` or ``"gguf"``, without touching a
    code, as ``dualgemm convert``. A file that is there is replaced only with ``force``."""
    return _run("convert", checkpoint, out, to=to, mlp_only=mlp_only, force=force, **reading)


@_over("run")
def run(checkpoint, layer=None, **options):
    """Computes a layer, times it and compares it with the f64 reference, as ``dualgemm run``: with ``a_format="nvfp4"``,
    ``threads=4``, ``no_roofline=True``."""
    return _run("run", checkpoint, layer=layer, **options)


@_over("bench")
def bench(shapes="challenge", *, peers=False, **options):
    """Times the kernels on sets of shapes or shapes such as ``"16x4096x7168"``, as ``dualgemm bench``: with
    ``a_format="bf16"``, ``budget=0.2``, ``cache="warm"``.

    With ``peers=True`` the Triton kernels of ``dualgemm.peers`` are timed beside, on float16 and nvfp4 A as the report has
    them, on the CUDA device, where Triton and one are there; their rows come last.
    """
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


@_over("sim")
def simulate(arch, shape, **options):
    """Runs the GPU kernel of an architecture in the simulator with every check on, as ``dualgemm sim``: ``arch`` such as
    ``"sm_90a"``, ``shape`` ``(m, n, k)``. ``report.right`` is False if a check fails or C is wrong."""
    if not isinstance(shape, str):
        shape = "x".join(map(str, shape))
    return _run("sim", arch=arch, shape=shape, **options)
