"""Loss curves with a bug and without, which check finds which bug, and how long each rank waits.

    loss         \\___      with the bug, over the healthy one
    difference   ==~~==    on a strip: the distance of two healthy trainings with different initial weights; all
                           panels have one scale, and what is too large for it leaves the panel

               one process   all ranks   memory
    a bug           #            .          .        # found
    another         .          hangs        #        or a word: how the bug stopped the check

Left out: the causes; lesson 08 has the bugs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import page, panel, scale, three_digits, words, write
from zero_mini.course.plots.palette import FAINT, GRADIENTS, INK, NEUTRAL, tint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Losses = Sequence[float]  # step by step
ROW_IN, LINE_IN = 1.72, 0.24
SPREADS = 2.5  # the height of the lower panels, on either side of 0, in distances of two healthy trainings
HEALTHY, STRIP = tint(INK, 0.45), tint(NEUTRAL, 0.6)


def differences(one: Losses, other: Losses) -> list[float]:
    """other - one, step by step. ValueError if their numbers of steps differ.

    >>> differences([3.0, 2.0], [3.0, 2.5])
    [0.0, 0.5]
    """
    if len(one) != len(other):
        raise ValueError(f"curves of {len(one)} and {len(other)} steps: train both for the same number")
    return [b - a for a, b in zip(one, other)]


def said(apart: Losses) -> str:
    """How far a curve is from another, in words.

    >>> said([0.0, -0.25]), said([0.0, 1e-6]), said([0.0, 0.0])
    ('difference: at most 0.250', 'difference: less than 0.001', 'no difference, to the bit')
    """
    most = max(map(abs, apart))
    if 0 < most < 0.001:
        return "difference: less than 0.001"
    return f"difference: at most {three_digits(most)}" if most else "no difference, to the bit"


def spread_of(seeds: Sequence[Losses]) -> float:
    """The largest difference between any two of these curves at any step.

    >>> spread_of([[3.0, 2.0], [3.5, 2.0], [2.75, 2.5]])
    0.75
    """
    return max(max(losses) - min(losses) for losses in zip(*seeds))


def draw_bugs(curves: dict[str, tuple[Losses, Losses]], seeds: Sequence[Losses], note: str = "") -> Figure:
    """curves: a bug -> (losses without it, losses with it).

    seeds: losses of healthy trainings, each from other random weights. `spread_of` them is half the strip's height.
    """
    rows = -(-len(curves) // 2)
    figure = page(1.05 + rows * ROW_IN, f"{len(curves)} bugs, and the loss that each draws", note)
    words(
        figure,
        0.1,
        0.6,
        {"without the bug": HEALTHY, "with it": GRADIENTS, "as far apart as two healthy trainings": STRIP},
    )
    spread = spread_of(seeds)
    for index, (bug, (healthy, sick)) in enumerate(curves.items()):
        left, top = 0.45 + index % 2 * 3.45, 0.95 + index // 2 * ROW_IN
        write(figure, left - 0.3, top, bug, va="top", fontsize=8.5, fontweight="bold")
        losses = panel(figure, left, top + 0.22, 2.95, 0.58)
        losses.plot(healthy, color=HEALTHY, linewidth=3.2, solid_capstyle="round")
        losses.plot(sick, color=GRADIENTS, linewidth=1.2)
        apart = panel(figure, left, top + 1.02, 2.95, 0.36)
        apart.axhspan(-spread, spread, color=STRIP, linewidth=0)
        apart.plot(differences(healthy, sick), color=GRADIENTS, linewidth=1.2)
        apart.set_title(said(differences(healthy, sick)), loc="left", fontsize=7.5, color=FAINT, pad=3)
        most = SPREADS * spread or 1.0
        apart.set(ylim=(-most, most), xlim=losses.get_xlim())
        scale(losses, "left")
        few(losses, losses.get_ylim())
        scale(apart, "left")
        tick = float(f"{0.8 * most:.0e}")  # one digit
        apart.set_yticks((-tick, 0, tick))
        if index >= len(curves) - 2:
            scale(apart, "bottom", "step")
    return figure


def few(axes: Axes, limits: tuple[float, float]) -> None:
    """Two or three numbers on a low axis."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(2, steps=[1, 2, 5, 10]))
    axes.set_ylim(*limits)


def draw_findings(found: dict[str, dict[str, bool | str]], note: str = "") -> Figure:
    """found: a bug -> a check -> whether it finds the bug, or a word for how. All bugs have the same checks."""
    checks = list(next(iter(found.values())))
    for bug, row in found.items():
        if list(row) != checks:
            raise ValueError(f"{bug!r} was given to {', '.join(row)}, others to {', '.join(checks)}: give all to all")
    figure = page(1.05 + len(found) * LINE_IN, "Which check finds which bug", note)
    axes = panel(figure, 2.75, 0.95, 4.15, len(found) * LINE_IN)
    axes.set(xlim=(0, len(checks)), ylim=(len(found), 0))
    label = dict(ha="center", va="center")
    for column, check in enumerate(checks):
        axes.text(column + 0.5, -0.55, check, fontsize=7.5, color=INK, **label)
    for line, (bug, row) in enumerate(found.items()):
        axes.axhline(line, color=tint(NEUTRAL, 0.5), linewidth=0.6)
        write(figure, 0.1, 0.95 + (line + 0.5) * LINE_IN, bug, va="center")
        for column, check in enumerate(checks):
            hit = row[check]
            mark, colour = ("■" if hit is True else hit, GRADIENTS) if hit else ("·", FAINT)
            axes.text(
                column + 0.5, line + 0.5, mark, fontsize=7.5 if isinstance(hit, str) else 11, color=colour, **label
            )
    return figure


def draw_waits(ms: Sequence[Sequence[float]], note: str = "") -> Figure:
    """ms: milliseconds that each rank waited in each step. All ranks have one scale."""
    figure = page(1.05 + len(ms) * ROW_IN / 2, "How long each rank waits for collectives, in ms", note)
    most = 1.1 * max(map(max, ms))
    for rank, waited in enumerate(ms):
        top = 0.8 + rank * ROW_IN / 2
        write(figure, 0.1, top + 0.3, f"rank {rank}", va="center")
        axes = panel(figure, 1.1, top, 5.8, 0.62)
        axes.bar(range(1, len(waited) + 1), waited, width=0.6, color=GRADIENTS)
        axes.set(ylim=(0, most), xlim=(0.5, len(waited) + 0.5))
        scale(axes, "left")
        few(axes, (0, most))
        if rank == len(ms) - 1:
            scale(axes, "bottom", "step")
    return figure
