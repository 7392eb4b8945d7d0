"""One colour for each thing, the same in every picture; they differ in lightness too, for colour-blind readers."""

PARAMETERS = "#2f6db3"  # blue
GRADIENTS = "#e8892b"  # orange
OPTIMIZER = "#3f9b57"  # green
ACTIVATIONS = "#8a5fb0"  # purple
COMMUNICATION = "#8c8c8c"  # grey
NEUTRAL = "#c9cdd2"  # what is not the point: peers, backgrounds
INK = "#22262b"  # text
FAINT = "#6b7178"  # notes, axes

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

    >>> tint("#2f6db3", 1), tint("#2f6db3", 0), tint("#000000", 0.5)
    ('#2f6db3', '#ffffff', '#808080')
    """
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in parts)
