"""Computation and communication of each rank over time, and the time in which the computation waits for the wire.

    rank 0  compute  [forward u0][forward u1]      [forward u2]
            wire     [g1]        [-----g2-----]
            exposed               .............    <- a collective runs, and nothing computes

Spans come from a profiler's kernels (`from_kernels`, memory/timeline.py) or from clocks around calls on the CPU. Blue
are gathers of parameters, orange reductions of gradients, green the update, purple the model's computation.

A collective's span begins with its launch: if it waits for the wire, it overlaps the collective before it.

Left out: streams within a lane; the host's side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import LETTER_IN, cards, page, panel, scale, three_digits, words
from zero_mini.course.plots.palette import (
    ACTIVATIONS,
    COMMUNICATION,
    FAINT,
    GRADIENTS,
    INK,
    NEUTRAL,
    OPTIMIZER,
    PARAMETERS,
    text_on,
    tint,
)
from zero_mini.memory.timeline import Kernel, length, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = ("compute", "wire")
KINDS = {  # by the first word of a span's label
    "forward": tint(ACTIVATIONS, 0.6),
    "backward": ACTIVATIONS,
    "matmul": ACTIVATIONS,
    "attention": tint(ACTIVATIONS, 0.6),
    "step": OPTIMIZER,
    "optimizer": OPTIMIZER,
    "all_gather": PARAMETERS,
    "reduce_scatter": GRADIENTS,
    "all_reduce": GRADIENTS,
    "broadcast": COMMUNICATION,
    "copy": COMMUNICATION,
    "other": NEUTRAL,
}
CARRIED = {"reducescatter": "reduce_scatter", "allreduce": "all_reduce", "broadcast": "broadcast"}
WIDTH_IN, RANK_IN, LEFT_IN = 5.5, 0.98, 1.15
GAP_MS = 0.01  # not seen between two bars


@dataclass(frozen=True)
class Span:
    """Something that ran on a rank, in milliseconds. `label`: a kind, and perhaps a unit: "all_gather blocks.0"."""

    rank: int
    lane: str  # "compute" or "wire"
    label: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        return self.label.partition(" ")[0]


def from_kernels(kernels: list[Kernel], rank: int = 0, begin: float | None = None) -> list[Span]:
    """A GPU's kernels as spans, from `begin` (microseconds) or the first one's start.

    Copies between GPUs are gathers by copy engines. The clocks of one host's GPUs agree, so that two ranks' spans
    from one `begin` are on one scale.

    >>> from_kernels([Kernel("nvjet", 7, 1000, 3000), Kernel("ncclDevKernel_ReduceScatter", 9, 2000, 3500)])[1]
    Span(rank=0, lane='wire', label='reduce_scatter', start=1.0, end=2.5)
    """
    if begin is None:
        begin = min((kernel.start for kernel in kernels), default=0.0)
    spans = []
    for kernel in kernels:
        lane, label = "compute", kernel.kind
        if kernel.kind == "collective":
            lowered = kernel.name.lower()
            lane, label = "wire", next((kind for mark, kind in CARRIED.items() if mark in lowered), "all_gather")
        spans.append(Span(rank, lane, label, (kernel.start - begin) / 1e3, (kernel.end - begin) / 1e3))
    return spans


def joined(spans: list[Span]) -> list[Span]:
    """A rank's computations of one label that follow one another within GAP_MS, as one: what a picture can show.

    Each collective on the wire stays a span of its own.

    >>> joined([Span(0, "compute", "matmul", 0, 1), Span(0, "compute", "matmul", 1.005, 2)])
    [Span(rank=0, lane='compute', label='matmul', start=0, end=2)]
    """
    last: dict[tuple[int, str], Span] = {}
    result = []
    for span in sorted(spans, key=lambda span: span.start):
        before = last.get((span.rank, span.lane))
        if before and before.label == span.label and span.start - before.end <= GAP_MS and span.lane == "compute":
            result.remove(before)
            span = Span(span.rank, span.lane, span.label, before.start, max(before.end, span.end))
        last[span.rank, span.lane] = span
        result.append(span)
    return result


def from_measured(record: dict, name: str) -> dict:
    """The content of NAME.json -> the arguments of `draw_gantt`.

    >>> record = {"machine": {"cards": 2, "card": "X"}, "gantt_3": {"model": "1.5B", "stage": 3, "part": "backward",
    ...         "ms": 12.0, "spans": [[0, "wire", "all_gather", 1.0, 2.0]]}}
    >>> from_measured(record, "gantt_3")["note"]
    '12 ms of the backward of a step at stage 3: 1.5B on 2 x X'
    """
    window, machine = record[name], record["machine"]
    of = f"{window['ms']:g} ms of the {window['part']} of a step at stage {window['stage']}"
    return {
        "spans": [Span(*row) for row in window["spans"]],
        "note": f"{of}: {window['model']} on {cards(machine)}",
        "until": window["ms"],
    }


def exposed(spans: list[Span]) -> list[tuple[float, float]]:
    """When the wire of these spans' rank works and nothing computes.

    >>> exposed([Span(0, "wire", "all_gather", 0, 9), Span(0, "compute", "forward", 2, 4)])
    [(0, 2), (4, 9)]
    """
    computing = union((span.start, span.end) for span in spans if span.lane == "compute")
    alone = []
    for start, end in union((span.start, span.end) for span in spans if span.lane == "wire"):
        for busy_from, busy_to in computing:
            if busy_from < end and start < busy_to:
                if start < busy_from:
                    alone.append((start, busy_from))
                start = max(start, busy_to)
        if start < end:
            alone.append((start, end))
    return alone


def draw_gantt(spans: list[Span], title: str = "", note: str = "", until: float | None = None) -> Figure:
    """A pair of lanes for each rank. until: the scale's right end in ms, to compare pictures."""
    ranks = sorted({span.rank for span in spans})
    right = until or max(span.end for span in spans)
    unknown = sorted({span.kind for span in spans} - set(KINDS))
    if unknown:
        raise ValueError(f"a span's label begins with {unknown[0]!r}, which is none of {', '.join(KINDS)}")
    figure = page(1.3 + RANK_IN * len(ranks), title or "Compute and wire over time", note)
    kinds = {span.kind for span in spans}
    words(figure, 0.1, 0.56, {kind: colour for kind, colour in KINDS.items() if kind in kinds})
    axes = panel(figure, LEFT_IN, 0.85, WIDTH_IN, RANK_IN * len(ranks))
    axes.set(xlim=(0, right), ylim=(len(ranks), 0))
    for row, rank in enumerate(ranks):
        draw_rank(axes, row, [span for span in spans if span.rank == rank], right)
        axes.text(-1.07 / WIDTH_IN * right, row + 0.22, f"rank {rank}", va="center", fontsize=9, color=INK)
    scale(axes, "bottom", "ms")
    return figure


