"""A slow wire: collectives that begin late, of the kinds and on the ranks that a test chooses.

On gloo a thread launches the collectives, in order, and holds back those that are to be late; on NCCL the GPU sleeps
on a stream that the collective comes after. The computation goes on meanwhile in both. So whoever reads a result
without having waited for it, or changes an input that is still in use, gets other numbers.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

NAMES = ("all_reduce", "broadcast", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor")
NAMES += ("reduce_scatter_single", "all_gather_single")  # torch 2.13's names for the flat ones


@dataclass(frozen=True)
class Delay:
    """Which asynchronous collectives are late, and how late."""

    kinds: tuple[str, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    seconds: float = 0.3  # on gloo; but one that is waited for is held back no longer
    cycles: int = 10_000_000  # of the GPU's clock, on NCCL

    def of(self, name: str) -> bool:
        return name.startswith(self.kinds) and dist.get_rank() in self.ranks


class Held:
    """A work whose collective a thread launches: in its turn, and not before its time has come."""

    def __init__(self, before: "list[Held]", seconds: float, launch: Callable[[], dist.Work], thread):
        self.before, self.launch, self.go = before, launch, threading.Event()
        before.append(self)
        self.done = thread.submit(self.run, time.monotonic() + seconds)

    def run(self, when: float) -> None:
        self.go.wait(max(0.0, when - time.monotonic()))
        self.launch().wait()

    def wait(self, time_out: timedelta | None = None) -> None:
        while self.before and self.before[0] is not self:  # they come first on the wire
            self.before.pop(0).go.set()
        self.go.set()
        self.done.result()


@contextlib.contextmanager
def delayed(delay: Delay) -> Iterator[list[str]]:
    """Within, collectives are late. Yields the names of those that were, in order."""
    late: list[str] = []
    before: list[Held] = []

    def on_a_thread(name: str, original: Callable, thread, *args, async_op: bool = False, **options):
        if not async_op or not args[0].is_floating_point():  # words between hosts, on a group of their own
            return original(*args, async_op=async_op, **options)
        late.extend([name] if delay.of(name) else [])
        launch = partial(original, *args, async_op=True, **options)
        return Held(before, delay.seconds if delay.of(name) else 0.0, launch, thread)

    def behind_a_sleep(name: str, original: Callable, stream, *args, async_op: bool = False, **options):
        if not (async_op and delay.of(name) and args[0].is_floating_point()):
            return original(*args, async_op=async_op, **options)
        late.append(name)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(delay.cycles)
            return original(*args, async_op=True, **options)

    on_gpu = dist.get_backend() == "nccl"
    with ThreadPoolExecutor(1) as thread, pytest.MonkeyPatch.context() as patch:
        slow = partial(behind_a_sleep) if on_gpu else on_a_thread
        place = torch.cuda.Stream() if on_gpu else thread
        for name in NAMES:
            if hasattr(dist, name):
                patch.setattr(dist, name, partial(slow, name, getattr(dist, name), place))
        yield late
