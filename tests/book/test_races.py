"""Late collectives change no bit, and what would read too early is seen: with the waits, order is all that counts."""

import contextlib

import pytest
import torch
from delays import Delay, delayed
from models import ZOO
from parity import Loop, Run, Stage, differences, exactly, train
from test_mutants import (
    does_not_wait_for_its_slot,
    does_not_wait_for_means,
    does_not_wait_for_new_values,
    patched,
)

from zero_mini.course.ranks import Ranks
from zero_mini.ddp import DDP
from zero_mini.script import Script
from zero_mini.zero1 import Zero1
from zero_mini.zero2 import Zero2
from zero_mini.zero3 import Zero3

STAGES = (0, 1, 2, 3)
DELAYS = {
    "every collective": Delay(),
    "reductions": Delay(kinds=("all_reduce", "reduce_scatter")),
    "gathers": Delay(kinds=("all_gather",)),
    "on rank 1": Delay(ranks=(1,)),
}
CLIPPED = Loop("AdamW", clip=(0.05, 2.0), watch=False)
ACCUMULATING = Loop("SGD", micro_batches=2, no_sync=True, watch=False)
MIXED = Loop("AdamW", compute_dtype=torch.bfloat16, evaluate=True, watch=False)
TRAINED = [
    ("plain blocks", CLIPPED),
    ("unused on some ranks", ACCUMULATING),
    ("tied embedding and head", MIXED),
    ("order changes", CLIPPED),
    ("checkpoint of two", ACCUMULATING),
]


@pytest.fixture(
    params=[pytest.param(DELAYS["every collective"], marks=pytest.mark.check), *list(DELAYS.values())[1:]], ids=DELAYS
)
def delay(request) -> Delay:
    """Which collectives are late."""
    return request.param


def late_and_prompt(delay: Delay, stage: int, model: str, loop: Loop, patches=()) -> tuple[list[str], int]:
    """(the differences that a slow wire makes, how many of its collectives were late); that wire alone is patched."""
    with exactly():
        prompt: Run = train(ZOO[model], loop, Stage, stage=stage)
        with contextlib.ExitStack() as stack:
            late = stack.enter_context(delayed(delay))
            for patch in patches:
                stack.enter_context(patched(*patch))
            slow = train(ZOO[model], loop, Stage, stage=stage)
    return differences("a slow wire", prompt, slow), len(late)


def all_late_and_prompt(delay: Delay, stage: int, trained: list[tuple[str, Loop]]) -> tuple[list[str], int]:
    results = [late_and_prompt(delay, stage, model, loop) for model, loop in trained]
    return sum((found for found, _ in results), []), sum(late for _, late in results)


def check_late(pool: Ranks, delay: Delay, stage: int) -> None:
    if stage == 0 and delay == DELAYS["gathers"]:
        return  # it has none
    trained = TRAINED if delay == DELAYS["every collective"] else TRAINED[:2]
    results = pool.run(all_late_and_prompt, delay, stage, trained)
    assert not any(found for found, _ in results), results[0][0][:8]
    assert sum(late for _, late in results) > 20


@pytest.mark.parametrize("stage", STAGES)
def test_late_collectives_change_no_bit(ranks, delay, stage):
    check_late(ranks(2), delay, stage)


def changes_what_is_sent(original):
    def reduce(self, unit):
        original(self, unit)
        unit.local_grad.add_(1.0)

    return reduce


# mutant -> (patch, stages)
MUTANTS = {
    "the means are not waited for": ((Script, "finish_reduction", does_not_wait_for_means), STAGES),
    "the new values are not waited for": ((Zero1, "before_forward", does_not_wait_for_new_values), (1, 2)),
    "the slot is not waited for": ((Zero3, "gather", does_not_wait_for_its_slot), (3,)),
    "what stage 0 is sending changes": ((DDP, "reduce", changes_what_is_sent), (0,)),
    "what stage 1 is sending changes": ((Zero1, "reduce", changes_what_is_sent), (1,)),
    "what stages 2 and 3 are sending changes": ((Zero2, "reduce", changes_what_is_sent), (2, 3)),
}


@pytest.mark.check
@pytest.mark.parametrize("name, stage", [(name, stage) for name, (_, stages) in MUTANTS.items() for stage in stages])
def test_a_slow_wire_shows_that(ranks, name, stage):
    for found, _ in ranks(2).run(late_and_prompt, Delay(), stage, "plain blocks", CLIPPED, [MUTANTS[name][0]]):
        assert found


@pytest.mark.gpu
@pytest.mark.parametrize("stage", STAGES)
def test_late_collectives_change_no_bit_on_gpus(nccl, delay, stage):
    check_late(nccl, delay, stage)


@pytest.mark.gpu
@pytest.mark.parametrize("name, stage", [(name, stage) for name, (_, stages) in MUTANTS.items() for stage in stages])
def test_a_slow_wire_of_gpus_shows_that(nccl, name, stage):
    results = nccl.run(late_and_prompt, Delay(), stage, "plain blocks", CLIPPED, [MUTANTS[name][0]])
    assert any(found for found, _ in results)
