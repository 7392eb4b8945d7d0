"""A throttled link on GPUs: a kernel on a stream of its own stands for it, and the host does not wait."""

import time

import pytest
import torch
from torch import nn

from zero_mini import zeroify
from zero_mini.course.ranks import own_device
from zero_mini.wire.throttled import ThrottledComm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, has {torch.cuda.device_count()}"),
]


def step_s(stage: int, bytes_per_s: float) -> tuple[float, float, float]:
    """Of the last of three steps: seconds on the GPU; of the formula; until the host had launched all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).to(own_device())
    comm = ThrottledComm(latency_s=1e-3, bytes_per_s=bytes_per_s)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroify(model, optimizer, stage, comm=comm)
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model(torch.ones(2, 512, device=own_device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        zero.wait()
        launched = time.perf_counter() - begun
        torch.cuda.synchronize()
        ended = time.perf_counter() - begun
    return ended, sum(comm.link.seconds(call, zero.world_size) for call in zero.ledger), launched


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_on_gpus_takes_what_the_formula_says(nccl, stage):
    for seconds, expected, launched in nccl.run(step_s, stage, 1e8):
        # At stages 1 and 2 the gathers that end the step are waited for in the next one.
        assert expected * (0.45 if stage in (1, 2) else 0.95) < seconds < 1.15 * expected + 0.02
        assert launched < seconds / 2
