"""The five colours of the pictures are five colours for every reader, and text on them can be read. Numbers only.

Colour blindness: Machado, Oliveira and Fernandes 2009, severity 1.0, in linear RGB. Distances: CIEDE2000, in which 1 is
about the least that an eye can tell.
"""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

import zero_mini
from zero_mini.course.plots import palette
from zero_mini.course.plots.palette import CATEGORY, GRADIENTS, READABLE, as_text, contrast, linear, text_on, tint

np = pytest.importorskip("numpy")
pytest.importorskip("matplotlib")
MEASURED = Path(zero_mini.__file__).parent / "measured"

SEEN = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.119192, 0.9503041]]
)
FIVE = {name: colour for name, colour in CATEGORY.items() if name != "other"}
PAIRS = list(combinations(CATEGORY, 2))  # "other" is another colour too


def lab(colour, vision="normal"):
    """L*, a*, b* of an sRGB colour, as this reader sees it."""
    light = np.clip(np.array(SEEN[vision]) @ linear(colour), 0, 1)
    xyz = TO_XYZ @ light / (0.95047, 1, 1.08883)
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def ciede2000(one, other):
    """Sharma, Wu and Dalal 2005."""
    (L1, a1, b1), (L2, a2, b2) = one, other
    C7 = ((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2) ** 7
    a1, a2 = (a * (1.5 - 0.5 * np.sqrt(C7 / (C7 + 25**7))) for a in (a1, a2))
    C1, C2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180
    L, C, h = (L1 + L2) / 2, (C1 + C2) / 2, h1 + turn / 2
    hue = 2 * np.sqrt(C1 * C2) * np.sin(np.radians(turn / 2))
    waves = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    T = 1 + sum(size * np.cos(np.radians(times * h + shift)) for size, times, shift in waves)
    dL = (L2 - L1) / (1 + 0.015 * (L - 50) ** 2 / np.sqrt(20 + (L - 50) ** 2))
    dC, dH = (C2 - C1) / (1 + 0.045 * C), hue / (1 + 0.015 * C * T)
    twist = np.sin(np.radians(60 * np.exp(-((((h % 360) - 275) / 25) ** 2))))
    return np.sqrt(dL**2 + dC**2 + dH**2 - 2 * np.sqrt(C**7 / (C**7 + 25**7)) * twist * dC * dH)


@pytest.mark.parametrize(
    "one, other, distance",
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
    ],
)
def test_the_distance_is_that_of_the_published_pairs(one, other, distance):
    assert ciede2000(one, other) == pytest.approx(distance, abs=1e-4)


@pytest.mark.parametrize("vision", SEEN)
def test_two_categories_are_far_apart_for_every_reader(vision):
    apart = {(a, b): ciede2000(lab(CATEGORY[a], vision), lab(CATEGORY[b], vision)) for a, b in PAIRS}
    assert min(apart.values()) >= 15, sorted(apart.items(), key=lambda pair: pair[1])[:3]


def test_two_categories_differ_in_lightness():
    apart = {(a, b): abs(lab(CATEGORY[a])[0] - lab(CATEGORY[b])[0]) for a, b in PAIRS}
    assert min(apart.values()) >= 5, sorted(apart.items(), key=lambda pair: pair[1])[:3]


def test_each_category_has_the_hue_that_lessons_call_it_by():
    hues = {"parameters": (260, 290), "gradients": (55, 75), "optimizer": (135, 165), "activations": (295, 320)}
    for name, (low, high) in hues.items():
        _, a, b = lab(CATEGORY[name])
        assert low < np.degrees(np.arctan2(b, a)) % 360 < high and np.hypot(a, b) > 25, name
    assert np.hypot(*lab(CATEGORY["communication"])[1:]) < 5  # grey


def test_text_can_be_read_on_every_colour_and_every_colour_as_text():
    fills = [*CATEGORY.values(), *(tint(colour, 0.4) for colour in CATEGORY.values())]  # calculator.py: other stages
    fills += [tint(GRADIENTS, 0.65 * k / 8) for k in range(8)]  # steps.py: sums of k of 8 ranks
    fills += [tint(CATEGORY["activations"], 0.6)]  # gantt.py
    for fill in fills:
        text = text_on(fill)
        assert contrast("#ffffff" if text == "white" else text, fill) >= READABLE == 4.5, fill
    for name, colour in CATEGORY.items():
        assert contrast(as_text(colour), "#ffffff") >= contrast(as_text(colour), palette.PAPER) >= 4.5, name


def test_words_beside_a_curve_or_a_bar_can_be_read_on_white():
    from matplotlib.colors import to_hex

    from zero_mini.course.plots import curves, loss_scales, states

    def record(name):
        return json.loads((MEASURED / f"{name}.json").read_text())

    figures = [
        curves.draw_curves(curves.from_measured(record("training"))),
        loss_scales.draw_loss_scales([2.0**16, 2.0**15], [False, True]),
        states.draw_states(**states.from_measured(record("memory"))),
    ]
    for figure in figures:
        words = [text for axes in figure.axes for text in axes.texts if re.search("[a-z]", text.get_text())]
        assert words and all(contrast(to_hex(text.get_color()), "#ffffff") >= READABLE for text in words)


def test_slides_write_in_the_colours_of_the_pictures():
    theme = (MEASURED.parents[1] / "slides" / "theme.css").read_text()
    colours = dict(re.findall(r"--(\w+): (#\w{6});", theme))
    assert colours["paper"] == palette.PAPER and colours["ink"] == palette.INK and colours["rule"] == palette.NEUTRAL
    for name in ("parameters", "gradients", "optimizer", "activations"):
        assert colours[name] == as_text(CATEGORY[name]), name


@pytest.mark.parametrize("name", ["moments", "fits"])
def test_a_line_between_phases_leaves_a_spike_whole_and_the_legend_names_what_is_seen(name):
    from matplotlib.colors import to_hex

    from zero_mini.course.plots import moments

    drawn = moments.from_measured(json.loads((MEASURED / f"{name}.json").read_text()), 0, 1, 2, 3)
    figure = moments.draw_moments(**drawn)
    for axes, story in zip(figure.axes, drawn["stories"].values()):
        lines = [line for line in axes.lines if line.get_color() == "white" and len(set(line.get_xdata())) == 1]
        assert len(lines) == len(story.phases) - 1
        index = 0
        for line, (_, count) in zip(lines, story.phases):
            index += count
            near = story.totals[max(0, index - 3) : index + 4]
            assert max(line.get_ydata()) <= min(near)  # below every step of the curve beside it
    legend = dict(zip((text.get_color() for text in figure.texts), figure.texts))
    for category in ("parameters", "optimizer", "gradients"):
        assert to_hex(CATEGORY[category]) in legend, category
