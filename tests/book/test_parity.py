"""Every stage trains every model of the zoo as torch DDP does: to the bit, wherever bits are defined.

What is compared, and with what where torch DDP adds in another order, is said in parity.py.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from models import BEYOND_DDP, INTEGERS, RARE, SOMETIMES_UNUSED, ZOO, Case, Turn, ViewsInPlace, some_integers
from parity import (
    Alone,
    CastDDP,
    Loop,
    Magnitudes,
    Run,
    Stage,
    Step,
    TorchDDP,
    agree,
    build,
    differences,
    differences_beyond,
    differences_of_norms,
    empties_full_of,
    exactly,
    loss_of,
    parity,
    train,
)
from torch import nn

EVERY_MODEL = ZOO | RARE
WORLD_SIZES = (1, 2, 3, 8)
STAGES = (0, 1, 2, 3)
MERGED = (  # where it matters which blocks are one unit
    *("tied embedding and head", "frozen", "unused on some ranks", "0-dim and 0-element", "unit called twice"),
    *("order changes", "checkpoint, re-entrant", "checkpoint of two", "checkpoint of two, re-entrant"),
)
QUICK = ("plain blocks", "tied embedding and head", "frozen", "unused on some ranks", "order changes", "checkpoint")


def parities(case: Case, loops: list[Loop]) -> list[str]:
    return [f"{loop}: {difference}" for loop in loops for difference in parity(case, loop)]


def each_stage(case: Case, loop: Loop) -> dict[int, Run]:
    with exactly():
        return {stage: train(case, loop, Stage, stage=stage) for stage in case.stages}


def note(row, name: str) -> None:
    for stage in EVERY_MODEL[name].stages:
        row("models", f"the model '{name}'", stage, result="as torch DDP", says="")


# --- against torch DDP ----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_torch_ddp_equals_itself(ranks, world_size):
    def twice(case: Case, loop: Loop) -> list[str]:
        with exactly():
            return differences("again", train(case, loop, TorchDDP), train(case, loop, TorchDDP))

    for name in ("plain blocks", "tied embedding and head", "buffers"):
        assert agree(ranks(world_size).run(twice, EVERY_MODEL[name], Loop("AdamW", steps=2)))


def chosen() -> list:
    """(model, optimizer, N): every model with SGD at N = 2, where torch DDP is the reference to the bit.

    AdamW, whose two groups may share a shard, takes some models here and nearly all at N = 3, against float64, below.
    Other N: one rank holds all, and shards that are short or empty.
    """
    awkward = ("odd sizes", "0-dim and 0-element")
    two = [(name, "SGD", 2) for name in ZOO] + [(name, "AdamW", 2) for name in (*QUICK, *awkward)]
    one = [(name, "AdamW", 1) for name in ("plain blocks", "unused on some ranks", "checkpoint")]
    many = [(name, "AdamW", 4) for name in ("tied embedding and head", "0-dim and 0-element")]
    many += [("plain blocks", "SGD", 8)]
    quick = [(name, optimizer, 2) for name in QUICK for optimizer in ("SGD", "AdamW")]
    return [pytest.param(*each, marks=pytest.mark.check) if each in quick else each for each in two + one + many]


@pytest.mark.parametrize("name, optimizer, world_size", chosen())
def test_every_stage_trains_as_torch_ddp_does(ranks, row, name, optimizer, world_size):
    """At N = 2 nobody looks before the last step: to the bit, its numbers tell of all that went before."""
    loop = Loop(optimizer, steps={1: 3, 2: 3, 8: 1}.get(world_size, 2), watch=world_size != 2)
    assert agree(ranks(world_size).run(parity, EVERY_MODEL[name], loop))
    note(row, name)


@pytest.mark.parametrize("name, merge", list(zip(MERGED, itertools.cycle([200, 300]))))
def test_units_of_several_blocks_train_as_torch_ddp_does(ranks, name, merge):
    assert agree(ranks(2).run(parity, ZOO[name], Loop("SGD", steps=2, merge=merge, watch=False)))


@pytest.mark.parametrize("name", RARE)
def test_every_stage_trains_rare_models_as_torch_ddp_does(ranks, row, name):
    case = EVERY_MODEL[name]
    # Where no bits are defined, torch DDP follows step by step.
    assert agree(ranks(2).run(parity, case, Loop("SGD", watch=case.comes_twice)))
    note(row, name)


@pytest.mark.parametrize(
    "name, world_size",
    [
        # At N = 3 most models, against float64, and whole numbers without no_sync().
        *itertools.product(["plain blocks"], [1, 2]),
        *itertools.product(["tied embedding and head", "unused on some ranks", "unit called twice"], [2]),
    ],
)
def test_micro_batches_add_up_as_in_torch_ddp_with_and_without_no_sync(ranks, name, world_size):
    loops = [Loop("SGD", steps=2, micro_batches=3, no_sync=True), Loop("AdamW", steps=2, micro_batches=2)]
    assert agree(ranks(world_size).run(parities, EVERY_MODEL[name], loops))


@pytest.mark.parametrize(
    "name, world_size",
    [
        # At N = 3, and with micro-batches, most models against float64.
        *itertools.product(["tied embedding and head"], [1, 2]),
        *itertools.product(["frozen", "unused on some ranks"], [2]),
    ],
)
def test_clipping_is_torchs_and_its_norm_one_float_everywhere(ranks, name, world_size):
    loops = [Loop("SGD", steps=2, clip=(0.05, 2.0)), Loop("AdamW", steps=2, clip=(0.02, math.inf))]
    assert agree(ranks(world_size).run(parities, EVERY_MODEL[name], loops))


@pytest.mark.parametrize("name, world_size", [("buffers", 2), ("checkpoint", 2), ("order changes", 3)])
def test_forwards_without_backward_between_the_steps_change_nothing(ranks, name, world_size):
    loops = [Loop("AdamW", steps=2, evaluate=True, micro_batches=2, no_sync=True)]
    if world_size == 2:
        loops += [Loop("SGD", steps=2, evaluate=True)]
    assert agree(ranks(world_size).run(parities, EVERY_MODEL[name], loops))


@pytest.mark.parametrize("name", ["order changes", "checkpoint of two"])
def test_looking_at_the_numbers_after_every_step_does_not_change_them(ranks, name):
    """Nor does it put right what training alone does wrong: the unwatched run is the one that users have.

    (And the one that float64 judges below, for all models.)
    """

    def compare(case: Case) -> list[str]:
        watched, unwatched = (each_stage(case, Loop("AdamW", watch=watch)) for watch in (True, False))
        return [d for stage in case.stages for d in differences(f"stage {stage}", watched[stage], unwatched[stage])]

    assert agree(ranks(2).run(compare, EVERY_MODEL[name]))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_what_no_rank_used_in_a_step_is_left_alone_as_torch_ddp_leaves_it(ranks, optimizer, world_size):
    """Value, momentum and count of steps: the last steps use all of it again, where each of them would show."""
    loop = Loop(optimizer, steps=5)
    block = [f"blocks.2.{part}.{kind}" for part in ("norm", "up", "down") for kind in ("weight", "bias")]

    def unused() -> list[str]:
        with exactly():
            return [
                name
                for name, grad in train(SOMETIMES_UNUSED, loop, Stage, stage=2).steps[1].grads.items()
                if grad is None
            ]

    for names in ranks(world_size).run(unused):
        assert names == ["blocks.1.maybe.weight", "blocks.1.maybe.bias", *block]
    assert agree(ranks(world_size).run(parity, SOMETIMES_UNUSED, loop))


def test_a_view_that_is_changed_in_place_trains_as_under_torch_ddp(ranks):
    """The change cuts the unit's hook off the graph, so no moment of the script sees its turn in backward."""
    assert agree(ranks(2).run(parity, Case(ViewsInPlace), Loop("SGD")))


