"""The ledger: every collective in the order of launch, with its kind, whose data it carries, and how many elements.

    number  kind            unit        numel    a step at stage 3 of a GPT with two blocks (d = 32): each stays in
    1       all_gather      root         8768    its slot from forward to backward
    2       all_gather      blocks.0    12736
    3       all_gather      blocks.1    12736
    4       reduce_scatter  blocks.1    12736
    5       reduce_scatter  blocks.0    12736
    6       reduce_scatter  root         8768    end_step(): `last_step` has all of these now

Whatever is promised of the wire is counted here. The order has to be the same on every rank. So the ledger keeps a
digest, one number for all that was launched, which ranks compare once a step (`Comm.agree`); and it lets the others
know where this rank is, in case a collective fails (whereabouts.py).

Left out: what was computed when. An evaluation's calls are numbered and digested, but are no part of a step's.
"""

import zlib
from dataclasses import dataclass

import torch

from zero_mini.whereabouts import Position, Whereabouts


@dataclass(frozen=True)
class Call:
    """One collective as the ledger keeps it."""

    kind: str  # "all_reduce", "reduce_scatter", "all_gather" or "broadcast"
    unit: str  # whose data travelled
    numel: int  # elements of the whole buffer, P, padding included
    itemsize: int  # bytes of an element

    @property
    def line(self) -> str:
        """How messages name it."""
        return f"{self.kind} of {self.unit}"

    def wire_numel(self, world_size: int) -> float:
        """Elements over one rank's wire, ring convention.

        >>> Call("all_reduce", "blocks.0", numel=8, itemsize=4).wire_numel(world_size=4)
        12.0
        >>> Call("all_gather", "blocks.0", numel=8, itemsize=4).wire_numel(world_size=4)
        6.0
        """
        passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}[self.kind]
        return passes * self.numel * (world_size - 1) / world_size


class Ledger:
    """`calls` holds what was launched since the step began, `last_step` what the last whole step launched."""

    def __init__(self, whereabouts: Whereabouts | None):
        self.whereabouts = whereabouts
        self.calls: list[Call] = []
        self.last_step: list[Call] = []
        self.recording = True  # evaluation does not enter `calls`
        self.steps = 0
        self.number = 0  # of collectives since the step began, evaluation included
        self.digest = 0  # of everything launched so far
        self.seen: dict[tuple, tuple[Call, bytes]] = {}  # each call, and the bytes that stand for it in the digest

    def end_step(self) -> None:
        """Close the ledger's page."""
        self.last_step, self.calls = self.calls, []
        self.steps, self.number = self.steps + 1, 0
        if self.whereabouts is not None:
            self.whereabouts.begin_page(self.steps, self.number)

    def _note(self, kind: str, unit: str, buffer: torch.Tensor) -> tuple[Call, Position, Whereabouts | None]:
        """Write down what is about to be launched, for other ranks too: if sizes differ, gloo ends the process."""
        key = (kind, unit, buffer.numel(), buffer.element_size())
        if key not in self.seen:
            self.seen[key] = Call(*key), repr(key).encode()
        call, name = self.seen[key]
        if self.recording:
            self.calls.append(call)
        self.number += 1
        self.digest = zlib.crc32(name, self.digest)
        position = (self.steps, self.number)
        if self.whereabouts is not None:
            self.whereabouts.note(call.line, position)
        return call, position, self.whereabouts
