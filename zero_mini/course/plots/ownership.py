"""Which rank holds which bytes of a unit: its flat buffer across, bytes of an element down, so that area is memory.

              weight        | bias | - -
    rank 0   [parameters 16-bit         ]    filled: held          pale: memory that stays without use
             [master   ]                     hatched: lent for the unit's turn      blank: another rank has it
    rank 1   [parameters 16-bit         ]
                        [master         ]

Left out: moments within a step (moments.py); it shows the memory between a backward and a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import LETTER_IN, page, panel, three_digits, unit_of
from zero_mini.course.plots.holdings import Holding, Layout
from zero_mini.course.plots.palette import FAINT, GRADIENTS, INK, NEUTRAL, OPTIMIZER, PARAMETERS, as_text, tint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STRIPS = {
    "parameters": PARAMETERS,
    "gradients": GRADIENTS,
    "master": OPTIMIZER,
    "momentum": OPTIMIZER,
    "variance": OPTIMIZER,
}
LEFT_IN, WIDTH_IN, RANK_IN, GAP_IN = 1.15, 4.7, 0.62, 0.09


def named(tensors: list[tuple[str, int, int]], P: int, width_in: float = WIDTH_IN) -> list[tuple[str, float, int]]:
    """(name, middle, line) for those that find room above the buffer, on two lines; slivers stay unnamed.

    >>> named([("weight", 0, 60), ("bias", 60, 20), ("gain", 80, 1), ("shift", 81, 19)], P=100, width_in=1.0)
    [('weight', 30.0, 0), ('bias', 70.0, 0), ('shift', 90.5, 1)]
    """
    ends, placed = [0.0, 0.0], []
    for name, offset, numel in tensors:
        middle, half = (offset + numel / 2) / P * width_in, (len(name) + 1) / 2 * LETTER_IN * 7.5
        line = next((line for line, end in enumerate(ends) if middle - half >= end), None)
        if numel / P > 0.015 and line is not None and middle + half <= width_in * 1.1:
            ends[line] = middle + half
            placed.append((name, offset + numel / 2, line))
    return placed


def draw_ownership(flat: Layout, stages: dict[int, list[Holding]]) -> Figure:
    """stages: stage -> what all ranks hold of the unit that is laid out as `flat`."""
    whole = [holding for held in stages.values() for holding in held]
    depths = {h.what: (h.itemsize, h.dtype) for h in sorted(whole, key=lambda h: h.itemsize, reverse=True)}
    depths = {what: depths[what] for what in STRIPS if what in depths}
    ranks = sorted({holding.rank for holding in whole})
    stage_in = (RANK_IN + GAP_IN) * len(ranks) + 0.16
    note = "Area is bytes. " + ", ".join(
        text
        for use, text in (
            ("held", "Full colour: held"),
            ("idle", "pale: kept without need"),
            ("lent", "hatched: a slot, during the unit's turn"),
        )
        if any(holding.use == use for holding in whole)
    )
    note += ".\nWhite lines: where a tensor begins; dashed: where one rank's slice ends and the next one's begins"
    figure = page(1.12 + stage_in * len(stages), f"Who holds what of {flat.name}, {flat.P:,} elements", note + ".")
    for place, (stage, on_all_ranks) in enumerate(stages.items()):
        for row, rank in enumerate(ranks):
            top = 1.1 + place * stage_in + row * (RANK_IN + GAP_IN)
            axes = panel(figure, LEFT_IN, top, WIDTH_IN, RANK_IN)
            on_rank = [holding for holding in on_all_ranks if holding.rank == rank]
            draw_rank(axes, flat, on_rank, depths, len(ranks))
            left = dict(ha="right", va="center", transform=axes.transAxes)
            axes.text(-0.02, 0.72, f"rank {rank}", fontsize=8, color=INK, **left)
            if row == 0:
                style = dict(fontsize=9.5, fontweight="bold", color=INK) | left | {"ha": "left"}
                axes.text(-1.05 / WIDTH_IN, 0.72, f"stage {stage}", **style)
            nbytes = sum(holding.nbytes for holding in on_rank)
            size, unit = unit_of(nbytes)
            text = f"{three_digits(nbytes / size)} {unit} = {nbytes / flat.P:.3g} P"
            axes.text(-0.02, 0.4, text, fontsize=8, color=FAINT, **left)
            if place == row == 0:
                name_tensors(axes, flat)
                name_strips(axes, depths)
    return figure


def draw_rank(axes: Axes, flat: Layout, on_rank: list[Holding], depths: dict, world_size: int) -> None:
    """A rectangle of P elements by the bytes of one, filled where this rank has them."""
    from matplotlib.patches import Rectangle

    depth = sum(size for size, _ in depths.values())
    axes.set(xlim=(0, flat.P), ylim=(depth, 0))
    top = 0
    for what, (itemsize, _) in depths.items():
        outline = dict(facecolor="none", edgecolor=NEUTRAL, linewidth=0.5, clip_on=False, zorder=3)
        axes.add_patch(Rectangle((0, top), flat.P, itemsize, **outline))
        for holding in on_rank:
            if holding.what == what:
                style = dict(facecolor=STRIPS[what], edgecolor="white", linewidth=0.6)
                if holding.use == "idle":
                    style["facecolor"] = tint(STRIPS[what], 0.35)
                elif holding.use == "lent":
                    style = dict(facecolor="none", edgecolor=STRIPS[what], hatch="//////", linewidth=0)
                axes.add_patch(Rectangle((holding.low, top), holding.high - holding.low, holding.itemsize, **style))
        top += itemsize
    for _, offset, _ in flat.tensors[1:]:
        axes.axvline(offset, color="white", linewidth=0.5)
    for rank in range(1, world_size):
        axes.axvline(rank * flat.P / world_size, color=INK, linewidth=0.7, linestyle=(0, (2, 2)))


def name_tensors(axes: Axes, flat: Layout) -> None:
    """Above the first rectangle; ticks mark where each tensor begins."""
    depth = axes.get_ylim()[0]
    for _, offset, _ in flat.tensors:
        axes.plot([offset, offset], [0, -0.06 * depth], color=FAINT, linewidth=0.5, clip_on=False)
    for name, middle, line in named(flat.tensors, flat.P):
        y = -(0.07 + 0.2 * line) * depth
        axes.text(middle, y, name, ha="center", va="bottom", fontsize=7.5, color=INK)


def name_strips(axes: Axes, depths: dict) -> None:
    """Right of the first rectangle, in its strips' order and colours."""
    for place, (what, (_, dtype)) in enumerate(depths.items()):
        y = (place + 0.5) / len(depths)
        text = f"{what} {dtype.replace('bfloat', 'bf').replace('float', 'fp')}"
        style = dict(
            va="center",
            fontsize=7.5,
            fontweight="bold",
            color=as_text(STRIPS[what] if what in ("parameters", "gradients") else OPTIMIZER),
        )
        axes.text(1.01, 1 - y, text, transform=axes.transAxes, **style)
