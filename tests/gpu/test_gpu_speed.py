"""What makes the stages fast, proved on GPUs: overlap, the step in one pass, copy engines, compiled blocks.

pytest -m gpu tests/gpu/test_gpu_speed.py --record zero_mini/measured      # two CUDA devices

No speed is asserted here; comparison/benchmark.py measures that.
"""

import gc
import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_mini.memory import timeline
from zero_mini.trainer.gpt import GPT, PRESETS, GPTConfig
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
    tokens = torch.randint(50304, (32, 1025), device="cuda")

    def steps():
        zero.comm.host.gather(None)  # start together: time in which a rank waits for another is not the wire's
        for _ in range(2):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps()
    found = timeline.summary(timeline.record(steps))
    for work in getattr(zero, "arriving", {}).values():
        work.wait()
    return found | {"units": len(zero.units), "launched": len(zero.ledger)}


def test_collectives_hide_behind_compute(nccl, record):
    runs = {stage: nccl.run(trace_350M, stage) for stage in range(4)}
    record("overlap", {"model": "350M", "batch": 32, "steps": 2, "stages": runs}, cards=2)
    idle = {stage: max(found["idle_ms"] / found["span_ms"] for found in ranks) for stage, ranks in runs.items()}
    for stage, ranks in runs.items():
        assert min(found["exposed_ms"] / found["span_ms"] for found in ranks) < 0.05  # of the rank that waits less
        for found in ranks:
            assert found["collectives"] == 2 * found["launched"]  # the profiler sees what the ledger says
            # What cannot: in each step the reductions of the first block and the root, and the root's gather.
            # Stages 1 and 2 gather at the end of a step: of that, the second step has no forward to hide it behind.
            U = found["units"]
            hidden = {0: 2 * (U - 2), 1: 3 * U - 5, 2: 3 * U - 5, 3: 2 * (found["launched"] - 3)}[stage]
            if idle[stage] < 0.08:
                assert found["overlapping_compute"] > 0.9 * hidden
                assert found["overlapping_a_matmul"] > 0.6 * hidden  # the others meet attention, norms, GELU
    if max(idle.values()) >= 0.08:
        waited = ", ".join(f"stage {stage} {share:.0%}" for stage, share in idle.items())
        pytest.skip(f"nothing to hide behind while a GPU waits for its host, profiler included: {waited}")


class Dot(nn.Module):
    """Its gradient is its input, to the bit."""

    def __init__(self, numel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel, device="cuda"))

    def forward(self, x):
        return (self.weight * x).sum()


def kernel_and_torch(clip: bool) -> tuple[float, float]:
    """Largest differences of weights, and relative ones of second moments, after three steps of equal gradients."""
    one_pass = importlib.import_module("zero_mini.update.one_pass")
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
            if clip:
                zero.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append(zero.state_dict())
    one_pass.suits = suits
    pairs = [(result["model"]["weight"], result["optimizer"]["weight"]["exp_avg_sq"]) for result in results]
    (weight, moment), (their_weight, their_moment) = pairs
    return (weight - their_weight).abs().max().item(), (moment / their_moment - 1).nan_to_num().abs().max().item()


@pytest.mark.parametrize("clip", [False, True])
def test_the_kernel_updates_as_torchs_fused_adamw_up_to_rounding(nccl, clip):
    for weights, moments in nccl.run(kernel_and_torch, clip):
        assert weights <= 2e-6  # of up to 5, where fp32 numbers are 4.8e-7 apart
        assert moments <= 2e-5  # torch takes 1 - beta2 of a beta2 in fp32, which is 1.3e-5 of it off


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