def draw_rank(axes: Axes, row: int, spans: list[Span], right: float) -> None:
    """Its lanes, and below them the exposed time."""
    for lane, y in zip(LANES, (row + 0.22, row + 0.54)):
        axes.text(-0.08 / WIDTH_IN * right, y, lane, ha="right", va="center", fontsize=8, color=FAINT)
        axes.axhline(y, color=NEUTRAL, linewidth=0.5, zorder=1)
        chosen = sorted((span for span in spans if span.lane == lane), key=lambda span: span.start)
        bars = [(span.start, span.end - span.start) for span in chosen]
        edges = [0.5 if length / right * WIDTH_IN > 0.03 else 0 for _, length in bars]  # which would hide a thin bar
        colours = [KINDS[span.kind] for span in chosen]
        axes.broken_barh(bars, (y - 0.14, 0.28), facecolors=colours, edgecolor="white", linewidths=edges, zorder=2)
        for span, after in zip(chosen, [*chosen[1:], None]):
            write(axes, span, min(span.end, after.start) if after else span.end, y, right)
    alone = exposed(spans)
    bars = [(start, end - start) for start, end in alone]
    axes.broken_barh(bars, (row + 0.76, 0.05), facecolor=INK, zorder=2)
    text = f"exposed {three_digits(length(alone))} ms"
    axes.text(-0.08 / WIDTH_IN * right, row + 0.785, text, ha="right", va="center", fontsize=7.5, color=INK)


def write(axes: Axes, span: Span, end: float, y: float, right: float) -> None:
    """The unit's name inside what is seen of its bar, up to `end`: a block's number alone if need be."""
    unit = span.label.partition(" ")[2]
    style = dict(ha="center", va="center", fontsize=7.5)
    for text in (unit, unit.rpartition(".")[2]):
        if text and (end - span.start) / right * WIDTH_IN > (len(text) + 0.6) * LETTER_IN * 7.5:
            axes.text((span.start + end) / 2, y, text, color=text_on(KINDS[span.kind]), **style)
            return
