"""A Comm without a process group: one process is rank r of N, and what absent ranks would send is computed.

All ranks have the same batch, so they have the same gradients, and a sum over N ranks has N equal terms:

    all_reduce       buffer / N, added N times, one after the other, as gloo's ring does      true up to N = 8
                     N > 8: the mean of equal numbers is that number                          true up to rounding
    reduce_scatter   the same for this rank's slice
    all_gather       absent ranks' slices: their initial values (values.py)                   true until a step is taken
    broadcast        rank 0 has the same initial values as this rank                          true

After the first step only this rank's slice is known: the other slices keep their initial values, so a second forward
is not that of a real training. Allocations, products and the ledger stay those of a real rank.

Left out: batches that differ between ranks; NCCL's order of summation; the time of a transfer.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_mini.comm import Comm, Launched
from zero_mini.flat import Unit
from zero_mini.simulate.values import Values

MOST_RANKS = 1 << 16  # several numbers of each rank are kept
IN_TURN = 8  # up to so many ranks gloo adds the terms one after the other
ORDERS = (2.0, float("inf"))  # of norms: to clip, and to see an overflow in fp16
AT_ONCE = 1 << 22  # elements that are added up together: they need temporary memory


class Absent(Comm):
    """Rank `rank` of `world_size`, whose peers are absent.

    values    how the model was initialised. None: the values that the model has at the start are kept, whole, for any
              model that fits.

        zero = zeroify(model, optimizer, 3, comm=Absent(0, 1024, values), initialise=values.initialise)
    """

    def __init__(self, rank: int, world_size: int, values: Values | None = None) -> None:
        check_place(rank, world_size)
        super().__init__(without=(rank, world_size))
        self.values = values
        self.kept: dict[str, Tensor] = {}  # a unit's name -> its values at the start, or after full_params()
        self.units: dict[str, Unit] = {}
        # A unit's name -> order -> the norms (N) of the ranks' slices of its mean; None if they are not known.
        self.norms: dict[str, dict[float, Tensor] | None] = {}
        self.step_of_norms = 0

    def follow(self, zero) -> None:
        """The layout of the handle's units is known now. ValueError if it has been another handle's."""
        units = {unit.name: unit for unit in zero.units}
        if self.units and self.units != units:
            raise ValueError("this Absent knows the values of another model: make one for each model")
        self.units = units

    def all_reduce(self, buffer: Tensor, unit: str) -> Launched:
        return self.launch("all_reduce", unit, buffer, functools.partial(self.add_up, buffer))

    def reduce_scatter(self, shard: Tensor, buffer: Tensor, unit: str) -> Launched:
        def reduce() -> None:
            parts = buffer.chunk(self.world_size)
            for part in parts if self.world_size <= IN_TURN else ():  # all: the norm needs every rank's slice
                self.add_up(part)
            if self.step_of_norms != self.ledger.steps:
                self.norms, self.step_of_norms = {}, self.ledger.steps
            # A second micro-batch adds to the mean: the norm of the sum is not known.
            rows = buffer.view(self.world_size, -1)
            self.norms[unit] = None if unit in self.norms else {order: norms_of(parts, rows, order) for order in ORDERS}
            put(shard, parts[self.rank])

        return self.launch("reduce_scatter", unit, buffer, reduce)

    def all_gather(self, buffer: Tensor, shard: Tensor, unit: str) -> Launched:
        def gather() -> None:
            parts = buffer.chunk(self.world_size)
            put(parts[self.rank], shard)
            if unit == "norm":
                buffer.fill_(parts[self.rank][0].clone())  # total_norm knows more
            else:
                start = self.rank * shard.numel()
                self.fill_in(buffer[:start], unit, 0)
                self.fill_in(buffer[start + shard.numel() :], unit, start + shard.numel())

        return self.launch("all_gather", unit, buffer, gather)

    def broadcast(self, buffer: Tensor, unit: str) -> Launched:
        if unit in self.units and (self.values is None or self.ledger.steps):  # later: what full_params() has changed
            self.kept[unit] = buffer.clone()
        return self.launch("broadcast", unit, buffer, lambda: None)

    def add_up(self, term: Tensor) -> None:
        """term (n) <- the mean of N terms like it."""
        for part in term.split(AT_ONCE) if 1 < self.world_size <= IN_TURN else ():
            part.mul_(1 / self.world_size)
            each = part.clone()
            for _ in range(self.world_size - 1):
                part.add_(each)

    def total_norm(self, norms: Tensor, norm_type: float) -> Tensor:
        """Of absent ranks' slices too. Where their norms are not known, each has this rank's."""
        in_order = [self.norms[name] for name in self.units if name in self.norms]
        if in_order and all(known and norm_type in known for known in in_order):
            # Of each rank's norms apart, as each rank does it: a reduction over rows may add up in another order.
            table = torch.stack([known[norm_type] for known in in_order], dim=1)
            if self.world_size <= IN_TURN:
                total = torch.stack([torch.linalg.vector_norm(row, norm_type) for row in table])
            else:
                total = torch.linalg.vector_norm(table, norm_type, dim=1)
            mine = norms[self.rank].clone()
            total = total.to(norms)
            if torch.allclose(total[self.rank], mine, rtol=1e-2, equal_nan=True):  # else gradients were changed since
                norms = total
                norms[self.rank] = mine
        return super().total_norm(norms, norm_type)

    def fill_in(self, out: Tensor, unit: str, start: int) -> None:
        """out (n) <- elements start to start + n of the unit's flat buffer, as they were at the start of training.

        RuntimeError for whole gradients and optimizer states, as zero.state_dict() has them: they are not known.
        """
        if unit not in self.units:
            raise RuntimeError(f"{unit} are spread over {self.world_size} ranks, of which all but one are absent")
        if unit in self.kept:
            out.copy_(self.kept[unit][start : start + out.numel()])
            return
        layout, end = self.units[unit], start + out.numel()
        for name, shape, offset in zip(layout.names, layout.shapes, layout.offsets):
            low, high = max(start, offset), min(end, offset + shape.numel())
            if low < high:
                self.values.part(name, shape, low - offset, out[low - start : high - start])
        for first, after in layout.gaps:
            out[max(first - start, 0) : max(after - start, 0)] = 0


class OwnSlice(Absent):
    """The trap: absent ranks "send" this rank's slice. Every byte is real, and the loss is not, but looks right."""

    def fill_in(self, out: Tensor, unit: str, start: int) -> None:
        pass

    def all_gather(self, buffer: Tensor, shard: Tensor, unit: str) -> Launched:
        for part in buffer.chunk(self.world_size):
            put(part, shard)
        return super().all_gather(buffer, shard, unit)


