"""Memory over a step, stacked by category: a panel for each stage, all on one scale.

    bytes |      /\\        activations grow in forward and shrink in backward, gradients the other way round;
          |    _/  \\__     parameters and optimizer lie below
          |___/_______\\__
            forward | backward | step

Time is the order of allocations and frees, as memory/recorder.py saw them; a phase is equally wide in all panels.

Left out: seconds, and what no operation returns: see memory/recorder.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_mini.course.plots.frame import (
    LETTER_IN,
    cards,
    draw_a_record,
    page,
    panel,
    scale,
    three_digits,
    unit_of,
    words,
)
from zero_mini.course.plots.palette import CATEGORY, FAINT, INK, NEUTRAL, text_on
from zero_mini.memory.recorder import Recorder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_IN = (2.85, 1.75)
WHITE = dict(facecolor="white", edgecolor="none", pad=1)  # a box behind text that may lie on colours
# Categories that hardly change lie below, so that the others have a level base.
ORDER = ("parameters", "optimizer", "gradients", "activations", "communication", "other")


@dataclass(frozen=True)
class Story:
    """Bytes alive in one step, by category: plain numbers, which a rank can return."""

    phases: list[tuple[str, int]]  # (label, how many of the instants are its)
    series: dict[str, list[int]]  # category -> bytes at each instant; the first is the step's beginning

    @property
    def totals(self) -> list[int]:
        return [sum(now) for now in zip(*self.series.values())]

    def thinned(self, most: int = 150) -> Story:
        """At most so many instants a phase: of those that share a place, the one with the most bytes.

        So the peak stays, and a story of thousands of places fits into a small file.

        >>> Story([("forward", 4)], {"other": [0, 1, 5, 2, 3]}).thinned(2)
        Story(phases=[('forward', 2)], series={'other': [0, 5, 3]})
        """
        places, phases, start, totals = [0], [], 1, self.totals
        for label, count in self.phases:
            bounds = [start + count * k // min(most, count) for k in range(min(most, count) + 1)] if count else [start]
            places += [max(range(low, high), key=totals.__getitem__) for low, high in zip(bounds, bounds[1:])]
            phases.append((label, len(bounds) - 1))
            start += count
        return Story(phases, {category: [values[at] for at in places] for category, values in self.series.items()})


def last_step(recorder: Recorder) -> Story:
    """The recorder's last step: from its last mark "forward" to the next mark "end", or to the end."""
    labels = [label for label, _ in recorder.moments]
    first = len(labels) - 1 - labels[::-1].index("forward")
    last = labels.index("end", first) if "end" in labels[first:] else len(labels)
    bounds = [index for _, index in recorder.moments] + [len(recorder.events)]
    series = {category: [0, *values] for category, values in recorder.timeline().items()}  # [0]: before any event
    begin, end = bounds[first], bounds[last]
    phases = [(labels[k], bounds[k + 1] - bounds[k]) for k in range(first, last)]
    return Story(phases, {category: values[begin : end + 1] for category, values in series.items()})


def from_measured(record: dict, *stages: int) -> dict:
    """The content of moments.json or fits.json for these stages -> the arguments of `draw_moments`."""
    if "moments" in record:
        moments = record["moments"]
        about = {"title": f"{moments['model']} in {moments['precision']} on {cards(record['machine'])}"}
    else:
        moments = record["fits"]
        size = f"{moments['psi'] / 1e9:.1f}B parameters in {moments['precision']}"
        ranks = f"rank 0 of {moments['world_size']}, the others simulated"
        about = {"title": f"{size}, {ranks}, on {cards(record['machine'])}", "card_bytes": moments["card_bytes"]}
    recorded = {stage: moments["stages"][str(stage)] for stage in stages}
    stories = {
        f"stage {stage}": Story([tuple(phase) for phase in story["phases"]], story["series"])
        for stage, story in recorded.items()
    }
    return {"stories": stories, **about}


def instants(phases: list[tuple[str, int]], widths: list[float]) -> list[float]:
    """Where each instant lies across a panel: the beginning at 0, then each phase's evenly over its width.

    >>> instants([("forward", 2), ("backward", 1)], [1.0, 3.0])
    [0.0, 0.5, 1.0, 4.0]
    """
    places, start = [0.0], 0.0
    for (_, count), width in zip(phases, widths):
        places += [start + width * (j + 1) / count for j in range(count)]
        start += width
    return places


