"""What activations cost on real GPUs: bytes against time, all combinations, and memory that is free but in pieces.

pytest -m gpu tests/gpu/test_gpu_activations.py --record zero_mini/measured      # one CUDA device; better two
"""

import gc
from statistics import median

import pytest
import torch
from torch import nn

from zero_mini.activations.checkpointing import checkpoint_blocks
from zero_mini.course.ranks import Ranks
from zero_mini.memory.formulas import walk
from zero_mini.memory.fragmentation import Arena, fragmentation
from zero_mini.memory.timeline import length
from zero_mini.memory.timeline import record as kernels_of
from zero_mini.trainer.gpt import GPT, PRESETS
from zero_mini.zeroify import zeroify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SETTINGS = {  # name -> arguments of checkpoint_blocks
    "all kept": None,
    "every 2nd block": {"every": 2},
    "every block": {"every": 1},
    "every block, on the host": {"every": 1, "keep": "host"},
}


def apply(model: GPT, setting: str, chunks: int) -> None:
    for block in model.blocks:
        vars(block).pop("forward", None)
    if SETTINGS[setting]:
        checkpoint_blocks(model, **SETTINGS[setting])
    model.loss_chunks = chunks


def compute_ms(step, steps: int = 3) -> float:
    """Milliseconds of a step in which a kernel runs that is no collective; in the others the GPU waits."""
    kernels = kernels_of(lambda: [step() for _ in range(steps)])
    return length((k.start, k.end) for k in kernels if k.kind != "collective") / 1e3 / steps


