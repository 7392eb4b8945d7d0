"""Every stage trains every model of the zoo as torch DDP does, to the bit wherever bits are defined.

The comparison itself, and what it compares at three ranks and more, is `models.parity`.
"""

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from models import (
    INTEGERS,
    OPTIMIZERS,
    ZOO,
    Alone,
    Case,
    CastDDP,
    Integers,
    Loop,
    Magnitudes,
    Run,
    SometimesUnused,
    Stack,
    Stage,
    Step,
    Tied,
    TorchDDP,
    ZerosForNone,
    adamw,
    build,
    differences,
    differences_beyond,
    empties_full_of,
    exactly,
    loss_of,
    parity,
    some_tokens,
    train,
)

WORLD_SIZES = (1, 2, 3, 4)
EVERY_STAGE = (0, 1, 2, 3)


def agree(results: list[list[str]]) -> bool:
    """No rank found a difference; if one did, the first few are the message."""
    found = [f"rank {rank}: {difference}" for rank, result in enumerate(results) for difference in result]
    assert not found, "\n".join([f"{len(found)} differences", *found[:8]])
    return True


def parities(name: str, loops: list[Loop]) -> list[str]:
    return [f"{loop}: {difference}" for loop in loops for difference in parity(name, loop)]


# --- against torch DDP ----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_torch_ddp_equals_itself(ranks, world_size):
    def twice(name: str, loop: Loop) -> list[str]:
        with exactly():
            return differences(name, train(ZOO[name], loop, TorchDDP), train(ZOO[name], loop, TorchDDP))

    for name, optimizer in itertools.product(["plain blocks", "tied embedding and head", "buffers"], ["SGD", "AdamW"]):
        assert agree(ranks(world_size).run(twice, name, Loop(optimizer)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", ZOO)
def test_every_stage_trains_as_torch_ddp_does(ranks, name, optimizer, world_size):
    assert agree(ranks(world_size).run(parity, name, Loop(optimizer)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "name",
    [
        "plain blocks",
        "tied embedding and head",
        "frozen",
        "unused on some ranks",
        "odd sizes",
        "0-dim and 0-element",
        "unit called twice",
        "order changes",
        "buffers",
        "checkpoint",
        "checkpoint of two blocks, re-entrant",
    ],
)
def test_micro_batches_add_up_as_in_torch_ddp_with_and_without_no_sync(ranks, name, world_size):
    loops = [Loop("SGD", steps=2, micro_batches=3, no_sync=True), Loop("AdamW", steps=2, micro_batches=2)]
    assert agree(ranks(world_size).run(parities, name, loops))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "name", ["plain blocks", "tied embedding and head", "frozen", "odd sizes", "0-dim and 0-element", "unused on some ranks"]
)
def test_clipping_is_torchs_and_its_norm_one_float_everywhere(ranks, name, world_size):
    loops = [
        Loop("SGD", clip=(0.05, 2.0)),
        Loop("AdamW", clip=(0.02, math.inf)),
        Loop("SGD", clip=(100.0, 2.0), steps=1),  # far above the norm: gradients stay as they are
        Loop("SGD", clip=(0.05, 2.0), steps=1, micro_batches=2, no_sync=True),
    ]
    assert agree(ranks(world_size).run(parities, name, loops))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "name", ["plain blocks", "no root", "tied embedding and head", "frozen", "buffers", "order changes", "checkpoint, re-entrant"]
)
def test_forwards_without_backward_between_the_steps_change_nothing(ranks, name, world_size):
    loops = [Loop("SGD", evaluate=True), Loop("AdamW", evaluate=True, steps=2, micro_batches=2, no_sync=True)]
    assert agree(ranks(world_size).run(parities, name, loops))


@pytest.mark.parametrize("name", ZOO)
def test_looking_at_the_numbers_after_every_step_does_not_change_them(ranks, name):
    def compare(loops: list[Loop]) -> list[str]:
        with exactly():
            found = []
            for stage in ZOO[name].stages:
                watched, unwatched = (train(ZOO[name], loop, Stage, stage=stage) for loop in loops)
                found += differences(f"stage {stage}", watched, unwatched)
            return found

    assert agree(ranks(2).run(compare, [Loop("AdamW", watch=True), Loop("AdamW", watch=False)]))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_what_no_rank_used_has_a_zero_gradient_where_torch_ddp_has_none(ranks, optimizer, world_size):
    """So momentum and weight decay go on there. It is all that differs: to the bit, DDP does so with zeros."""

    def compare(loop: Loop) -> tuple[list[str], list[str]]:
        with exactly():
            theirs, ours = train(case, loop, TorchDDP), train(case, loop, Stage, stage=2)
            nones = [name for name, grad in theirs.steps[1].grads.items() if grad is None]
            return nones, [name for name in nones if ours.steps[1].grads[name].count_nonzero() == 0]

    case = ZOO.setdefault("sometimes unused", Case(SometimesUnused, unused=True))
    try:
        nones, zeros = ranks(world_size).run(compare, Loop(optimizer))[0]
        layer = ["blocks.1.maybe.weight", "blocks.1.maybe.bias"]
        block = [f"blocks.2.{part}.{kind}" for part in ("norm", "up", "down") for kind in ("weight", "bias")]
        assert nones == zeros == layer + block
    finally:
        del ZOO["sometimes unused"]


def test_three_ranks_and_more_add_in_an_order_that_depends_on_the_buffer_so_ddp_does_not_equal_itself():
    pass
