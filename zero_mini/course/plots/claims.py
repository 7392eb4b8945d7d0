"""What people say of ZeRO: a panel for each claim, with the verdict and a bar for each thing that was measured.

    ZeRO sends less
    [no]  as much as data parallelism, at stage 3 more
    sent in a step, in units of Psi (N-1)/N
    stage 0   |==========      2
    stage 3   |==============  2.763

This package's stages are blue, everything else grey. Each quantity has a scale of its own, which begins at 0.

Left out: the experiments; zero_mini/laboratory/ has them, and `make myths` runs them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import LETTER_IN, WIDTH_IN, draw_a_record, page, panel, write
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
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERDICTS = {"yes": OPTIMIZER, "no": GRADIENTS, "it depends": ACTIVATIONS, "open": COMMUNICATION}
LINE_IN, ROW_IN, GAP_IN, EDGE_IN = 0.15, 0.175, 0.2, 0.1
NAMES_IN, NUMBERS_IN = 1.2, 0.85  # to the left of the bars, and to their right
TITLE_PT, TEXT_PT = 8.5, 7.5
DPI = 100  # 700 pixels across: a lesson has a dozen of these pictures


def draw_claims(rows: Sequence[dict], title: str = "", note: str = "") -> Figure:
    """rows: of zero_mini.laboratory.rows, in two columns; one alone has the whole width."""
    columns = min(2, len(rows))
    across = (WIDTH_IN - EDGE_IN - columns * GAP_IN) / columns
    lines = [rows[at : at + columns] for at in range(0, len(rows), columns)]
    heights = [max(height(row, across) for row in line) for line in lines]
    top = 0.65 if title else EDGE_IN
    figure = page(top + sum(heights) + GAP_IN * (len(lines) - 1) + EDGE_IN, title, note)
    figure.set_dpi(DPI)
    for line, tall in zip(lines, heights):
        for column, row in enumerate(line):
            draw_claim(figure, EDGE_IN + column * (across + GAP_IN), top, across, row)
        top += tall + GAP_IN
    return figure


def draw_claim(figure: Figure, left: float, top: float, across: float, row: dict) -> None:
    """One panel, `across` inches wide, from its top left corner on."""
    claim, word, reason, indent = words_of(row, across)
    for at, line in enumerate(claim):
        write(figure, left, top + at * LINE_IN + 0.11, line, fontsize=TITLE_PT, fontweight="bold")
    top += LINE_IN * len(claim) + 0.08
    pill = dict(boxstyle="round,pad=0.25", facecolor=VERDICTS[word], linewidth=0)
    style = dict(color=text_on(VERDICTS[word]), fontsize=TEXT_PT, fontweight="bold")
    write(figure, left + 0.04, top + 0.11, word, bbox=pill, **style)
    for at, line in enumerate(reason):
        write(figure, left + indent, top + at * LINE_IN + 0.11, line, fontsize=TEXT_PT)
    top += LINE_IN * len(reason) + 0.08
    for bars in row["measured"]:
        write(figure, left, top + 0.11, bars["quantity"], fontsize=TEXT_PT, color=FAINT)
        top += LINE_IN + 0.02
        draw_bars(figure, left, top, across, bars)
        top += ROW_IN * len(bars["values"]) + 0.06


def draw_bars(figure: Figure, left: float, top: float, across: float, bars: dict) -> None:
    """The values of one quantity, on a scale from 0 (or the lowest, if it is below) to the highest."""
    values = bars["values"]
    known = [value for value in values.values() if value is not None]
    low, high = min([0, *known]), max([0, *known])
    width, length = across - NAMES_IN - NUMBERS_IN, ROW_IN * len(values)
    axes = panel(figure, left + NAMES_IN, top, width, length)
    axes.set(xlim=(low, high if high > low else low + 1), ylim=(len(values), 0))
    axes.axvline(0, color=FAINT, linewidth=0.8, zorder=3, clip_on=False)
    for place, (thing, value) in enumerate(values.items()):
        colour = PARAMETERS if thing.startswith("stage ") else NEUTRAL
        axes.barh(place + 0.5, value or 0, 0.66, color=colour, linewidth=0)
        middle = top + (place + 0.5) * ROW_IN
        write(figure, left + NAMES_IN - 0.07, middle, thing, ha="right", va="center", fontsize=TEXT_PT, color=FAINT)
        said = "never" if value is None else f"{number(value)} {bars['unit']}".strip()
        at = {"xytext": (4, 0), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(said, (max(value or 0, 0), place + 0.5), va="center", fontsize=TEXT_PT, color=INK, **at)


def height(row: dict, across: float) -> float:
    """Inches of a claim's panel."""
    claim, _, reason, _ = words_of(row, across)
    bars = sum(LINE_IN + 0.08 + ROW_IN * len(bars["values"]) for bars in row["measured"])
    return LINE_IN * (len(claim) + len(reason)) + 0.16 + bars


def words_of(row: dict, across: float) -> tuple[list[str], str, list[str], float]:
    """Lines of the claim, the verdict's word, lines of its reason, and inches from the panel's edge to the reason."""
    word, _, reason = row["verdict"].partition(": ")
    word, reason = (word, reason) if reason else ("open", word)
    indent = 0.2 + len(word) * LETTER_IN * TEXT_PT
    letters = [int(inches / (LETTER_IN * size)) for inches, size in ((across, TITLE_PT), (across - indent, TEXT_PT))]
    return even(row["claim"], letters[0]), word, even(reason, letters[1]), indent


def even(text: str, letters: int) -> list[str]:
    """As few lines as `wrap` needs, of about the same length.

    >>> even("below that of stage 1", 20), even("short", 20)
    (['below that', 'of stage 1'], ['short'])
    """
    fewest = len(wrap(text, letters))
    return wrap(text, min(width for width in range(1, letters + 1) if len(wrap(text, width)) == fewest))


def number(value: float) -> str:
    """With as many digits as a panel has room for.

    >>> [number(value) for value in (0.0, 3, 1214.976, 192.34, 2.5, 0.40499, -0.0154, 1.49e-08)]
    ['0', '3', '1,215', '192.3', '2.5', '0.405', '-0.015', '1.5e-08']
    """
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    text = f"{value:,.{0 if size >= 1000 else 1 if size >= 10 else 3}f}"
    return re.sub(r"\.?0+$", "", text) if "." in text else text


if __name__ == "__main__":  # python -m zero_mini.course.plots.claims zero_mini/measured/myths.json myths.png
    from zero_mini.laboratory.rows import about_zero

    def draw(record: dict) -> Figure:
        machine, found = record["machine"], about_zero(record["myths"]["results"])
        where = f"{machine['cores']} cores of a CPU, torch {machine['torch']}, {machine['backend']}"
        note = f"{where}; blue: stages of ZeRO"
        return draw_claims(found, "What people say of ZeRO, and what was measured", note)

    draw_a_record(draw, dpi=160)
