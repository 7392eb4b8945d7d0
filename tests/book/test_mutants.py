"""Tests of the parity tests: each mutant is a mistake that is easily made, and parity must fail under it.

A mutant is a small patch of the package inside the ranks, for the time of one comparison with torch DDP.
It has to be seen in the numbers: a mutant that merely crashes shows nothing about the comparison.
"""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from models import ZOO
from parity import Loop, parity

from zero_mini.binding import hooks
from zero_mini.binding.out_of_turn import backward_is_running
from zero_mini.binding.parameter import plainly, set_grad
from zero_mini.comm import Comm
from zero_mini.ddp import DDP
from zero_mini.flat import Unit
from zero_mini.script import Script
from zero_mini.update.clip import slice_norm
from zero_mini.update.on_device import OnDevice
from zero_mini.zero1 import Zero1
from zero_mini.zero2 import Zero2
from zero_mini.zero3 import Zero3

STAGES = (0, 1, 2, 3)
PLAIN = Loop("SGD")
CLIPPED = Loop("SGD", clip=(0.05, 2.0))


class Done:
    """A work that nobody waits for."""

    def wait(self) -> None:
        """Nothing to do."""


class Late:
    """A work that begins when it is waited for: the slowest wire there is."""

    def __init__(self, launch: Callable[[], dist.Work]):
        self.launch = launch

    def wait(self) -> None:
        if self.launch is not None:
            self.launch().wait()
            self.launch = None


