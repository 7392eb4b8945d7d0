"""A model that stage 3 fits into a GPU of 80 GB and data parallelism does not, as rank 0 of 8 on one larger GPU.

pytest -m gpu tests/gpu/test_gpu_fits.py --record zero_mini/measured      # one CUDA device of 120 GB or more

The other seven ranks are absent (simulate/absent.py): what they would send is computed, every allocation of rank 0 is
real.
"""

import gc
from dataclasses import asdict
from functools import partial

import pytest
import torch
from test_gpu_pictures import requested_bytes

from zero_mini.activations.checkpointing import checkpoint_blocks
from zero_mini.course.plots.moments import last_step
from zero_mini.memory.recorder import Recorder
from zero_mini.simulate.absent import Absent
from zero_mini.simulate.values import Values
from zero_mini.trainer.gpt import GPT, GPTConfig, init_rule
from zero_mini.zeroify import zeroify

WORLD_SIZE, CARD_BYTES = 8, 80e9
CONFIG = GPTConfig(L=30, d=4096, heads=32, vocab=50304, T=1024)
NEEDED = 120e9

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < NEEDED, reason="needs a GPU of 120 GB"
    ),
]


def story(stage: int) -> tuple[dict, int]:
    """The second step, and the parameters."""
    gc.collect()
    torch.cuda.empty_cache()
    before = requested_bytes()
    with Recorder(device="cuda") as recorder:
        with torch.device("meta"):
            model = GPT(CONFIG, loss_chunks=8)
        checkpoint_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        values = Values(partial(init_rule, L=CONFIG.L))
        comm = Absent(0, WORLD_SIZE, values)
        options = {"dtype": torch.bfloat16, "device": "cuda", "initialise": values.initialise}
        zero = zeroify(model, optimizer, stage, comm=comm, **options)
        recorder.follow(zero)
        tokens = torch.randint(CONFIG.vocab, (1, CONFIG.T + 1), device="cuda")
        for _ in range(2):
            recorder.mark("forward")
            loss = model(tokens[:, :-1], tokens[:, 1:])
            recorder.mark("backward")
            loss.backward()
            recorder.mark("step")
            optimizer.step()
            optimizer.zero_grad()
        recorder.mark("end")
        assert recorder.live_bytes() == pytest.approx(requested_bytes() - before, rel=0.01)
    return asdict(last_step(recorder).thinned()), sum(param.numel() for param in model.parameters())


def test_stage_3_fits_where_data_parallelism_does_not(record):
    stories = {}
    for stage in range(4):
        stories[stage], psi = story(stage)
    about = {"psi": psi, "precision": "bf16", "batch": 1, "world_size": WORLD_SIZE, "card_bytes": CARD_BYTES}
    record("fits", about | {"stages": stories}, cards=1)
    peaks = [max(map(sum, zip(*one["series"].values()))) for one in stories.values()]
    assert peaks[0] > CARD_BYTES > peaks[1] > peaks[2] > peaks[3]
