"""Time of a step against memory, a dot for each way to train: what is towards the lower left corner is better.

    ms |        o  computed again, on the host
       |            o  computed again
       |                         o  all kept
       |________________________________ GB

Left out: which dots a machine with other ratios of compute to memory would prefer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.plots.frame import page, panel, scale, words
from zero_mini.plots.palette import ACTIVATIONS, COMMUNICATION, INK, tint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (INK, ACTIVATIONS, COMMUNICATION, tint(ACTIVATIONS, 0.5))
MARKS = ("o", "s", "^", "D")


def draw_tradeoff(
    dots: dict[str, list[tuple[float, float, str]]], title: str, note: str = "", of: str = "peak, GB (1e9 bytes)"
) -> Figure:
    """dots: a kind (its colour and mark) -> (bytes, milliseconds, what stands beside the dot)."""
    figure = page(4.1, title, note)
    kinds = dict(zip(dots, COLOURS))
    words(figure, 0.1, 0.6, kinds)
    axes = panel(figure, 0.6, 0.95, 6.0, 2.6)
    scale(axes, "bottom", of)
    scale(axes, "left", "ms a step")
    for (kind, points), mark in zip(dots.items(), MARKS):
        places = [(nbytes / 1e9, ms) for nbytes, ms, _ in points]
        axes.scatter(*zip(*places), color=kinds[kind], marker=mark, s=34, edgecolors="white", zorder=2)
        for (x, y), (_, _, text) in zip(places, points):
            if text:
                axes.annotate(text, (x, y), xytext=(5, 3), textcoords="offset points", fontsize=7.5, color=INK)
    axes.set_xlim(0, 1.12 * max(nbytes for points in dots.values() for nbytes, _, _ in points) / 1e9)
    axes.set_ylim(0, 1.15 * max(ms for points in dots.values() for _, ms, _ in points))
    return figure
