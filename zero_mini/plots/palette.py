"""One colour for each thing, the same in every picture; they differ in lightness too, for those who see no hue."""

PARAMETERS = "#2f6db3"  # blue
GRADIENTS = "#e8892b"  # orange
OPTIMIZER = "#3f9b57"  # green
ACTIVATIONS = "#8a5fb0"  # purple
COMMUNICATION = "#8c8c8c"  # grey
NEUTRAL = "#c9cdd2"  # what is not the point: peers, backgrounds
INK = "#22262b"  # text
FAINT = "#6b7178"  # notes, axes