@contextlib.contextmanager
def patched(owner: object, name: str, mutate: Callable) -> Iterator[None]:
    """`owner.name` is what `mutate` makes of it, until the end."""
    original = vars(owner)[name]
    setattr(owner, name, mutate(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


# --- the mutants: original -> mutant --------------------------------------------------------------


def sums_for_means(original):
    return lambda self, buffer: dist.ReduceOp.SUM


def begins_one_element_late(original):
    def own(self, buffer, rank=None):
        first = min((self.rank if rank is None else rank) * self.S + 1, self.P - self.S)
        return buffer[first : first + self.S]

    return own


def leaves_gaps_as_they_are(original):
    def fill(self, buffer, tensors):
        gaps, self.gaps = self.gaps, []
        filled = original(self, buffer, tensors)
        self.gaps = gaps
        return filled

    return fill


def leaves_missing_as_they_are(original):
    def fill(self, buffer, tensors):
        views = self.views(buffer)
        return original(self, buffer, [view if tensor is None else tensor for view, tensor in zip(views, tensors)])

    return fill


def not_on_the_last_rank(original):
    def hand_means_to_optimizer(self):
        original(self)
        if self.zero.rank == self.zero.world_size - 1:
            with plainly():
                for unit in self.zero.trainable:
                    for _, piece in unit.pieces:
                        set_grad(piece, None)

    return hand_means_to_optimizer


def all_slices_but_the_last(original):
    return lambda self, norm_type: torch.stack([slice_norm(self, r, norm_type) for r in range(self.world_size - 1)])


def nothing(original):
    return lambda self, *args, **kwargs: None


def nothing_is_sent(original):
    return lambda self, buffer, unit: Done()


def the_other_group(original):
    return lambda self, *args: [(1 - group, view) for group, view in original(self, *args)]


def own_norm_only(original):
    return lambda self, norm_type: slice_norm(self, self.rank, norm_type).view(1)


def every_name_counts(original):
    def make_units(model, *args):
        model.named_parameters = partial(model.named_parameters, remove_duplicate=False)
        made = original(model, *args)
        del model.named_parameters
        return made

    return make_units


def draws_a_number_in_a_recompute(original):
    def enter_forward(zero, *args):
        if backward_is_running():
            torch.rand(1)
        return original(zero, *args)

    return enter_forward


def as_stage_2_does(original):
    return getattr(Zero2, original.__name__)


def late(original):
    return lambda self, *args: Late(partial(original, self, *args))


def does_not_wait_for_means(original):
    def finish_reduction(self, unit):
        if unit.reducing is not None:
            unit.reducing = unit.reducing._replace(work=Done())
        original(self, unit)

    return finish_reduction


def does_not_wait_for_new_values(original):
    def before_forward(self, unit):
        if unit in self.arriving:
            self.arriving[unit] = Done()
        original(self, unit)

    return before_forward


def does_not_wait_for_its_slot(original):
    def gather(self, unit):
        if unit.place.slot.holder is not unit:
            self.launch_gather(unit)
        if unit.place.slot.arriving is not None:
            unit.place.slot.arriving = Done()
        original(self, unit)

    return gather


@dataclass(frozen=True)
class Mutant:
    patches: tuple[tuple[object, str, Callable], ...]
    stages: tuple[int, ...] = STAGES
    model: str = "plain blocks"
    loop: Loop = PLAIN
    shows: str = ""  # in what, at least


LATE_WIRE = tuple((Comm, name, late) for name in ("all_reduce", "reduce_scatter", "all_gather"))
MAKE_UNITS = (importlib.import_module("zero_mini.zeroify"), "make_units", every_name_counts)

MUTANTS = {
    "gradients are summed, not averaged": Mutant(((Comm, "_prepare_mean", sums_for_means),), shows="grad of"),
    "a shard begins one element late": Mutant(((Unit, "slice_of", begins_one_element_late),), loop=CLIPPED),
    "padding is not zeroed": Mutant(((Unit, "fill", leaves_gaps_as_they_are),), loop=CLIPPED, shows="norms"),
    "what nobody used here is not zeroed": Mutant(
        ((Unit, "fill", leaves_missing_as_they_are),), model="unused on some ranks", shows="grad of"
    ),
    "the last shard is not updated": Mutant(
        ((OnDevice, "hand_means_to_optimizer", not_on_the_last_rank),), shows="param of"
    ),
    "the last slice is left out of the norm": Mutant(
        ((DDP, "partial_norms", all_slices_but_the_last),), (0,), loop=CLIPPED, shows="norms"
    ),
    "gradients of the last step stay": Mutant(((Script, "zero_grad", nothing),), shows="grad of"),
    "new values are not sent": Mutant(((Zero1, "publish", nothing),), (1, 2), shows="loss"),
    # Unwatched: reading whole gradients before the step would empty the slots, and so hide the mistake.
    "slots keep the values of the last step": Mutant(
        ((Zero3, "publish", nothing),), (3,), loop=Loop("SGD", watch=False), shows="loss"
    ),
    "ranks start from their own values": Mutant(
        ((Comm, "broadcast", nothing_is_sent),), model="ranks start differently", shows="at the start"
    ),
    "weight decay goes to the other group": Mutant(
        ((Unit, "by_group", the_other_group),), loop=Loop("AdamW"), shows="param of"
    ),
    "each rank clips by its own norm": Mutant(
        ((Zero1, "partial_norms", own_norm_only),), (1, 2, 3), loop=CLIPPED, shows="ranks have norms"
    ),
    "a tied weight counts twice in the norm": Mutant(
        (MAKE_UNITS,), model="tied embedding and head", loop=CLIPPED, shows="norms"
    ),
    # torch's checkpoint restores the random state, then runs the block: its hooks must not draw from it.
    "a recompute meets other random numbers": Mutant(
        ((hooks, "enter_forward", draws_a_number_in_a_recompute),), model="checkpoint", shows="grad of"
    ),
    "the second gather of stage 3 is left out": Mutant(
        tuple((Zero3, name, as_stage_2_does) for name in ("before_backward", "after_backward")), (3,), shows="grad of"
    ),
    "the means are not waited for": Mutant(
        (*LATE_WIRE, (Script, "finish_reduction", does_not_wait_for_means)), shows="grad of"
    ),
    "the new values are not waited for": Mutant(
        (*LATE_WIRE, (Zero1, "before_forward", does_not_wait_for_new_values)), (1, 2), shows="loss"
    ),
    "the slot is not waited for": Mutant(
        (*LATE_WIRE, (Zero3, "gather", does_not_wait_for_its_slot)), (3,), shows="loss"
    ),
}


def parity_under(mutant: Mutant, stages: tuple[int, ...]) -> list[str]:
    with contextlib.ExitStack() as stack:
        for patch in mutant.patches:
            stack.enter_context(patched(*patch))
        return parity(ZOO[mutant.model], mutant.loop, stages)


QUICK = ("gradients are summed, not averaged", "the last shard is not updated", "the slot is not waited for")


@pytest.mark.parametrize(
    "name, stage",
    [
        pytest.param(name, stage, marks=[pytest.mark.check] if name in QUICK else [])
        for name, mutant in MUTANTS.items()
        for stage in mutant.stages
    ],
)
def test_parity_fails_if(ranks, name, stage):
    mutant = MUTANTS[name]
    found = [difference for result in ranks(2).run(parity_under, mutant, (stage,)) for difference in result]
    assert any(mutant.shows in difference for difference in found), found[:8]


def test_parity_holds_on_the_slowest_wire(ranks):
    for loop in (PLAIN, Loop("AdamW", clip=(0.05, math.inf), watch=False)):
        assert not any(ranks(2).run(parity_under, Mutant(LATE_WIRE, loop=loop), STAGES))


def test_parity_holds_again_without_the_mutants(ranks):
    for model, loop in (("plain blocks", CLIPPED), ("tied embedding and head", Loop("AdamW", watch=False))):
        assert not any(ranks(2).run(parity, ZOO[model], loop))
