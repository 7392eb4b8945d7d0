"""The loss scale of fp16, step by step: it halves where a step is skipped, and doubles after enough good ones.

    2^16 __
           |_    x: skipped
    2^14     |_______----

Left out: losses; curves.py draws them.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import page, panel, scale
from zero_mini.course.plots.palette import FAINT, GRADIENTS, INK, as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_loss_scales(scales: list[float], stepped: list[bool], note: str = "") -> Figure:
    """scales[t]: the scale that step t used; stepped[t]: False if it was skipped."""
    if len(scales) != len(stepped):
        raise ValueError(f"{len(scales)} scales for {len(stepped)} steps: give one for each step")
    figure = page(2.35, "The loss scale over a training", note)
    axes = panel(figure, 0.62, 0.62, 5.0, 1.3)
    exponents = [log2(value) for value in scales]
    axes.plot(range(len(scales)), exponents, drawstyle="steps-post", color=INK, linewidth=1.2)
    skipped = [(t, e) for t, (e, took) in enumerate(zip(exponents, stepped)) if not took]
    axes.plot([t for t, _ in skipped], [e for _, e in skipped], "X", color=GRADIENTS, markersize=6)
    axes.set(xlim=(-0.5, len(scales)), ylim=(min(exponents) - 1, max(exponents) + 1))
    scale(axes, "bottom", "step")
    scale(axes, "left")
    axes.yaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    label = dict(transform=axes.transAxes, fontsize=8, va="center")
    axes.text(1.02, 0.7, "scale", color=INK, **label)
    axes.text(1.02, 0.45, "X skipped", color=as_text(GRADIENTS), **label)
    axes.text(1.02, 0.25, f"{len(skipped)} of {len(scales)} steps", color=FAINT, **label)
    return figure