# --- where torch DDP adds in another order --------------------------------------------------------


class ExactMean(Magnitudes):
    """Its gradients are the float64 means of the ranks' fp32 gradients."""

    def after_backward(self) -> None:
        self.sums = {
            name: param.grad.double() / dist.get_world_size() for name, param in self.module.named_parameters()
        }
        self.module.zero_grad()


def orders_of_summation() -> tuple[list[int], list[float], list[str]]:
    """torch DDP, with other buckets, and stage 2: gradients unlike DDP's, gaps to the exact mean, what is too far."""
    case, loop = ZOO["plain blocks"], Loop("SGD", steps=2)  # DDP rebuilds its buckets after the first
    with exactly():
        ddp = train(case, loop, TorchDDP)
        buckets = train(case, loop, TorchDDP, follow=ddp, bucket_cap_mb=1e-4)
        stage = train(case, loop, Stage, follow=ddp, stage=2)
        exact, scale = train(case, loop, ExactMean, follow=ddp), train(case, loop, Magnitudes, follow=ddp)
    runs = [ddp, buckets, stage]
    unequal = [len(differences("", ddp, run, what=("grads",))) for run in runs]
    # Against the exact mean only one of the two sums is rounded, and the division by N.
    unit = dist.get_world_size() * 2**-24
    beyond = [d for run in runs for d in differences_beyond(unit, scale, "", run, exact)]
    return unequal, [largest_gap(run, exact) for run in runs], beyond


