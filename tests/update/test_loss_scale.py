"""fp16: the scale's decisions are GradScaler's, one overflow anywhere skips the step everywhere, and the rest is exact.

The oracle is torch's: DistributedDataParallel of an fp16 copy, GradScaler over an fp32 master.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Block, Case, Stack
from parity import OPTIMIZERS, CastDDP, Loop, build, copies_of, exactly, loss_of, place
from says import naming, tells
from torch import nn

from zero_mini.update.loss_scale import LossScaler
from zero_mini.zeroify import zeroify

HALF = Loop(compute_dtype=torch.float16)


# --- the scale alone ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.sampled_from([2.0, 3.0]), st.integers(-3, 127))
def test_the_scale_goes_where_grad_scaler_s_goes(overflows, interval, growth, exponent):
    options = dict(growth_factor=growth, backoff_factor=0.25, growth_interval=interval)
    ours = LossScaler(scale=2.0**exponent, most_in_a_row=99, **options)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**exponent, **options)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs.scale(torch.zeros(1))
    for overflow in overflows:
        parameter.grad = torch.full((1,), math.inf if overflow else 0.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        state = theirs.state_dict()
        if not 1e-37 < state["scale"] < 1e38:  # theirs rounds to fp32 there
            return
        assert ours.scale == pytest.approx(state["scale"], rel=1e-6)
        assert ours.good_in_a_row == state["_growth_tracker"]
    assert ours.skipped == sum(overflows)


def test_too_many_overflows_in_a_row_are_an_error_that_says_what_to_do():
    scaler = LossScaler(scale=8.0, most_in_a_row=2)
    for overflow in (True, True, False, True, True):
        scaler.update(overflow)
    with pytest.raises(RuntimeError, match=naming(3, 0.25, "learning rate")):
        scaler.update(True)


@pytest.mark.parametrize(
    "option, value",
    [("scale", 0.0), ("scale", math.nan), ("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_interval", 0)],
)
def test_a_setting_that_leads_nowhere_is_refused(option, value):
    with pytest.raises(ValueError, match=naming(option, value)):
        LossScaler(**{option: value})


def test_its_state_is_numbers_and_comes_back():
    scaler = LossScaler(scale=64.0, growth_interval=5)
    for overflow in (False, True, False):
        scaler.update(overflow)
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other == scaler and (other.scale, other.good_in_a_row, other.skipped) == (32.0, 1, 1)


# --- in training ----------------------------------------------------------------------------------


class Spike(nn.Module):
    """Passes on what it gets. The gradient of its last weight alone is `size`, so one rank's slice alone has it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096))
        self.size = 0.0

    def forward(self, h):
        return h + self.weight[-1] * self.size


def stack() -> Stack:
    return Stack(Block(), Spike(), Block())


CASE = Case(stack)
SPIKES = {(2, 1), (3, 0), (6, 0)}  # (step, rank) whose last weight's gradient overflows


@dataclass
class Trained:
    decisions: list[tuple[bool, float]] = field(default_factory=list)  # (stepped, the scale after)
    norms: list[torch.Tensor] = field(default_factory=list)
    params: list[dict] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def adamw_in_one_pass(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


CHOICES = OPTIMIZERS | {"fused AdamW": adamw_in_one_pass}


def prepare(optimizer: str, seed: int = 0):
    model = build(CASE, HALF, seed)
    made = CHOICES[optimizer](model)
    return model, made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.9**step)


def set_spike(spike: Spike, step: int, micro: int = 0) -> None:
    rank = dist.get_rank() % 2
    spike.size = 1e4 if (step, rank) in SPIKES and micro == 0 else 0.0


