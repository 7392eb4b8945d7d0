"""Bytes a parameter: a bar for each run, of any stage, N and precision, and below it one for the paper's formula.

Colours are those of the categories in all pictures. The measured bar is thick; the formula's is the thin one below it,
in the same order, so bytes that are not in the formula (padding, slots, the root's buffers) stick out.

Left out: activations, which no formula of the stages covers; they have a figure of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import sheet
from zero_mini.course.plots.palette import CATEGORY, FAINT, INK, NEUTRAL, as_text, text_on
from zero_mini.course.plots.states import segments

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_per_parameter(
    measured: dict[str, dict[str, float]], formula: dict[str, dict[str, float]], psi: float
) -> Figure:
    """measured and formula: label of a bar -> category -> bytes. psi: parameters; bars are in bytes a parameter."""
    figure = sheet(0.95 + 0.62 * len(measured), layout="constrained")
    axes = figure.subplots()
    named = set()
    for place, (label, parts) in enumerate(measured.items()):
        for category, start, length in segments({c: b / psi for c, b in parts.items()}):
            axes.barh(
                place, length, left=start, height=0.42, color=CATEGORY[category], edgecolor="white", linewidth=0.8
            )
            if length > 0.8:
                style = dict(ha="center", va="center", fontsize=7.5, color=text_on(CATEGORY[category]))
                axes.text(start + length / 2, place, f"{length:.1f}", **style)
            if category not in named and length > 0.5:  # where a category comes first, its name stands above
                named.add(category)
                axes.text(start, place - 0.26, category, va="bottom", fontsize=7.5, color=as_text(CATEGORY[category]))
        for category, start, length in segments({c: b / psi for c, b in formula.get(label, {}).items()}):
            axes.barh(place + 0.3, length, left=start, height=0.1, color=CATEGORY[category], alpha=0.75)
        axes.text(
            sum(parts.values()) / psi + 0.15, place, f"{sum(parts.values()) / psi:.1f}", va="center", fontsize=8.5
        )
    axes.set_yticks(range(len(measured)), list(measured), fontsize=9, color=INK)
    axes.set(ylim=(len(measured) - 0.45, -0.6), xlabel="bytes a parameter on one rank (thin: the formula)")
    axes.xaxis.label.set(fontsize=8, color=FAINT)
    axes.tick_params(axis="x", labelsize=8, labelcolor=FAINT, color=NEUTRAL)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlim(0, 1.08 * max(sum(parts.values()) for parts in measured.values()) / psi)
    return figure
