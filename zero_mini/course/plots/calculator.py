"""A calculator of model states: what one rank holds at each stage, by the paper's formula, beside a GPU's memory.

     120 GB
    [      ]
    [      ] ------------------------------------ a GPU's 80 GB
    [      ]    31.4 GB
    [      ]   [       ]   16.6 GB   1.88 GB
    stage 0     stage 1    stage 2   stage 3      the chosen one in full colour

If the same model, number of ranks and precision were measured, marks show the measured bytes and the machine.
The numbers are those of model_states.py; see there for what they leave out.

Left out: a line for a GPU's memory far above the stacks, which would flatten them; the text states it instead.
"""

from __future__ import annotations

from math import inf
from numbers import Real
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import page, panel, three_digits, unit_of, words, write
from zero_mini.course.plots.model_states import (
    BACKWARD,
    ITEMSIZE,
    MODELS,
    STAGES,
    check_one_of,
    formula,
    found,
    psi_of,
    states_by_stage,
)
from zero_mini.course.plots.palette import CATEGORY, FAINT, INK, text_on, tint
from zero_mini.course.plots.states import SHARDED, segments
from zero_mini.memory.formulas import OPTIMIZERS

if TYPE_CHECKING:
    from ipywidgets import Widget
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_IN = 2.5  # of the panel
HIGHEST = 4  # times the highest stack: a GPU's memory above that has no line but a text


def draw_calculator(
    model: str | float = "7.5B",
    N: int = 64,
    stage: int = 2,
    precision: str = "bf16",
    optimizer: str = "AdamW",
    gpu_GB: float = 80,
    records: tuple[dict, dict] | None = None,
) -> Figure:
    """A stack for each stage, a line for a GPU's memory, a mark for what `records` (memory.json, speed.json) hold."""
    states, psi = states_by_stage(model, N, precision, optimizer), psi_of(model)
    check_one_of("stage", stage, STAGES)
    if not (isinstance(gpu_GB, Real) and 0 < gpu_GB < inf):
        raise ValueError(f"gpu_GB must be a number > 0 (got {gpu_GB!r}); pass a GPU's memory in 1e9 bytes, as 80")
    each = states_by_stage(1, 1, precision, optimizer)[0]
    measured = found(*records, psi, N, precision) if records and optimizer == "AdamW" else {}
    total, longest, gpu_bytes = sum(states[stage].values()), sum(states[0].values()), gpu_GB * 1e9
    kind = precision if precision == "fp32" else f"{precision} over an fp32 master"
    share = f"{100 * total / gpu_bytes:.3g} % of" if total <= gpu_bytes else "more than"
    note = (
        f"parameters Ψ = {psi:,.0f}, ranks N = {N:,}, {kind}, {optimizer}\n"
        f"Stage {stage}: {_amount(total, longest)} on each rank, {share} a GPU's {gpu_GB:g} GB (1e9 bytes); "
        "activations come on top"
    )
    figure = page(4.15 + 0.16 * len(measured), "Bytes of model states on one rank, by the paper's formula", note)
    words(figure, 0.1, 0.78, {f"{category} {nbytes:g}Ψ": CATEGORY[category] for category, nbytes in each.items()})
    axes = panel(figure, 0.1, 1.05, 5.6, HEIGHT_IN)
    axes.set(xlim=(-0.5, 3.5), ylim=(0, 1.12 * (gpu_bytes if longest < gpu_bytes <= HIGHEST * longest else longest)))
    _draw_stacks(axes, states, stage, [f"stage {s}\n{SHARDED[s]}\n{formula(s, each)}" for s in STAGES])
    _draw_gpu(axes, gpu_GB, longest)
    for row, ((machine, moment), held) in enumerate(measured.items()):
        side, marker, sign = (0.31, "o", "●") if moment == BACKWARD else (-0.31, "D", "◆")
        style = dict(s=30, marker=marker, color=INK, edgecolors="white", zorder=4)
        axes.scatter([s + side for s in held], held.values(), **style)
        write(figure, 0.1, 4.15 + 0.16 * row, f"{sign}  measured on {machine}, {moment}", va="top", color=FAINT)
    return figure


def _amount(nbytes: float, longest: float) -> str:
    size, unit = unit_of(longest)
    return f"{three_digits(nbytes / size)} {unit}"


def _draw_stacks(axes: Axes, states: dict[int, dict[str, float]], chosen: int, names: list[str]) -> None:
    longest = sum(states[0].values())
    for stage, held in states.items():
        share, weight = (1.0, "bold") if stage == chosen else (0.4, "normal")
        for category, start, nbytes in segments(held):
            colour = tint(CATEGORY[category], share)
            style = dict(color=colour, edgecolor="white", linewidth=0.6, zorder=2)
            axes.bar(stage, nbytes, 0.62, bottom=start, **style)
            if nbytes / axes.get_ylim()[1] * HEIGHT_IN > 0.14:
                style = dict(ha="center", va="center", fontsize=8, color=text_on(colour), zorder=3)
                axes.text(stage, start + nbytes / 2, _amount(nbytes, longest), **style)
        total = sum(held.values())
        style = dict(fontsize=9.5, fontweight=weight, color=INK, ha="center", va="bottom", zorder=3)
        around = dict(facecolor="white", edgecolor="none", pad=0.8)  # the GPU's line may pass
        above = dict(xytext=(0, 3), textcoords="offset points", bbox=around)
        axes.annotate(_amount(total, longest), (stage, total), **above, **style)
    axes.set_xticks(STAGES, names, fontsize=8.5, linespacing=1.3)
    axes.get_xticklabels()[chosen].set(color=INK, fontweight="bold")


def _draw_gpu(axes: Axes, gpu_GB: float, longest: float) -> None:
    """Its line where the panel reaches; in words how far above it is elsewhere."""
    top, text = axes.get_ylim()[1], f" a GPU's\n {gpu_GB:g} GB"
    if gpu_GB * 1e9 <= top:
        axes.axhline(gpu_GB * 1e9, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    else:
        text = f" ↑ a GPU's {gpu_GB:g} GB,\n {three_digits(gpu_GB * 1e9 / longest)} x stage 0"
    axes.annotate(text, (3.5, min(gpu_GB * 1e9, top)), va="center", fontsize=8, color=INK, annotation_clip=False)


def calculator() -> Widget:
    """Menus and sliders above that figure, which is drawn anew at each change; needs ipywidgets."""
    from ipywidgets import SelectionSlider, fixed, interactive

    from zero_mini.course.lesson import recorded

    return interactive(
        draw_calculator,
        {"auto_display": True},
        model=list(MODELS),
        N=SelectionSlider(options=[2**k for k in range(11)], value=64),
        stage=(0, 3),
        precision=list(ITEMSIZE),
        optimizer=list(OPTIMIZERS),
        gpu_GB=[16, 24, 40, 80, 141],
        records=fixed((recorded("memory"), recorded("speed"))),
    )
