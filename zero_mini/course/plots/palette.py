"""One colour for each thing, the same in every picture; colour-blind readers see five different ones too.

tests/course/test_palette.py has the distances, as readers with normal vision, protanopia and deuteranopia see them. The
five also differ in lightness, as on a black-and-white print. Text on each of them is readable in white or in INK.
"""

PARAMETERS = "#1a55a3"  # blue
GRADIENTS = "#f79d3a"  # orange
OPTIMIZER = "#42824d"  # green
ACTIVATIONS = "#a688ea"  # purple
COMMUNICATION = "#606368"  # grey
NEUTRAL = "#c9cdd2"  # what is not the point: peers, backgrounds
INK = "#22262b"  # text
FAINT = "#6b7178"  # notes, axes
PAPER = "#f5f6f7"  # behind code on slides
READABLE = 4.5  # the least contrast of text (WCAG 2, level AA)

CATEGORY = {  # of memory/formulas.py, in the order in which they are stacked
    "parameters": PARAMETERS,
    "gradients": GRADIENTS,
    "optimizer": OPTIMIZER,
    "activations": ACTIVATIONS,
    "communication": COMMUNICATION,
    "other": NEUTRAL,
}
STAGE = {0: INK, 1: OPTIMIZER, 2: GRADIENTS, 3: PARAMETERS}  # by what a stage is the first to shard


def tint(colour: str, share: float) -> str:
    """The colour mixed with white: all of it at share 1, white at 0.

    >>> tint("#1a55a3", 1), tint("#1a55a3", 0), tint("#000000", 0.5)
    ('#1a55a3', '#ffffff', '#808080')
    """
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in rgb(colour))


def text_on(colour: str) -> str:
    """White or INK: what can be read on this colour.

    >>> text_on(PARAMETERS), text_on(GRADIENTS) == INK
    ('white', True)
    """
    return "white" if contrast(colour, "#ffffff") > contrast(colour, INK) else INK


def as_text(colour: str) -> str:
    """The colour, darkened until words in it can be read on white and on PAPER.

    >>> as_text(PARAMETERS) == PARAMETERS, as_text(GRADIENTS)
    (True, '#a16223')
    """
    while contrast(colour, PAPER) < READABLE:
        colour = "#" + "".join(f"{int(part * 0.98):02x}" for part in rgb(colour))
    return colour


def contrast(one: str, other: str) -> float:
    """Of two colours, from 1 to 21, by WCAG 2.

    >>> contrast("#000000", "#ffffff"), contrast("#777777", "#777777")
    (21.0, 1.0)
    """
    dark, light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(one), linear(other)))
    return (light + 0.05) / (dark + 0.05)


def linear(colour: str) -> list[float]:
    """Light of red, green and blue, from 0 to 1 (sRGB).

    >>> linear("#ff0000")
    [1.0, 0.0, 0.0]
    """
    shares = [part / 255 for part in rgb(colour)]
    return [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]


def rgb(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
