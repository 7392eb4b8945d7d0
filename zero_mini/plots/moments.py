"""Memory through one training step: how much of what is alive at each moment, one panel a run, all on one scale.

The horizontal axis counts events (something was allocated or freed), not time: a moment with many small tensors is
wide. Thin lines mark where forward, backward and step begin. Colours are those of the categories everywhere.

Left out: what the recorder cannot see (memory.py says what that is).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_mini.plots import palette
from zero_mini.plots.states import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Recording = tuple[dict[str, list[int]], list[tuple[str, int]]]  # Recorder.timeline(), Recorder.moments


def last_step(recording: Recording) -> Recording:
    """The part of a recording from its last moment called "forward" on.

    >>> last_step(({"other": [5, 6, 7]}, [("start", 0), ("forward", 1), ("backward", 2)]))
    ({'other': [6, 7]}, [('forward', 0), ('backward', 1)])
    """
    series, moments = recording
    first = max(place for place, (label, _) in enumerate(moments) if label == "forward")
    begin = moments[first][1]
    return (
        {category: values[begin:] for category, values in series.items()},
        [(label, index - begin) for label, index in moments[first:]],
    )


def draw_moments(recordings: dict[str, Recording]) -> Figure:
    """recordings: title of a panel -> what was recorded there. Bytes are shown in MB (1e6)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 0.3 + 1.55 * len(recordings)), layout="constrained")
    panels = figure.subplots(len(recordings), 1, squeeze=False, sharey=True)[:, 0]
    top = max(sum(values) for series, _ in recordings.values() for values in zip(*series.values())) / 1e6
    for axes, (title, (series, moments)) in zip(panels, recordings.items()):
        events, below = range(len(next(iter(series.values())))), [0.0] * len(next(iter(series.values())))
        for category, colour in COLOURS.items():
            above = [low + value / 1e6 for low, value in zip(below, series[category])]
            axes.fill_between(events, below, above, step="post", color=colour, linewidth=0)
            below = above
        peak = max(below)
        axes.axhline(peak, color=palette.INK, linewidth=0.6, linestyle=":")
        axes.text(len(events), peak, f" {peak:.2f}", va="center", fontsize=7.5, color=palette.INK)
        for label, index in moments:
            if label in ("forward", "backward", "step"):
                axes.axvline(index, color=palette.INK, linewidth=0.7)
                axes.text(index, 1.16 * top, f" {label}", va="top", fontsize=7.5, color=palette.FAINT)
        axes.set(xlim=(0, len(events)), ylim=(0, 1.2 * top))
        axes.set_title(title, loc="left", fontsize=9, fontweight="bold", color=palette.INK)
        axes.set_xticks([])
        axes.set_ylabel("MB", fontsize=7.5, color=palette.FAINT)
        axes.tick_params(axis="y", labelsize=7.5, labelcolor=palette.FAINT, color=palette.NEUTRAL)
        axes.spines[["top", "right"]].set_visible(False)
    names = [
        category for category in COLOURS if any(max(s[category]) > 0.01 * 1e6 * top for s, _ in recordings.values())
    ]
    figure.legend(
        handles=[swatch(COLOURS[name]) for name in names],
        labels=names,
        loc="outside lower left",
        ncols=len(names),
        fontsize=7.5,
        frameon=False,
        handlelength=0.9,
        columnspacing=1.2,
    )
    return figure


def swatch(colour: str):
    from matplotlib.patches import Patch

    return Patch(color=colour)
