"""A Comm whose collectives take as long as a slower link would: one with a given latency and bandwidth.

    zero = zeroify(model, optimizer, stage=3, comm=ThrottledComm(latency_s=20e-6, bytes_per_s=1e9))

A collective of `bytes` over a rank's wire, in a ring of N ranks, occupies the link for

    steps x latency_s + bytes / bytes_per_s      steps: 2(N-1) of an all-reduce, N-1 of a half and of a broadcast

and it begins when it is launched, or when the collective before it on this link has ended:

    time -->   launch 1   launch 2                        wait 2
    link       [-------- 1 --------][-------- 2 --------]
    rank       computes   computes        computes       [sleeps] goes on

So what a rank computes between launch and wait hides the link, as on a real one. The collective itself is the real one:
the numbers are those of `Comm`. On a GPU a kernel that only counts cycles stands for the link, on a stream of its own.

To throttle another Comm, put this one before it: `class SlowNode(ThrottledComm, HybridComm)` has the arguments of both.

Left out: a rank that comes late (the link of each rank counts from its own launch), words between hosts
(`comm.host`), and several ranks that share one link.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from zero_mini.comm import Comm, Launched
from zero_mini.wire.ledger import Call

CYCLES = 20_000_000  # of the kernel that measures a GPU's clock: some 10 ms


@dataclass
class SlowLink:
    """One link of a rank: a collective at a time, in order of launch.

    latency_s    seconds for each step of a ring, however small the chunk is (alpha).
    bytes_per_s  what it carries in a second (beta).
    clock        returns the time in seconds; sleep(seconds) returns when they have passed. Tests have their own.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    free_at: float = field(default=-math.inf, init=False)  # when the last collective will have ended

    def __post_init__(self):
        if not 0 <= self.latency_s < math.inf or not self.bytes_per_s > 0:
            raise ValueError(
                f"latency_s is {self.latency_s} and bytes_per_s {self.bytes_per_s}: "
                "a link has a finite latency_s >= 0 and bytes_per_s > 0"
            )

    def seconds(self, call: Call, world_size: int) -> float:
        """How long it carries a collective of so many ranks.

        >>> SlowLink(latency_s=1.0, bytes_per_s=8.0).seconds(Call("all_reduce", "blocks.0", 8, itemsize=4), 4)
        12.0
        """
        return ring_steps(call.kind, world_size) * self.latency_s + sent_bytes(call, world_size) / self.bytes_per_s

    def occupy(self, seconds: float) -> float:
        """A collective is launched now. Returns when the link will have carried it."""
        self.free_at = max(self.free_at, self.clock()) + seconds
        return self.free_at

    def sleep_until(self, end: float) -> None:
        """Return at `end`, or at once if it has passed."""
        if (left := end - self.clock()) > 0:
            self.sleep(left)


class ThrottledComm(Comm):
    """The collectives of `Comm`, or of the class after it, over a link that is as slow as the arguments say."""

    def __init__(
        self,
        *args,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        **options,
    ):
        self.link = SlowLink(latency_s, bytes_per_s, clock, sleep)
        self.stream: torch.cuda.Stream | None = None  # the link, if buffers are on a GPU
        super().__init__(*args, **options)

    def launch(self, kind: str, unit: str, buffer: torch.Tensor, start: Callable) -> "OnLink | OnGpuLink":
        seconds = self.link.seconds(Call(kind, unit, buffer.numel(), buffer.element_size()), self.world_size)
        if buffer.is_cuda:
            return self.launch_on_gpu(kind, unit, buffer, start, seconds)
        end = self.link.occupy(seconds)
        return OnLink(super().launch(kind, unit, buffer, start), self.link, end)

    def launch_on_gpu(self, kind: str, unit: str, buffer: torch.Tensor, start: Callable, seconds: float) -> "OnGpuLink":
        """The collective begins when the GPU has slept so long on the stream of the link, after all enqueued so far."""
        self.stream = self.stream or torch.cuda.Stream(buffer.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(int(seconds * cycles_per_s(buffer.device)))
            launched = super().launch(kind, unit, buffer, start)
            return OnGpuLink(launched, self.stream.record_event())


@dataclass(frozen=True)
class OnLink:
    """A collective that ends when it is done, and not before the link has carried it."""

    launched: Launched
    link: SlowLink
    end: float

    def wait(self) -> None:
        self.launched.wait()
        self.link.sleep_until(self.end)


@dataclass(frozen=True)
class OnGpuLink:
    """The same on a GPU, where waiting is up to the current stream."""

    launched: Launched
    carried: torch.cuda.Event

    def wait(self) -> None:
        self.launched.wait()
        torch.cuda.current_stream().wait_event(self.carried)


def ring_steps(kind: str, world_size: int) -> int:
    """Steps of a collective in a ring, one after the other.

    >>> ring_steps("all_reduce", 1024), ring_steps("all_gather", 1024)
    (2046, 1023)
    """
    halves = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}[kind]
    return halves * (world_size - 1)


def sent_bytes(call: Call, world_size: int) -> float:
    """Bytes that one rank sends.

    >>> sent_bytes(Call("all_gather", "blocks.0", numel=8, itemsize=2), world_size=4)
    12.0
    """
    return call.wire_numel(world_size) * call.itemsize


@functools.cache
def cycles_per_s(device: torch.device) -> float:
    """Of the GPU's clock, measured by a kernel that counts cycles."""
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CYCLES)  # the clock rises from idle
        begin.record()
        torch.cuda._sleep(CYCLES)
        end.record()
        end.synchronize()
        return CYCLES / (1e-3 * begin.elapsed_time(end))
