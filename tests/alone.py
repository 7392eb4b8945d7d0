"""A Comm without a process group: one process is rank r of N, and the other ranks are absent."""

import torch

from zero_mini.comm import Comm, Launched


class Alone(Comm):
    """Absent ranks have the gradients of this one, and the parameters that it had at the start (kept in `values`).

    Without `keep` they have this rank's slice instead of their own: bytes are real, losses are not.
    """

    def __init__(self, rank: int, world_size: int, keep: bool = True):
        super().__init__(without=(rank, world_size))
        self.keep, self.values = keep, {}

    def all_reduce(self, buffer: torch.Tensor, unit: str) -> Launched:
        return self.launch("all_reduce", unit, buffer, lambda: None)

    def reduce_scatter(self, shard: torch.Tensor, buffer: torch.Tensor, unit: str) -> Launched:
        mine = buffer.chunk(self.world_size)[self.rank]
        if shard.data_ptr() != mine.data_ptr():
            shard.copy_(mine)
        return self.launch("reduce_scatter", unit, buffer, lambda: None)

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, unit: str) -> Launched:
        if self.keep:
            buffer.copy_(self.values[unit])
        else:
            for part in buffer.chunk(self.world_size):
                if part.data_ptr() != shard.data_ptr():
                    part.copy_(shard)
        return self.launch("all_gather", unit, buffer, lambda: None)

    def broadcast(self, buffer: torch.Tensor, unit: str) -> Launched:
        if self.keep:
            self.values[unit] = buffer.clone()
        return self.launch("broadcast", unit, buffer, lambda: None)
