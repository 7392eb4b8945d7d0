"""The ledger: every collective in the order of launch, with its kind, whose data it carries, and how many elements.

    number  kind            unit        numel    a step at stage 3 of a GPT with two blocks (d = 32): each stays in
    1       all_gather      root         8768    its slot from forward to backward
    2       all_gather      blocks.0    12736
    3       all_gather      blocks.1    12736
    4       reduce_scatter  blocks.1    12736
    5       reduce_scatter  blocks.0    12736
    6       reduce_scatter  root         8768    end_step(): `last_step` has all of these now

Whatever is promised of the wire is counted here. The order has to be the same on every rank. So the ledger keeps a
digest, one number for all that was launched, which ranks compare once a step (host_words.py); and it lets the others
know where this rank is, in case a collective fails (lost_ranks.py).

Left out: what was computed when. An evaluation's calls are numbered and digested, but are no part of a step's.
"""

import zlib
from collections import deque
from dataclasses import dataclass

import torch

from zero_mini.wire.lost_ranks import LINES, Position, Whereabouts


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
        self.seen: dict[tuple, tuple[Call, str, bytes]] = {}  # each call, its line, and its bytes in the digest
        self.lines: deque[tuple[int, str]] = deque(maxlen=LINES)  # (number, line) since the step began
        self.purpose = ""  # what the user called, if that is not a training step

    def end_step(self) -> None:
        """Close the ledger's page."""
        self.last_step, self.calls = self.calls, []
        self.steps, self.number = self.steps + 1, 0
        self.lines.clear()
        if self.whereabouts is not None:
            self.whereabouts.begin_page(self.steps, self.number)

    def note(self, kind: str, unit: str, buffer: torch.Tensor) -> tuple[Call, Position]:
        """Write down what is about to be launched, for other ranks too: if sizes differ, gloo ends the process."""
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
        """The next entry of this rank's page."""
        self.number += 1
        self.lines.append((self.number, line))
        position = (self.steps, self.number)
        if self.whereabouts is not None:
            self.whereabouts.note(line, position)
        return position
