"""Finer units: large blocks are cut into their parts, and train as before."""

import pytest
import torch
from torch import nn

from zero_mini.activations.checkpointing import checkpoint_blocks
from zero_mini.binding.split import split_blocks
from zero_mini.memory.recorder import Recorder
from zero_mini.trainer.gpt import GPT, GPTConfig
from zero_mini.zeroify import zeroify

SHAPE = GPTConfig(L=3, d=64, heads=2, vocab=64, T=16)
STAGES = (0, 1, 2, 3)
BLOCK = 12 * 64**2 + 13 * 64


def names(model: nn.Module, units: list[list[nn.Module]]) -> list[list[str]]:
    of = {id(module): name for name, module in model.named_modules()}
    return [[of[id(module)] for module in unit] for unit in units]


def test_a_block_that_fits_stays_whole():
    model = GPT(SHAPE)
    assert names(model, split_blocks(model, BLOCK)) == [["blocks.0"], ["blocks.1"], ["blocks.2"]]
    assert names(model, split_blocks(model, 4 * BLOCK, 2 * BLOCK)) == [["blocks.0", "blocks.1"], ["blocks.2"]]


def test_a_larger_block_is_cut_into_layers_and_its_norms_go_to_the_root():
    model = GPT(GPTConfig(L=1, d=2048, heads=2, vocab=8, T=4), loss_chunks=1)
    units = names(model, split_blocks(model, 16 * 2**20))
    assert units == [["blocks.0.qkv"], ["blocks.0.attn_out"], ["blocks.0.fc"], ["blocks.0.mlp_out"]]


class Attention(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.inner = nn.MultiheadAttention(d, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Nested(nn.Module):
    """Parts in parts, a list, a shared layer, an own parameter."""

    def __init__(self, d: int = 32, shared: nn.Module | None = None):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d))
        self.attention = Attention(d)
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(2))
        self.shared = shared or nn.Linear(d, d)

    def forward(self, x):
        x = x + self.attention(x) * self.gain
        for expert in self.experts:
            x = x + expert(x)
        return torch.tanh(x + self.shared(x))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Nested(shared=shared) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_parts_in_lists_are_found_and_a_module_that_reads_others_weights_stays_whole():
    model = Deep()
    units = names(model, split_blocks(model, 2000))
    assert units[:3] == [["blocks.0.attention.inner"], ["blocks.0.experts.0"], ["blocks.0.experts.1"]]
    assert not any("shared" in unit[0] for unit in units)  # the root's


@pytest.mark.parametrize("most, least", [(0, 0), (10, 11), (float("nan"), 0)])
def test_numbers_that_cannot_be_met_are_refused(most, least):
    with pytest.raises(ValueError, match=f"{most}.*{least}"):
        split_blocks(GPT(SHAPE), most, least)


def train(make, stage, most_numel, checkpointed=False) -> tuple[list[float], dict]:
    torch.manual_seed(0)
    model = make()
    if checkpointed:
        checkpoint_blocks(model)
    units = None if most_numel is None else split_blocks(model, most_numel)
    zero = zeroify(model, torch.optim.AdamW(model.parameters(), 1e-2), stage, units=units)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + zero.rank)
        if isinstance(model, GPT):
            tokens = torch.randint(64, (2, 17), generator=generator)
            loss = model(tokens[:, :-1], tokens[:, 1:])
        else:
            loss = model(torch.randn(2, 4, 32, generator=generator))
        loss.backward()
        losses.append(loss.item())
        zero.optimizer.step()
        zero.optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("make", [lambda: GPT(SHAPE), Deep], ids=["gpt", "nested"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_finer_units_train_as_whole_blocks_to_the_bit(ranks, make, checkpointed):
    def work():
        return [[train(make, stage, most, checkpointed) for most in (None, 16_000, 2000)] for stage in STAGES]

    for at_stages in ranks(2).run(work):
        expected = at_stages[0][0]
        for trained in at_stages:
            for losses, state in trained:
                assert losses == expected[0]
                assert all(torch.equal(value, expected[1][name]) for name, value in state.items())


def peak_of_a_step(most_numel: int | None) -> int:
    torch.manual_seed(0)
    with Recorder() as recorder:
        model = GPT(SHAPE)
        checkpoint_blocks(model)
        units = None if most_numel is None else split_blocks(model, most_numel)
        zero = zeroify(model, torch.optim.AdamW(model.parameters(), fused=True), 3, units=units)
        tokens = torch.zeros(1, 9, dtype=torch.int64)
        for _ in range(2):
            recorder.peak_bytes = recorder.live_bytes()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            zero.optimizer.step()
            zero.optimizer.zero_grad()
    return recorder.peak_bytes


def test_finer_units_lower_the_peak_of_a_step_at_stage_3(ranks):
    for whole, split in ranks(4).run(lambda: [peak_of_a_step(most) for most in (None, 20_000)]):
        assert split < 0.75 * whole
