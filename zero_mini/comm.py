"""The four collectives ZeRO is made of. Each launch is written into a ledger (wire/ledger.py).

Volumes (arXiv 1910.02054, section 7.1; ring algorithms): with N ranks and a buffer of P elements,
a reduce-scatter and an all-gather each move P (N-1)/N elements over a rank's wire, and an
all-reduce, which is the one followed by the other, moves 2 P (N-1)/N. The traffic of every stage
is a sum of these.

    before            all_reduce         reduce_scatter     all_gather
    rank 0  a0 b0     rank 0  A  B       rank 0  A  .       rank 0  A  B
    rank 1  a1 b1     rank 1  A  B       rank 1  .  B       rank 1  A  B

    A = mean(a0, a1), B = mean(b0, b1); all_gather starts from reduce_scatter's result.

Every reduction here is a *mean*: the loss of the global batch is the mean of the ranks' losses.
Every collective is asynchronous and returns a `Launched`: the buffer has the result after its
`wait()`. On NCCL `wait()` does not stop the host: it makes the current CUDA stream wait. The launch
makes NCCL's stream wait for everything enqueued so far, so no stream object is needed.
Numbers in host memory, a few in a step, go through `comm.host` (wire/host_words.py).

A subclass sends in another way, and `zeroify(comm=...)` takes it: examples/hybrid_shard.py has two
process groups, examples/bf16_wire.py another reduce-scatter, wire/throttled.py a slower link, and
simulate/absent.py no group at all: the other ranks are absent. An overridden collective may return any object with a
`wait()`, which is called once; work that follows the collective, such as a cast, belongs there.

Left out: hierarchical and quantised collectives (ZeRO++, arXiv 2306.10209).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zero_mini.wire.host_words import HostWords, all_gather, same_ranks
from zero_mini.wire.ledger import Call, Ledger
from zero_mini.wire.lost_ranks import Position, open_pages, wait


@dataclass(frozen=True)
class Launched:
    """A collective in flight."""

    work: dist.Work | None  # None: it was done at once
    call: Call
    position: Position  # in the ledger
    ledger: Ledger

    def wait(self) -> None:
        """Return when it is done; on NCCL, when the current stream waits for it. LostRank if it cannot complete."""
        if self.work is not None:
            wait(self.work, self.call.line, self.position, self.ledger.whereabouts)


class Comm:
    """The collectives of one process group, and the ledger of them.

    group        None: all ranks.
    without      (rank, world size) of a rank without a process group; a subclass then overrides the four collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, without: tuple[int, int] | None = None):
        self.group = None if without else group or dist.group.WORLD
        self.rank, self.world_size = without or (dist.get_rank(self.group), dist.get_world_size(self.group))
        self.is_nccl = not without and dist.get_backend(self.group) == "nccl"
        # Numbers in host memory need a CPU group of their own: they must neither queue behind collectives on the GPU
        # nor be mistaken for one of them.
        host_group = None if without else same_ranks(self.group, "gloo")
        self.ledger = Ledger(None if without else open_pages(self.group, host_group.group_name))
        self.host = HostWords(host_group, self.ledger, self.world_size)
        self.replica = 0  # the number of this group, where several groups hold the same shards
        self.gathering = self.group  # all-gathers run in this group; copy engines have one of their own
        self.reachable = None  # memory that copy engines reach, or None (wire/copy_engine.py)

    @property
    def number(self) -> int:
        """The number of this rank among all ranks that train the model."""
        return self.replica * self.world_size + self.rank

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer (numel) that is gathered into for as long as training lasts."""
        if self.reachable is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return self.reachable.empty(numel, dtype)

    def follow(self, zero) -> None:
        """zeroify() calls it with the handle, before any values are sent. A subclass may look at its units."""

    def all_reduce(self, buffer: torch.Tensor, unit: str) -> Launched:
        """buffer (P) <- its mean over ranks, on every rank."""
        op = self._prepare_mean(buffer)
        start = functools.partial(dist.all_reduce, buffer, op=op, group=self.group, async_op=True)
        return self.launch("all_reduce", unit, buffer, start)

    def reduce_scatter(self, shard: torch.Tensor, buffer: torch.Tensor, unit: str) -> Launched:
        """shard (S = P/N) <- slice `rank` of the mean of buffer (P). The values of `buffer` are lost.

        `shard` may be that slice of `buffer`. Keep `buffer` until `wait()` has returned.
        """
        op = self._prepare_mean(buffer)
        start = functools.partial(reduce_scatter, shard, buffer, op=op, group=self.group, async_op=True)
        return self.launch("reduce_scatter", unit, buffer, start)

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, unit: str) -> Launched:
        """buffer (P) <- the ranks' shards (S) in rank order; `shard` may be a slice of `buffer`."""
        start = functools.partial(all_gather, buffer, shard, group=self.gathering, async_op=True)
        launched = self.launch("all_gather", unit, buffer, start)
        if self.reachable is not None:
            self.reachable.latest = launched.work
        return launched

    def broadcast(self, buffer: torch.Tensor, unit: str) -> Launched:
        """buffer <- rank 0's, on every rank."""
        start = functools.partial(dist.broadcast, buffer, group=self.group, group_src=0, async_op=True)
        return self.launch("broadcast", unit, buffer, start)

    def total_norm(self, norms: torch.Tensor, norm_type: float) -> torch.Tensor:
        """norms (N), one of each rank's slices -> the norm (0-dim) of the whole gradient.

        Clipping and fp16's overflow check (the norm of order inf is finite) both ask here. Where another group of ranks
        holds further parts of the model, as in tensor parallelism, a subclass combines the norms of both groups.
        """
        return torch.linalg.vector_norm(norms, norm_type)

    def launch(self, kind: str, unit: str, buffer: torch.Tensor, start: Callable[[], dist.Work | None]) -> Launched:
        """Note a collective on `buffer` in the ledger, then start it. `start` returns None if it is done at once.

        `kind` is one of the four, whatever `start` calls: it says how many elements of `buffer` cross the wire
        (`Call.wire_numel`). The dtype of `buffer` says how many bytes each has.
        """
        call, position = self.ledger.note(kind, unit, buffer)
        return Launched(start(), call, position, self.ledger)

    def _prepare_mean(self, buffer: torch.Tensor) -> dist.ReduceOp:
        if self.is_nccl and buffer.dtype != torch.float16:  # gloo can only sum
            return dist.ReduceOp.AVG
        # Divide before the sum, as torch DDP does, so that the sum cannot overflow. In fp16 on NCCL too: AVG
        # multiplies and adds with one rounding, so the smallest numbers would differ from DDP's.
        buffer.mul_(1 / self.world_size)
        return dist.ReduceOp.SUM


# torch 2.13 renamed the two flat collectives; 2.9 to 2.12 have the old names only.
def reduce_scatter(*args, **options) -> dist.Work:
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(*args, **options)
