"""Parts of all pictures: a page measured in inches from its top left corner, bare axes, bytes in a unit that fits.

Text is at least 7.5 points on a page 7 inches wide, which is still legible if the page is shown 700 pixels wide.

Left out: pictures whose size depends on the number of bars (speed.py, per_parameter.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, NoReturn

from zero_mini.course.plots.palette import FAINT, INK, NEUTRAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 7.0
LETTER_IN = 0.0078  # a letter's width for each point of its size, on average


def sheet(height_in: float, **options) -> Figure:
    """A figure of the width that all pictures have, with nothing on it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), dpi=160, facecolor="white", **options)


def page(height_in: float, title: str, note: str = "") -> Figure:
    """An empty page with its title, and a note of one or more lines below; they take 0.45 inches and 0.14 a line."""
    figure = sheet(height_in)
    write(figure, 0.1, 0.1, title, va="top", fontsize=11, fontweight="bold")
    write(figure, 0.1, 0.34, note, va="top", fontsize=8, color=FAINT, linespacing=1.3)
    return figure


def write(figure: Figure, left: float, top: float, text: str, **style) -> None:
    """Text on the page itself, inches from its top left corner."""
    width, height = figure.get_size_inches()
    figure.text(left / width, 1 - top / height, text, **{"color": INK, "fontsize": 8} | style)


def panel(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Bare axes, inches from the page's top left corner."""
    across, down = figure.get_size_inches()
    axes = figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=7.5, labelcolor=FAINT)
    axes.set(xticks=[], yticks=[])
    return axes


def scale(axes: Axes, side: str, name: str = "") -> None:
    """A thin axis with few numbers, on the side "bottom" or "left"."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    axis = axes.xaxis if side == "bottom" else axes.yaxis
    axes.spines[side].set(visible=True, color=NEUTRAL)
    axis.set_major_locator(MaxNLocator(6 if side == "bottom" else 5, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(ScalarFormatter(useOffset=False))
    axis.set_tick_params(length=2, color=NEUTRAL)
    axis.set_label_text(name, fontsize=8, color=FAINT)


def words(figure: Figure, left: float, top: float, coloured: dict[str, str], marks: Iterable[str] = ()) -> None:
    """Words in a row, each behind a mark in the colour of what it names: a legend without a box.

    marks: one letter for each word; a square where none is given.
    """
    for (word, colour), mark in zip(coloured.items(), chain(marks, repeat("■"))):
        write(figure, left, top, mark, va="top", color=colour)
        write(figure, left + 0.13, top, word, va="top")
        left += 0.33 + len(word) * LETTER_IN * 8


def cards(machine: dict) -> str:
    """What a record was made on, in its title.

    >>> cards({"cards": 2, "card": "X", "torch": "2"})
    '2 x X'
    """
    return f"{machine['cards']} x {machine['card']}"


def unit_of(nbytes: float) -> tuple[float, str]:
    """Bytes of the unit, and its name, in which so many bytes are a number of one to three digits.

    >>> unit_of(2_371_000_000), unit_of(16_000), unit_of(3)
    ((1000000000.0, 'GB'), (1000.0, 'kB'), (1.0, 'B'))
    """
    return next(((size, name) for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if nbytes >= size), (1.0, "B"))


def three_digits(value: float) -> str:
    """A number with three digits that count, or all of those before the point.

    >>> [three_digits(value) for value in (1991.6, 107.2, 9.876, 0.5, 0)]
    ['1,992', '107', '9.88', '0.500', '0']
    """
    places = 0 if value == 0 or value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{places}f}"


def spread(places: Sequence[float], gap: float) -> list[float]:
    """The same places, moved as little as it takes for any two to be `gap` apart; their order stays.

    >>> spread([0, 0, 5], gap=2), spread([3, 1], gap=1)
    ([-1.0, 1.0, 5.0], [3.0, 1.0])
    """
    clusters: list[list[int]] = []  # neighbours that touch move as one, around their mean
    for index in sorted(range(len(places)), key=places.__getitem__):
        clusters.append([index])
        while len(clusters) > 1 and _first(clusters[-1], places, gap) < _last(clusters[-2], places, gap) + gap:
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    moved = [0.0] * len(places)
    for cluster in clusters:
        for order, index in enumerate(cluster):
            moved[index] = _first(cluster, places, gap) + order * gap
    return moved


def _first(cluster: list[int], places: Sequence[float], gap: float) -> float:
    return sum(places[index] for index in cluster) / len(cluster) - (len(cluster) - 1) / 2 * gap


def _last(cluster: list[int], places: Sequence[float], gap: float) -> float:
    return _first(cluster, places, gap) + (len(cluster) - 1) * gap


def draw_a_record(draw: Callable[[dict], Figure], **options) -> None:
    """The command `python -m zero_mini.course.plots.NAME RECORD.json PICTURE.png`; options of savefig.

    What cannot be read, drawn or written ends it with one line and status 2.
    """
    if len(sys.argv) != 3:
        refuse(f"needs two files, RECORD.json and PICTURE.png (got {len(sys.argv) - 1})")
    record, picture = sys.argv[1:]
    try:
        with open(record) as file:
            figure = draw(json.load(file))
    except OSError as error:
        refuse(f"{record} cannot be read: {error.strerror}; give a record, as those of zero_mini/measured")
    except ImportError as error:
        refuse(f'{error}; pip install -e ".[lessons]"')
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        refuse(f"{record} is not a record of this picture ({reason}); give one of zero_mini/measured")
    try:
        figure.savefig(picture, **options)
    except OSError as error:
        refuse(f"{picture} cannot be written: {error.strerror}; choose another file")
    except ValueError as error:  # an ending that is no format of a picture
        refuse(f"{picture} cannot be written: {error}")


def refuse(reason: str) -> NoReturn:
    print(f"zero_mini.course.plots: error: {reason}", file=sys.stderr)
    sys.exit(2)
