"""Run a function on N ranks of a torch.distributed job, and get each rank's result back.

    def total(x):
        tensor = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item()

    run(total, 2, 10)                   # [21, 21], one result a rank

    with Ranks(2) as ranks:             # the same, with processes that stay for the next call
        ranks.run(total, 10)
        ranks.run(lambda: dist.get_rank())

The function may live anywhere: in a module, a notebook cell, a script, another function.

    parent                          rank 0                        rank 1
      |------- pickled call ---------> |                             |
      |------- pickled call --------------------------------------> |
      |                                | <====== collectives ======> |
      | <-- result, or failure ------- |                             |
      | <-- result, or failure ------------------------------------- |
      v
    prints the ranks' output, in rank order; returns the results or raises RankError

Left out: several machines (torchrun does that), and output while the function still runs.
"""

import contextlib
import linecache
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TextIO

import torch
import torch.distributed as dist

from zero_mini.course.pickling import pack, unpack
from zero_mini.course.rank_process import START_S, TIDY_UP, WHERE, Failure, end_group, join, serve
from zero_mini.wire.lost_ranks import LostRank

GRACE_S = 2.0  # after the first failure, for the other ranks to report theirs


class RankError(RuntimeError):
    """A call that not every rank finished. The message begins with the root cause; `rank` is the rank of the cause."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


def run(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    backend: str | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world_size` new ranks; return [rank 0's result, rank 1's, ...].

    This uses `Ranks` once; see there for the arguments and the errors.
    """
    with Ranks(world_size, timeout_s, backend, device) as ranks:
        return ranks.run(function, *args, **kwargs)


def own_device() -> torch.device:
    """In a function on ranks: this rank's GPU if the backend is NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Ranks:
    """`world_size` processes that form one torch.distributed job and wait for functions to run.

    In such a function `dist` is initialised, the CPU cores are divided among the ranks, and on "cuda" each rank
    has its current GPU. Each rank draws random numbers of its own until the function seeds them. Arguments and
    results are copied; a tensor on a GPU arrives on the CPU. Between calls a rank keeps its state (random generators,
    imported modules), but not the process groups that the function made.

    timeout_s: seconds that one call may take; the start of the processes does not count.
    device:    "cpu" or "cuda"; None: "cuda" for nccl, or if no backend is given and every rank can have a GPU.
    backend:   "gloo" or "nccl"; None: nccl on "cuda", gloo on "cpu".

    ValueError if such a job is impossible: less than one rank, or more nccl ranks than GPUs.
    """

    def __init__(
        self, world_size: int, timeout_s: float = 120.0, backend: str | None = None, device: str | None = None
    ):
        self.backend, self.device = _placement(world_size, backend, device)
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._processes: list[multiprocessing.process.BaseProcess] = []
        weakref.finalize(self, _kill, self._processes)  # if close() was forgotten; also when this process ends
        self._pipes: list[Connection] = []
        self._outputs: list[TextIO] = []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank; return [rank 0's result, rank 1's, ...].

        RankError if a rank raises, exits, is killed or takes longer than `timeout_s`. Then all ranks are ended, and
        the next call starts new ones.
        """
        call = pack((function, args, kwargs, _lines_without_a_file()))
        try:
            if not self._processes:
                self._start()
            results = self._call([call] * self.world_size, self.timeout_s)
        except BaseException:  # a Ctrl-C too: no rank outlives its call
            self.close()
            raise
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(TIDY_UP)
        self._print_outputs()
        return [unpack(result) for result in results]

    def close(self) -> None:
        """End all ranks and print their remaining output. The next `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        _kill(self._processes)  # an idle rank has nothing to clean up, and a stuck one would not react
        for process in self._processes:
            process.join(GRACE_S)
        self._print_outputs()
        for output in self._outputs:
            output.close()
        for resources in (self._processes, self._pipes, self._outputs):
            resources.clear()

    def _start(self) -> None:
        # A forked copy of this process can hang for ever: it has no threads, but their locks stay locked. A new
        # interpreter for each rank spends seconds in `import torch`. So one process without threads imports it once
        # and forks every rank. (torch._dynamo: optimizers import it at their first use, which takes over a second.)
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "cloudpickle"])
        # The parent serves the store through which ranks find each other: it gets a free port (0) before they start,
        # and it survives every rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        joins = []
        with tempfile.TemporaryDirectory() as folder:  # its files are open, so they stay readable after its removal
            for rank in range(self.world_size):
                path = os.path.join(folder, str(rank))
                self._outputs.append(open(path, "w+", encoding="utf-8", errors="replace", newline="\n"))
                pipe, far_end = context.Pipe()
                self._pipes.append(pipe)
                arguments = (rank, far_end, path, dict(os.environ))
                process = context.Process(target=serve, args=arguments, daemon=True)  # ends when this process does
                with _main_hidden():
                    process.start()
                self._processes.append(process)
                far_end.close()
                place = (rank, self.world_size, self.backend, self.device, self._store.port, self.timeout_s)
                joins.append(pack((join, place, {}, {})))
            self._call(joins, START_S)
        for output in self._outputs:
            output.read()  # skip what libraries print at start: it is not the function's output

    def _call(self, calls: list[bytes], timeout_s: float) -> list[bytes]:
        """Give each rank its call; return each rank's packed result, or raise RankError with the reason."""
        for pipe, call in zip(self._pipes, calls):
            with contextlib.suppress(OSError):  # the rank died since the last call: _reply() reports it below
                pipe.send_bytes(call)
        results: dict[int, bytes] = {}
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + timeout_s
        while pending := [r for r in range(self.world_size) if r not in results and r not in failures]:
            patience_s = deadline - time.monotonic()
            if patience_s <= 0:
                break
            wait([self._pipes[r] for r in pending] + [self._processes[r].sentinel for r in pending], patience_s)
            for rank in pending:
                reply = self._reply(rank)
                if isinstance(reply, bytes):
                    results[rank] = reply
                elif isinstance(reply, Failure):
                    failures[rank] = reply
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise _root_cause_first(list(failures.values()), pending)
        if pending:
            raise self._too_late(pending, timeout_s)
        return [results[rank] for rank in range(self.world_size)]

    def _reply(self, rank: int) -> "bytes | str | Failure | None":
        """The rank's message, a Failure if the process has ended, or None if it runs and has sent nothing."""
        alive = self._processes[rank].exitcode is None  # before poll(): a rank may send its last message and then end
        with contextlib.suppress(EOFError, OSError):
            if self._pipes[rank].poll():
                return self._pipes[rank].recv()
            if alive:
                return None
        self._processes[rank].join(GRACE_S)
        _kill([self._processes[rank]])  # its workers share its sockets; other ranks see them close when all have ended
        code = self._processes[rank].exitcode
        what = f"exited with status {code} before its function returned"
        if code is not None and code < 0:
            what = f"died of {signal.Signals(-code).name}"
        return Failure(rank, time.monotonic(), what)

    def _too_late(self, late: list[int], timeout_s: float) -> RankError:
        """The error for ranks that neither finished nor failed in time, with the stack of each."""
        done = [rank for rank in range(self.world_size) if rank not in late]
        parts = [f"{_names(late)} did not finish within {timeout_s:g} s" + (f"; {_names(done)} did" if done else "")]
        for rank in late:
            with contextlib.suppress(EOFError, OSError):
                self._pipes[rank].send_bytes(WHERE)
                stack = self._pipes[rank].recv() if self._pipes[rank].poll(GRACE_S) else "  somewhere outside Python"
                if isinstance(stack, str):
                    parts.append(f"rank {rank} is at:\n{stack}")
        return RankError("\n\n".join(parts), late[0])

    def _print_outputs(self) -> None:
        for rank, output in enumerate(self._outputs):
            for line in output:
                text = line.rstrip("\n").rpartition("\r")[2]  # of a progress bar only the final state
                print(f"[rank {rank}] {text}" if self.world_size > 1 else text)


