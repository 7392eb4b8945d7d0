"""What the lessons show of real GPUs: recorded here, and checked against what the GPU itself says.

pytest -m gpu tests/gpu/test_gpu_pictures.py --record zero_mini/measured      # two CUDA devices
"""

import gc
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from zero_mini.comparison.measure import seconds
from zero_mini.course.plots.gantt import exposed, from_kernels, joined
from zero_mini.course.plots.moments import last_step
from zero_mini.memory import timeline
from zero_mini.memory.recorder import Recorder
from zero_mini.trainer.gpt import GPT, PRESETS
from zero_mini.zeroify import zeroify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, has {torch.cuda.device_count()}"),
]


def trainee(preset: str, stage: int, batch: int):
    """Model, optimizer, handle and tokens (batch, 1025), in bf16."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(PRESETS[preset])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    zero = zeroify(model, optimizer, stage=stage, dtype=torch.bfloat16)
    return model, optimizer, zero, torch.randint(50304, (batch, 1025), device="cuda")


def requested_bytes() -> int:
    """What the program asked the allocator for and has not given back, less cuBLAS's workspaces."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def record_two_steps(stage: int) -> tuple[dict, list[tuple[int, int]]]:
    """The second step's story, and at each mark the bytes that recorder and allocator have seen since the start."""
    gc.collect()
    before, seen = requested_bytes(), []
    with Recorder(device="cuda") as recorder:
        model, optimizer, zero, tokens = trainee("124M", stage, batch=2)
        recorder.follow(zero)

        def mark(label: str) -> None:
            recorder.mark(label)
            seen.append((recorder.live_bytes(), requested_bytes() - before))

        for _ in range(2):
            mark("forward")
            loss = model(tokens[:, :-1], tokens[:, 1:])
            mark("backward")
            loss.backward()
            mark("step")
            optimizer.step()
            optimizer.zero_grad()
        mark("end")
    for work in getattr(zero, "arriving", {}).values():
        work.wait()
    return asdict(last_step(recorder).thinned()), seen


def test_the_recorder_and_the_allocator_count_the_same_bytes(nccl, record):
    stories = {}
    for stage in range(4):
        stories[stage], seen = nccl.run(record_two_steps, stage)[0]
        for recorded_bytes, allocator_bytes in seen:
            assert recorded_bytes == pytest.approx(allocator_bytes, rel=0.01)
    record("moments", {"model": "124M", "precision": "bf16", "batch": 2, "stages": stories}, cards=2)
    peaks = [max(map(sum, zip(*story["series"].values()))) for story in stories.values()]
    assert peaks[3] < peaks[2] <= peaks[1] < peaks[0]  # 2 and 1: at the start of backward neither has gradients


def kernels_of_two_steps(preset: str, batch: int, stage: int) -> list[timeline.Kernel]:
    gc.collect()
    model, optimizer, zero, tokens = trainee(preset, stage, batch)

    def steps():
        zero.comm.host.gather(None)
        for _ in range(2):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps()
    found = timeline.record(steps)
    for work in getattr(zero, "arriving", {}).values():
        work.wait()
    return found


@pytest.mark.parametrize(
    "stage, preset, batch, part, ms",
    [(0, "350M", 32, "backward", 24.0), (1, "350M", 32, "update", 24.0), (3, "1.5B", 8, "backward", 12.0)],
)
def test_a_window_of_a_real_step_shows_compute_and_wire_at_once(nccl, record, stage, preset, batch, part, ms):
    ranks = nccl.run(kernels_of_two_steps, preset, batch, stage)
    begin, end = min(map(starts, ranks)), max(map(ends, ranks))
    middle = begin + 0.8 * (end - begin)  # in the second step's backward
    if part == "update":  # the first step's: gradients before it, the next forward after it
        updates = [kernel.start for kernel in ranks[0] if kernel.kind == "optimizer"]
        middle = min(updates, key=lambda start: abs(start - (begin + end) / 2))
    low, high = middle - ms / 2 * 1e3, middle + ms / 2 * 1e3
    spans = []
    for rank, kernels in enumerate(ranks):
        shown = [kernel for kernel in kernels if kernel.start < high and kernel.end > low]
        spans += joined(from_kernels(shown, rank, low))
    assert {(span.rank, span.lane) for span in spans} == {(r, lane) for r in (0, 1) for lane in ("compute", "wire")}
    exposed_ms = [sum(b - a for a, b in exposed([s for s in spans if s.rank == rank])) for rank in (0, 1)]
    assert min(exposed_ms) < 0.3 * ms
    rows = [[span.rank, span.lane, span.label, round(span.start, 3), round(span.end, 3)] for span in spans]
    about = {"model": preset, "batch": batch, "stage": stage, "part": part, "ms": ms}
    record(f"gantt_{stage}", about | {"spans": rows}, cards=2)


def starts(kernels: list[timeline.Kernel]) -> float:
    return min(kernel.start for kernel in kernels)


def ends(kernels: list[timeline.Kernel]) -> float:
    return max(kernel.end for kernel in kernels)


def time_us(kind: str, nbytes: int) -> float:
    """Microseconds of one collective alone, over a whole buffer of so many bytes in bf16."""
    whole = torch.zeros(nbytes // 2, device="cuda", dtype=torch.bfloat16)
    shard = torch.zeros(len(whole) // dist.get_world_size(), device="cuda", dtype=torch.bfloat16)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
    }
    return seconds(calls[kind], warm_up=5, repeats=20) * 1e6


def times_us(sizes: list[int]) -> dict[str, dict[int, float]]:
    kinds = ("all_reduce", "reduce_scatter", "all_gather")
    return {kind: {nbytes: time_us(kind, nbytes) for nbytes in sizes} for kind in kinds}


def test_a_small_collective_costs_a_call_and_a_large_one_the_wire(nccl, record):
    found = nccl.run(times_us, [4**k for k in range(5, 16)])[0]
    record("collectives", {"dtype": "bf16", "us": found}, cards=2)
    for points in found.values():
        sizes = sorted(points)
        assert points[sizes[1]] < 4 * points[sizes[0]]  # four times the bytes, nearly the same time
        assert points[sizes[-1]] > 2.5 * points[sizes[-2]]  # here nearly four times
    halves = [found["reduce_scatter"][sizes[-1]], found["all_gather"][sizes[-1]]]
    assert sum(halves) == pytest.approx(found["all_reduce"][sizes[-1]], rel=0.3)  # all-reduce is these two
