"""Runs a notebook in the percent format and writes it as Markdown with what its cells print.

    python3 examples/notebook/render.py        # examples/notebook/tour.py -> docs/tour.md and docs/tour-roofline.svg

A cell that needs a package which is not installed ends the run. Needs matplotlib.
"""

import contextlib
import io
import os
import pathlib
import platform
import re
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples/notebook/tour.py"
PAGE = ROOT / "docs/tour.md"
#: What a cell writes, and where the page has it.
PLOT, PLOT_OF_PAGE = "roofline.svg", "tour-roofline.svg"


def cells(text):
    """Pairs of kind, ``markdown`` or ``code``, and text."""
    parts = re.split(r"^# %%(?: \[(markdown)\])?\n", text, flags=re.MULTILINE)[1:]
    for kind, body in zip(parts[::2], parts[1::2]):
        body = body.strip("\n")
        yield (kind, re.sub(r"^# ?", "", body, flags=re.MULTILINE)) if kind else ("code", body)


def run(name, source, names):
    """What a cell prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec"), names)
    return printed.getvalue()


def machine():
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return f"{found[1]}, {os.cpu_count()} threads"
    return f"{platform.machine()}, {os.cpu_count()} threads"


def main():
    import matplotlib

    matplotlib.use("svg")
    # The same drawing gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "dualgemm"
    page, names = [], {"__name__": "__main__"}
    os.chdir(ROOT)
    for kind, body in cells(NOTEBOOK.read_text(encoding="utf-8")):
        if kind == "markdown":
            page.append(body)
            continue
        page.append(f"```python\n{body}\n```")
        with tempfile.TemporaryDirectory() as folder:
            source = body.replace(f'"{PLOT}"', repr(os.path.join(folder, PLOT)))
            printed = run(NOTEBOOK.name, source, names)
            if os.path.exists(os.path.join(folder, PLOT)):
                svg = pathlib.Path(folder, PLOT).read_text(encoding="utf-8")
                (PAGE.parent / PLOT_OF_PAGE).write_text(re.sub(r" *<dc:date>.*</dc:date>\n", "", svg), encoding="utf-8")
                page.append(f"![Measurements under the roofline]({PLOT_OF_PAGE})")
        if printed:
            page.append(f"```text\n{printed.rstrip()}\n```")
    page.append(f"Run on {machine()}, by `python3 examples/notebook/render.py`.")
    PAGE.write_text("\n\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
