"""A GPU's profile: which kernels ran when, and how much communication overlapped compute.

    compute    ####matmul####  ##matmul##      ##adam##
    wire           ====gather====      ===reduce===
    exposed                      ......            <- a collective runs, and no kernel computes

A collective *overlaps compute* if any other kernel runs at some moment of it, and *a matmul* if a matrix product
does; *exposed* is the time in which only collectives run: what communication adds to a step. Times are microseconds.

Left out: the host's side; a trace's arrows between launch and kernel.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# The first kind with a word that occurs in a kernel's name is its kind.
KINDS = {
    "collective": ("nccl", "memcpy ptop"),  # a copy between GPUs is a gather by the copy engines
    "attention": ("flash", "fmha", "cudnn_generated"),
    "matmul": ("gemm", "nvjet", "cutlass", "splitk"),
    "optimizer": ("adam",),
    "copy": ("copy", "memcpy", "memset", "catarray", "fillfunctor"),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy on the GPU, in microseconds since the trace began."""

    name: str
    stream: int
    start: float
    end: float

    @property
    def kind(self) -> str:
        """ "collective", "attention", "matmul", "optimizer", "copy" or "other".

        >>> Kernel("ncclDevKernel_AllGather_RING_LL", 16, 0, 1).kind, Kernel("nvjet_tst_192x208", 7, 0, 1).kind
        ('collective', 'matmul')
        """
        lowered = self.name.lower()
        return next((kind for kind, marks in KINDS.items() if any(mark in lowered for mark in marks)), "other")


def record(function: Callable[[], None]) -> list[Kernel]:
    """Run `function` under torch's profiler; the kernels that it ran on this process's GPU, in order of start."""
    with profile(activities=[ProfilerActivity.CUDA]):  # the first start is slow, and not equally slow on all ranks
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return read(json.loads(path.read_text()))


def read(trace: dict) -> list[Kernel]:
    """The kernels of a Chrome trace as torch writes it."""
    kernels = [
        Kernel(event["name"], event["args"]["stream"], event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans in order; those that touch or overlap are joined.

    >>> union([(4, 5), (0, 2), (1, 3)])
    [(0, 3), (4, 5)]
    """
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Time covered by at least one of the spans.

    >>> length([(0, 2), (1, 3), (4, 5)])
    4
    """
    return sum(end - start for start, end in union(spans))


def overlapping(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> int:
    """How many of the spans overlap at least one of the others.

    >>> overlapping([(0, 2), (3, 4)], [(1, 3)])
    1
    """
    return sum(any(start < o_end and o_start < end for o_start, o_end in others) for start, end in spans)


def summary(kernels: list[Kernel]) -> dict:
    """Milliseconds by kind, idle and exposed time, and the collectives that overlap a matmul."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for kernel in kernels:
        by_kind.setdefault(kernel.kind, []).append((kernel.start, kernel.end))
    computing = [span for kind, spans in by_kind.items() if kind != "collective" for span in spans]
    collectives = by_kind.get("collective", [])
    everything = computing + collectives
    whole = max(end for _, end in everything) - min(start for start, _ in everything) if everything else 0.0
    return {
        "span_ms": whole / 1e3,
        "busy_ms": {kind: sum(end - start for start, end in spans) / 1e3 for kind, spans in sorted(by_kind.items())},
        "idle_ms": (whole - length(everything)) / 1e3,
        "exposed_ms": (length(everything) - length(computing)) / 1e3,
        "kernels": len(kernels),
        "collectives": len(collectives),
        "overlapping_compute": overlapping(collectives, computing),
        "overlapping_a_matmul": overlapping(collectives, by_kind.get("matmul", [])),
    }
