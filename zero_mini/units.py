"""Which parameters travel together: a unit for each repeated block, and one for the rest, the root.

A unit is large enough for the wire to be busy and small enough for two of them to be little beside
the model: in a transformer that is one block. What belongs to no block (embeddings, last norm,
head), or to two of them, is the root's; its turn lasts as long as the whole model's.

Left out: merging blocks that are very small, splitting one that is very large.
"""

from torch import nn

from zero_mini.flat import Unit


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks: the children of the outermost ModuleLists and Sequentials.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> [name for name, _ in find_blocks(model)]
    ['0', '2']
    """
    found: list[tuple[str, nn.Module]] = []

    def look(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                if any(True for _ in child.parameters()) and all(child is not block for _, block in found):
                    found.append((prefix + name, child))
            else:
                look(child, f"{prefix}{name}.")

    look(model, "")
    return found


def make_units(model: nn.Module, blocks: list[tuple[str, nn.Module]], group_of: dict, rank: int, world_size: int):
    """The root's unit first, then one for each block, in order; frozen parameters apart.

    `group_of` maps id(parameter) to its param group; a frozen parameter need not be in it. A
    parameter that two blocks share, or a block and the root, belongs to the root, once.
    """
    owner: dict[int, nn.Module] = {}
    inside = {id(module): block for _, block in blocks for module in block.modules()}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            home = inside.get(id(module), model)
            owner[id(param)] = home if owner.get(id(param), home) is home else model
    units = []
    for name, module in [("root", model), *((name, block) for name, block in blocks if block is not model)]:
        mine = [(n, p) for n, p in model.named_parameters() if owner[id(p)] is module]
        for trainable in (True, False):
            chosen = [(group_of.get(id(p), 0), n, p) for n, p in mine if p.requires_grad is trainable]
            if chosen:
                groups, names, params = zip(*sorted(chosen, key=lambda entry: entry[0]))
                label = name if trainable else f"{name} (frozen)"
                units.append(
                    Unit(label, module, list(names), list(params), list(groups), rank, world_size, module is model)
                )
    return units
