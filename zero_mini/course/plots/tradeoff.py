"""Time of a step against memory, a dot for each way to train: dots towards the lower left corner are better.

    ms |        o  computed again, on the host
       |            o  computed again
       |                         o  all kept
       |________________________________ GB

Left out: machines with other ratios of compute to memory, on which other dots may be best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import LETTER_IN, page, panel, scale, words
from zero_mini.course.plots.palette import ACTIVATIONS, COMMUNICATION, FAINT, INK, tint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (INK, ACTIVATIONS, COMMUNICATION, tint(ACTIVATIONS, 0.5))
ACROSS_IN, DOWN_IN = 6.0, 2.6
MARKS = {"o": "●", "s": "■", "^": "▲", "D": "◆"}  # as matplotlib names it, and as a letter for the legend
PEAK = "peak, GB (1e9 bytes)"
TIME = "ms a step"


def draw_tradeoff(
    dots: dict[str, list[tuple[float, float, str]]],
    title: str,
    note: str = "",
    of: str = PEAK,
    law: Sequence[tuple[float, float]] = (),
    time: str = TIME,
) -> Figure:
    """dots: a kind (its colour and mark) -> (bytes, milliseconds, what stands beside the dot).

    of, time: what the axes are of; time may be divided by something, as "ms a step for a billion parameters".
    law: (bytes that a formula expects, milliseconds of the dot that it expects there), each a short upright line.
    """
    figure = page(4.1, title, note)
    kinds = dict(zip(dots, COLOURS))
    words(figure, 0.1, 0.6, kinds, MARKS.values())
    everything = [(nbytes / 1e9, ms) for points in dots.values() for nbytes, ms, _ in points]
    axes, right, top = plane(figure, of, everything, time)
    for nbytes, ms in law:
        axes.plot([nbytes / 1e9], [ms], marker="|", markersize=22, color=FAINT, zorder=1)
    for (kind, points), mark in zip(dots.items(), MARKS):
        places = [(nbytes / 1e9, ms) for nbytes, ms, _ in points]
        axes.scatter(*zip(*places), color=kinds[kind], marker=mark, s=34, edgecolors="white", zorder=2)
        for (x, y), (_, _, text) in zip(places, points):
            if text:
                inches = [((u - x) / right * ACROSS_IN, (v - y) / top * DOWN_IN) for u, v in everything]
                aside = {"xytext": (-5, 3), "ha": "right"} if is_met(text, inches) else {"xytext": (5, 3)}
                axes.annotate(text, (x, y), textcoords="offset points", fontsize=7.5, color=INK, **aside)
    return figure


def plane(figure: Figure, of: str, dots: list[tuple[float, float]], time: str) -> tuple[Axes, float, float]:
    """Where dots (GB, ms) will lie, from 0 to some more than the largest: the axes, and both ends."""
    axes = panel(figure, 0.6, 0.95, ACROSS_IN, DOWN_IN)
    scale(axes, "bottom", of)
    scale(axes, "left", time)
    right, top = 1.12 * max(x for x, _ in dots), 1.15 * max(y for _, y in dots)
    axes.set(xlim=(0, right), ylim=(0, top))
    return axes, right, top


def is_met(text: str, others: list[tuple[float, float]]) -> bool:
    """Does a dot lie where the text would stand, to the right of its own dot? others: inches from there.

    >>> is_met("stage 0", [(0, 0), (0.3, 0.05)]), is_met("stage 0", [(0, 0), (0.3, 0.4), (1.3, 0)])
    (True, False)
    """
    reach = 0.15 + 7.5 * LETTER_IN * len(text)
    return any(0 < right < reach and -0.06 < up < 0.2 for right, up in others)
