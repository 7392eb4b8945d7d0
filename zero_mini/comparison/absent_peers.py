"""One GPU as rank 0 of N whose peers are absent: what a step would take if the wire took no time.

    reduction     this rank's slice keeps its own gradient, as if all ranks had the same one
    all-gather    the other ranks' slices keep what they have: random numbers of a weight's size in stage 3's slots,
                  initial values elsewhere

Everything else is a real rank's: allocations, products, casts, the update of 1/N, what the host launches. So the
difference from a run on N GPUs is the wire's. Losses are not those of a training, and no gate compares them.

Left out: values. simulate/absent.py computes what absent ranks would send, which takes time.
"""

import functools

import torch
from torch import Tensor

from zero_mini.comm import Comm, Launched
from zero_mini.comparison.plain import build_plain
from zero_mini.comparison.systems import build_zero
from zero_mini.comparison.trainee import Trainee
from zero_mini.comparison.works import BASELINE, Work

STD = 0.02  # of a weight

SYSTEMS = {
    **{f"zero-{stage}": functools.partial(build_zero, stage) for stage in range(4)},
    "zero-3 keep attention": functools.partial(build_zero, 3, keep_attention=True),
}


class Silent(Comm):
    """Rank 0 of `world_size`; nothing is sent."""

    def __init__(self, world_size: int) -> None:
        super().__init__(without=(0, world_size))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer (numel) for gathers: numbers of a weight's size, since products of NaN take another time."""
        return super().empty(numel, dtype, device).normal_(std=STD)

    def all_reduce(self, buffer: Tensor, unit: str) -> Launched:
        return self.launch("all_reduce", unit, buffer, lambda: None)

    def reduce_scatter(self, shard: Tensor, buffer: Tensor, unit: str) -> Launched:
        mine = buffer[: shard.numel()]
        if mine.data_ptr() != shard.data_ptr():
            shard.copy_(mine)
        return self.launch("reduce_scatter", unit, buffer, lambda: None)

    def all_gather(self, buffer: Tensor, shard: Tensor, unit: str) -> Launched:
        mine = buffer[: shard.numel()]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        return self.launch("all_gather", unit, buffer, lambda: None)

    def broadcast(self, buffer: Tensor, unit: str) -> Launched:
        return self.launch("broadcast", unit, buffer, lambda: None)


def build(world_size: int, system: str, work: Work, device: torch.device) -> Trainee:
    """The work's model in training as rank 0 of `world_size`; plain rows have no ranks anyway."""
    if system in SYSTEMS:
        return SYSTEMS[system](work, device, comm=Silent(world_size))
    return build_plain(work, device, updates=world_size if system == BASELINE else 0)
