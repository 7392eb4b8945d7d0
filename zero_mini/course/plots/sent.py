"""What one rank sends in a collective, against the number of ranks: measured dots on the lines of the formulas.

In a ring an all-reduce sends 2 P (N-1)/N elements, each of its halves P (N-1)/N: less than 2 P and P for any number of
ranks. If rank 0 collects every buffer and sends the sum to all, it sends P (N-1).

Left out: the steps of a collective; steps.py draws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import page, panel, scale
from zero_mini.course.plots.palette import COMMUNICATION, FAINT, GRADIENTS, INK, NEUTRAL, PARAMETERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES = {  # what it is called -> elements sent / P, colour
    "all_reduce": (lambda N: 2 * (N - 1) / N, INK),
    "reduce_scatter": (lambda N: (N - 1) / N, GRADIENTS),
    "all_gather": (lambda N: (N - 1) / N, PARAMETERS),
}
MOST = 8  # ranks


def draw_sent(measured: dict[str, dict[int, float]]) -> Figure:
    """measured: collective -> N -> bytes that a rank sent / bytes of its buffer."""
    figure = page(3.1, "What one rank sends", "in buffers of P elements; dots: measured, lines: formulas")
    axes = panel(figure, 0.45, 0.62, 4.4, 2.0)
    every = [N / 10 for N in range(20, 10 * MOST + 1)]
    axes.plot(every, [N - 1 for N in every], color=NEUTRAL, linewidth=1.2, linestyle="--", zorder=1)
    for height, kind in enumerate(measured):
        formula, colour = LINES[kind]
        axes.plot(every, [formula(N) for N in every], color=colour, linewidth=1.2, zorder=1)
        sizes = 60 if kind == "reduce_scatter" else 24  # two that cost the same are seen one within the other
        points = measured[kind]
        axes.scatter(list(points), list(points.values()), color=colour, s=sizes, zorder=2 + height, edgecolors="white")
    axes.set(xlim=(1.8, MOST), ylim=(0, 3.4))
    scale(axes, "bottom", "ranks, N")
    scale(axes, "left")
    axes.set_xticks(range(2, MOST + 1))
    axes.set_yticks(range(4))
    beside = dict(fontsize=8, va="center", annotation_clip=False)
    axes.annotate("all through rank 0: N-1", (4.5, 3.2), color=COMMUNICATION, **beside)
    axes.annotate("all_reduce: 2 (N-1)/N", (MOST + 0.1, 1.75), color=INK, **beside)
    axes.annotate("reduce_scatter, all_gather:\n(N-1)/N", (MOST + 0.1, 0.875), color=FAINT, **beside)
    return figure
