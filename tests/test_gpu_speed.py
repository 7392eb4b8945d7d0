"""What makes the stages fast, proved on GPUs: overlap, the step in one pass, copy engines, compiled blocks.

pytest -m gpu tests/test_gpu_speed.py --record zero_mini/measured      # two CUDA devices

No speed is asserted here; benchmark.py measures that.
"""

import gc
import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_mini import timeline
from zero_mini.gpt import GPT, PRESETS, GPTConfig
from zero_mini.zeroify import zeroify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, has {torch.cuda.device_count()}"),
]


def trace_350M(stage: int) -> dict:
    """Two steps in a row, of this rank: what the first one sends at its end hides behind the second one's forward."""
    gc.collect()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(PRESETS["350M"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    zero = zeroify(model, optimizer, stage=stage, dtype=torch.bfloat16)
    tokens = torch.randint(50304, (16, 1025), device="cuda")

    def steps():
        for _ in range(2):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps()
    found = timeline.summary(timeline.record(steps))
    for work in getattr(zero, "arriving", {}).values():
        work.wait()
    return found | {"units": len(zero.units), "launched": len(zero.ledger)}


def test_collectives_hide_behind_matrix_products(nccl, record):
    runs = {stage: nccl.run(trace_350M, stage) for stage in range(4)}
    record("overlap", {"model": "350M", "batch": 16, "steps": 2, "stages": {s: ranks[0] for s, ranks in runs.items()}})
    for ranks in runs.values():
        for found in ranks:
            assert found["collectives"] == 2 * found["launched"]  # the profiler sees what the ledger says
            # What cannot: the root's reduction at the end of a backward and its gather at the start of a forward,
            # their neighbours, and, without a third step, the last gathers.
            hidden = found["overlapping_a_matmul"] / found["collectives"]
            assert hidden > (0.85 if found["launched"] != 2 * found["units"] else 0.7)
            assert found["exposed_ms"] < 0.05 * found["span_ms"]


def adamw_both_ways(clip: bool) -> list[float]:
    """Largest relative difference of masters and states between the kernel and torch's own update."""
    one_pass = importlib.import_module("zero_mini.one_pass")
    states, suits = [], one_pass.suits
    torch.use_deterministic_algorithms(True)
    try:
        for allowed in (True, False):
            one_pass.suits = suits if allowed else lambda zero: False
            torch.manual_seed(0)
            model = GPT(GPTConfig(L=2, d=256, heads=4, vocab=256, T=64))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
            zero = zeroify(model, optimizer, stage=2, dtype=torch.bfloat16)
            generator = torch.Generator("cuda").manual_seed(zero.rank)
            for _ in range(5):
                tokens = torch.randint(256, (8, 65), device="cuda", generator=generator)
                model(tokens[:, :-1], tokens[:, 1:]).backward()
                if clip:
                    zero.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            states.append(zero.state_dict())
    finally:
        torch.use_deterministic_algorithms(False)
        one_pass.suits = suits
    one, three = states
    pairs = [(one["model"][n], three["model"][n]) for n in one["model"]]
    pairs += [(one["optimizer"][n][k], three["optimizer"][n][k]) for n in one["optimizer"] for k in ("exp_avg", "step")]
    return [((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in pairs]


@pytest.mark.parametrize("clip", [False, True])
def test_the_kernel_updates_as_torchs_fused_adamw(nccl, clip):
    for differences in nccl.run(adamw_both_ways, clip):
        assert max(differences) < 2e-3  # after five steps in bf16: one rounding of a weight changes a gradient by 2^-9


class Dot(nn.Module):
    """Its gradient is its input, to the bit."""

    def __init__(self, numel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel, device="cuda"))

    def forward(self, x):
        return (self.weight * x).sum()


def one_update() -> float:
    """One step from the same gradients: nothing but fp32 rounding may differ."""
    one_pass = importlib.import_module("zero_mini.one_pass")
    torch.manual_seed(0)
    results, numel, suits = [], 100_003, one_pass.suits
    gradient = torch.randn(numel, device="cuda").bfloat16()
    for allowed in (True, False):
        one_pass.suits = suits if allowed else lambda zero: False
        torch.manual_seed(1)
        model = Dot(numel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        zero = zeroify(model, optimizer, stage=1, dtype=torch.bfloat16)
        for _ in range(3):
            model(gradient).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(zero.state_dict()["model"]["weight"])
    one_pass.suits = suits
    return (results[0] - results[1]).abs().max().item()


def test_from_equal_gradients_the_kernel_differs_by_rounding_only(nccl):
    assert max(nccl.run(one_update)) <= 2e-6  # weights of up to 5: their spacing is 4.8e-7


def wide_model(stage: int | None) -> list[torch.Tensor]:
    """Units that are worth copy engines, in fp32; None is torch DDP."""
    gc.collect()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(5600, 5600) for _ in range(3)]).cuda()
    wrapped = nn.parallel.DistributedDataParallel(model) if stage is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    zero = None if stage is None else zeroify(model, optimizer, stage=stage)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    for _ in range(3):
        wrapped(torch.randn(64, 5600, device="cuda", generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [value.sum(dim=-1).cpu() for value in model.state_dict().values()]
    assert zero is None or stage == 0 or zero.comm.reachable is not None
    return found


def test_gathers_by_copy_engines_bring_the_same_bits(nccl):
    expected = nccl.run(wide_model, None)
    for stage in range(4):
        for found, theirs in zip(nccl.run(wide_model, stage), expected):
            assert all(torch.equal(a, b) for a, b in zip(found, theirs))


def copies_of_a_gather() -> list[str]:
    gc.collect()
    model = nn.Sequential(*[nn.Linear(5600, 5600) for _ in range(3)]).cuda()
    zeroify(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    x = torch.randn(4, 5600, device="cuda")

    def forward():
        with torch.no_grad():
            model(x)

    forward()
    return [kernel.name for kernel in timeline.record(forward)]


def test_such_gathers_run_no_kernel(nccl):
    for names in nccl.run(copies_of_a_gather):
        assert not any("nccl" in name.lower() for name in names)
        assert any("PtoP" in name for name in names)


def compiled(stage: int) -> tuple[int, list[float], list[float]]:
    from torch._dynamo.utils import counters

    curves = []
    for compiling in (True, False):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = GPT(GPTConfig(L=6, d=256, heads=4, vocab=256, T=64))
        if compiling:
            for block in model.blocks:
                block.forward = torch.compile(block.forward)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        zeroify(model, optimizer, stage=stage, dtype=torch.bfloat16)
        tokens = torch.randint(256, (8, 65), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        losses = []
        for _ in range(4):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        curves.append(torch.stack(losses).tolist())
        if compiling:
            graphs = counters["stats"]["unique_graphs"]
    return graphs, *curves


@pytest.mark.parametrize("stage", [3])
def test_one_compiled_graph_serves_all_blocks(nccl, stage):
    for graphs, fast, eager in nccl.run(compiled, stage):
        assert graphs == 1
        assert fast == pytest.approx(eager, abs=0.03)
