"""torch.compile: blocks are compiled once for all of them, block or model as a whole too, and train as without."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from zero_mini.trainer.gpt import GPT, GPTConfig
from zero_mini.zeroify import zeroify


def train(stage, backend, what="block.forward"):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = call = GPT(GPTConfig(L=5, d=32, heads=1, vocab=32, T=8))
    if backend and what == "block.forward":
        for block in model.blocks:  # not the module: hooks, and with them collectives, stay outside
            block.forward = torch.compile(block.forward, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zeroify(model, optimizer, stage=stage)
    if backend and what == "block":
        for block in model.blocks:
            block.compile(backend=backend)
    if backend and what == "model":
        call = torch.compile(model, backend=backend)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        tokens = torch.randint(32, (2, 9), generator=generator)
        loss = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled_and_not(stage):
    counter = CompileCounterWithBackend("aot_eager")  # compiles nothing to machine code, but traces as others do
    return train(stage, counter), train(stage, None), counter.frame_count


def compiled_otherwise(stage):
    return train(stage, "aot_eager", "block"), train(stage, "aot_eager", "model"), train(stage, None)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_blocks_are_compiled_once_and_train_alike(ranks, stage):
    for compiled, eager, graphs in ranks(2).run(compiled_and_not, stage):
        assert graphs == 1
        assert compiled == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_block_or_a_model_that_is_compiled_with_its_hooks_trains_alike(ranks, stage):
    for block, model, eager in ranks(2).run(compiled_otherwise, stage):
        assert block == pytest.approx(eager, rel=1e-5) and model == pytest.approx(eager, rel=1e-5)
