"""Tokens a second on each GPU: a panel for each work, a bar for each system, the ceiling as a dashed line.

This package's stages are blue, peers grey. Each bar's label has its speed and the allocator's peak in memory; a system
that failed, or whose losses differ from DDP's, has the reason instead of a bar.

Left out: the spread of the steps; it is in the benchmark's table.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zero_mini.course.plots.palette import FAINT, INK, NEUTRAL, PARAMETERS, text_on

if TYPE_CHECKING:  # matplotlib is for those who draw: it is imported where that begins
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR_IN, HEAD_IN, PANEL_IN = 0.27, 0.95, 6.2  # inches: a bar's share, a panel's title and axis, its width

TITLE = (
    "$\\bf{Tokens\\ a\\ second\\ on\\ each\\ GPU}$\n"
    "blue: zero_mini; dashed: a plain forward and backward, without ranks or optimizer"
)


def save(record: dict, path: Path) -> None:
    """Draw the content of DIR/speed.json as a PNG."""
    draw(record["works"]).savefig(path, dpi=160, facecolor="white")


def draw(works: dict[str, dict]) -> Figure:
    """One panel for each work, in two columns if there are more than two; a bar is as thick in all of them."""
    from matplotlib.figure import Figure

    columns: list[list[str]] = [[] for _ in range(2 if len(works) > 2 else 1)]
    for name in works:
        min(columns, key=lambda names: sum(height(works[each]) for each in names)).append(name)
    tall = max(sum(height(works[name]) for name in names) for names in columns)
    figure = Figure(figsize=(PANEL_IN * len(columns), tall + 0.55), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.02)
    figure.suptitle(TITLE, x=0.012, ha="left", fontsize=9, color=INK)
    grid = figure.add_gridspec(1, len(columns))
    for index, names in enumerate(columns):
        heights = [height(works[name]) for name in names]
        rest = [tall - sum(heights)] if tall - sum(heights) > 0.01 else []
        column = grid[index].subgridspec(len(heights + rest), 1, height_ratios=heights + rest)
        for place, name in enumerate(names):
            panel(figure.add_subplot(column[place]), name, works[name])
        if rest:
            figure.add_subplot(column[-1]).set_axis_off()
    return figure


def height(entry: dict) -> float:
    """Inches of a work's panel."""
    return BAR_IN * len(shown(entry)) + HEAD_IN


def shown(entry: dict) -> list[str]:
    """The systems that have a bar, or a reason why not; the ceiling is a line."""
    return [system for system in entry["systems"] if system != "plain"]


def panel(axes: Axes, name: str, entry: dict) -> None:
    """The bars of one work."""
    systems, scores = shown(entry), entry["scores"]
    ceiling = scores.get("plain", {}).get("tokens_s")
    fastest = max([score["tokens_s"] for score in scores.values() if "tokens_s" in score], default=1.0)
    for place, system in enumerate(systems):
        score, row = scores[system], entry["systems"][system]
        if "reason" in score:
            axes.text(0.01 * fastest, place, shortened(score["reason"]), va="center", fontsize=8, color=FAINT)
            continue
        speed = score["tokens_s"]
        colour = PARAMETERS if is_ours(system) else NEUTRAL
        axes.barh(place, speed, height=0.72, color=colour, zorder=2)
        inside = dict(ha="right", va="center", fontsize=8, zorder=4)
        axes.text(speed - 0.012 * fastest, place, f"{speed:,.0f}", color=text_on(colour), **inside)
        if "peak_bytes" in row:
            memory = f"{row['peak_bytes'] / 2**30:.0f} GiB"
            axes.text(1.05 * fastest, place, memory, va="center", fontsize=8, color=FAINT)
    if ceiling:
        axes.axvline(ceiling, color=INK, linestyle=(0, (4, 3)), linewidth=1.1, zorder=3)
        axes.text(ceiling, -0.72, "plain ", ha="right", va="bottom", fontsize=7.5, color=INK)
    if any("peak_bytes" in row for row in entry["systems"].values()):
        axes.text(1.05 * fastest, -0.72, "peak", va="bottom", fontsize=7.5, color=FAINT)
    axes.set(xlim=(0, 1.17 * fastest), ylim=(len(systems) - 0.4, -0.9))
    axes.set_yticks(range(len(systems)), systems, fontsize=8.5, color=INK)
    machine = entry["machine"]
    axes.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=16)
    note = f"{machine['cards']} x {machine['card'].removeprefix('NVIDIA ')}, torch {machine['torch']}"
    axes.text(0, 1.02, note, transform=axes.transAxes, va="bottom", fontsize=7.5, color=FAINT)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=6)
    if not any("tokens_s" in score for score in scores.values()):
        axes.set_xticks([])
    axes.tick_params(axis="x", labelsize=7.5, labelcolor=FAINT, color=NEUTRAL, length=2)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(NEUTRAL)


def is_ours(system: str) -> bool:
    """Is it this package's?

    >>> is_ours("zero-3 no prefetch"), is_ours("ddp-zero1")
    (True, False)
    """
    return system.startswith("zero-")


def shortened(reason: str, most: int = 62) -> str:
    """A reason that fits into a panel.

    >>> shortened("one two three", most=9)
    'one two ...'
    """
    return reason if len(reason) <= most else reason[:most].rpartition(" ")[0] + " ..."
