"""What one rank sends in a collective, against the number of ranks: measured dots on the lines of the formulas.

Left out: how a collective travels; steps.py draws that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.plots.palette import COMMUNICATION, FAINT, INK, NEUTRAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_sent(measured: dict[str, dict[int, float]]) -> Figure:
    """Elements that a rank sent, in buffers of P, against N: measured dots on the lines of the formulas.

    measured: kind -> N -> elements sent / P.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 2.9), layout="constrained")
    axes = figure.subplots()
    most = max(N for points in measured.values() for N in points)
    for index, (kind, points) in enumerate(measured.items()):
        passes = 2 if kind == "all_reduce" else 1
        every = [N / 10 for N in range(20, 10 * most + 6)]
        style = dict(color=INK, linewidth=1, linestyle="-" if passes == 2 else ":")
        axes.plot(every, [passes * (N - 1) / N for N in every], zorder=1, **style)
        marker = dict(zorder=2, s=34, color=COMMUNICATION, marker="os^"[index % 3], edgecolors="white", linewidths=0.6)
        axes.scatter([N + 0.05 * (index - 1) for N in points], points.values(), **marker)
    axes.text(most + 0.65, 2 * (most - 1) / most, "all_reduce\n2 (N-1)/N", fontsize=8, va="center", color=INK)
    axes.text(most + 0.65, (most - 1) / most, "all_gather, reduce_scatter\n(N-1)/N", fontsize=8, va="center", color=INK)
    axes.set(xlim=(1.8, most + 2.6), ylim=(0, 2.05), xlabel="ranks, N")
    axes.set_xticks(range(2, most + 1))
    axes.set_title("sent by one rank, in buffers", loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=FAINT, color=NEUTRAL)
    return figure
