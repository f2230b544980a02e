"""Plots of reports. Needs matplotlib."""

import numpy as np


def roofline(report, ax=None):
    """The measurements of :func:`dualgemm.bench` under what the machine allows: GFLOP/s over FLOP per byte, both
    logarithmic; a line for each strategy and format of A. Returns the matplotlib axes."""
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(7, 4.5))
    rows = [row for row in report["rows"] if "flops_per_byte" in row]
    intensity = np.array([row["flops_per_byte"] for row in rows])
    span = np.geomspace(intensity.min() / 2, intensity.max() * 2, 200)
    for limit in report["rooflines"]:
        allowed = np.minimum(limit["flops_per_s"], span * limit["bytes_per_s"]) * 1e-9
        ax.loglog(span, allowed, linewidth=2, label=f"{limit['name']}: {limit['flops_per_s'] * 1e-9:.0f} GFLOP/s, "
                                       f"{limit['bytes_per_s'] * 1e-9:.1f} GB/s")  # fmt: skip
    groups = {}
    for row in sorted(rows, key=lambda row: row["flops_per_byte"]):
        groups.setdefault((row["strategy"], row["a_format"]), []).append(row)
    for (strategy, a_format), mine in sorted(groups.items()):
        points = [r["flops_per_byte"] for r in mine], [r["gflops"] for r in mine]
        ax.loglog(*points, "o-", linewidth=0.8, markersize=5, label=f"{strategy}, A {a_format}")
    ax.set_xlabel("FLOP per byte that has to move")
    ax.set_ylabel("GFLOP/s")
    ax.grid(True, which="both", alpha=0.3)
    ax.legend(fontsize="small", loc="lower right")
    return ax
