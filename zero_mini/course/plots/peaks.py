"""The peak of a step, cut into what is alive at it: a bar for each way to train, in groups.

    stage 0   all kept            [ states      | activations  | logits ]  47
              every block again   [ states      |a| logits ]  28
    stage 3   all kept            [ states | activations  | logits ]  35
    GB        0                  20                  40

Left out: when the peak is; two bars of one group may have theirs at different moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import page, panel, scale, three_digits, unit_of, words, write
from zero_mini.course.plots.palette import ACTIVATIONS, FAINT, GRADIENTS, INK, OPTIMIZER, tint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (OPTIMIZER, ACTIVATIONS, tint(ACTIVATIONS, 0.5), GRADIENTS)
ROW_IN, GAP_IN, LEFT_IN, ACROSS_IN = 0.2, 0.14, 2.45, 4.1


def draw_peaks(groups: dict[str, dict[str, dict[str, float]]], title: str, note: str = "") -> Figure:
    """groups: a group's name -> the name of a bar -> what is in it -> bytes, from the left to the right."""
    bars = [parts for group in groups.values() for parts in group.values()]
    kinds = dict(zip(dict.fromkeys(kind for parts in bars for kind in parts), COLOURS))
    most = max(sum(parts.values()) for parts in bars)
    size, unit = unit_of(most)
    height = len(bars) * ROW_IN + (len(groups) - 1) * GAP_IN
    figure = page(height + 1.4, title, note)
    words(figure, 0.1, 0.56, kinds)
    axes = panel(figure, LEFT_IN, 0.85, ACROSS_IN, height)
    axes.set(xlim=(0, 1.1 * most / size), ylim=(height, 0))
    scale(axes, "bottom", f"{unit} ({size:.0e} bytes)".replace("e+0", "e"))
    top = 0.0
    for group, ways in groups.items():
        write(figure, 0.1, 0.85 + top + ROW_IN / 2, group, va="center", fontweight="bold")
        for way, parts in ways.items():
            middle, left = top + ROW_IN / 2, 0.0
            for kind, nbytes in parts.items():
                axes.barh(middle, nbytes / size, 0.8 * ROW_IN, left, color=kinds[kind], linewidth=0)
                left += nbytes / size
            write(figure, LEFT_IN - 0.07, 0.85 + middle, way, ha="right", va="center", color=FAINT)
            style = dict(va="center", fontsize=8, color=INK, fontweight="bold")
            axes.text(left + 0.01 * most / size, middle, three_digits(left), **style)
            top += ROW_IN
        top += GAP_IN
    return figure
