"""The ranges of a unit's flat buffer that a rank keeps: of parameters, gradients and states, with their dtypes.

    stage 1, rank 1 of 2    parameters 0..P, gradients P/2..P (and 0..P/2, idle), master, momentum, variance P/2..P

It reads the handle's tensors, and ownership.py draws the ranges. Their bytes are those of memory.walk.

Left out: Adam's step counter (4 bytes a piece), gradients before they are reduced, optimizers other than Adam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_mini.memory.timeline import union

if TYPE_CHECKING:
    import torch

    from zero_mini.flat import Unit
    from zero_mini.script import Script

STATES = {"exp_avg": "momentum", "exp_avg_sq": "variance"}  # as torch's Adam calls them


@dataclass(frozen=True)
class Holding:
    """A range of a unit's flat buffer that a rank keeps, in elements."""

    rank: int
    what: str  # one of STRIPS
    dtype: str
    itemsize: int
    low: int
    high: int
    use: str = "held"  # or "idle": memory that stays though it is not used any more; "lent": during the unit's turn

    @property
    def nbytes(self) -> int:
        return 0 if self.use == "lent" else (self.high - self.low) * self.itemsize


@dataclass(frozen=True)
class Layout:
    """A unit's flat buffer: P elements, and in it (name, offset, numel) of each tensor."""

    name: str
    P: int
    tensors: list[tuple[str, int, int]]


def layout(unit: Unit) -> Layout:
    """The unit's tensors in its buffer; their names lose the prefix of the unit's name."""
    names = [name.removeprefix(unit.name + ".") for name in unit.names]
    return Layout(unit.name, unit.P, list(zip(names, unit.offsets, [shape.numel() for shape in unit.shapes])))


def holdings(zero: Script, unit: Unit) -> list[Holding]:
    """The ranges that this rank keeps of the unit now. Call it between a backward and the next zero_grad()."""
    result = []

    def keep(what: str, tensor: torch.Tensor, low: int, high: int, use: str = "held") -> None:
        name = str(tensor.dtype).removeprefix("torch.")
        result.append(Holding(zero.rank, what, name, tensor.element_size(), low, high, use))

    low = unit.start_of(unit.master)
    high = low + unit.master.numel()
    if unit.full is not None:
        keep("parameters", unit.full, 0, unit.P)
    else:
        keep("parameters", unit.place.slot.buffer, 0, unit.P, "lent")
    if zero.mixed:
        keep("master", unit.master, low, high)
    elif unit.full is None:
        keep("parameters", unit.master, low, high)
    if unit.mean_grad is not None:
        grad, start = unit.mean_grad, unit.start_of(unit.mean_grad)
        keep("gradients", grad, start, start + grad.numel())
        if grad.untyped_storage().nbytes() > grad.nbytes:  # a view of a buffer that stays
            for rest in ((0, start), (start + grad.numel(), unit.P)):
                if rest[0] < rest[1]:
                    keep("gradients", grad, *rest, "idle")
    for key, what in STATES.items():
        ranges = [(run.group, run.low, run.high) for run in unit.runs[unit.master.numel()]]
        states = [zero.optimizer.state.get(piece, {}).get(key) for _, piece in unit.pieces]
        spans = [(low + a, low + b) for (_, a, b), state in zip(ranges, states) if state is not None]
        for start, end in union(spans):
            keep(what, next(state for state in states if state is not None), start, end)
    return result