def ours(optimizer: str, stage: int, clip: float | None, micro_batches: int = 1, steps: int = 8) -> Trained:
    model, made, schedule = prepare(optimizer)
    scaler = LossScaler(scale=2.0**10, growth_interval=2)
    zero, run = zeroify(model, made, stage, dtype=torch.float16, scaler=scaler), Trained()
    for step in range(steps):
        for micro in range(micro_batches):
            set_spike(model.blocks[1], step, micro)
            zero.scale(loss_of(CASE, HALF, model, dist.get_rank(), step, micro) / micro_batches).backward()
        if clip:
            run.norms.append(zero.clip_grad_norm_(clip).clone())
        made.step()
        if zero.stepped:
            schedule.step()
        made.zero_grad()
        run.decisions.append((zero.stepped, scaler.scale))
        run.params.append(copies_of(model.state_dict()))
        run.rates.append(schedule.get_last_lr()[0])
    return run


def theirs(optimizer: str, clip: float | None, norms: list[torch.Tensor], steps: int = 8) -> Trained:
    """By torch. Clips by the norms that are given, which must be its own to 1e-6."""
    model, made, schedule = prepare(optimizer)
    side = CastDDP(CASE, model, made, HALF)
    scaler, run = torch.amp.GradScaler(place().type, init_scale=2.0**10, growth_interval=2), Trained()
    for step in range(steps):
        set_spike(side.module.blocks[1], step)
        scaler.scale(loss_of(CASE, HALF, side.model, dist.get_rank(), step, 0)).backward()
        side.before_step()
        scaler.unscale_(made)
        if clip:
            params = list(model.parameters())
            before = [param.grad.clone() for param in params]
            own = torch.nn.utils.clip_grad_norm_(params, clip)
            assert torch.allclose(own, norms[step], rtol=1e-6, equal_nan=True) or not own.isfinite()
            for param, grad in zip(params, before):
                param.grad.copy_(grad.mul_(torch.clamp(clip / (norms[step] + 1e-6), max=1.0)))
        scale = scaler.get_scale()
        scaler.step(made)
        scaler.update()
        stepped = scaler.get_scale() >= scale
        if stepped:
            schedule.step()
        made.zero_grad()
        run.decisions.append((stepped, scaler.get_scale()))
        run.params.append(copies_of(model.state_dict()))
        run.rates.append(schedule.get_last_lr()[0])
    return run


