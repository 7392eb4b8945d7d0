"""Bytes of model states on one rank at each stage, by category: measured, and below it by the paper's formula.

    stage 0   [par][gra][    optimizer     ] 1,992 MB     measured: memory.walk
              [par][gra][    optimizer     ] paper 1,992  memory.model_state_bytes

Left out: activations at their peak, and an allocator's rounding; moments.py shows bytes over time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import LETTER_IN, cards, page, panel, spread, three_digits, unit_of
from zero_mini.course.plots.palette import CATEGORY, FAINT, INK, as_text, text_on, tint
from zero_mini.memory.formulas import model_state_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, STAGE_IN = 4.55, 0.62  # of the longest bar; of a stage, down the page
SHARDED = ("nothing sharded", "P_os", "P_os+g", "P_os+g+p")


def from_measured(record: dict) -> dict:
    """The content of memory.json -> the arguments of `draw_states`.

    >>> stage = {"held_bytes": {"parameters": 4}, "units_P": {"root": 1, "blocks.0": 1}}
    >>> from_measured({"machine": {"cards": 2, "card": "X"},
    ...                "memory": {"model": "2", "precision": "bf16", "stages": {"0": stage}}})
    {'held': {0: {'parameters': 4}}, 'psi': 2, 'world_size': 2, 'itemsize': 2, 'title': '2 in bf16 on 2 x X'}
    """
    memory, machine = record["memory"], record["machine"]
    stages = {int(stage): row for stage, row in memory["stages"].items()}
    return {
        "held": {stage: row["held_bytes"] for stage, row in stages.items()},
        "psi": sum(next(iter(stages.values()))["units_P"].values()),
        "world_size": machine["cards"],
        "itemsize": 4 if memory["precision"] == "fp32" else 2,
        "title": f"{memory['model']} in {memory['precision']} on {cards(machine)}",
    }


def segments(held: dict[str, float]) -> list[tuple[str, float, float]]:
    """(category, start, bytes) of what is there, end to end in the order of the categories.

    >>> segments({"optimizer": 8, "gradients": 0, "parameters": 4})
    [('parameters', 0, 4), ('optimizer', 4, 8)]
    """
    placed, start = [], 0
    for category in CATEGORY:
        if held.get(category):
            placed.append((category, start, held[category]))
            start += held[category]
    return placed


def draw_states(
    held: dict[int, dict[str, float]], psi: float, world_size: int, itemsize: int = 2, title: str = ""
) -> Figure:
    """A pair of bars for each stage. held: stage -> bytes by category; psi: elements, padding included."""
    paper = {stage: model_state_bytes(psi, world_size, stage, itemsize) for stage in held}
    longest = max(sum(states.values()) for states in (*held.values(), *paper.values()))
    size, unit = unit_of(longest / 10)  # small categories need digits too
    note = f"{title + '; ' if title else ''}after a backward, in {unit} ({size:.0e} bytes)".replace("e+0", "e")
    figure = page(0.95 + STAGE_IN * len(held), "Model states on one rank: measured, and by the paper's formula", note)
    axes = panel(figure, 1.05, 0.88, WIDTH_IN, STAGE_IN * len(held))
    axes.set(xlim=(0, longest), ylim=(len(held) - 0.1, -0.1))
    named: set[str] = set()
    for row, stage in enumerate(held):
        axes.text(
            -0.1 / WIDTH_IN * longest, row + 0.21, f"stage {stage}", ha="right", va="center", fontsize=9.5, color=INK
        )
        below = dict(ha="right", va="center", fontsize=7.5, color=FAINT)
        axes.text(-0.1 / WIDTH_IN * longest, row + 0.51, SHARDED[stage], **below)
        bar(axes, row + 0.21, 0.36, held[stage], size, 1.0)
        bar(axes, row + 0.51, 0.14, paper[stage], size, 0.45)
        right = sum(held[stage].values())
        total = f" {three_digits(right / size)} {unit}"
        axes.text(right, row + 0.21, total, va="center", fontsize=9.5, color=INK, fontweight="bold")
        end, sums = sum(paper[stage].values()), three_digits(sum(paper[stage].values()) / size)
        axes.text(end, row + 0.51, f"  paper {sums}", va="center", fontsize=8, color=FAINT)
        above = []
        for category, start, nbytes in segments(held[stage]):
            number = three_digits(nbytes / size)
            words = [category] * (category not in named) + [number] * (not inside(number, nbytes, longest))
            if words and nbytes > longest / 100:
                above.append((category, start + nbytes / 2, " ".join(words)))
        write_above(axes, row, above, longest)
        named.update(category for category, _, _ in above)
    return figure


def inside(number: str, nbytes: float, longest: float) -> bool:
    """Is there room for it in a segment of so many bytes?"""
    return nbytes / longest * WIDTH_IN > (len(number) + 0.5) * LETTER_IN * 8


def bar(axes: Axes, y: float, height: float, held: dict[str, float], size: float, share: float) -> None:
    """One stack; its numbers are inside where there is room."""
    for category, start, nbytes in segments(held):
        colour = tint(CATEGORY[category], share)
        axes.barh(y, nbytes, height, left=start, color=colour, edgecolor="white", linewidth=0.6)
        text = three_digits(nbytes / size)
        if share == 1 and inside(text, nbytes, axes.get_xlim()[1]):
            axes.text(start + nbytes / 2, y, text, ha="center", va="center", fontsize=8, color=text_on(colour))


def write_above(axes: Axes, row: int, texts: list[tuple[str, float, str]], longest: float) -> None:
    """Above their segments: categories that come for the first time, and numbers that are too long to be inside."""
    wide = [0.1 + 0.6 * LETTER_IN * 8 * (len(one) + len(other)) for (*_, one), (*_, other) in zip(texts, texts[1:])]
    gap = max([0.78, *wide]) / WIDTH_IN * longest
    places = spread([middle for _, middle, _ in texts], gap)
    if places and places[0] < 0:  # outside of the bars, where the stage's name is: begin where they begin
        half = LETTER_IN * 8 * len(texts[0][2]) / 2 / WIDTH_IN * longest
        places = [place - places[0] + half for place in places]
    for (category, _, text), place in zip(texts, places):
        style = dict(ha="center", va="bottom", fontsize=8, fontweight="bold", color=as_text(CATEGORY[category]))
        axes.text(place, row, text, **style)
