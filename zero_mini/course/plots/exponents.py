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

from zero_mini.course.plots.frame import page, panel, scale
from zero_mini.course.plots.palette import FAINT, GRADIENTS, INK, NEUTRAL, tint

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALLEST, NORMAL, LARGEST = -24, -14, 15  # exponents of fp16: the last subnormal, the last with all bits, the largest
PANEL_IN = 1.15


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


def draw_exponents(counts: dict[int, int], shifts: tuple[int, ...] = (0, 16), what: str = "gradients") -> Figure:
    """A histogram of `exponents` for each shift: the numbers times 2^shift."""
    note = f"share of all {what} for each power of two; what fp16 makes of it"
    figure = page(0.95 + (PANEL_IN + 0.62) * len(shifts), f"How large {what} are", note)
    low = min(min(counts) + min(shifts), SMALLEST - 4)
    high = max(max(counts) + max(shifts), LARGEST) + 2
    for place, shift in enumerate(shifts):
        axes = panel(figure, 0.3, 0.95 + place * (PANEL_IN + 0.62), 6.4, PANEL_IN)
        axes.set(xlim=(low, high), ylim=(0, 1.3 * max(counts.values()) / sum(counts.values())))
        regions(axes, low, high)
        total = sum(counts.values())
        heights = [count / total for count in counts.values()]
        axes.bar([e + shift + 0.5 for e in counts], heights, width=0.9, color=GRADIENTS, zorder=2)
        name = "as they are" if shift == 0 else f"times 2^{shift}"
        lost, shortened = share_lost(counts, shift), share_shortened(counts, shift)
        text = f"{name}: {lost:.1%} become zero, {shortened:.0%} lose bits"
        axes.set_title(text, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=14)
        scale(axes, "bottom", "exponent of two" if place == len(shifts) - 1 else "")
    return figure


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