def nearly(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch's fused update rounds the last few elements of a tensor otherwise than the rest of it."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def differences(label: str, one: Trained, other: Trained, equal=torch.equal) -> list[str]:
    found = [f"{label}: decisions {one.decisions} and {other.decisions}"] if one.decisions != other.decisions else []
    found += [f"{label}: learning rates differ"] if one.rates != other.rates else []
    for step, (a, b) in enumerate(zip(one.params, other.params, strict=True)):
        found += [f"{label}: step {step}, {name}" for name in a if not equal(a[name], b[name])]
    return found


@pytest.mark.parametrize("optimizer, clip", [("SGD", None), ("AdamW", 0.05), ("fused AdamW", None)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_is_torch_ddp_with_a_grad_scaler_to_the_bit(ranks, world_size, optimizer, clip):
    def compare() -> list[str]:
        with exactly():
            runs = {stage: ours(optimizer, stage, clip) for stage in range(4)}
            reference = theirs(optimizer, clip, runs[0].norms)
        stepped = [took for took, _ in reference.decisions]
        spikes = {step for step, rank in SPIKES if rank < world_size}
        assert [not took for took in stepped] == [step in spikes for step in range(8)]
        equal = nearly if optimizer == "fused AdamW" else torch.equal
        return [d for stage, run in runs.items() for d in differences(f"stage {stage}", run, reference, equal)]

    for found in ranks(world_size).run(compare):
        assert not found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, has {torch.cuda.device_count()}")
@pytest.mark.parametrize("optimizer, clip", [("SGD", None), ("AdamW", 0.05), ("fused AdamW", 0.05)])
def test_on_gpus_too_fp16_is_torch_ddp_with_a_grad_scaler(nccl, optimizer, clip):
    def compare() -> list[str]:
        with exactly():
            runs = {stage: ours(optimizer, stage, clip) for stage in range(4)}
            reference = theirs(optimizer, clip, runs[0].norms)
        equal = nearly if optimizer == "fused AdamW" else torch.equal
        return [d for stage, run in runs.items() for d in differences(f"stage {stage}", run, reference, equal)]

    for found in nccl.run(compare):
        assert not found


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused AdamW"])
def test_all_stages_decide_and_train_alike_on_four_ranks_with_micro_batches_and_clipping(ranks, optimizer):
    def compare() -> list[str]:
        with exactly():
            runs = [ours(optimizer, stage, 0.05, micro_batches=2, steps=5) for stage in range(4)]
        assert [took for took, _ in runs[0].decisions] == [True, True, False, False, True]
        equal = nearly if optimizer == "fused AdamW" else torch.equal
        return [d for other in (1, 2, 3) for d in differences(f"stage {other}", runs[0], runs[other], equal)]

    for found in ranks(4).run(compare):
        assert not found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_that_one_rank_alone_can_see_skips_the_step_on_all(ranks, stage):
    def decide() -> tuple[list[bool], int]:
        run = ours("SGD", stage, None, steps=3)
        return [took for took, _ in run.decisions]

    assert ranks(2).run(decide) == [[True, True, False]] * 2


def test_gradients_that_fp16_would_lose_survive(ranks):
    """1e-8 is zero in fp16; times the scale it is not."""

    def gradient(dtype: torch.dtype) -> float:
        torch.manual_seed(0)
        model = nn.Linear(1, 1, bias=False)
        zero = zeroify(model, torch.optim.SGD(model.parameters(), lr=1.0), dtype=dtype)
        zero.scale(model(torch.full((1, 1), 1e-4)).sum() * 1e-4).backward()
        with zero.full_params(grads=True):
            return model.weight.grad.item()

    for value in ranks(2).run(gradient, torch.float16):
        assert value == pytest.approx(1e-8, rel=1e-2)


def small(dtype=torch.float16, **options):
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroify(model, optimizer, dtype=dtype, **options)
    return zero, optimizer, lambda: loss_of(Case(Stack), HALF, model, dist.get_rank(), 0, 0)


def test_a_loss_that_was_not_scaled_is_refused_at_the_step(ranks):
    def step() -> str:
        _, optimizer, loss = small()
        loss().backward()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        return str(caught.value)

    for message in ranks(2).run(step):
        assert tells(message, "zero.scale(loss).backward()")


def test_a_backward_after_unscaling_is_refused(ranks):
    def scale_again() -> str:
        zero, optimizer, loss = small()
        zero.scale(loss()).backward()
        zero.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError) as caught:
            zero.scale(loss())
        optimizer.zero_grad()
        zero.scale(loss()).backward()  # a new beginning
        optimizer.step()
        assert zero.stepped
        return str(caught.value)

    for message in ranks(2).run(scale_again):
        assert tells(message, "zero_grad()")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_other_precisions_need_no_scale_and_the_loop_stays_the_same(ranks, dtype):
    def train() -> bool:
        zero, optimizer, loss = small(dtype)
        value = loss()
        same = zero.scale(value) is value
        zero.scale(value).backward()
        optimizer.step()
        return same and zero.stepped and zero.scaler is None and zero.state_dict()["scaler"] is None

    assert ranks(2).run(train) == [True, True]


def test_the_scaler_is_saved_and_loaded_with_the_rest(ranks):
    def save_and_load() -> tuple[LossScaler, LossScaler]:
        zero, optimizer, loss = small(scaler=LossScaler(scale=2.0**20, growth_interval=7))
        for _ in range(2):
            zero.scale(loss() * 1e30).backward()
            optimizer.step()
            optimizer.zero_grad()
        other, _, _ = small(stage=3)
        other.load_state_dict(zero.state_dict())
        return zero.scaler, other.scaler

    for saved, loaded in ranks(2).run(save_and_load):
        assert saved == loaded and (saved.scale, saved.skipped) == (2.0**18, 2)