def draw_moments(stories: dict[str, Story], title: str = "", card_bytes: float | None = None) -> Figure:
    """stories: a panel's name, such as "stage 2", -> its step. They need the same phases in the same order.

    card_bytes: the memory of a GPU, drawn as a line; each panel's title says whether the step fits.
    """
    labels = {tuple(label for label, _ in story.phases) for story in stories.values()}
    if len(labels) != 1:
        raise ValueError(f"stories of different phases cannot share a scale: {sorted(labels)}")
    counts = zip(*([count for _, count in story.phases] for story in stories.values()))
    widths = [float(max(1, sum(column))) for column in counts]
    widths = [max(width, sum(widths) / 5) for width in widths]  # room for a phase's name
    most = max(max(story.totals) for story in stories.values())
    size, unit = unit_of(most)
    rows = -(-len(stories) // 2)
    note = f"{unit} ({size:.0e} bytes) alive, in the order of allocations and frees"
    note = f"{title}{'' if not title else '; ' if card_bytes is None else chr(10)}{note}"
    top = 0.14 * note.count("\n")
    figure = page(0.85 + top + rows * 2.3, "Memory through one training step", note.replace("e+0", "e"))
    named: set[str] = set()
    peaks = {name: max(story.totals) for name, story in stories.items()}
    for place, (name, story) in enumerate(stories.items()):
        axes = panel(figure, 0.55 + place % 2 * 3.35, 0.95 + top + place // 2 * 2.3, *PANEL_IN)
        axes.set(xlim=(0, sum(widths)), ylim=(0, 1.16 * most))
        draw_story(axes, story, widths, size, named)
        first = next(iter(peaks))
        line, what = (
            (peaks[first], f"{first}'s peak")
            if card_bytes is None
            else (card_bytes, f"a GPU of {card_bytes / size:g} {unit}")
        )
        verdict = ""
        if card_bytes is not None:
            verdict = f": fits in {card_bytes / size:g} {unit}" if peaks[name] <= card_bytes else ": does not fit"
        axes.set_title(name + verdict, loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=4)
        if place or card_bytes is not None:
            is_above = peaks[name] > line
            if is_above:
                axes.axhline(line, color="white", linewidth=2)  # so that the dashes can be seen on any colour
            axes.axhline(line, color=INK if is_above else FAINT, linewidth=0.7, linestyle=(0, (4, 3)))
            text = dict(xytext=(-2, -4 if is_above else 2), textcoords="offset points", ha="right", fontsize=7.5)
            text |= dict(va="top", bbox=WHITE, color=INK) if is_above else dict(va="bottom", color=FAINT)
            axes.annotate(what, (sum(widths), line), **text)
        scale(axes, "left", unit if place % 2 == 0 else "")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / size:g}")
    largest = {category: max(max(story.series[category]) for story in stories.values()) for category in ORDER}
    words(figure, 0.1, 0.56 + top, {c: CATEGORY[c] for c, b in largest.items() if b > most / 200})
    return figure


def draw_story(axes: Axes, story: Story, widths: list[float], size: float, named: set[str]) -> None:
    """One stack, its peak, its phases; a category's name where it first finds room (`named` has those who did)."""
    x = instants(story.phases, widths)
    floor = [0.0] * len(x)
    for category in ORDER:
        roof = [low + more for low, more in zip(floor, story.series[category])]
        colour = CATEGORY[category]
        axes.fill_between(x, floor, roof, step="post", color=colour, linewidth=0)
        if category not in named and label(axes, category, x, floor, roof, widths):
            named.add(category)
        floor = roof
    peak = max(floor)
    at = x[floor.index(peak)]
    axes.plot(at, peak, "o", color=INK, markersize=3)
    to_left = at > sum(widths) / 2
    text = f"  peak {three_digits(peak / size)}  "
    style = dict(ha="right" if to_left else "left", va="bottom", fontsize=8, color=INK, fontweight="bold")
    axes.text(at, peak, text, **style)
    start = 0.0
    for (name, _), width in zip(story.phases, widths):
        if start:
            top = axes.get_ylim()[1]
            axes.plot([start] * 2, [0, level(x, floor, start, sum(widths) / 25)], color="white", linewidth=0.9)
            axes.plot([start] * 2, [0, -0.1 * top], color=INK, linewidth=0.7, clip_on=False)
        axes.text(start + width / 2, -0.03 * axes.get_ylim()[1], name, ha="center", va="top", fontsize=8, color=INK)
        start += width
    axes.axhline(0, color=NEUTRAL, linewidth=0.8)


def level(x: list[float], roof: list[float], place: float, around: float) -> float:
    """The lowest point of `roof` near the place: a spike there rises above it, and a line up to it leaves it whole.

    >>> level([0, 1, 2, 3, 4], [5, 6, 9, 7, 1], place=2, around=1)
    6
    """
    return min(high for at, high in zip(x, roof) if abs(at - place) <= around)


def label(axes: Axes, text: str, x: list[float], floor: list[float], roof: list[float], widths: list[float]) -> bool:
    """Write `text` into the band between floor and roof where it is widest; False if it fits nowhere."""
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    width = (1.2 * len(text) + 2) * LETTER_IN * 8 / PANEL_IN[0] * right  # bold letters are wider
    middle, low, high = roomiest(x, floor, roof, width, [sum(widths[:k]) for k in range(1, len(widths))])
    if (high - low) / top * PANEL_IN[1] < 0.13:
        return False
    style = dict(ha="center", va="center_baseline", fontsize=8, fontweight="bold")
    axes.text(middle, (low + high) / 2, text, color=text_on(CATEGORY[text]), **style)
    return True


def roomiest(
    x: list[float], floor: list[float], roof: list[float], width: float, avoid: list[float]
) -> tuple[float, float, float]:
    """(middle, low, high) of the highest box of that width between two step functions, with no place of `avoid` in it.

    Of boxes nearly as high, the one nearest to the middle; (0, 0, 0) if there is none.

    >>> roomiest([0, 1, 2, 3, 4], [0, 0, 0, 0, 0], [1, 5, 5, 5, 1], width=2, avoid=[])
    (2.0, 0, 5)
    """
    boxes = [(0.0, 0.0, 0.0)]
    for left in x:
        if left + width <= x[-1] and not any(left < place < left + width for place in avoid):
            within = [i for i, (a, b) in enumerate(zip(x, x[1:])) if a < left + width and b > left]
            boxes.append((left + width / 2, max(floor[i] for i in within), min(roof[i] for i in within)))
    highest = max(high - low for _, low, high in boxes)
    return min(
        (box for box in boxes if box[2] - box[1] >= 0.97 * highest),
        key=lambda box: abs(box[0] - x[-1] / 2),
    )


if __name__ == "__main__":  # python -m zero_mini.course.plots.moments RECORD.json PICTURE.png
    draw_a_record(lambda record: draw_moments(**from_measured(record, 0, 1, 2, 3)))
