"""A throttled link on GPUs: a kernel on a stream of its own stands for it, and the host does not wait.

pytest -m gpu tests/gpu/test_gpu_throttled.py      # one CUDA device beside absent peers, or two
"""

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from zero_mini import zeroify
from zero_mini.comm import Comm
from zero_mini.comparison.absent_peers import Silent
from zero_mini.wire.throttled import ThrottledComm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LINK = {"latency_s": 1e-3, "bytes_per_s": 1e8}


class SlowSilent(ThrottledComm, Silent):
    """The link of rank 0 of N alone."""


def step_s(stage: int, make_comm: Callable[[], Comm]) -> tuple[float, float, float]:
    """Of the last of three steps: seconds on the GPU; of the formula; until the host had launched all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).cuda()
    comm = make_comm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroify(model, optimizer, stage, comm=comm, device=torch.cuda.current_device())
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model(torch.ones(2, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        zero.wait()
        launched = time.perf_counter() - begun
        torch.cuda.synchronize()
        ended = time.perf_counter() - begun
    return ended, sum(comm.link.seconds(call, zero.world_size) for call in zero.ledger), launched


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("peers", ["absent", "present"])
def test_a_step_on_gpus_takes_what_the_formula_says(request, peers, stage):
    if peers == "absent":
        runs = [step_s(stage, partial(SlowSilent, 2, **LINK))]
    elif torch.cuda.device_count() > 1:
        runs = request.getfixturevalue("nccl").run(step_s, stage, partial(ThrottledComm, **LINK))
    else:
        pytest.skip("needs two GPUs")
    for seconds, expected, launched in runs:
        # At stages 1 and 2 the gathers that end the step are waited for in the next one.
        assert expected * (0.45 if stage in (1, 2) else 0.95) < seconds < 1.15 * expected + 0.02
        assert launched < seconds / 2
