"""All-gathers by the GPU's copy engines, which take no multiprocessor away from the matrix products.

An NCCL collective is a kernel: while it runs it holds some of the GPU's multiprocessors, and a matrix
product that was planned for all of them then waits for the last. An all-gather only copies, and GPUs have
engines that do nothing else. NCCL uses those if two things are given:

    its communicator is told so          cta_policy "zero": no thread block where it can be done without
    ranks can reach each other's memory  buffers from NCCL's allocator, registered on all ranks alike

The buffers that are gathered live as long as training (the parameters at stages 1 and 2, two slots and
the root at stage 3), so they can be registered once. Reductions add, so they need a kernel still.

Left out: several hosts, and GPUs that do not reach each other's memory: there gathers stay kernels.
"""

import contextlib
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist

from zero_mini.comm import Comm, same_ranks
from zero_mini.flat import Unit

ZERO_CTAS = 2  # NCCL_CTA_POLICY_ZERO
WORTH_IT = 30_000_000  # elements of a unit: the host spends longer on such a gather than on a kernel


@contextlib.contextmanager
def gather_by_copy_engines(comm: Comm, units: list[Unit]) -> Iterator[None]:
    """From here on gathers take no part of the GPU from the computation, where that can be and is worth it. Collective.

    Within, `comm.empty` gives memory that they reach: make all buffers there, and gather only later.
    """
    largest = max((unit.P for unit in units if not unit.is_root), default=0)
    if comm.is_nccl and comm.world_size > 1 and largest >= WORTH_IT:
        group = group_of_copiers(comm.group, comm.host.gather(host_and_devices()))
        if group is not None:
            comm.gathering, comm.reachable = group, ReachableMemory(group)
    yield
    if comm.reachable is not None:
        comm.reachable.register()


def group_of_copiers(parent: dist.ProcessGroup, hosts: list[str | None]) -> dist.ProcessGroup | None:
    """A second NCCL communicator of the same ranks, that gathers without kernels; None if that cannot be.

    `hosts`: each rank's `host_and_devices()`.
    """
    options = dist.ProcessGroupNCCL.Options()
    if None in hosts or len(set(hosts)) > 1 or not hasattr(options.config, "cta_policy"):
        return None
    options.config.cta_policy = ZERO_CTAS
    group = same_ranks(parent, "nccl", pg_options=options)
    dist.all_reduce(torch.zeros((), device="cuda"), group=group)  # torch makes the communicator at first use
    return group


def host_and_devices() -> str | None:
    """Names this host, if its GPUs reach each other's memory; else None."""
    count = torch.cuda.device_count()
    reach = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
    return socket.gethostname() if reach else None


class ReachableMemory:
    """Where buffers for the copy engines are allocated: all of them first, on all ranks alike, then `register`."""

    def __init__(self, group: dist.ProcessGroup):
        self.backend = group._get_backend(torch.device("cuda"))
        self.pool = torch.cuda.MemPool(self.backend.mem_allocator)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self.pool):
            return torch.empty(numel, dtype=dtype, device="cuda")

    def register(self) -> None:
        """Collective."""
        self.backend.register_mem_pool(self.pool, symm=True)