def norms_of(parts: Sequence[Tensor], rows: Tensor, order: float) -> Tensor:
    """parts: the N rows (S) of `rows` -> their norms (N), in fp32 at least."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if len(parts) <= IN_TURN:
        return torch.stack(torch._foreach_norm(parts, order, dtype))
    at_once = max(1, AT_ONCE // rows.shape[1])  # it may cast them
    return torch.cat([torch.linalg.vector_norm(some, order, dim=1, dtype=dtype) for some in rows.split(at_once)])


def put(target: Tensor, source: Tensor) -> None:
    """Copy, unless it is the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def check_place(rank: int, world_size: int) -> None:
    """ValueError unless they are whole numbers, 0 <= rank < world_size <= MOST_RANKS.

    >>> check_place(2, 2)
    Traceback (most recent call last):
    ValueError: rank must be from 0 to 1, of 2 ranks (got 2)
    """
    if not (isinstance(rank, int) and isinstance(world_size, int)):
        raise ValueError(f"rank and world_size are whole numbers (got {rank!r} and {world_size!r})")
    if world_size < 1:
        raise ValueError(f"the number of ranks must be at least 1 (got {world_size})")
    if world_size > MOST_RANKS:
        raise ValueError(f"the number of ranks must be at most {MOST_RANKS:,} (got {world_size:,})")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, of {world_size} ranks (got {rank})")
