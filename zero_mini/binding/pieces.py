"""What the optimizer sees in place of parameters: its pieces, which are ranges of this rank's masters.

    a param group of a unit   one piece: the part of the group in this rank's slice, 1/N of the unit
    unused in a step          a parameter that no rank used, in a piece with used ones, gets a separate piece: the
                              optimizer skips it and counts no step for it, as torch does when a gradient is None
    unfrozen                  parameters that were frozen at zeroify() get pieces at requires_grad_(True)

States move with the elements. Outside `optimizer.step()` and `updating` a piece is a `Shard` (parameter.py), and
operations on it raise: a range of a rank's slice is not a parameter.
"""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

from zero_mini.binding.parameter import HeldParameter, Shard, plainly
from zero_mini.flat import Unit


def point_optimizer_to_pieces(zero) -> None:
    """The optimizer's param groups hold the pieces of all trainable units, in order."""
    groups = zero.optimizer.param_groups
    for group in groups:
        group["params"] = []
    for unit in zero.trainable:
        for group, piece in unit.pieces:
            groups[group]["params"].append(piece)


def make_pieces(zero, unit: Unit) -> None:
    unit.pieces = [(group, make_piece(zero, unit, view)) for group, view in unit.by_group(unit.master)]


def make_piece(zero, unit: Unit, view: torch.Tensor) -> nn.Parameter:
    piece = nn.Parameter(view)
    piece.unit = unit
    piece.__class__ = nn.Parameter if zero.pieces_open else Shard
    return piece


@torch.no_grad()
def set_apart(zero, unit: Unit, indices: set[int]) -> None:
    """These parameters of the unit get pieces of their own. States move with the elements."""
    with zero.update.in_memory(unit, write=True), plainly():
        before = list(zip(unit.runs[unit.master.numel()], unit.pieces))
        unit.apart |= indices
        unit.find_runs()
        unit.pieces = []
        for run, (group, view) in zip(unit.runs[unit.master.numel()], unit.by_group(unit.master)):
            old, (_, old_piece) = next(entry for entry in before if entry[0].low <= run.low < entry[0].high)
            if (old.low, old.high) == (run.low, run.high):
                unit.pieces.append((group, old_piece))
                continue
            piece = make_piece(zero, unit, view)
            part = slice(run.low - old.low, run.high - old.low)
            for key, value in zero.optimizer.state.get(old_piece, {}).items():
                is_range = is_elementwise(value, old_piece)
                zero.optimizer.state[piece][key] = value[part] if is_range else copy.deepcopy(value)
            unit.pieces.append((group, piece))
        piece_ids = {id(piece) for _, piece in unit.pieces}
        for _, (_, old_piece) in before:
            if id(old_piece) not in piece_ids:
                zero.optimizer.state.pop(old_piece, None)
    point_optimizer_to_pieces(zero)


def set_apart_what_differs(zero, unit: Unit, numbers: list) -> None:
    """Parameters of one run whose optimizer states have different numbers, such as steps, get pieces of their own."""
    indices = set()
    for run in unit.runs[unit.P]:
        members = range(run.first, run.after)
        if any(numbers[index] != numbers[run.first] for index in members):
            indices |= set(members)
    if indices:
        set_apart(zero, unit, indices)


def unfreeze(zero, param: HeldParameter) -> None:
    """The frozen unit of this parameter becomes a trainable one. RuntimeError if it is in no param group."""
    unit = param.unit
    if not unit.is_grouped:
        raise RuntimeError(
            f"requires_grad_(True) of {param.name_in_model}, which was frozen at zeroify() and is in no param group: "
            "give it to the optimizer before zeroify(), frozen or not"
        )
    unit.trainable = True
    zero.trainable = [unit for unit in zero.units if unit.trainable]
    with zero.update.in_memory(unit), plainly():
        make_pieces(zero, unit)
        torch.Tensor.requires_grad_(param)
    point_optimizer_to_pieces(zero)
    unit.middle = param


def set_open(zero, is_open: bool) -> None:
    """Open pieces are plain Parameters, which torch's optimizers update fastest."""
    if zero.pieces_open is not is_open:
        zero.pieces_open = is_open
        for unit in zero.trainable:
            for _, piece in unit.pieces:
                piece.__class__ = nn.Parameter if is_open else Shard


@contextlib.contextmanager
def updating(zero) -> Iterator[None]:
    """Inside the block, the optimizer's parameters may be changed outside step(), as schedule-free's eval() does.

    At the end the model gets the new values. Collective. `optimizer.eval()` and `optimizer.train()` call it themselves.
    """
    zero.check_step()
    was_recording, zero.comm.ledger.recording = zero.comm.ledger.recording, False
    try:
        with contextlib.ExitStack() as masters:
            for unit in zero.trainable:
                masters.enter_context(zero.update.in_memory(unit, write=True))
            set_open(zero, True)
            try:
                yield
            finally:
                set_open(zero, False)
            with torch.no_grad():
                for unit in zero.trainable:
                    zero.update.write_cast(unit)
        for unit in zero.trainable:
            zero.publish(unit)
    finally:
        zero.comm.ledger.recording = was_recording


def is_elementwise(value: object, piece: torch.Tensor) -> bool:
    """Does the value have one number for each element (a momentum), and not one for all elements (a step)?

    >>> is_elementwise(torch.zeros(3), torch.ones(3)), is_elementwise(torch.tensor(1.0), torch.ones(3))
    (True, False)
    """
    return isinstance(value, torch.Tensor) and value.shape == piece.shape
