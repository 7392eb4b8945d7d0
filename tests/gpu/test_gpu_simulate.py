"""One process as rank r of N on a GPU: values have the CPU's bits, and the loss is true at every cut.

pytest -m gpu tests/gpu/test_gpu_simulate.py      # one CUDA device
"""

from functools import partial

import pytest
import torch

from zero_mini.simulate import values as module
from zero_mini.simulate.setup import Setup
from zero_mini.simulate.values import Values, fill_by_torch, fill_by_triton
from zero_mini.trainer.gpt import GPTConfig, init_rule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
KEY = -7046029254386353131
SHAPE = GPTConfig(L=4, d=512, heads=8, vocab=1024, T=128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start, mean", [(0, 0.0), (2**33 + 5, 0.0), (3, 0.75)])
def test_cpu_gpu_and_kernel_compute_the_same_bits(dtype, start, mean):
    numel = (1 << 20) + 77
    fills = [(fill_by_torch, "cpu"), (fill_by_torch, "cuda")]
    fills += [(fill_by_triton, "cuda")] if module.triton is not None else []
    results = []
    for fill, device in fills:
        out = torch.empty(numel, dtype=dtype, device=device)
        fill(out, KEY, start, mean, 0.02 / module.SIGMA)
        results.append(out.cpu())
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_parameter_on_the_gpu_has_the_cpus_values():
    ours = Values(partial(init_rule, L=2))
    pair = [torch.empty(33, 65, device=device) for device in ("cpu", "cuda")]
    for tensor in pair:
        ours.initialise("blocks.0.attn_out.weight", tensor)
    assert torch.equal(pair[0], pair[1].cpu())


def test_the_first_loss_depends_on_neither_stage_nor_cut_nor_ranks():
    losses = {}
    for stage in range(4):
        for N, split in ((1, None), (64, None), (64, 2**20)):
            about, result = Setup(SHAPE, stage, N, N // 2, "cuda", split=split).run()
            assert result["outcome"] == "ran"
            losses[stage, N, split] = result["losses"][0]
    assert len(set(losses.values())) == 1, losses


def test_a_smaller_gpu_is_out_of_memory_and_the_next_run_is_not():
    large = GPTConfig(L=8, d=2048, heads=16, vocab=1024, T=128)
    _, refused = Setup(large, 0, 64, 0, "cuda", device_bytes=2e9).run()
    assert refused["outcome"].startswith("out of memory in ")
    _, result = Setup(large, 3, 64, 0, "cuda", device_bytes=2e9).run()
    assert result["outcome"] == "ran"
    assert result["moments"]["step 2"]["peak_bytes"] < 2e9
