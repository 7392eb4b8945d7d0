"""The process of a rank that `Ranks` has started: it runs one call after the other, until the parent ends it.

A rank leads a process group of its own. The processes that it starts, such as the workers of a DataLoader, belong to
that group, and `end_group` ends them and the rank together. The parent calls it if a call fails or the ranks are
closed; the rank itself calls it if its function raises or the parent is gone.

    parent --- pipe ---> thread `_listen` --- queue ---> main thread `serve`
       ^                       |                              |
       | <--- stack -----------+      <--- result, Failure ---+
"""

import contextlib
import gc
import linecache
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from zero_mini.course.pickling import pack, unpack

START_S = 120.0  # for all ranks to start and to find each other
WHERE = b"where are you?"
TIDY_UP = b"all ranks are done"
# In the error of a collective: the *other* rank of a connection has ended.
LOST_PEER = re.compile("closed by peer|reset by peer|broken pipe|connection refused|remote process exited", re.I)


@dataclass
class Failure:
    """Why one rank has no result."""

    rank: int
    when_s: float  # on the monotonic clock, which the processes of a machine share
    what: str  # "raised ValueError: ..."
    details: str = ""  # the traceback of an exception

    @property
    def is_victim(self) -> bool:
        return LOST_PEER.search(self.what) is not None


def end_group(leader: int) -> None:
    """Kill the process group that the process `leader` leads, whether or not that process is alive."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty, or (macOS) has only dead ones
        os.killpg(leader, signal.SIGKILL)


def serve(rank: int, pipe: Connection, output_path: str, environment: dict[str, str]) -> None:
    """The main function of a rank's process."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C may reach this process too; the parent handles it
    os.environ.update(environment)  # the forkserver has an older environment
    # Redirect file descriptors, not only sys.stdout, to include output of C++ code and of a rank that is killed.
    output = os.open(output_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
    warnings.simplefilter("ignore")
    _fork_workers()
    _seed()
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    one_at_a_time = threading.Lock()
    threading.Thread(target=_listen, args=(pipe, calls, one_at_a_time), daemon=True).start()
    gc.freeze()  # torch's 300,000 objects are never garbage: _tidy_up() need not scan them
    times, modules = 0, len(sys.modules)
    while True:
        call = calls.get()
        if call == TIDY_UP:
            times += 1
            _tidy_up(times)
            if len(sys.modules) > modules:  # nor those of what the call imported: torch.compile's cost 0.1 s a scan
                gc.freeze()
                modules = len(sys.modules)
            continue
        reply = _answer(rank, call)
        sys.stdout.flush()
        with one_at_a_time:
            pipe.send(reply)
        if isinstance(reply, Failure):
            end_group(os.getpid())  # so that ranks that wait for this one in a collective fail at once


def _fork_workers() -> None:
    """A DataLoader in this rank forks its workers, as torch does by default on Linux up to Python 3.13.

    A forked worker has all objects of the function, also a Dataset of a notebook cell. A fork server, the default in a
    process that a fork server started, would have to import the Dataset, and would spend seconds in `import torch`.

    Why this is safe: a forked process lacks the rank's threads (gloo's, autograd's, OpenMP's), so it hangs if it waits
    for one. A worker computes with one thread, has no collectives, and exits by os._exit, which frees nothing. Garbage
    remains a danger: a process group joins its threads when Python frees it. So gc.freeze() keeps the rank's objects.
    """
    multiprocessing.current_process().daemon = False  # a daemon may not start workers
    if sys.platform == "linux":  # elsewhere a fork is not safe for the system's own libraries
        multiprocessing.set_start_method("fork", force=True)
        os.register_at_fork(after_in_child=gc.freeze)


def _seed() -> None:
    """Seed with different numbers on every rank and in every job, as under torchrun, until the function seeds them.

    Without this, all ranks would inherit torch's and numpy's generators of the fork server. (Python's are reseeded in
    a fork.)
    """
    torch.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _listen(pipe: Connection, calls: queue.SimpleQueue[bytes], one_at_a_time: threading.Lock) -> None:
    """Pass calls to the main thread, answer WHERE with its stack, and end the process when the parent is gone."""
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            end_group(os.getpid())
        if message != WHERE:
            calls.put(message)
            continue
        frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        own = [i for i, frame in enumerate(frames) if frame.filename == _listen.__code__.co_filename]
        with one_at_a_time:
            pipe.send("".join(traceback.format_list(frames[own[-1] + 1 :])).rstrip())


def _answer(rank: int, call: bytes) -> bytes | Failure:
    try:
        function, args, kwargs, lines = unpack(call)
        linecache.cache.update(lines)
        return pack(function(*args, **kwargs))
    except SystemExit as error:
        return Failure(rank, time.monotonic(), f"called sys.exit({error.code!r})")
    except BaseException as error:
        what = "".join(traceback.format_exception_only(error)).rstrip()
        stack = traceback.format_exception(type(error), error, error.__traceback__.tb_next)  # without this function
        return Failure(rank, time.monotonic(), f"raised {what}", "".join(stack).rstrip())


def _tidy_up(times: int) -> None:
    """Destroy the groups that the call made: each has sockets and three threads, one of which wakes 100 times a second.

    A group can be destroyed only when all ranks are done. References to it must go too, such as those of a model, which
    is in a cycle with its hooks: hence gc.collect(). `times` counts the calls: torch gives groups of the same few ranks
    the same names again, so the next call's need a part of the store of their own, without the addresses of these.
    """
    groups = dist.distributed_c10d._world.pg_map
    for group in list(groups):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    if groups:
        backend, store = groups[dist.group.WORLD]
        store = store.underlying_store if times > 1 else store
        groups[dist.group.WORLD] = backend, dist.PrefixStore(f"after call {times}", store)
    gc.collect()


def join(rank: int, world_size: int, backend: str, device: str, port: int, timeout_s: float) -> None:
    """The first call of a rank: join the job, with a share of the cores, or OMP_NUM_THREADS if that is less."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    share = max(1, cores // world_size)
    torch.set_num_threads(min(share, int(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0] or share)))
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if backend == "gloo" and sys.platform == "linux":
        # By default Linux lets a process that a message wakes up preempt another rank. That rank may hold a lock for
        # which gloo's threads then spin.
        with contextlib.suppress(OSError):  # a sandbox may not have it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group(
        backend,
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s + START_S),  # later than the time-out of `Ranks`, whose message says more
        device_id=torch.device("cuda", rank) if backend == "nccl" else None,
    )
