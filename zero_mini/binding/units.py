"""Which parameters form a unit: one unit for each repeated block, and one, the root, for the rest.

A unit should be large enough to use the wire's bandwidth, and two units should be small compared to
the model: in a transformer a unit is one block. Parameters of no block (embeddings, last norm, head),
or of two blocks, belong to the root; its turn lasts as long as the whole model's.

On a GPU a small block is not enough: its products take less time than the host needs to launch the work of a
unit, so the GPU waits. There `units_by_size` joins consecutive blocks; on a CPU each block is a unit.

A very large block is cut into units by split.py.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from torch import nn

from zero_mini.flat import Unit

ENOUGH = 30_000_000  # parameters of a unit on a GPU: one block of a GPT-2 of 1.5B, three of 350M


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks: children of the outermost ModuleLists and Sequentials, with a forward of their own.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> [name for name, _ in find_blocks(model)]
    ['0', '2']
    """
    blocks: list[tuple[str, nn.Module]] = []

    def look(module: nn.Module, prefix: str, in_list: bool) -> None:
        in_list = in_list or isinstance(module, (nn.ModuleList, nn.Sequential))
        for name, child in module.named_children():
            if not in_list or not is_called(child):
                look(child, f"{prefix}{name}.", in_list)
            elif any(True for _ in child.parameters()) and all(child is not block for _, block in blocks):
                blocks.append((prefix + name, child))

    look(model, "", in_list=False)
    return blocks


def is_called(module: nn.Module) -> bool:
    """Does the module have its own forward? A ModuleList or ModuleDict has none: its children are called.

    >>> is_called(nn.Linear(2, 2)), is_called(nn.ModuleDict())
    (True, False)
    """
    return module.forward.__func__ is not nn.Module.forward if hasattr(module.forward, "__func__") else True


def merge_blocks(model: nn.Module, least_numel: int) -> list[list[nn.Module]]:
    """Consecutive blocks, joined until they hold `least_numel` parameters: for zeroify(units=...).

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))  # 6 parameters each
    >>> [len(modules) for modules in merge_blocks(model, 7)]
    [2, 1]
    """
    return join([block for _, block in find_blocks(model)], least_numel)


def join(blocks: Iterable[nn.Module], least_numel: int, most_blocks: int | None = None) -> list[list[nn.Module]]:
    """Neighbours, joined until they hold `least_numel` parameters or are `most_blocks`."""
    units: list[list[nn.Module]] = []
    numel = 0  # of the last unit
    for block in blocks:
        if not units or numel >= least_numel or len(units[-1]) == most_blocks:
            units.append([])
            numel = 0
        units[-1].append(block)
        numel += numel_of(block)
    return units


def numel_of(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def units_by_size(model: nn.Module) -> list[list[nn.Module]]:
    """The units on a GPU: consecutive blocks of a list, joined until they hold ENOUGH parameters.

    A unit has at most an eighth of the blocks, so that two units stay small compared to the model. Blocks of two
    ModuleLists of one module that are equally long stay apart: forward may run them in turns, as `zip` does, and a unit
    of one list would be gathered again for each of its blocks.

    >>> model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(16)])
    >>> [len(modules) for modules in units_by_size(model)]
    [2, 2, 2, 2, 2, 2, 2, 2]
    """
    blocks = [(name_of_list(model, name), block) for name, block in find_blocks(model)]
    lengths = Counter(name for name, _ in blocks)
    in_turns = Counter((name.rpartition(".")[0], length) for name, length in lengths.items())
    units: list[list[nn.Module]] = []
    for name, neighbours in groupby(blocks, key=itemgetter(0)):
        is_alone = in_turns[name.rpartition(".")[0], lengths[name]] == 1
        units += join((block for _, block in neighbours), ENOUGH, max(1, len(blocks) // 8) if is_alone else 1)
    return units


def name_of_list(model: nn.Module, block: str) -> str:
    """The outermost ModuleList or Sequential around the block of this name.

    >>> model = nn.Module()
    >>> model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])
    >>> name_of_list(model, "layers.0.1")
    'layers'
    """
    parts = block.split(".")
    names = [".".join(parts[:depth]) for depth in range(len(parts))]
    return next(name for name in names if isinstance(model.get_submodule(name), (nn.ModuleList, nn.Sequential)))


def make_units(model: nn.Module, blocks: list[tuple[str, Sequence[nn.Module]]], group_of: dict, rank, world_size):
    """The root's unit first, then one for each entry of `blocks`, in order; separate units for frozen parameters.

    `group_of` maps id(parameter) to its param group; a frozen parameter need not be in it. A
    parameter or a module that two blocks share, or a block and the root, belongs to the root, once.
    """
    owner: dict[int, nn.Module] = {}
    block_of: dict[int, nn.Module] = {}
    for _, block in blocks:
        for module in (module for part in block for module in part.modules()):
            block_of[id(module)] = block[0] if block_of.get(id(module), block[0]) is block[0] else model
    for module in model.modules():
        for param in module.parameters(recurse=False):
            home = block_of.get(id(module), model)
            owner[id(param)] = home if owner.get(id(param), home) is home else model
    units = []
    for name, block in [("root", [model]), *((name, block) for name, block in blocks if block[0] is not model)]:
        entries = [(n, p) for n, p in model.named_parameters() if owner[id(p)] is block[0]]
        kinds = {"": (True, True), " (frozen)": (False, True), " (frozen, ungrouped)": (False, False)}
        for kind, (trainable, in_group) in kinds.items():
            selection = [
                (group_of.get(id(p), 0), n, p)
                for n, p in entries
                if (p.requires_grad, id(p) in group_of) == (trainable, in_group)
            ]
            if selection:
                groups, names, params = zip(*sorted(selection, key=lambda entry: entry[0]))
                layout = list(names), list(params), list(groups), rank, world_size
                middle = selection[len(selection) // 2][2]
                units.append(Unit(f"{name}{kind}", tuple(block), *layout, block[0] is model, in_group, middle))
    return units
