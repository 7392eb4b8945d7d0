"""The measurements of one rank of a fresh group, for one row of the benchmark.

    10 steps       their losses, which must be alike for all systems (scores.py); they are the warm-up too
    12 steps       timed one by one (a work may have fewer of both), with the allocator's peak over all of them
    1 step         under a profiler (memory/timeline.py), on a GPU
    3 + 5 steps    of one sequence of 64 tokens, on a GPU. There is almost nothing to multiply, so the time of
                   a step is the host's, or that of the wire and the update, which depend on parameters only

On a GPU a step's time is that between two CUDA events, and the host never waits in between. On a CPU ranks meet at a
barrier before each step, outside the time.

Left out: the CPU under the profiler. Tracing it takes so long that kernels would wait for the host.
"""

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from zero_mini.comparison.systems import build
from zero_mini.comparison.trainee import Trainee
from zero_mini.comparison.works import Work, batches
from zero_mini.course.ranks import own_device
from zero_mini.memory import timeline
from zero_mini.trainer.report import host_peak_bytes, sent_bytes

SHORT_WARM_UP, SHORT_TOKENS = 3, 64
NEARLY_FREE, PATIENCE_S = 0.9, 30.0


def measure(system: str, work: Work, build: Callable[[str, Work, torch.device], Trainee] = build) -> dict:
    """This rank's raw numbers for one row. Collective."""
    device = own_device()
    if device.type == "cuda":
        wait_for_memory()
    data = batches(work, dist.get_rank(), dist.get_world_size(), device)
    trainee = build(system, work, device)
    losses = torch.stack([trainee.step(data[index % 2]) for index in range(work.gate_steps)]).float().tolist()
    gc.collect()
    if device.type == "cuda":
        row = time_on_gpu(trainee, data, work.timed_steps)
    else:
        row = {"step_ms": time_on_cpu(trainee.step, data, work.timed_steps)}
    row |= {"losses": losses, "state_bytes": trainee.state_bytes(), "host_peak_bytes": host_peak_bytes()}
    if trainee.zero is not None:
        row["wire_bytes"] = sent_bytes(trainee.zero.ledger, dist.get_world_size())
    if device.type == "cuda":
        row["timeline"] = timeline.summary(timeline.record(lambda: trainee.step(data[0])))
        if work.short_steps:
            tokens = data[0][:1, : SHORT_TOKENS + 1].contiguous()
            row["short_step_ms"] = time_short_step(trainee.step, tokens, work.short_steps)
    return row


def wait_for_memory() -> None:
    """Wait until the GPU is nearly free: the driver frees the last group's memory only after its processes end."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        if free_bytes > NEARLY_FREE * total_bytes:
            return
        time.sleep(0.2)


def time_on_gpu(trainee: Trainee, data: list[Tensor], steps: int) -> dict:
    """Each step's time, by CUDA events, and memory."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for index, event in enumerate(events[1:]):
        trainee.step(data[index % 2])
        event.record()
    torch.cuda.synchronize()
    return {
        "step_ms": [start.elapsed_time(end) for start, end in zip(events, events[1:])],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "held_bytes": torch.cuda.memory_allocated(),  # between steps, DDP's buckets too
    }


def time_on_cpu(step: Callable[[Tensor], Tensor], data: list[Tensor], steps: int) -> list[float]:
    times_ms = []
    for index in range(steps):
        dist.barrier()
        started = time.perf_counter()
        step(data[index % 2])
        times_ms.append(1e3 * (time.perf_counter() - started))
    return times_ms


def time_short_step(step: Callable[[Tensor], Tensor], tokens: Tensor, steps: int) -> float:
    """Milliseconds a step; the host waits before the first and after the last only."""
    for _ in range(SHORT_WARM_UP):
        step(tokens)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step(tokens)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / steps


# --- what the machine can do ------------------------------------------------------------------


def machine() -> dict:
    """Card, number of them, and versions."""
    device = own_device()
    facts = {"cards": dist.get_world_size(), "torch": torch.__version__}
    if device.type == "cpu":
        return {"card": "CPU", **facts}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"card": torch.cuda.get_device_name(device), **facts, "cuda": torch.version.cuda, "nccl": nccl}


def rates() -> dict | None:
    """This rank's rates of matrix products, copies and all-reduces, each alone; None on a CPU. Collective."""
    device = own_device()
    if device.type == "cpu":
        return None
    n = 8192
    a, b, c = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(3))
    matmul_s = seconds(lambda: torch.mm(a, b, out=c))
    source, target = (torch.empty(2**28, device=device) for _ in range(2))  # 1 GiB each
    copy_s = seconds(lambda: target.copy_(source))
    buffer = torch.zeros(2**27, device=device, dtype=torch.bfloat16)  # 256 MiB
    N = dist.get_world_size()
    all_reduce_s = seconds(lambda: dist.all_reduce(buffer))
    return {
        "matmul_flops": 2 * n**3 / matmul_s,
        "copy_bytes": 2 * source.nbytes / copy_s,  # read + written
        "all_reduce_bytes": 2 * (N - 1) / N * buffer.nbytes / all_reduce_s,  # over a rank's wire
    }


def seconds(function: Callable[[], object], warm_up: int = 10, repeats: int = 30) -> float:
    """Mean time of a call on the GPU, over `repeats` calls launched without waiting."""
    for _ in range(warm_up):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def machine_and_rates() -> tuple[dict, dict | None]:
    """Machine and rates, measured by one group."""
    if own_device().type == "cuda":
        wait_for_memory()
    return machine(), rates()
