"""Corners of the script of moments that models of the zoo do not reach."""

import pytest
import torch
import torch.distributed as dist
from says import tells
from torch import nn

from zero_mini.comm import Comm
from zero_mini.memory.formulas import walk
from zero_mini.zeroify import zeroify


class Heads(nn.Module):
    """Two heads, of which a forward uses one; their list has a name that begins with "root"."""

    def __init__(self):
        super().__init__()
        self.roots = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

    def forward(self, x, head):
        return self.roots[head](x)


def two_backwards_one_step(stage):
    torch.manual_seed(0)
    model = Heads()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zeroify(model, optimizer, stage=stage)
    x = torch.ones(2, 3) * (1 + dist.get_rank())
    for head in (0, 1):
        model(x, head).sum().backward()
    optimizer.step()
    return {name: (value - before[name]).unique().tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_second_backward_that_leaves_a_unit_out_keeps_what_the_first_one_brought(ranks, stage):
    for moved in ranks(2).run(two_backwards_one_step, stage):
        for head in (0, 1):
            assert moved[f"roots.{head}.weight"] == pytest.approx([-3.0])  # 2 rows of mean 1.5
            assert moved[f"roots.{head}.bias"] == pytest.approx([-2.0])


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, skip):
        for index, block in enumerate(self.blocks):
            x = x if skip and index == 1 else block(x)
        return x


def skip_a_block_under_no_sync(stage):
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zero = zeroify(model, optimizer, stage=stage, dtype=torch.bfloat16)
    with zero.no_sync():
        model(torch.ones(2, 3), skip=dist.get_rank() == 1).sum().backward()
    model(torch.ones(2, 3), skip=False).sum().backward()
    sizes = [call.itemsize for call in zero.comm.ledger.calls]
    optimizer.step()
    return sizes, torch.cat([value.flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_send_gradients_of_one_dtype_also_if_one_of_them_skipped_a_block(ranks, stage):
    (sizes, first), (other_sizes, other) = ranks(2).run(skip_a_block_under_no_sync, stage)
    assert sizes == other_sizes
    assert torch.equal(first, other) and first.isfinite().all()


def pairs_of_four(stage):
    """Ranks 0, 1 and ranks 2, 3 train apart."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroify(model, optimizer, stage=stage, group=group)
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    optimizer.step()
    return model.state_dict()["0.weight"].sum().item()


def test_groups_of_ranks_train_apart(ranks):
    a, b, c, d = ranks(4).run(pairs_of_four, 2)
    assert a == b != c == d


def changed_at_rest(stage, through_data):
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zeroify(model, optimizer, stage=stage, dtype=torch.bfloat16)
    model(torch.ones(2, 3), skip=False).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    try:
        weight = model.blocks[0].weight  # between the step and the next forward
        nn.init.zeros_(weight.data if through_data else weight)
        model(torch.ones(2, 3), skip=False).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_write_that_nothing_can_follow_raises(ranks, stage, through_data):
    for said in ranks(2).run(changed_at_rest, stage, through_data):
        assert tells(said, "blocks.0.weight", "zero.full_params()")


def late_peer():
    comm = Comm()

    class Refused:
        def is_completed(self):
            return True

        def wait(self, time_out):
            raise RuntimeError("Timed out waiting 60000ms for recv operation to complete\nand a long C++ trace")

    buffer = torch.zeros(8)
    comm.ledger.steps = 12
    work = comm.launch("reduce_scatter", "blocks.3", buffer, Refused)
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)


def test_a_collective_that_fails_says_which_it_was_where_and_when(ranks):
    for rank, said in enumerate(ranks(2).run(late_peer)):
        assert tells(said, "reduce_scatter of blocks.3", "number 1", "step 12", f"rank {rank}", "60000ms")
        assert "C++" not in said


class Scaled(nn.Module):
    """Its first parameter is 0-dim, as Adam's step is."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale * self.weight


def save_and_load(stage):
    def trained(steps, state=None):
        model = nn.Sequential(Scaled(), Scaled())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        zero = zeroify(model, optimizer, stage=stage)
        if state:
            zero.load_state_dict(state)
        for _ in range(steps):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero

    straight, resumed = trained(4), trained(2, trained(2).state_dict())
    same = all(
        torch.equal(a, b) for a, b in zip(straight.model.state_dict().values(), resumed.model.state_dict().values())
    )
    return same, {tuple(state["step"].shape) for state in resumed.optimizer.state.values()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_is_not_taken_for_the_momentum_of_a_0_dim_parameter(ranks, stage):
    assert ranks(2).run(save_and_load, stage) == [(True, {()})] * 2


def handle_says(stage):
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zero = zeroify(model, optimizer, stage=stage)
    model(torch.ones(2, 3), skip=False).sum().backward()
    held = zero.memory()
    optimizer.step()
    return held == walk(zero), [call.unit for call in zero.ledger if "reduce" in call.kind]


def test_the_handle_tells_its_memory_and_its_ledger(ranks):
    for _, reduced in ranks(2).run(handle_says, 2):
        assert reduced == ["blocks.2", "blocks.1", "blocks.0"]
    assert ranks(2).run(handle_says, 0)[0][0]  # nothing comes or goes in the step there