@pytest.mark.parametrize("world_size", [2, 3])
def test_from_three_ranks_on_the_order_of_a_sum_depends_on_its_place_in_the_buffer(ranks, world_size):
    """a + b is b + a, but (a + b) + c is not a + (b + c), and which of them a ring computes for an element depends on
    the chunk that the element falls into. So torch DDP with other buckets does not equal torch DDP, at N >= 3.
    """
    for (none, other_buckets, stage), gaps, beyond in ranks(world_size).run(orders_of_summation):
        assert not beyond
        assert 0 < max(gaps) < 1e-7 and max(gaps) <= 2 * min(gaps)  # no order is better than another
        assert none == 0
        assert (other_buckets == stage == 0) if world_size == 2 else (other_buckets > 0 and stage > 0)


def largest_gap(one: Run, other: Run) -> float:
    pairs = [(grad, b.grads[name]) for a, b in zip(one.steps, other.steps) for name, grad in a.grads.items()]
    return max((a - b).abs().max().item() for a, b in pairs)


# --- oracles --------------------------------------------------------------------------------------


def whole_numbers(loop: Loop) -> Run:
    """What SGD with momentum 0.5 and learning rates 2^-6, 2^-7, ... makes of gradients that are whole numbers."""
    world_size, model = dist.get_world_size(), build(INTEGERS, loop).double()
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    momentum = {name: torch.zeros_like(param) for name, param in params.items()}
    run = Run(dict(params), [])
    for number in range(loop.steps):
        turns = [
            (Turn(rank, world_size, number), micro) for rank in range(world_size) for micro in range(loop.micro_batches)
        ]
        total = sum(some_integers(turn, micro)[0].double() for turn, micro in turns)
        numbers, grads = total / len(turns), {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                first = int(name.split(".")[1]) + 1 if name.startswith("blocks") else 0
                grads[name] = numbers[first : first + param.numel()].view(param.shape)
                momentum[name] = 0.5 * momentum[name] + grads[name]
                params[name] = params[name] - 2 ** -(6 + number) * momentum[name]
            else:
                grads[name] = None
        run.steps.append(Step([], None, grads, dict(params)))
    return run


def equal_in_value(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.double(), b.double())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_whole_numbers_come_out_exact_in_any_order_of_summation(ranks, world_size):
    """Lost, doubled, shifted, stale, unscaled gradients and padding that is not zero would show to the bit."""

    def compare() -> list[str]:
        if world_size == 8:  # they take their time
            loops = [Loop("dyadic SGD", steps=2, micro_batches=2, no_sync=True, watch=False)]
        else:
            loops = [Loop("dyadic SGD", micro_batches=4, no_sync=True, watch=False)]
        found = []
        if world_size == 3:  # at N = 2 these loops are held against torch DDP
            loops += [Loop("dyadic SGD"), Loop("dyadic SGD", steps=2, micro_batches=2)]
            loops += [Loop("dyadic SGD", units=units, watch=False) for units in ((), ("blocks.1", "root"))]
        for loop in loops:
            with empties_full_of(7777.0):
                runs = each_stage(INTEGERS, loop)
            expected = whole_numbers(loop)
            for stage, run in runs.items():
                label = f"{loop}, stage {stage}"
                found += differences(label, run, expected, equal_in_value, what=("grads", "params"))
        return found

    assert agree(ranks(world_size).run(compare))


@pytest.mark.parametrize("name", ["odd sizes", "unused on some ranks"])
def test_memory_full_of_numbers_that_nobody_wrote_changes_no_gradient_and_no_norm(ranks, name):
    def among_empties(case: Case, loops: list[Loop]) -> list[str]:
        with empties_full_of(7777.0):
            return parities(case, loops)

    loops = [Loop("AdamW", steps=2, clip=(0.05, 2.0), micro_batches=2, no_sync=True)]
    assert agree(ranks(3).run(among_empties, EVERY_MODEL[name], loops))


TWINS = {  # Of the two ways to compute the same model again, one is enough here: both are in the tests at N = 2.
    *("checkpoint", "checkpoint of two, re-entrant", "checkpoint from the input", "checkpoint of frozen, re-entrant"),
    *("checkpoint of three", "checkpoint of what is called twice", "checkpoint in changing order, re-entrant"),
    *("checkpoint in checkpoint", "checkpoint of what is unused on some ranks", "checkpoint without early stop"),
}


def close_to_1e9(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


ON_THREE = [name for name in EVERY_MODEL | BEYOND_DDP if name not in TWINS]


@pytest.mark.parametrize("name", ON_THREE)
def test_in_float64_every_stage_trains_as_one_process_with_the_whole_batch(ranks, name):
    """Stage 3 trains all of them, the others take turns: that all are alike for a model is in the tests at N = 2."""

    def compare(case: Case, loop: Loop) -> list[str]:
        buffers = [name for name, _ in build(case, loop).named_buffers()]
        with exactly():
            shared = [train(case, loop, Alone) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shared)
        (whole,) = shared
        found = []
        for stage, run in each_stage(case, loop).items():
            for step in (*run.steps, *whole.steps):  # buffers are the ranks' own
                step.params = {n: value for n, value in step.params.items() if n not in buffers}
            found += differences(f"stage {stage}", run, whole, close_to_1e9, what=("grads", "params"))
            found += differences_of_norms(f"stage {stage}", run, whole, tolerance=1e-9)
        return found

    case = (EVERY_MODEL | BEYOND_DDP)[name]
    if name not in (*QUICK, *BEYOND_DDP):
        turn = ON_THREE.index(name) % 3
        case = replace(case, stages=tuple(stage for stage in case.stages if stage in (turn, 3)))
    loop = Loop("AdamW", 2, micro_batches=2, no_sync=True, clip=(0.05, 2.0), watch=False, dtype=torch.float64)
    assert agree(ranks(3).run(compare, case, loop))


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_first_step_of_adam_moves_every_coordinate_by_the_learning_rate(ranks, world_size):
    def compare(case: Case) -> list[str]:
        found = []
        for stage, run in each_stage(case, Loop("Adam", steps=1)).items():
            for name, grad in run.steps[0].grads.items():
                moved = run.steps[0].params[name] - run.start[name]
                if not torch.allclose(moved, -0.01 * grad.sign(), rtol=1e-4, atol=1e-8):
                    found.append(f"stage {stage}: {name} moved by {moved.abs().min()} to {moved.abs().max()}")
        return found

    assert agree(ranks(world_size).run(compare, ZOO["tied embedding and head"]))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_tied_gradient_is_the_sum_of_both_uses(ranks, world_size):
    def compare(case: Case) -> list[str]:
        loop = Loop("SGD", steps=1)
        untied = build(case, loop)
        untied.head.weight = nn.Parameter(untied.wte.weight.detach().clone())
        for rank in range(world_size):
            (loss_of(case, loop, untied, rank, step=0, micro=0) / world_size).backward()
        both = untied.wte.weight.grad + untied.head.weight.grad
        return [
            f"stage {stage}: {run.steps[0].grads['wte.weight'] - both}"
            for stage, run in each_stage(case, loop).items()
            if not torch.allclose(run.steps[0].grads["wte.weight"], both, rtol=1e-5, atol=1e-7)
        ]

    assert agree(ranks(world_size).run(compare, ZOO["tied embedding and head"]))


@pytest.mark.parametrize("norm_type, world_size", [(2.0, 2), (1.0, 2), (math.inf, 2), (2.0, 8)])
def test_the_coefficient_of_clipping_is_the_maximum_over_the_norm(ranks, norm_type, world_size):
    def compare() -> list[str]:
        found, loop = [], Loop("dyadic SGD", clip=(1.0, norm_type), steps=1)
        grads = whole_numbers(loop).steps[0].grads
        numbers = torch.cat([grad.flatten() for grad in grads.values() if grad is not None])
        norm = torch.linalg.vector_norm(numbers, norm_type)
        for stage, run in each_stage(INTEGERS, loop).items():
            (step,) = run.steps
            if not torch.allclose(step.norm.double(), norm, rtol=1e-6, atol=0):
                found.append(f"stage {stage}: norm {step.norm}, not {norm}")
            for name, grad in grads.items():
                if grad is not None and not torch.allclose(step.grads[name].double(), grad / (norm + 1e-6), rtol=1e-6):
                    found.append(f"stage {stage}: {name}")
        return found

    assert agree(ranks(world_size).run(compare))


# --- bf16 -----------------------------------------------------------------------------------------


def distance(run: Run, other: Run) -> float:
    """Between the last parameters, all taken as one vector."""
    pairs = zip(run.steps[-1].params.values(), other.steps[-1].params.values(), strict=True)
    return math.sqrt(sum((a - b).square().sum().item() for a, b in pairs))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_bf16_is_torch_ddp_with_a_bf16_copy_to_the_bit(ranks, optimizer, world_size):
    def compare(loop: Loop) -> list[str]:
        with exactly():
            theirs = train(ZOO["plain blocks"], loop, CastDDP)
        runs = each_stage(ZOO["plain blocks"], loop)
        return [d for stage, run in runs.items() for d in differences(f"stage {stage}", run, theirs)]

    assert agree(ranks(world_size).run(compare, Loop(optimizer, compute_dtype=torch.bfloat16)))


@pytest.mark.parametrize("world_size, micro_batches", [(2, 1), (3, 2)])
def test_bf16_strays_no_further_from_fp32_than_twice_what_torch_ddp_in_bf16_does(ranks, micro_batches, world_size):
    """DDP in bf16: a bf16 copy of the model under DDP, an fp32 master copy under the optimizer."""

    def distances(optimizer: str) -> dict:
        case = ZOO["plain blocks"]
        fp32 = Loop(optimizer, steps=4, micro_batches=micro_batches, no_sync=True, watch=False)
        bf16 = replace(fp32, compute_dtype=torch.bfloat16)
        with exactly():
            true, theirs = train(case, fp32, TorchDDP), train(case, bf16, CastDDP)
        return {"DDP": distance(theirs, true)} | {k: distance(run, true) for k, run in each_stage(case, bf16).items()}

    for optimizer in ("SGD", "AdamW") if world_size == 2 else ("AdamW",):
        for result in ranks(world_size).run(distances, optimizer):
            assert 0 < result["DDP"] < 1
            assert all(result[stage] <= 2 * result["DDP"] for stage in STAGES), result
