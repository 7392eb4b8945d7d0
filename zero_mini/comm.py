"""The four collectives ZeRO is made of. Each call is written into a ledger (wire/ledger.py).

Volumes (arXiv 1910.02054, section 7.1; ring algorithms): with N ranks and a buffer of P elements,
a reduce-scatter and an all-gather each move P (N-1)/N elements over a rank's wire, and an
all-reduce, which is the one followed by the other, moves 2 P (N-1)/N. These two lines are the
whole cost model of ZeRO.

    before            all_reduce         reduce_scatter     all_gather
    rank 0  a0 b0     rank 0  A  B       rank 0  A  .       rank 0  A  B
    rank 1  a1 b1     rank 1  A  B       rank 1  .  B       rank 1  A  B

    A = mean(a0, a1), B = mean(b0, b1); all_gather starts from reduce_scatter's result.

Every reduction here is a *mean*: the loss of the global batch is the mean of the ranks' losses.
Every collective on tensors is asynchronous and returns a work (words between hosts, `exchange`,
`agree` and `host_gather`, wait); nothing is known to have arrived before
`work.wait()`. On NCCL that call does not stop the host: it makes the current CUDA stream wait, and
launching makes NCCL's stream wait for everything enqueued so far, so no stream object is needed.

Left out: hierarchical and quantised collectives (ZeRO++, arXiv 2306.10209).
"""

import contextlib
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zero_mini.wire.ledger import Call, Ledger
from zero_mini.wire.lost_ranks import LostRank, Position, Whereabouts, difference, lost_rank, open_pages

HEADER = 64  # words with which every exchange between hosts begins
PATIENCE_S = 2.0  # of a collective, before its rank looks where the others are


@dataclass(frozen=True)
class Launched:
    """A collective under way."""

    work: dist.Work
    call: Call
    position: Position
    whereabouts: Whereabouts | None  # of all ranks, for when it fails

    def wait(self) -> None:
        """Return when it is done; on NCCL, when the current stream knows to wait for it."""
        wait(self.work, self.call.line, self.position, self.whereabouts)