def _kill(processes: list[multiprocessing.process.BaseProcess]) -> None:
    """End ranks and the processes that they have started."""
    for process in processes:
        end_group(process.pid)
        process.kill()  # for a process that has just started and has no group yet


def _root_cause_first(failures: list[Failure], pending: list[int]) -> RankError:
    failures = sorted(failures, key=lambda failure: failure.rank)
    # A victim often reports before the rank that caused its error, so times decide only between failures of one sort.
    cause = min(failures, key=lambda failure: (failure.is_victim, failure.when_s)).what
    alike = [failure for failure in failures if failure.what == cause]
    others = [failure for failure in failures if failure.what != cause]
    parts = [f"{_names([failure.rank for failure in alike])} {cause}", alike[0].details]
    parts += [f"rank {failure.rank} {failure.what}" for failure in others if not failure.is_victim]
    if victims := [failure.rank for failure in others if failure.is_victim]:
        parts.append(f"{_names(victims)} lost the connection in a collective")
        parts += [f"rank {failure.rank} {failure.what}" for failure in others if LostRank.__name__ in failure.what]
    if pending:
        parts.append(f"{_names(pending)} had not finished yet")
    return RankError("\n\n".join(part for part in parts if part), alike[0].rank)


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _placement(world_size: int, backend: str | None, device: str | None) -> tuple[str, str]:
    """(backend, device), with defaults in place of None."""
    gpus = torch.cuda.device_count()
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: a job has 1 rank or more")
    if device is None:
        device = "cuda" if backend == "nccl" or (backend is None and gpus >= world_size) else "cpu"
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    needed = world_size if backend == "nccl" else 1 if device == "cuda" else 0
    if gpus < needed:
        raise ValueError(
            f'{world_size} ranks with backend="{backend}" on device="{device}" need {needed} GPUs, this machine has '
            f'{gpus}: ask for fewer ranks, or for backend="gloo", device="cpu"'
        )
    return backend, device


def _lines_without_a_file() -> dict[str, tuple]:
    # The source of notebook cells, for the tracebacks of ranks.
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    # multiprocessing runs the parent's script again in each new process. Ranks do not need it, because functions are
    # pickled by value, and a script without `if __name__ == "__main__"` would start ranks that start ranks.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
