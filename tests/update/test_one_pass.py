"""The step in one pass: the numbers of the three passes it replaces, and only where it may replace them."""

import importlib

import pytest
import torch
import torch.distributed as dist

from zero_mini.trainer.gpt import GPT, GPTConfig, param_groups
from zero_mini.zeroify import zeroify

one_pass = importlib.import_module("zero_mini.update.one_pass")
SMALL = GPTConfig(L=3, d=32, heads=1, vocab=32, T=8)


class Trained:
    """A small GPT in bf16 after some steps; `passes` says how often one pass was taken."""

    def __init__(self, stage, clip=None, touch=None, steps=4, allowed=True, zeroes=True, **options):
        self.passes, suits, step = 0, one_pass.can_fuse, one_pass.step

        def counted(zero):
            self.passes += 1
            step(zero)

        one_pass.can_fuse = suits if allowed else lambda zero: False
        one_pass.step = counted
        try:
            torch.manual_seed(0)
            model = GPT(SMALL)
            optimizer = torch.optim.AdamW(param_groups(model, 0.1), **{"lr": 1e-2, "fused": True, **options})
            zero = zeroify(model, optimizer, stage=stage, dtype=torch.bfloat16)
            generator = torch.Generator().manual_seed(dist.get_rank())
            self.seen = []
            for _ in range(steps):
                tokens = torch.randint(SMALL.vocab, (2, SMALL.T + 1), generator=generator)
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                self.seen.append(loss.item())
                for max_norm in clip or ():
                    self.seen.append(zero.clip_grad_norm_(max_norm).item())
                if touch:
                    touch(zero)
                optimizer.step()
                if zeroes:
                    optimizer.zero_grad()
            self.state = zero.state_dict()
        finally:
            one_pass.can_fuse, one_pass.step = suits, step


def same(one: dict, other: dict) -> bool:
    parts = ((one["model"], other["model"]), *((one["optimizer"][n], other["optimizer"][n]) for n in one["optimizer"]))
    return all(torch.equal(a[key], b[key]) for a, b in parts for key in a)


def one_and_three(stage, clip):
    one, three = Trained(stage, clip), Trained(stage, clip, allowed=False)
    return one.passes, three.passes, one.seen == three.seen and same(one.state, three.state)


@pytest.mark.parametrize("clip, passes", [(None, 4), ((0.5,), 4), ((0.9, 0.5), 0)])  # clipped twice: three passes
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_pass_is_three_passes_to_the_bit(ranks, stage, clip, passes):
    assert ranks(2).run(one_and_three, stage, clip) == [(passes, 0, True)] * 2


def another_backward(zero):
    tokens = torch.ones(2, SMALL.T, dtype=torch.long)
    zero.model(tokens, tokens).backward()


def clipped_between_two_backwards(stage):
    def train(allowed):
        return Trained(stage, clip=(0.1,), touch=another_backward, allowed=allowed).state

    return same(train(True), train(False))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_comes_after_clipping_is_not_clipped(ranks, stage):
    assert ranks(2).run(clipped_between_two_backwards, stage) == [True, True]


def without_zero_grad(stage):
    one, three, zeroed = (
        Trained(stage, clip=(0.5,), allowed=allowed, zeroes=zeroes)
        for allowed, zeroes in ((True, False), (False, False), (True, True))
    )
    assert one.passes == 4 and one.seen != zeroed.seen
    return one.seen == three.seen and same(one.state, three.state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_nobody_zeroes_stay_clipped(ranks, stage):
    assert ranks(2).run(without_zero_grad, stage) == [True, True]


def doubled_by_hand(zero):
    with zero.full_params(grads=True):
        for param in zero.model.parameters():
            param.grad.mul_(2)


def taken_to_hand(zero):
    zero.update.hand_means_to_optimizer()


CASES = {
    "an optimizer with amsgrad": {"amsgrad": True},
    "an optimizer that is not fused": {"fused": False},
    "gradients that were changed by hand": {"touch": doubled_by_hand},
    "gradients that were read": {"touch": taken_to_hand},
}


def passes_of(name):
    return Trained(2, **CASES[name]).passes


@pytest.mark.parametrize("name", CASES)
def test_three_passes_are_taken_for(ranks, name):
    assert ranks(2).run(passes_of, name) == [0, 0]


def peak_of_the_step(allowed):
    held = []
    suits = one_pass.can_fuse

    def look(zero, *args):
        held.append(sum(grad.numel() * grad.element_size() for u in zero.trainable for grad in [u.mean_grad]))

    one_pass.can_fuse = suits if allowed else lambda zero: False
    try:
        torch.manual_seed(0)
        model = GPT(SMALL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        zero = zeroify(model, optimizer, stage=2, dtype=torch.bfloat16)
        optimizer.register_step_post_hook(lambda *_: look(zero))
        tokens = torch.zeros(1, SMALL.T, dtype=torch.long)
        model(tokens, tokens).backward()
        optimizer.step()
        return held[0] / sum(unit.S for unit in zero.trainable)
    finally:
        one_pass.can_fuse = suits


def test_gradients_stay_in_16_bits(ranks):
    assert ranks(2).run(peak_of_the_step, True) == [2, 2]
    assert ranks(2).run(peak_of_the_step, False) == [4, 4]
