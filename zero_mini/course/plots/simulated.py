"""Figure 1 of the paper, measured: bars by the paper's formula, dots for what one rank of N held, the others absent.

    stage 0  parameters  [par][gra][      optimizer      ]o^      o: states by the walk    ^: peak of the second step
    stage 3              [] o  ^

Left out: the build, whose peak is lower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import draw_a_record, page, panel, scale, three_digits, words, write
from zero_mini.course.plots.palette import CATEGORY, FAINT, INK, as_text, tint
from zero_mini.course.plots.states import SHARDED
from zero_mini.memory.formulas import model_state_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_IN, LEFT_IN, ACROSS_IN = 0.5, 1.05, 4.1
STATES, PEAK = "states, measured", "peak of a step, measured"


def from_measured(record: dict) -> dict:
    """The content of figure1.json -> the arguments of `draw_simulated`.

    >>> run = {"stage": 1, "psi": 8, "world_size": 2, "precision": "bf16", "states_bytes": 80, "outcome": "ran"}
    >>> from_measured({"machine": {"card": "X"}, "simulated": [run | {"moments": {"step 2": {"peak_bytes": 90}}}]})
    {'measured': {1: (80, 90)}, 'psi': 8, 'world_size': 2, 'itemsize': 2, 'note': 'rank 0 of 2 on one X'}
    """
    runs = record["simulated"]
    measured = {
        run["stage"]: (run["states_bytes"], run["moments"]["step 2"]["peak_bytes"]) if run["outcome"] == "ran" else None
        for run in runs
    }
    first, card = runs[0], record["machine"]["card"].removeprefix("NVIDIA ")
    where = "a CPU" if card == "CPU" else f"one {card}"
    return {
        "measured": measured,
        "psi": first["psi"],
        "world_size": first["world_size"],
        "itemsize": 4 if first["precision"] == "fp32" else 2,
        "note": f"rank {first.get('rank', 0)} of {first['world_size']} on {where}",
    }


def draw_simulated(
    measured: dict[int, tuple[float, float] | None], psi: float, world_size: int, itemsize: int = 2, note: str = ""
) -> Figure:
    """measured: stage -> (bytes of states, bytes at the peak of a step), or None if memory was too small."""
    formula = {stage: model_state_bytes(psi, world_size, stage, itemsize) for stage in measured}
    totals = [sum(parts.values()) for parts in formula.values()]
    most = max(*totals, *(peak for found in measured.values() if found for peak in found))
    size, unit = (1e9, "GB") if most >= 1e9 else (1e6, "MB")
    figure = page(
        1.2 + ROW_IN * len(measured),
        f"The paper's bars, and what a rank held: {three_digits(psi / (1e9 if psi >= 1e9 else 1e6))}"
        f"{'B' if psi >= 1e9 else 'M'} parameters, N = {world_size}",
        f"{note}; {unit} ({size:.0e} bytes)".replace("e+0", "e"),
    )
    bars = {name: tint(CATEGORY[name], 0.55) for name in ("parameters", "gradients", "optimizer")}
    words(figure, 0.1, 0.58, bars | {STATES: INK, PEAK: FAINT}, "■■■●▲")
    axes = panel(figure, LEFT_IN, 0.85, ACROSS_IN, ROW_IN * len(measured))
    axes.set(xlim=(0, 1.02 * most / size), ylim=(len(measured), 0))
    scale(axes, "bottom")
    for row, (stage, found) in enumerate(measured.items()):
        left = 0.0
        for name, colour in bars.items():
            axes.barh(row + 0.5, formula[stage][name] / size, 0.62, left, color=colour, linewidth=0)
            left += formula[stage][name] / size
        top = 0.85 + ROW_IN * (row + 0.5)
        write(figure, LEFT_IN - 0.08, top - 0.07, f"stage {stage}", ha="right", va="center", fontweight="bold")
        write(figure, LEFT_IN - 0.08, top + 0.09, SHARDED[stage], ha="right", va="center", color=FAINT, fontsize=7.5)
        write(figure, LEFT_IN + ACROSS_IN + 0.12, top - 0.09, f"paper {three_digits(left)}", va="center", color=FAINT)
        text, colour = "out of memory", as_text(CATEGORY["gradients"])
        if found:
            states, peak = (nbytes / size for nbytes in found)
            axes.plot([states], [row + 0.5], "o", color=INK, markersize=5, clip_on=False, zorder=3)
            axes.plot([peak], [row + 0.5], "^", color=FAINT, markersize=5, clip_on=False, zorder=2)
            text, colour = f"states {three_digits(states)}, peak {three_digits(peak)}", INK
        write(figure, LEFT_IN + ACROSS_IN + 0.12, top + 0.07, text, va="center", color=colour)
    return figure


if __name__ == "__main__":  # python -m zero_mini.course.plots.simulated RECORD.json PICTURE.png
    draw_a_record(lambda record: draw_simulated(**from_measured(record)))
