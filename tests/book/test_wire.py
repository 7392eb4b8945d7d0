"""The wire contract (section 7 of the paper): what a step sends, counted call by call."""

import re

import pytest
import torch
import torch.distributed as dist

from zero_mini.memory.formulas import wire_numel
from zero_mini.wire.host_words import HEADER
from zero_mini.zeroify import zeroify

BLOCKS = 6


class Model(torch.nn.Module):
    """A root (two layers) around equal blocks, odd sizes on purpose."""

    def __init__(self, blocks=BLOCKS):
        super().__init__()
        self.first = torch.nn.Linear(3, 17)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(17, 17) for _ in range(blocks))
        self.last = torch.nn.Linear(17, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


def steps(stage, micro_batches=1, synced=False, clip=False, blocks=BLOCKS, profile=False):
    """Two steps; returns the second's ledger, the units' P, and what torch's profiler saw."""
    torch.manual_seed(0)
    model = Model(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroify(model, optimizer, stage=stage)

    def step():
        for k in range(micro_batches):
            last = k == micro_batches - 1
            with torch.enable_grad() if last or synced else zero.no_sync():
                model(torch.randn(4, 3, device=zero.device)).square().mean().backward()
        if clip:
            zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    seen = []
    if profile:
        with torch.profiler.profile(record_shapes=True) as profiler:
            step()
            for work in getattr(zero, "arriving", {}).values():
                work.wait()  # the profiler cannot be stopped while threads still record
        names = {
            "c10d::allreduce_": "all_reduce",
            "c10d::_reduce_scatter_base_": "reduce_scatter",
            "c10d::_allgather_base_": "all_gather",
        }
        for event in profiler.events():
            if event.name in names:
                # The buffer of P elements; an all-reduce takes a list of tensors, which has no shape.
                shape = event.input_shapes[1 if event.name == "c10d::_reduce_scatter_base_" else 0]
                seen.append((event.time_range.start, names[event.name], shape[0] if shape else None))
        seen = [(kind, numel) for _, kind, numel in sorted(seen)]
    else:
        step()
    calls = [(c.kind, c.unit, c.numel, c.wire_numel(zero.world_size)) for c in zero.comm.ledger.last_step]
    return calls, [(unit.name, unit.P) for unit in zero.units], seen


def expected_numel(stage, k, units):
    """Whole-buffer elements of a step, without the factor (N-1)/N: 2 for an all-reduce."""
    root, blocks = units[0][1], [P for _, P in units[1:]]
    psi = root + sum(blocks)
    if stage < 3:
        return (2, 2, k + 1)[stage] * psi
    kept = sum(blocks[-2:])  # the last two units of forward stand in their slots when backward begins,
    again = sum(blocks[:2])  # the first two of backward's end when the next micro-batch begins
    return k * (3 * psi - kept - root) - (k - 1) * (again + root)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.check), 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_sends_the_closed_form_to_the_element_and_never_more_than_the_paper_says(ranks, stage, world_size):
    for k in (1, 3):
        calls, units, _ = ranks(world_size).run(steps, stage, micro_batches=k)[0]
        sent = sum(numel for *_, numel in calls)
        share = (world_size - 1) / world_size
        assert sent == pytest.approx(expected_numel(stage, k, units) * share, abs=1e-6)
        psi = sum(P for _, P in units)
        assert sent <= wire_numel(psi, world_size, stage, micro_batches=k) + 1e-6
        if stage < 3:
            assert sent == pytest.approx(wire_numel(psi, world_size, stage, micro_batches=k))


def test_padding_is_less_than_one_alignment_a_parameter_and_rank(ranks):
    _, units, _ = ranks(3).run(steps, 1)[0]
    sizes = {"root": [3 * 17, 17, 17, 1], **{f"blocks.{i}": [17 * 17, 17] for i in range(BLOCKS)}}
    for name, P in units:
        assert sum(sizes[name]) <= P < sum(sizes[name]) + 32 * (len(sizes[name]) + 3)


@pytest.mark.check
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_launches_the_same_calls_in_the_same_order(ranks, stage):
    for k in (1, 2):
        ledgers = [calls for calls, *_ in ranks(3).run(steps, stage, micro_batches=k, clip=True)]
        assert ledgers[0] == ledgers[1] == ledgers[2]


def test_reductions_start_in_reverse_unit_order_at_every_stage(ranks):
    for stage in range(4):
        calls, units, _ = ranks(2).run(steps, stage)[0]
        reduced = [unit for kind, unit, *_ in calls if kind in ("all_reduce", "reduce_scatter")]
        assert reduced == [name for name, _ in reversed(units)]


@pytest.mark.check
def test_stage_3_launches_each_gather_one_unit_ahead_of_its_use(ranks):
    calls, units, _ = ranks(2).run(steps, 3)[0]
    names = [name for name, _ in units]  # root, blocks.0, ...
    order = [(kind, unit) for kind, unit, *_ in calls]
    forward = [("all_gather", name) for name in names]
    assert order[: len(forward)] == forward
    # Backward enters a unit: the one before it is gathered, then the one after it is reduced.
    backward = []
    for index in range(len(names) - 2, 0, -1):
        backward += [("all_gather", names[index - 1])] * (index > 1)
        backward += [("reduce_scatter", names[index + 1])]
    backward += [("reduce_scatter", names[1]), ("reduce_scatter", "root")]
    assert order[len(forward) :] == backward


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_stage_3_gathers_nothing_twice_that_is_still_in_a_slot(ranks, blocks):
    calls, units, _ = ranks(2).run(steps, 3, blocks=blocks)[0]
    gathers = [unit for kind, unit, *_ in calls if kind == "all_gather"]
    assert len(gathers) == 1 + blocks + max(0, blocks - 2)


def test_no_sync_at_stages_0_and_1_reduces_once_a_step_and_changes_nothing_at_2_and_3(ranks):
    reductions = {}
    for stage in range(4):
        calls, units, _ = ranks(2).run(steps, stage, micro_batches=3)[0]
        reductions[stage] = sum(kind in ("all_reduce", "reduce_scatter") for kind, *_ in calls) / len(units)
    assert reductions == {0: 1, 1: 1, 2: 3, 3: 3}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_ledger_is_what_the_profiler_sees(ranks, stage):
    for k in (1, 2):
        calls, _, seen = ranks(2).run(steps, stage, micro_batches=k, profile=True)[0]
        counted = [(kind, None if kind == "all_reduce" else numel) for kind, _, numel, _ in calls]
        seen.remove(("all_gather", 2 * HEADER))  # once a step: a digest of the ledger, and what was used
        assert seen == counted


def run_other_blocks(stage):
    """Rank 0 runs block 2, rank 1 block 3, of the same size."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroify(model, optimizer, stage=stage)
    x = model.first.weight.new_ones(2, 17)
    model.forward = lambda x: model.blocks[2 + dist.get_rank()](x).sum()
    try:
        model(x).backward()
        zero.clip_grad_norm_(1.0)
    except RuntimeError as error:
        return str(error)


def test_ranks_that_gather_different_units_are_told_both_names(ranks):
    said = ranks(2).run(run_other_blocks, 3)
    assert said[0] == said[1]
    assert re.search(r"all_gather of blocks\.2\b.*rank 0\b.*all_gather of blocks\.3\b.*rank 1\b", said[0])
