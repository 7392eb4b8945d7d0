"""A histogram of magnitudes, on a scale of powers of two, over the ranges of fp16.

          zero      | fewer bits |      all bits       | inf
    ________________|____________|_____________________|_____    2^e
        #### #####  ####

Left out: the sign, and numbers that are zero already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import page, panel, scale, words
from zero_mini.course.plots.palette import ACTIVATIONS, FAINT, GRADIENTS, INK, NEUTRAL, as_text, tint

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALLEST, NORMAL, LARGEST = -24, -14, 15  # exponents of fp16: the last subnormal, the last with all bits, the largest
PANEL_IN = 1.15
COLOURS = (ACTIVATIONS, GRADIENTS)


def exponents(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Exponent e -> how many elements lie in 2^e <= |x| < 2^(e+1). Zeros, infinities and NaN are not counted.

    >>> import torch
    >>> exponents([torch.tensor([1.0, -1.5, 0.25, 0.0])])
    {-2: 1, 0: 2}
    """
    counts: Counter[int] = Counter()
    for tensor in tensors:
        values = tensor.detach().float().flatten()
        values = values[values.isfinite() & (values != 0)]
        counts.update((values.frexp().exponent - 1).tolist())
    return dict(sorted(counts.items()))


def share_of_each(counts: dict[int, int]) -> dict[int, float]:
    """Exponent -> its share of all numbers.

    >>> share_of_each({-2: 1, 0: 3})
    {-2: 0.25, 0: 0.75}
    """
    return {e: count / sum(counts.values()) for e, count in counts.items()}


def share_lost(counts: dict[int, int], shift: int = 0) -> float:
    """The share that is zero in fp16 after multiplying by 2^shift.

    >>> share_lost({-30: 1, -10: 3}), share_lost({-30: 1, -10: 3}, shift=10)
    (0.25, 0.0)
    """
    return sum(count for e, count in counts.items() if e + shift < SMALLEST - 1) / sum(counts.values())


def share_shortened(counts: dict[int, int], shift: int = 0) -> float:
    """The share that is not zero in fp16 after multiplying by 2^shift, but has fewer bits than it had.

    >>> share_shortened({-30: 1, -20: 1, -10: 2}), share_shortened({-30: 1, -20: 1, -10: 2}, shift=10)
    (0.25, 0.25)
    """
    below = sum(count for e, count in counts.items() if e + shift < NORMAL) / sum(counts.values())
    return below - share_lost(counts, shift)


def times(counts: dict[int, int], power: int) -> dict[int, int]:
    """The exponents of the same numbers times 2^power.

    >>> times({-2: 1, 0: 2}, 16)
    {14: 1, 16: 2}
    """
    return {e + power: count for e, count in counts.items()}


def draw_exponents(rows: dict[str, dict[str, dict[int, int]]], what: str = "gradients") -> Figure:
    """A panel for each row, with one or two kinds of numbers in it: row -> kind -> `exponents`.

    The first kind is drawn as bars, the second as a line; each is a share of all numbers of its own kind.
    """
    gap = PANEL_IN + 0.72
    kinds = dict(zip(next(iter(rows.values())), COLOURS))
    figure = page(1.05 + gap * len(rows), f"How large {what} are", "share for each power of two; what fp16 makes of it")
    words(figure, 0.3, 0.56, {f"{what} {kind}": colour for kind, colour in kinds.items()})
    seen = [e for row in rows.values() for counts in row.values() for e in counts]
    low, high = max(min(*seen, SMALLEST - 4), SMALLEST - 16), max(*seen, LARGEST) + 2
    for place, (name, row) in enumerate(rows.items()):
        axes = panel(figure, 0.3, 1.2 + place * gap, 6.4, PANEL_IN)
        shares = {kind: share_of_each(counts) for kind, counts in row.items()}
        axes.set(xlim=(low, high), ylim=(0, 1.15 * max(share for part in shares.values() for share in part.values())))
        regions(axes, low, high)
        for order, (kind, part) in enumerate(shares.items()):
            draw_one_kind(axes, part, kinds[kind], as_bars=order == 0)
        for line, (kind, counts) in enumerate(row.items()):  # in the zone of zeros, which is empty or nearly so
            lost = f"■ {share_lost(counts):.1%} zero, {share_shortened(counts):.0%} lose bits"
            height = axes.get_ylim()[1] * (0.88 - 0.16 * line)
            axes.text(low + 0.3, height, lost, color=as_text(kinds[kind]), fontsize=8, zorder=4)
        axes.set_title(name, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=14)
        scale(axes, "bottom", "exponent of two" if place == len(rows) - 1 else "")
    return figure


def draw_one_kind(axes: Axes, shares: dict[int, float], colour: str, as_bars: bool) -> None:
    """Bars, or a line with a step at each power of two."""
    if as_bars:
        axes.bar([e + 0.5 for e in shares], list(shares.values()), width=0.9, color=colour, zorder=2)
        return
    whole = range(min(shares) - 1, max(shares) + 2)  # exponents that do not occur are zeros of the line
    heights = [shares.get(e, 0.0) for e in whole]
    axes.plot([e + 0.5 for e in whole], heights, drawstyle="steps-mid", color=colour, linewidth=1.6, zorder=3)


def regions(axes: Axes, low: float, high: float) -> None:
    """The result of rounding a number with that exponent to fp16."""
    parts = [
        (low, SMALLEST - 1, "zero", NEUTRAL),
        (SMALLEST - 1, NORMAL, "fewer bits", tint(NEUTRAL, 0.5)),
        (NORMAL, LARGEST + 1, "all bits", "white"),
        (LARGEST + 1, high, "inf", NEUTRAL),
    ]
    top = axes.get_ylim()[1]
    for start, end, name, colour in parts:
        axes.axvspan(start, end, color=colour, zorder=0, linewidth=0)
        axes.text((start + end) / 2, top * 1.02, name, ha="center", va="bottom", fontsize=7.5, color=FAINT)
