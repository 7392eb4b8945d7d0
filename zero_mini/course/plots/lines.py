"""Lines that a formula predicts, and dots where something was measured: the same name, the same colour.

    s  |        o__/       a dot on its line: the prediction holds
       |     __/
       |  o_/    x         a dot beside it: it does not
       |________________

Left out: how a prediction was made; the note names the formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from math import log10
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import page, panel, scale, spread
from zero_mini.course.plots.palette import (
    ACTIVATIONS,
    FAINT,
    GRADIENTS,
    INK,
    NEUTRAL,
    OPTIMIZER,
    PARAMETERS,
    STAGE,
    as_text,
)
from zero_mini.course.plots.sent import LINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, HEIGHT_IN, LINE_IN = 4.55, 2.45, 0.17
KNOWN = {f"stage {stage}": colour for stage, colour in STAGE.items()} | {kind: LINES[kind][1] for kind in LINES}
OTHERS = (INK, PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS)

Points = Mapping[float, float]  # x -> y


def draw_lines(
    lines: Mapping[str, Points],
    dots: Mapping[str, Points],
    title: str,
    note: str = "",
    across: str = "",
    up: str = "",
    log: str = "",
    low: float = 0.0,
) -> Figure:
    """lines, dots: a name -> x -> y. A name may have both.

    log: "x", "y" or "xy", the axes that are logarithmic. low: where an upright axis that is not begins.
    """
    figure = page(3.65, title, note)
    axes = panel(figure, 0.8, 0.68, WIDTH_IN, HEIGHT_IN)
    for side, letter, name in (("bottom", "x", across), ("left", "y", up)):
        scale(axes, side, name)
        if letter in log:
            axes.set(**{f"{letter}scale": "log"})
    axes.grid(axis="y", color=NEUTRAL, linewidth=0.4)
    colours = colours_of([*lines, *(name for name in dots if name not in lines)])
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points.items())), color=colours[name], linewidth=1.3, zorder=2)
    for name, points in dots.items():
        axes.scatter(*zip(*points.items()), color=colours[name], s=22, edgecolors="white", linewidths=0.6, zorder=3)
    if "y" not in log:
        axes.set_ylim(bottom=low)
    plain_numbers(axes, log)
    label_ends(axes, lines | {name: points for name, points in dots.items() if name not in lines}, colours)
    return figure


def colours_of(names: list[str]) -> dict[str, str]:
    """Those of stages and collectives, and for other names the palette's in turn.

    >>> colours_of(["stage 0", "a", "b"]) == {"stage 0": INK, "a": PARAMETERS, "b": GRADIENTS}
    True
    """
    taken = {KNOWN[name] for name in names if name in KNOWN}
    others = cycle([colour for colour in OTHERS if colour not in taken] or OTHERS)
    return {name: KNOWN.get(name) or next(others) for name in names}


def label_ends(axes: Axes, curves: Mapping[str, Points], colours: dict[str, str]) -> None:
    """Each name at the right of its line's last point, kept apart."""
    low, high = axes.get_ylim()
    is_log = axes.get_yscale() == "log"

    def share(y: float) -> float:
        return log10(y / low) / log10(high / low) if is_log else (y - low) / (high - low)

    most = max(name.count("\n") + 1 for name in curves)  # lines of a name
    places = spread([share(points[max(points)]) for points in curves.values()], most * LINE_IN / HEIGHT_IN)
    for name, place in zip(curves, places):
        style = dict(color=as_text(colours[name]), fontsize=8, va="center", transform=axes.transAxes)
        axes.text(1.02, place, name, **style)


def plain_numbers(axes: Axes, log: str) -> None:
    """Powers of ten as 0.1, 1, 10 up to five digits, and as 1e9 beyond; 1, 2, 5, 10 where there are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for letter, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if letter in log:
            low, high = axis.get_view_interval()
            few = high / low < 300  # less than two and a half decades
            axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if few else (1,), numticks=8))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(
                FuncFormatter(lambda value, _: f"{value:g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-"))
            )
            axis.set_tick_params(labelcolor=FAINT)