class Comm(Ledger):
    """The collectives of one process group, and the ledger of them."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group or dist.group.WORLD
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.is_nccl = dist.get_backend(self.group) == "nccl"
        # Host-side words between ranks need a CPU group of their own: they must neither queue
        # behind collectives on the GPU nor be mistaken for one of them.
        self.host_group = same_ranks(self.group, "gloo")
        super().__init__(open_pages(self.group, self.host_group.group_name))
        self.gathering, self.reachable = self.group, None  # unless copy engines gather (wire/copy_engine.py)
        # torch 2.13 renamed the two flat collectives; 2.9 to 2.12 have the old names only.
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer (numel) that will be gathered for as long as training lasts."""
        if self.reachable is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return self.reachable.empty(numel, dtype)

    def all_reduce(self, buffer: torch.Tensor, unit: str) -> Launched:
        """buffer (P) <- its mean over ranks, on every rank."""
        op = self._prepare_mean(buffer)
        noted = self._note("all_reduce", unit, buffer)
        work = dist.all_reduce(buffer, op=op, group=self.group, async_op=True)
        return Launched(work, *noted)

    def reduce_scatter(self, shard: torch.Tensor, buffer: torch.Tensor, unit: str) -> Launched:
        """shard (S = P/N) <- slice `rank` of the mean of buffer (P), which is used up.

        `shard` may be that very slice of `buffer`. Keep `buffer` until the work is waited for.
        """
        op = self._prepare_mean(buffer)
        noted = self._note("reduce_scatter", unit, buffer)
        work = self._reduce_scatter(shard, buffer, op=op, group=self.group, async_op=True)
        return Launched(work, *noted)

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, unit: str) -> Launched:
        """buffer (P) <- the ranks' shards (S) in rank order; `shard` may be a slice of `buffer`."""
        noted = self._note("all_gather", unit, buffer)
        work = self._all_gather(buffer, shard, group=self.gathering, async_op=True)
        return Launched(work, *noted)

    def broadcast(self, buffer: torch.Tensor, unit: str) -> Launched:
        """buffer <- rank 0's, on every rank."""
        noted = self._note("broadcast", unit, buffer)
        work = dist.broadcast(buffer, group=self.group, group_src=0, async_op=True)
        return Launched(work, *noted)

    def host_gather(self, value: object) -> list:
        """Every rank's `value` (anything that pickles, without GPU tensors), in rank order."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [length for (length,) in self.exchange([mine.numel()])]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        rows = self._gather_on_hosts(padded)
        return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths)]

    def agree(self, words: list[int]) -> list[list[int]]:
        """Every rank's words (int64, as many on each), in rank order, if ranks launched the same collectives.

        RuntimeError, on every rank, if they launched different ones since the step began.

        Collectives of one size match whatever they carry, so a rank that runs another module than
        its peers would be given their numbers for its own, without an error.
        """
        rows = self.exchange([self.digest, *words])
        if len({digest for digest, *_ in rows}) == 1:
            return [words for _, *words in rows]
        everyone = [dict(lines) for lines in self.host_gather(list(self.lines))]
        for number in sorted(set().union(*everyone)):
            lines = {rank: lines.get(number, "nothing") for rank, lines in enumerate(everyone)}
            if message := difference((self.steps, number), lines):
                raise RuntimeError(message)
        raise RuntimeError("ranks ran different modules in evaluation; every rank must run the same units in order")

    def exchange(self, words: list[int]) -> list[list[int]]:
        """Every rank's words (int64, as many on each), in rank order.

        RuntimeError, on every rank, if ranks do it for different purposes: state_dict() on rank 0 and a step on the
        others, say. Each exchange begins with one message of HEADER words, whatever it is for, so that they can tell.
        """
        purpose = self.purpose or "a step"
        header = torch.zeros(HEADER, dtype=torch.int64)
        mine = torch.tensor([zlib.crc32(purpose.encode()), *words])
        fit = min(HEADER, mine.numel())
        header[:fit] = mine[:fit]
        rows = self._gather_on_hosts(header)
        if rows[:, 0].unique().numel() > 1:
            text = torch.zeros(8 * HEADER, dtype=torch.uint8)
            name = torch.frombuffer(bytearray(purpose.encode()[: 8 * HEADER]), dtype=torch.uint8)
            text[: name.numel()] = name
            names = [row.numpy().tobytes().rstrip(b"\0").decode() for row in self._gather_on_hosts(text)]
            raise LostRank(other_purpose(names))
        if mine.numel() > HEADER:
            rows = torch.cat([rows, self._gather_on_hosts(mine[HEADER:])], dim=1)
        return rows[:, 1 : mine.numel()].tolist()

    @contextlib.contextmanager
    def doing(self, purpose: str, collective: bool = False) -> Iterator[None]:
        """Within, collectives are for this call of the user's. `collective`: first see that every rank is there."""
        if self.purpose:
            yield
            return
        self.purpose = purpose
        try:
            if collective:
                self.exchange([])
            yield
        finally:
            self.purpose = ""

    def _gather_on_hosts(self, row: torch.Tensor) -> torch.Tensor:
        """(N, n) <- every rank's row (n), on the host."""
        rows = torch.empty(self.world_size * row.numel(), dtype=row.dtype)
        what = f"a word between ranks in {self.purpose or 'a step'}"
        position = self._note_line(what)
        work = self._all_gather(rows, row, group=self.host_group, async_op=True)
        wait(work, what, position, self.whereabouts)
        return rows.view(self.world_size, -1)

    def _prepare_mean(self, buffer: torch.Tensor) -> dist.ReduceOp:
        if self.is_nccl and buffer.dtype != torch.float16:  # gloo can only sum
            return dist.ReduceOp.AVG
        # Before the sum, as torch DDP does: sums cannot overflow. NCCL multiplies and adds with one rounding, which
        # among fp16's smallest numbers, where halving has to round, is another one.
        buffer.mul_(1 / self.world_size)
        return dist.ReduceOp.SUM


def wait(work: dist.Work, what: str, position: Position, whereabouts: Whereabouts | None) -> None:
    """Return when the work is done. LostRank if it cannot complete; soon, if another rank launched something else."""
    patience = timedelta(seconds=PATIENCE_S)
    try:
        while whereabouts is not None:
            try:
                work.wait(patience)
                return
            except RuntimeError as error:
                if work.is_completed() or "Operation timed out" not in str(
                    error
                ):  # it has failed; else it is only late
                    raise
            if message := whereabouts.first_difference():
                raise LostRank(message)
        work.wait()
    except RuntimeError as error:
        if isinstance(error, LostRank):
            raise
        step, number = position
        place = f"{what}, number {number} of step {step} on rank {dist.get_rank()},"
        raise lost_rank(place, position, whereabouts, error) from error


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
