"""All-gathers by the GPU's copy engines, which leave all SMs to the matrix products.

An NCCL collective is a kernel: while it runs it occupies some of the GPU's SMs, and a matrix product
that is tiled for all SMs takes longer. An all-gather only copies, and GPUs have engines that do
nothing else. NCCL uses them under two conditions:

    its communicator has the option      cta_policy "zero": no thread block where a collective works without
    ranks can reach each other's memory  buffers from NCCL's allocator, registered on all ranks alike

The buffers that are gathered live as long as training (the parameters at stages 1 and 2, two slots and
the root at stage 3), so they can be registered once. Reductions add, so they still need a kernel.

Left out: several hosts, and GPUs that cannot reach each other's memory: there gathers are kernels.
"""

import atexit
import contextlib
import ctypes
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

from zero_mini.comm import Comm, same_ranks
from zero_mini.flat import Unit

ZERO_CTAS = 2  # NCCL_CTA_POLICY_ZERO
WORTH_IT = 30_000_000  # least elements of a unit: the host spends longer on such a gather than on a kernel
PATIENCE_S = 10.0  # for a gather that is in flight when the process ends


@contextlib.contextmanager
def gather_by_copy_engines(comm: Comm, units: list[Unit]) -> Iterator[None]:
    """Use copy engines for all-gathers, if the hardware allows it and units are large enough. Collective.

    Within, `comm.empty` allocates memory that they reach: allocate all buffers there, and gather only afterwards.
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
    """A second NCCL communicator of the same ranks that gathers without kernels; None if that is not possible.

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
    """The name of this host, if its GPUs reach each other's memory; else None."""
    count = torch.cuda.device_count()
    reach = all(torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b)
    return socket.gethostname() if reach else None


class ReachableMemory:
    """A memory pool for buffers of the copy engines: allocate all of them, on all ranks alike, then `register`."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.backend = group._get_backend(torch.device("cuda"))
        self.pool = torch.cuda.MemPool(self.backend.mem_allocator)
        self.latest: dist.Work | None = None  # the last gather
        self.release: weakref.finalize | None = None  # runs once: when this object goes, or at the end of the process

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self.pool):
            return torch.empty(numel, dtype=dtype, device="cuda")

    def register(self) -> None:
        """Register the pool with NCCL. Collective."""
        self.backend.register_mem_pool(self.pool, symm=True)
        self.release = weakref.finalize(self, release, self.group, self.backend, self.pool)
        self.release.atexit = False  # `leave` calls it
        atexit.register(leave, weakref.ref(self))

    def becomes_idle(self, patience_s: float) -> bool:
        """True if the last gather ends in this time; False after an error of CUDA, too."""
        deadline = time.monotonic() + patience_s
        try:
            while self.latest is not None and not self.latest.is_completed():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except RuntimeError:
            return False
        return True


def leave(reference: weakref.ref) -> None:
    """The process ends. If a peer has failed, a gather in flight never ends, since nothing can abort a copy engine."""
    memory = reference()
    if memory is None:
        return
    if exists(memory.group) and not memory.becomes_idle(PATIENCE_S):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    memory.release()


def release(group: dist.ProcessGroup, backend: dist.Backend, pool: torch.cuda.MemPool) -> None:
    """The pool is no longer used: deregister it, or else keep its memory for ever.

    In two cases torch ends a process with SIGABRT: registered memory is freed after `destroy_process_group()`; or the
    process ends without `destroy_process_group()`, so that torch aborts the group while memory is registered.
    """
    if exists(group):
        backend.deregister_mem_pool(pool)
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


def exists(group: dist.ProcessGroup) -> bool:
    """It was not destroyed."""
    return group in dist.distributed_c10d._world.pg_map
