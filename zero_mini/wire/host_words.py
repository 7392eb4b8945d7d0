"""What hosts say to each other: a few numbers a step, objects when something is to be compared or named.

    exchange   every rank's words (int64), in rank order
    gather     every rank's object, in rank order
    agree      the words, if all ranks launched the same collectives; else an error that names the first difference
    doing      the user's call that the words are for, as `zero.state_dict()`

All of them block. They travel on a gloo group of their own, so nothing waits for a GPU. Each exchange begins with one
message of HEADER words, whatever it is for, so that ranks in different calls find out instead of waiting.

Without a group (`Comm(without=...)`) every absent rank says what this rank says.
"""

import contextlib
import pickle
import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from zero_mini.wire.ledger import Ledger
from zero_mini.wire.lost_ranks import LostRank, difference, wait

HEADER = 64  # words with which every exchange between hosts begins


class HostWords:
    """`group`: on the CPU; None where the other ranks are absent."""

    def __init__(self, group: dist.ProcessGroup | None, ledger: Ledger, world_size: int):
        self.group, self.ledger, self.world_size = group, ledger, world_size

    def gather(self, value: object) -> list:
        """Every rank's `value` (anything that pickles, without GPU tensors), in rank order."""
        if self.group is None:
            return [value] * self.world_size
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [length for (length,) in self.exchange([mine.numel()])]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        rows = self.gather_rows(padded)
        return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths)]

    def agree(self, words: list[int]) -> list[list[int]]:
        """Every rank's words (int64, as many on each), in rank order, if ranks launched the same collectives.

        RuntimeError, on every rank, if they launched different ones since the step began.

        Collectives of one size match whatever they carry, so a rank that runs another module than
        its peers would be given their numbers for its own, without an error.
        """
        rows = self.exchange([self.ledger.digest, *words])
        if len({digest for digest, *_ in rows}) == 1:
            return [words for _, *words in rows]
        everyone = [dict(lines) for lines in self.gather(list(self.ledger.lines))]
        for number in sorted(set().union(*everyone)):
            lines = {rank: lines.get(number, "nothing") for rank, lines in enumerate(everyone)}
            if message := difference((self.ledger.steps, number), lines):
                raise RuntimeError(message)
        raise RuntimeError("ranks ran different modules in evaluation; every rank must run the same units in order")

    def exchange(self, words: list[int]) -> list[list[int]]:
        """Every rank's words (int64, as many on each), in rank order.

        RuntimeError, on every rank, if ranks do it for different purposes: state_dict() on rank 0 and a step on the
        others, say. Each exchange begins with one message of HEADER words, whatever it is for, so that they can tell.
        """
        purpose = self.ledger.purpose or "a step"
        header = torch.zeros(HEADER, dtype=torch.int64)
        mine = torch.tensor([zlib.crc32(purpose.encode()), *words])
        fit = min(HEADER, mine.numel())
        header[:fit] = mine[:fit]
        rows = self.gather_rows(header)
        if rows[:, 0].unique().numel() > 1:
            text = torch.zeros(8 * HEADER, dtype=torch.uint8)
            name = torch.frombuffer(bytearray(purpose.encode()[: 8 * HEADER]), dtype=torch.uint8)
            text[: name.numel()] = name
            names = [row.numpy().tobytes().rstrip(b"\0").decode() for row in self.gather_rows(text)]
            raise LostRank(other_purpose(names))
        if mine.numel() > HEADER:
            rows = torch.cat([rows, self.gather_rows(mine[HEADER:])], dim=1)
        return rows[:, 1 : mine.numel()].tolist()

    @contextlib.contextmanager
    def doing(self, purpose: str, collective: bool = False) -> Iterator[None]:
        """Within, collectives are for this call of the user's. `collective`: first see that every rank is there."""
        if self.ledger.purpose:
            yield
            return
        self.ledger.purpose = purpose
        try:
            if collective:
                self.exchange([])
            yield
        finally:
            self.ledger.purpose = ""

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """(N, n) <- every rank's row (n)."""
        if self.group is None:
            return row.expand(self.world_size, -1)
        rows = torch.empty(self.world_size * row.numel(), dtype=row.dtype)
        what = f"a word between ranks in {self.ledger.purpose or 'a step'}"
        position = self.ledger.note_line(what)
        work = all_gather(rows, row, group=self.group, async_op=True)
        wait(work, what, position, self.ledger.whereabouts)
        return rows.view(self.world_size, -1)

    def another(self) -> "HostWords":
        """A second channel of the same ranks: what a thread says must not mix with what a step says. Collective."""
        return HostWords(self.group and same_ranks(self.group, "gloo"), Ledger(None), self.world_size)


def other_purpose(names: list[str]) -> str:
    """names: what each rank is doing.

    >>> other_purpose(["model.state_dict()", "a step", "a step"])
    'rank 0 is in model.state_dict() while rank 1 is in a step: call model.state_dict() on every rank'
    """
    other = next(rank for rank, name in enumerate(names) if name != names[0])
    call = next(name for name in (names[0], names[other]) if name != "a step")
    return f"rank 0 is in {names[0]} while rank {other} is in {names[other]}: call {call} on every rank"


def same_ranks(group: dist.ProcessGroup, backend: str, **options) -> dist.ProcessGroup:
    """Another group of the same ranks, with the same time-out. Collective among these alone."""
    kind = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    time_out, ranks = group._get_backend(kind).options._timeout, dist.get_process_group_ranks(group)
    is_part = len(ranks) < dist.get_world_size()  # the other ranks cannot be asked to take part in making it
    return dist.new_group(ranks, timeout=time_out, backend=backend, use_local_synchronization=is_part, **options)


def all_gather(*args, **options) -> dist.Work:
    """Of flat buffers. torch 2.13 renamed it; 2.9 to 2.12 have the old name only."""
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(*args, **options)
