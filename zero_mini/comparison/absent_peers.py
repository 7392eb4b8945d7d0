"""One GPU as rank 0 of N whose peers are absent: what a step would take if the wire took no time.

    reduction     this rank's slice keeps its own gradient, as if all ranks had the same one
    all-gather    the other ranks' slices keep what they have: random numbers of a weight's size in stage 3's slots,
                  initial values elsewhere

Everything else is a real rank's: allocations, products, casts, the update of 1/N, what the host launches. So the
difference from a run on N GPUs is the wire's. Losses are not those of a training, and no gate compares them.

DDP, FSDP2 and DeepSpeed call torch.distributed, so they have a process group of N ranks that sends nothing. Its
all-gather copies this rank's part N times, since their buffers are new memory, which may hold NaN. Those copies take
time that is not theirs: at N = 2 about 1 byte a parameter read and 1 written for each gather of bf16.

Left out: values. simulate/absent.py computes what absent ranks would send, which takes time.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

from zero_mini.comm import Comm, Launched
from zero_mini.comparison import systems, works
from zero_mini.comparison.plain import build_plain
from zero_mini.comparison.trainee import Trainee
from zero_mini.comparison.works import BASELINE, PLAIN, Work
from zero_mini.simulate.absent import put

STD = 0.02  # of a weight

OURS = (*works.OURS, "zero-3 keep attention", "zero-2 offload", "zero-3 offload")
PEERS = [name for name in systems.SYSTEMS if name.startswith(("ddp", "fsdp2", "deepspeed")) and "symmetric" not in name]
ALLOWED = (*OURS, *PEERS, *PLAIN)


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
        put(shard, buffer[: shard.numel()])
        return self.launch("reduce_scatter", unit, buffer, lambda: None)

    def all_gather(self, buffer: Tensor, shard: Tensor, unit: str) -> Launched:
        put(buffer[: shard.numel()], shard)
        return self.launch("all_gather", unit, buffer, lambda: None)

    def broadcast(self, buffer: Tensor, unit: str) -> Launched:
        return self.launch("broadcast", unit, buffer, lambda: None)


class SilentGroup(dist.ProcessGroup):
    """A process group whose other ranks are absent, with the collectives that the peers use."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.ranks = world_size

    def size(self) -> int:
        return self.ranks

    def getBackendName(self) -> str:
        return "silent"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def done(self, result: object = None, *_, **__) -> dist.Work:
        """Nothing is sent, and tensors keep what they have."""
        future = torch.futures.Future()
        future.set_result(result)
        return _create_work_from_future(future)

    allreduce = allreduce_coalesced = broadcast = barrier = done

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_) -> dist.Work:
        for output in outputs[0]:
            put(output, inputs[0])
        return self.done()

    def all_gather_single(self, output: Tensor, source: Tensor, *_) -> dist.Work:
        return self.allgather([output.view(-1).chunk(self.ranks)], [source.view(-1)])

    def reduce_scatter_single(self, output: Tensor, source: Tensor, *_) -> dist.Work:
        put(output.view(-1), source.view(-1)[: output.numel()])
        return self.done()

    def all_gather_single_coalesced(self, outputs: list[Tensor], sources: list[Tensor], *_) -> dist.Work:
        for output, source in zip(outputs, sources):
            self.all_gather_single(output, source)
        return self.done()

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # until torch 2.12
    allgather_into_tensor_coalesced = all_gather_single_coalesced


def build(world_size: int, system: str, work: Work, device: torch.device) -> Trainee:
    """The work's model in training as rank 0 of `world_size`; plain rows have no ranks anyway."""
    if system in OURS:
        return systems.SYSTEMS[system].build(work, device, comm=Silent(world_size))
    if system in PLAIN:
        return build_plain(work, device, updates=world_size if system == BASELINE else 0)
    enter_silent_world(world_size)
    return systems.build(system, work, device)


def enter_silent_world(world_size: int) -> None:
    """From now on this process is rank 0 of `world_size` in its default group, a SilentGroup."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SilentGroup:
        return SilentGroup(rank, size)

    if not hasattr(dist.Backend, "SILENT"):
        dist.Backend.register_backend("silent", create, devices=["cpu", "cuda"])
    dist.destroy_process_group()
    dist.init_process_group("silent", rank=0, world_size=world_size, store=dist.HashStore())
