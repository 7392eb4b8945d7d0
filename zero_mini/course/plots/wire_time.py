"""The time of a collective, against the size of its buffer: for small buffers a call's fixed cost, then the wire's.

    time   |            /      the slope is the wire: bytes / (bytes a second)
           |  _________/       the floor is the fixed cost of a call
           |______________ bytes

A dashed line adds the times of reduce-scatter and all-gather, to compare with the all-reduce that sends as much.

Left out: other work at the same time; here each collective runs alone.
"""

from __future__ import annotations

from math import log10
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import cards, page, panel, scale, spread, three_digits, unit_of
from zero_mini.course.plots.palette import COMMUNICATION, FAINT, NEUTRAL, as_text
from zero_mini.course.plots.sent import LINES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEIGHT_IN = 2.4
HALVES = "reduce_scatter", "all_gather"
BOTH = "both halves"  # one after the other


def from_measured(record: dict) -> dict:
    """The content of collectives.json -> the arguments of `draw_wire_time`.

    >>> from_measured({"machine": {"cards": 2, "card": "X"}, "collectives": {"us": {"all_gather": {"1024": 9.5}}}})
    {'measured': {'all_gather': {1024: 9.5}}, 'N': 2, 'title': '2 x X'}
    """
    machine, us = record["machine"], record["collectives"]["us"]
    measured = {kind: {int(nbytes): time for nbytes, time in points.items()} for kind, points in us.items()}
    return {"measured": measured, "N": machine["cards"], "title": cards(machine)}


def with_both_halves(measured: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """Adds the sum of the two halves, if both were measured for the same buffers.

    >>> with_both_halves({"reduce_scatter": {1024: 9.0}, "all_gather": {1024: 8.0}})["both halves"]
    {1024: 17.0}
    """
    first, second = (measured.get(kind, {}) for kind in HALVES)
    if not first or first.keys() != second.keys():
        return measured
    return measured | {BOTH: {nbytes: first[nbytes] + second[nbytes] for nbytes in first}}


def draw_wire_time(measured: dict[str, dict[int, float]], N: int, title: str = "") -> Figure:
    """measured: collective -> bytes of the whole buffer -> microseconds, on N ranks; `title` names their machine."""
    note = f"{title}; both axes are logarithmic".removeprefix("; ")
    figure = page(3.4, "How long a collective takes when it is alone", note)
    axes = panel(figure, 0.62, 0.6, 4.0, HEIGHT_IN)
    scale(axes, "bottom", "bytes of the buffer")
    scale(axes, "left")
    axes.set(xscale="log", yscale="log")
    measured = with_both_halves(measured)
    lines = LINES | {BOTH: (LINES["all_reduce"][0], COMMUNICATION)}
    for kind, points in measured.items():
        dashed = dict(linestyle="--") if kind == BOTH else dict(marker="o", markersize=3.2)
        axes.plot(list(points), list(points.values()), color=lines[kind][1], linewidth=1.3, **dashed)
    in_words(axes.xaxis, lambda nbytes: f"{nbytes / unit_of(nbytes)[0]:.0f} {unit_of(nbytes)[1]}")
    in_words(axes.yaxis, lambda us: f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us")
    axes.grid(axis="y", color=NEUTRAL, linewidth=0.4)
    low, high = axes.get_ylim()
    largest = max(max(points) for points in measured.values())
    places = spread([log10(points[max(points)]) for points in measured.values()], 0.2 / HEIGHT_IN * log10(high / low))
    for (kind, points), place in zip(measured.items(), places):
        sent, colour = lines[kind]
        rate = sent(N) * max(points) / points[max(points)] * 1e6
        text = f"{kind}, {three_digits(rate / 1e9)} GB/s"
        style = dict(color=as_text(colour), fontsize=8, va="center", annotation_clip=False)
        axes.annotate(text, (largest * 1.6, 10**place), **style)
    axes.annotate(
        "sent by one rank, largest buffer", (largest * 1.6, 10 ** (min(places) - 0.35)), **style | {"color": FAINT}
    )
    return figure


def in_words(axis, text) -> None:
    """Powers of ten, each with the words that `text` makes of it, and nothing between them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(10))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
