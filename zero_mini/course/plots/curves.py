"""Loss curves on top of one another, and below them, enlarged, the difference of each from the first.

    loss         \\___                the four stages look like one line
    difference   --^-v--             from stage 0, on a scale of its own

Left out: the cause of differences in bf16: sums of rounded gradients in another order. In fp32 there may be none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import page, panel, scale, spread
from zero_mini.course.plots.palette import FAINT, STAGE, as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = list[tuple[int, float]]  # (step, loss)
HEIGHT_IN = {"loss": 1.9, "difference": 1.15}


def from_measured(record: dict) -> dict[int, Curve]:
    """The content of training.json -> stage -> its training losses.

    >>> from_measured({"training": {"stages": {"3": [{"step": 0, "validation_loss": 9.0}, {"step": 5, "loss": 7.0}]}}})
    {3: [(5, 7.0)]}
    """
    stages = record["training"]["stages"]
    return {int(stage): [(r["step"], r["loss"]) for r in rows if "loss" in r] for stage, rows in stages.items()}


def with_steps(losses: Sequence) -> Curve:
    """A curve as it is; plain losses count their steps from 1.

    >>> with_steps([7.0, 6.5]), with_steps([(5, 7.0)])
    ([(1, 7.0), (2, 6.5)], [(5, 7.0)])
    """
    pairs = all(isinstance(loss, (tuple, list)) for loss in losses)
    return [tuple(pair) for pair in losses] if pairs else list(enumerate(losses, start=1))


def differences(curves: dict[int | str, Curve]) -> dict[int | str, Curve]:
    """Each curve minus the first. ValueError if a curve has other steps than the first.

    >>> differences({0: [(5, 7.0), (10, 6.0)], 2: [(5, 7.25), (10, 6.0)]})
    {2: [(5, 0.25), (10, 0.0)]}
    """
    (first, base), *others = curves.items()
    for stage, curve in others:
        if [step for step, _ in curve] != [step for step, _ in base]:
            raise ValueError(f"{called(stage)} was logged at other steps than {called(first)}: log both at the same")
    return {stage: [(s, loss - b) for (s, loss), (_, b) in zip(curve, base)] for stage, curve in others}


def called(stage: int | str) -> str:
    """A curve's name.

    >>> called(2), called("torch DDP")
    ('stage 2', 'torch DDP')
    """
    return f"stage {stage}" if isinstance(stage, int) else stage


def colour(stage: int | str) -> str:
    """A stage's, or grey."""
    return STAGE.get(stage, FAINT)


def draw_curves(
    losses: dict[int | str, Sequence], title: str = "", colours: dict[int | str, str] | None = None
) -> Figure:
    """losses: a stage or a name -> losses in order of steps, or (step, loss) pairs; the first is compared with.

    Colours are those of stages, and grey for a name, unless `colours` has another one.
    """
    shade = {stage: colour(stage) for stage in losses} | (colours or {})
    curves = {stage: with_steps(given) for stage, given in losses.items()}
    apart = differences(curves)
    first = next(iter(curves))
    most = max((abs(value) for curve in apart.values() for _, value in curve), default=0.0)
    summary = f"at most {most:.2g} apart" if most else "equal to the bit"
    figure = page(4.6, f"Losses: {summary}", title)
    upper = panel(figure, 0.75, 0.78, 5.4, HEIGHT_IN["loss"])
    lower = panel(figure, 0.75, 3.05, 5.4, HEIGHT_IN["difference"])
    for place, (stage, curve) in enumerate(curves.items(), start=1):  # each shows from under the next
        width = 1.2 + 1.6 * (len(curves) - place)
        upper.plot(*zip(*curve), color=shade[stage], linewidth=width, solid_capstyle="round")
    label_ends(upper, {stage: curve[-1] for stage, curve in curves.items()}, HEIGHT_IN["loss"], shade)
    lower.axhline(0, color=shade[first], linewidth=1)
    for stage, curve in apart.items():
        lower.plot(*zip(*curve), color=shade[stage], linewidth=1.3, marker="o", markersize=2.5)
    limit = 1.15 * most or 1.0
    lower.set(xlim=upper.get_xlim(), ylim=(-limit, limit))
    label_ends(lower, {first: (curves[first][-1][0], 0.0)} | {s: c[-1] for s, c in apart.items()}, 1.15, shade)
    for axes, name in ((upper, "training loss, nats"), (lower, f"difference from {called(first)}'s")):
        scale(axes, "left")
        axes.set_title(name, loc="left", fontsize=8, color=FAINT, pad=4)
    if not most:
        lower.set_yticks([0])
    scale(lower, "bottom", "step")
    return figure


def label_ends(
    axes: Axes, ends: dict[int | str, tuple[int, float]], height_in: float, shade: dict[int | str, str]
) -> None:
    """Each line's name at its right end in its colour, kept apart."""
    low, high = axes.get_ylim()
    line = 0.15 / height_in * (high - low)
    places = spread([y for _, y in reversed(ends.values())], line)[::-1]  # of equals the first is on top
    if max(y for _, y in ends.values()) - min(y for _, y in ends.values()) < 0.1 * line:  # no eye tells them apart
        places.sort(reverse=True)
    right = axes.get_xlim()[1]
    for (stage, _), place in zip(ends.items(), places):
        axes.text(right, place, " " + called(stage), va="center", fontsize=8.5, color=as_text(shade[stage]))
