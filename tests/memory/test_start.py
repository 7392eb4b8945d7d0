"""The start: while a model becomes a rank's part of it, no unit is there twice."""

import functools

import pytest
import torch
from torch import nn

from zero_mini.binding.split import split_blocks
from zero_mini.memory.recorder import Recorder
from zero_mini.simulate.absent import Absent
from zero_mini.simulate.values import Values
from zero_mini.trainer.gpt import GPT, GPTConfig, init_rule
from zero_mini.zeroify import zeroify

SHAPE = GPTConfig(L=3, d=64, heads=2, vocab=64, T=16)
STAGES = (0, 1, 2, 3)


def peak_of_the_start(stage, dtype, on_meta, most_numel=None):
    """Peak of zeroify(); bytes before it and after it; bytes of the largest unit's fp32 values."""
    values = Values(functools.partial(init_rule, L=SHAPE.L))
    with Recorder() as recorder:
        with torch.device("meta" if on_meta else "cpu"):
            model = GPT(SHAPE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        before = recorder.live_bytes()
        units = split_blocks(model, most_numel) if most_numel else None
        options = {"dtype": dtype, "device": "cpu", "units": units, "initialise": values.initialise}
        zero = zeroify(model, optimizer, stage, comm=Absent(0, 8, values), **options)
        after, peak = recorder.live_bytes(), recorder.peak_bytes
    return before, after, peak, 4 * max(unit.P for unit in zero.units)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_meta_starts_with_its_states_and_one_unit_at_most(stage, dtype):
    before, after, peak, unit = peak_of_the_start(stage, dtype, on_meta=True)
    assert before == 0
    assert peak <= after + 1.03 * unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_with_values_starts_with_itself_and_one_unit_more(stage, dtype):
    before, after, peak, unit = peak_of_the_start(stage, dtype, on_meta=False)
    slots = 3 * unit // 4 * dtype.itemsize if stage == 3 else 0  # two blocks, and the root, which is smaller
    assert peak <= max(before + slots, after) + 1.25 * unit
    assert before > 2 * unit


def test_finer_units_lower_the_peak_of_the_start():
    _, _, whole, _ = peak_of_the_start(3, torch.bfloat16, on_meta=True)
    _, _, split, _ = peak_of_the_start(3, torch.bfloat16, on_meta=True, most_numel=20_000)
    assert split < 0.5 * whole


# --- models on the meta device ------------------------------------------------------------------------


def started(build, stage, initialise) -> nn.Module:
    with torch.device("meta"):
        model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    zeroify(model, optimizer, stage, comm=Absent(0, 2), device="cpu", initialise=initialise)
    return model


def other_memory(name: str, tensor: torch.Tensor) -> None:
    tensor.data = torch.full_like(tensor, 7.0)


def same_memory(name: str, tensor: torch.Tensor) -> None:
    tensor.fill_(7.0)


@pytest.mark.parametrize("initialise", [same_memory, other_memory])
@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 4), lambda: nn.LSTM(4, 4, 2)], ids=["Linear", "LSTM"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_meta_has_the_values_of_initialise_however_it_sets_them(stage, build, initialise):
    model = started(build, stage, initialise)
    assert all((value == 7).all() for value in model.state_dict().values())
    model(torch.ones(2, 3, 4))


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_on_meta_keeps_attributes_and_hooks(stage):
    seen, handles = [], []

    def build():
        model = nn.Linear(4, 4)
        model.weight.is_matrix = True
        handles.append(model.weight.register_hook(lambda grad: seen.append("gradient")))
        handles.append(model.bias.register_post_accumulate_grad_hook(lambda param: seen.append("bias")))
        return model

    model = started(build, stage, same_memory)
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.is_matrix and sorted(seen) == ["bias", "gradient"]
    [handle.remove() for handle in handles]
    model(torch.ones(1, 4)).sum().backward()
    assert len(seen) == 2
