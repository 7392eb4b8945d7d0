"""What the optimizer sees in place of parameters: its pieces, which are ranges of this rank's masters.

    a param group of a unit   one piece, on N ranks 1/N of it
    unused in a step          a parameter that no rank used, while others of its piece were, gets a piece of its
                              own: the optimizer leaves it alone as it leaves a gradient that is None, no step counted
    unfrozen                  parameters that were frozen at zeroify() get pieces at requires_grad_(True)

States move with the elements. Outside `optimizer.step()` and `updating` a piece is closed (`held.Shard`): a range of
a rank's slice is no parameter.
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
    unit.pieces = [(group, make_piece(zero, unit, view)) for group, view in unit.cut(unit.master)]


def make_piece(zero, unit: Unit, view: torch.Tensor) -> nn.Parameter:
    piece = nn.Parameter(view)
    piece.unit = unit
    piece.__class__ = nn.Parameter if zero.shards_open else Shard
    return piece


@torch.no_grad()
def set_apart(zero, unit: Unit, indices: set[int]) -> None:
    """These parameters of the unit get pieces of their own. States move with the elements."""
    with zero.in_memory(unit, write=True), plainly():
        before = list(zip(unit.runs[unit.master.numel()], unit.pieces))
        unit.apart |= indices
        unit.find_runs()
        unit.pieces = []
        for run, (group, view) in zip(unit.runs[unit.master.numel()], unit.cut(unit.master)):
            old, (_, old_piece) = next(entry for entry in before if entry[0].low <= run.low < entry[0].high)
            if (old.low, old.high) == (run.low, run.high):
                unit.pieces.append((group, old_piece))
                continue
            piece = make_piece(zero, unit, view)
            part = slice(run.low - old.low, run.high - old.low)
            for key, value in zero.optimizer.state.get(old_piece, {}).items():
                elementwise = isinstance(value, torch.Tensor) and value.shape == old_piece.shape
                zero.optimizer.state[piece][key] = value[part] if elementwise else copy.deepcopy(value)
            unit.pieces.append((group, piece))
        kept = {id(piece) for _, piece in unit.pieces}
        for _, (_, old_piece) in before:
            if id(old_piece) not in kept:
                zero.optimizer.state.pop(old_piece, None)
    point_optimizer_to_pieces(zero)


def unfreeze(zero, param: HeldParameter) -> None:
    """The frozen unit of this parameter becomes a trainable one. RuntimeError if the optimizer was not given it."""
    unit = param.unit
    if not unit.is_grouped:
        raise RuntimeError(
            f"requires_grad_(True) of {param.name_in_model}, which was frozen at zeroify() and is in no param group: "
            "give it to the optimizer before zeroify(), frozen or not"
        )
    unit.trainable = True
    zero.trainable = [unit for unit in zero.units if unit.trainable]
    with zero.in_memory(unit), plainly():
        make_pieces(zero, unit)
        torch.Tensor.requires_grad_(param)
    point_optimizer_to_pieces(zero)
    unit.middle = param
    zero.hook_middle(unit)


def set_open(zero, is_open: bool) -> None:
    """Open pieces are plain Parameters, which torch's optimizers update fastest."""
    if zero.shards_open is not is_open:
        zero.shards_open = is_open
        for unit in zero.trainable:
            for _, piece in unit.pieces:
                piece.__class__ = nn.Parameter if is_open else Shard


@contextlib.contextmanager
def updating(zero) -> Iterator[None]:
    """Within, what changes the optimizer's pieces outside step() may do so; then the model follows, on all ranks."""
    zero.check_step()
    recording, zero.comm.recording = zero.comm.recording, False
    try:
        with contextlib.ExitStack() as masters:
            for unit in zero.trainable:
                masters.enter_context(zero.in_memory(unit, write=True))
            set_open(zero, True)
            try:
                yield
            finally:
                set_open(zero, False)
            with torch.no_grad():
                for unit in zero.trainable:
                    zero.follow(unit)
        for unit in zero.trainable:
            zero.publish(unit)
    finally:
        zero.comm.recording = recording