def measure(stage: int, combinations: list[tuple[str, int]], batch: int, steps: int = 10) -> list[dict]:
    """1.5B in bf16: for each (setting, loss chunks) the bytes and times of a step, on this rank."""
    gc.collect()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(PRESETS["1.5B"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    zero = zeroify(model, optimizer, stage=stage, dtype=torch.bfloat16)
    tokens = torch.randint(50304, (batch, 1025), device="cuda")

    def step() -> int:
        """Bytes that forward leaves."""
        before = torch.cuda.memory_allocated()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        kept = torch.cuda.memory_allocated() - before
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return kept

    rows = []
    for setting, chunks in combinations:
        apply(model, setting, chunks)
        losses = []
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        kept = step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        ends[0].record()
        for end in ends[1:]:  # no wait in between: the host runs ahead, as in training
            step()
            end.record()
        torch.cuda.synchronize()
        times_ms = [start.elapsed_time(end) for start, end in zip(ends, ends[1:])]
        about = {"stage": stage, "setting": setting, "loss_chunks": chunks, "loss": losses[2].item()}
        times = {"step_ms": median(times_ms), "compute_ms": compute_ms(step)}
        rows.append(about | {"kept_bytes": kept, "peak_bytes": peak, **times})
    states_bytes = sum(walk(zero, "cuda").values())
    for work in getattr(zero, "arriving", {}).values():
        work.wait()
    return [row | {"states_bytes": states_bytes} for row in rows]


def test_activations_of_1_5B_on_one_gpu_are_what_the_law_says(record):
    batch, config = 8, PRESETS["1.5B"]
    with Ranks(1, backend="nccl", timeout_s=240) as alone:
        rows = alone.run(measure, 0, [(setting, 1) for setting in SETTINGS], batch)[0]
    record("activations", {"model": "1.5B", "batch": batch, "rows": rows}, cards=1)
    kept = {row["setting"]: row["kept_bytes"] for row in rows}
    x_bytes = 2 * batch * config.T * config.d  # a block's input
    logits_bytes = 4 * batch * config.T * config.vocab  # fp32 log-probabilities
    assert kept["all kept"] - logits_bytes == pytest.approx(32 * batch * config.T * config.d * config.L, rel=0.1)
    assert kept["every block"] - logits_bytes == pytest.approx(config.L * x_bytes, rel=0.1)
    assert kept["every block, on the host"] - logits_bytes < 4 * x_bytes
    assert kept["every block"] < kept["every 2nd block"] < kept["all kept"]
    assert len({row["loss"] for row in rows}) == len(rows)  # each trained on from the one before


def test_time_and_memory_of_every_combination(record):
    combinations = [(setting, chunks) for setting in SETTINGS if setting != "every 2nd block" for chunks in (1, 8)]
    N = min(2, torch.cuda.device_count())
    stages = range(4) if N > 1 else [3]  # alone, all stages keep the same
    with Ranks(N, backend="nccl", timeout_s=240) as ranks:
        rows = [row for stage in stages for row in ranks.run(measure, stage, combinations, 8)[0]]
    record("combinations", {"model": "1.5B", "batch": 8, "rows": rows}, cards=N)
    found = {(row["stage"], row["setting"], row["loss_chunks"]): row for row in rows}
    for stage in stages:
        for chunks in (1, 8):
            plain, device, host = (found[stage, setting, chunks] for setting, n in combinations if n == chunks)
            assert host["kept_bytes"] < device["kept_bytes"] < plain["kept_bytes"]
            # With the logits in parts a step's peak can lie where no activation is left.
            assert host["peak_bytes"] <= device["peak_bytes"] < plain["peak_bytes"]
        for setting, _ in combinations:
            assert found[stage, setting, 8]["peak_bytes"] < found[stage, setting, 1]["peak_bytes"]


class Greedy(nn.Module):
    """Its output is made when a temporary of nearly twice its size has just been freed: it takes half of that hole."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        wide = nn.functional.pad(x, (0, int(0.96 * len(x))))
        mean = wide.mean()
        del wide
        return torch.sin(x * self.weight + mean)


def train_greedy(L: int, keep: str, cap_bytes: int | None) -> dict:
    """One step of L such layers on vectors of 51 MiB; with a cap on what the process may reserve."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total if cap_bytes else 1.0)
    torch.cuda.reset_peak_memory_stats()
    numel = 51 * 2**18
    model = nn.Sequential(*(Greedy() for _ in range(L))).cuda()
    try:
        arena = Arena((L + 1) * 4 * numel, "cuda") if keep == "arena" else None
        checkpoint_blocks(model, keep=arena or "device")
        x = torch.linspace(-1, 1, numel, device="cuda", requires_grad=True)
        model(x * 1).square().mean().backward()
        bits = [p.grad.item() for p in model.parameters()]
    except torch.OutOfMemoryError:
        bits = None
    found = fragmentation()
    return {
        "keep": keep,
        "trained": bits is not None,
        "grads": bits,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "free_bytes_at_the_end": found.free_bytes,
        "largest_free_bytes_at_the_end": found.largest_free_bytes,
    }


def test_an_arena_trains_what_fragmentation_does_not(record):
    L = 16
    with Ranks(1, backend="nccl", timeout_s=240) as alone:
        free = {keep: alone.run(train_greedy, L, keep, None)[0] for keep in ("device", "arena")}
        cap = (free["device"]["peak_reserved_bytes"] + free["arena"]["peak_reserved_bytes"]) // 2
        capped = {keep: alone.run(train_greedy, L, keep, cap)[0] for keep in ("device", "arena")}
    rows = {"uncapped": free, "capped": capped}
    record("fragmentation", {"layers": L, "cap_bytes": cap, "rows": rows}, cards=1)
    assert free["arena"]["peak_reserved_bytes"] < 0.9 * free["device"]["peak_reserved_bytes"]
    assert capped["arena"]["trained"] and not capped["device"]["trained"]
    assert free["device"]["grads"] == free["arena"]["grads"] == capped["arena"]["grads"]


def test_expandable_segments_leave_hardly_anything_free(record, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before the process starts
    with Ranks(1, backend="nccl", timeout_s=240) as alone:
        row = alone.run(train_greedy, 16, "device", None)[0]
    record("fragmentation_expandable", {"layers": 16, "row": row}, cards=1)
    assert row["trained"] and row["peak_reserved_bytes"] < 1.05 * row["peak_allocated_bytes"]
