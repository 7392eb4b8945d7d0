"""Finer units: a block that is very large is cut into the modules inside it.

    block                       12 d^2      one unit, if it has at most `most_numel` parameters
      attention    mlp          4 + 8 d^2   else one unit for each part with a forward of its own,
      qkv  out     fc   out                 and so on, down to single layers
      norms                                 what is smaller than most_numel / SMALL goes to the root, which stays whole

At stage 3 two slots are as large as the two largest units, and up to five whole gradients are alive at once: finer
units lower both, and the peak at the start. Each unit is a further collective, so do not cut what fits. At stage 3
every rank must run the same units: experts that a batch may leave out must not be units, so do not cut their block.

Left out: one matrix cut by rows. A layer is one unit, however large it is.
"""

from collections import Counter
from itertools import groupby

from torch import nn

from zero_mini.binding.units import find_blocks, is_called, join, numel_of

SMALL = 1024
WHOLE = (nn.MultiheadAttention, nn.RNNBase)  # they read weights of modules inside them that they do not call


def split_blocks(model: nn.Module, most_numel: int, least_numel: int = 0) -> list[list[nn.Module]]:
    """Units for zeroify(units=...): blocks, but those of more than `most_numel` parameters cut into their parts.

    least_numel    consecutive blocks of fewer are joined, as by `merge_blocks`.

    ValueError if most_numel < 1 or least_numel > most_numel.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm, self.up, self.down = nn.LayerNorm(2), nn.Linear(2, 2000), nn.Linear(2000, 2)
    ...     def forward(self, x):
    ...         return x + self.down(self.up(self.norm(x)))
    >>> model = nn.Sequential(Block(), Block())  # 10,006 parameters each
    >>> [[type(module).__name__ for module in unit] for unit in split_blocks(model, 6000)]
    [['Linear'], ['Linear'], ['Linear'], ['Linear']]
    >>> [[type(module).__name__ for module in unit] for unit in split_blocks(model, 20000)]
    [['Block'], ['Block']]
    """
    if not (most_numel >= 1 and least_numel <= most_numel):
        raise ValueError(f"need 1 <= most_numel and least_numel <= most_numel (got {most_numel} and {least_numel})")
    large = {id(block) for _, block in find_blocks(model) if numel_of(block) > most_numel}
    parts = {id(block): parts_of(block, most_numel) for _, block in find_blocks(model)}
    seen = Counter(id(module) for found in parts.values() for part in found for module in part.modules())
    units: list[list[nn.Module]] = []
    for is_large, blocks in groupby((block for _, block in find_blocks(model)), key=lambda block: id(block) in large):
        if is_large:
            found = (part for block in blocks for part in parts[id(block)])
            units += [[part] for part in found if seen[id(part)] == 1]  # a part of two blocks: the root's
        else:
            units += join(blocks, least_numel)
    return units


def parts_of(module: nn.Module, most_numel: int) -> list[nn.Module]:
    """The largest modules inside that have at most `most_numel` parameters, or cannot be cut; without small ones."""
    children = [] if isinstance(module, WHOLE) else called_children(module)
    if numel_of(module) <= most_numel or not children:
        return [module]
    large = [child for child in children if numel_of(child) * SMALL > most_numel]
    return [part for child in large for part in parts_of(child, most_numel)]


def called_children(module: nn.Module) -> list[nn.Module]:
    """Modules with parameters that this one may call, each once; those of lists and dicts too."""
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if is_called(child) else called_children(child)
    return [child for child in dict.fromkeys(found) if any(True for _ in child.parameters())]
