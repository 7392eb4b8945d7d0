"""The ledger: every collective in the order of launch, with its kind, its unit and its number of elements.

    number  kind            unit        numel    a step at stage 3 of a GPT with two blocks (d = 32): each block stays
    1       all_gather      root         8768    in its slot from forward to backward
    2       all_gather      blocks.0    12736
    3       all_gather      blocks.1    12736
    4       reduce_scatter  blocks.1    12736
    5       reduce_scatter  blocks.0    12736
    6       reduce_scatter  root         8768    end_step(): `last_step` has all of these now

All claims about the wire are tested against these counts. The order has to be the same on every rank. So the ledger
keeps a digest, one number for all launches, which ranks compare once a step (`HostWords.agree`); and it publishes this
rank's position for the other ranks, in case a collective fails (lost_ranks.py).

Left out: times of computation. An evaluation's calls are numbered and digested, but are not part of a step's `calls`.
"""

import zlib
from collections import deque
from dataclasses import dataclass

import torch

from zero_mini.wire.lost_ranks import LINES, Position, Whereabouts


@dataclass(frozen=True)
class Call:
    """One collective, an entry of the ledger."""

    kind: str  # "all_reduce", "reduce_scatter", "all_gather" or "broadcast"
    unit: str  # the unit whose data it carries
    numel: int  # elements of the whole buffer, P, padding included
    itemsize: int  # bytes of an element

    @property
    def line(self) -> str:
        """Its name in messages."""
        return f"{self.kind} of {self.unit}"

    def wire_numel(self, world_size: int) -> float:
        """Elements that one rank sends, ring convention.

        >>> Call("all_reduce", "blocks.0", numel=8, itemsize=4).wire_numel(world_size=4)
        12.0
        >>> Call("all_gather", "blocks.0", numel=8, itemsize=4).wire_numel(world_size=4)
        6.0
        """
        passes = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}[self.kind]
        return passes * self.numel * (world_size - 1) / world_size


class Ledger:
    """`calls`: the collectives since the step began; `last_step`: those of the last whole step."""

    def __init__(self, whereabouts: Whereabouts | None):
        self.whereabouts = whereabouts
        self.calls: list[Call] = []
        self.last_step: list[Call] = []
        self.recording = True  # evaluation does not enter `calls`
        self.steps = 0
        self.number = 0  # of collectives since the step began, evaluation included
        self.digest = 0  # of everything launched so far
        self.seen: dict[tuple, tuple[Call, str, bytes]] = {}  # each call, its line, and its bytes in the digest
        self.lines: deque[tuple[int, str]] = deque(maxlen=LINES)  # (number, line) since the step began
        self.purpose = ""  # the public method that the user called, if this is not a training step

    def end_step(self) -> None:
        """Move `calls` to `last_step`, and begin the next step."""
        self.last_step, self.calls = self.calls, []
        self.steps, self.number = self.steps + 1, 0
        self.lines.clear()
        if self.whereabouts is not None:
            self.whereabouts.begin_page(self.steps, self.number)

    def note(self, kind: str, unit: str, buffer: torch.Tensor) -> tuple[Call, Position]:
        """Enter a collective before its launch, because gloo ends the process if sizes differ. Publish it too."""
        purpose = self.purpose or ("" if self.recording else "a forward without gradients")
        key = (kind, unit, buffer.numel(), buffer.element_size(), purpose)
        if key not in self.seen:
            call = Call(*key[:-1])
            self.seen[key] = call, f"{call.line} in {purpose}" if purpose else call.line, repr(key).encode()
        call, line, name = self.seen[key]
        if self.recording:
            self.calls.append(call)
        self.digest = zlib.crc32(name, self.digest)
        return call, self.note_line(line)

    def note_line(self, line: str) -> Position:
        """Add the next line to this rank's page."""
        self.number += 1
        self.lines.append((self.number, line))
        position = (self.steps, self.number)
        if self.whereabouts is not None:
            self.whereabouts.note(line, position)
        return position
