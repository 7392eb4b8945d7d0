"""Models that do what most do not: weights, outputs, hooks, buffers, strides (how that is seen: both_ways.py)."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from both_ways import D_IN, D_OUT, EXACT, ROWS, STAGES, Block, Compare, D, Tower, descent
from torch import nn
from torch.nn import functional as F

from zero_mini.zeroify import zeroify

# --- weights used in unusual ways ---------------------------------------------------------------------


class UsesAWeight(Tower):
    """Its forward reads weights of a block, before or after the block at `turn` has run."""

    def __init__(self, owner: int, turn: int):
        super().__init__()
        self.owner, self.turn = owner, turn

    def through(self, h):
        for index, block in enumerate(self.blocks):
            if index == self.turn:
                h = self.use(h, self.blocks[self.owner])
            h = block(h)
        return self.use(h, self.blocks[self.owner]) if self.turn == len(self.blocks) else h

    def use(self, h, block):
        return F.linear(torch.sin(F.linear(h, block.fc.weight)), block.out.weight)


class CallsAPart(UsesAWeight):
    """The same, with a call of the block's own modules."""

    def use(self, h, block):
        return block.out(torch.sin(block.fc(h)))


class CallsForward(Tower):
    """Blocks whose forward is called directly."""

    def through(self, h):
        for block in self.blocks:
            h = block.forward(h)
        return h


class UsesRootWeightTwice(Tower):
    """The root's own weights may be used at any time in its forward, as a tied head does."""

    def forward(self, x):
        return super().forward(x) + F.linear(super().forward(x), self.leave.weight @ self.leave.weight.T)


def watched_steps(job) -> None:
    """Two steps with a look at every moment, which disturbs what slots hold, and two without."""
    for step in range(2):
        x, y = job.batch(step)
        output = job.model(x)
        job.see_rows(output)
        job.optimizer.zero_grad()
        (output - y).square().mean().backward()
        with job.full_params(grads=True):
            for param in job.model.parameters():
                job.see(param.grad)
        job.optimizer.step()
        job.see_state()
    job.train(2, 3)


@pytest.mark.parametrize("model", [UsesAWeight, CallsAPart])
@pytest.mark.parametrize("owner, turn", [(0, 0), (0, 1), (0, 3), (1, 3), (2, 0)])
def test_a_block_used_outside_its_own_call_works_or_is_loud(compare_fp32, model, owner, turn):
    compare_fp32(watched_steps, build=lambda: model(owner, turn), may_raise=True, may_refuse=True)


def test_a_forward_called_directly_works_or_is_loud(compare):
    compare(watched_steps, build=CallsForward, may_raise=True, may_refuse=True)


def test_the_roots_weights_may_be_used_at_any_time_in_its_forward(compare_fp32):
    compare_fp32(watched_steps, build=UsesRootWeightTwice)


def test_a_model_whose_forward_is_called_directly_works_or_is_loud(compare):
    def script(job):
        for step in range(3):
            x, y = job.batch(step)
            job.optimizer.zero_grad()
            (job.model.forward(x) - y).square().mean().backward()
            job.optimizer.step()
            if step == 0:
                job.see_state()

    compare(script, may_raise=True, may_refuse=True)


def test_a_block_called_alone_works_or_is_loud(compare):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            h = F.pad(job.batch(step)[0], (0, D - D_IN))
            job.model.blocks[1](h).sin().mean().backward()
            job.optimizer.step()
            job.see_state()
        job.train(2)

    compare(script, optimizer=descent, may_raise=True, may_refuse=True)


class InPlace(Tower):
    """What a block returns is changed in place."""

    def through(self, h):
        for block in self.blocks:
            h = block(h)
            h += 0.5
            h.sin_()
        return h


class View(Block):
    """A block that returns a view."""

    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.of = of

    def forward(self, h):
        return self.of(super().forward(h))


VIEWS = {
    "view": lambda h: h.view(h.shape),
    "slice": lambda h: h[:],
    "part": lambda h: torch.cat([h, h], dim=1)[:, 1 : h.shape[1] + 1],
    "transpose": lambda h: h.t().contiguous().t(),
}


def test_an_output_changed_in_place_trains_right(compare):
    compare(watched_steps, build=InPlace)


@pytest.mark.parametrize("view", VIEWS)
def test_an_output_that_is_a_view_changed_in_place_works_or_raises(compare_fp32, view):
    compare_fp32(watched_steps, build=lambda: InPlace(lambda: View(VIEWS[view])), may_raise=True)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_changed_in_place_raises_at_every_stage_or_at_none(ranks, view):
    def build():
        return InPlace(lambda: View(VIEWS[view]))

    errors = [Compare(ranks, stage, EXACT)(lambda job: job.train(0), build, may_raise=True) for stage in STAGES]
    assert len({error is None for error in errors}) == 1, errors


class Alone(nn.Module):
    """No blocks: one unit, the root, that returns what it is told to."""

    def __init__(self, returns: Callable[[torch.Tensor], object]):
        super().__init__()
        self.layer, self.returns = nn.Linear(D_IN, D_OUT), returns

    def forward(self, x):
        return self.returns(self.layer(x))


class Output:
    """No tuple, dict or dataclass."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows


def test_a_models_output_changed_in_place_works_or_raises(compare_fp32):
    def script(job):
        for step in range(2):
            x, y = job.batch(step)
            job.optimizer.zero_grad()
            output = job.model(x)
            output -= y
            output.square().mean().backward()
            job.optimizer.step()

    compare_fp32(script)
    for view in VIEWS.values():
        compare_fp32(script, build=lambda view=view: Alone(view), may_raise=True)


def test_an_output_of_an_unknown_class_works_or_raises(compare):
    def script(job):
        for step in range(2):
            x, y = job.batch(step)
            job.optimizer.zero_grad()
            (job.model(x).rows - y).square().mean().backward()
            job.optimizer.step()

    class Wrapped(Tower):
        def forward(self, x):
            return Output(super().forward(x))

    compare(script, build=Wrapped, may_raise=True)
    compare(script, build=lambda: Alone(Output), may_raise=True)


class OutputBlock(Block):
    def forward(self, h):
        return Output(super().forward(h))


class UnpacksOutputs(Tower):
    def __init__(self):
        super().__init__(OutputBlock)

    def through(self, h):
        for block in self.blocks:
            h = block(h).rows
        return h


def test_a_blocks_output_of_an_unknown_class_works_or_raises(compare):
    compare(watched_steps, build=UnpacksOutputs, may_raise=True, may_refuse=True)


class Forks(Tower):
    """Rank 0's rows go through one block, rank 1's through another."""

    blocks_of_ranks = (0, 2)
    rank: int | None = None  # None: has all rows

    def through(self, h):
        if self.rank is not None:
            return self.blocks[self.blocks_of_ranks[self.rank]](h)
        rows = [self.blocks[index](h[rank::2]) for rank, index in enumerate(self.blocks_of_ranks)]
        return torch.stack(rows, dim=1).flatten(0, 1)


def test_ranks_that_run_different_blocks_never_take_each_others_numbers(compare):
    def script(job):
        job.model.rank = None if job.zero is None else job.rank
        job.train(0, 1)

    error = compare(script, build=Forks, optimizer=descent, may_raise=compare.stage == 3)
    assert compare.stage < 3 or all(f"rank {rank}" in error for rank in (0, 1))


# --- what the user hung on the model ------------------------------------------------------------------


@pytest.mark.parametrize("registered", ["before", "after"])
def test_hooks_of_the_user_run_as_often_and_with_the_same_effect(compare, registered):
    def register(job):
        block, leave = job.model.blocks[1], job.model.leave
        job.model.register_forward_pre_hook(lambda _, args: (args[0] + 0.1,))
        block.register_forward_pre_hook(lambda _, args: (job.see("pre"), args[0] * 1.1)[1:])
        block.register_forward_hook(lambda _, __, output: (job.see("forward"), output * 0.9)[1])
        block.fc.register_forward_hook(lambda *_: job.see("inner forward"))
        leave.register_full_backward_pre_hook(lambda _, grads: (job.see("pre backward"), grads[0] * 1.5)[1:])
        block.register_full_backward_hook(lambda _, grads, __: (job.see("backward"), grads[0] * 1.2)[1:])
        block.fc.weight.register_hook(lambda grad: (job.see(("tensor", tuple(grad.shape))), grad * 2)[1])
        leave.weight.register_post_accumulate_grad_hook(lambda param: job.see(("accumulated", param.grad is not None)))
        block.out.weight.register_post_accumulate_grad_hook(lambda param: [None, param.grad.mul_(2)][0])

    def script(job):
        if registered == "after":
            register(job)
        job.train(0, 1)

    compare(script, before=register if registered == "before" else None)


class OldWeightNorm(Block):
    def __init__(self):
        super().__init__()
        torch.nn.utils.weight_norm(self.fc)


class WeightNorm(Block):
    def __init__(self):
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.fc)


def norm_in_the_root() -> nn.Module:
    model = Tower(WeightNorm)
    torch.nn.utils.weight_norm(model.enter)
    torch.nn.utils.parametrizations.weight_norm(model.leave)
    return model


@pytest.mark.parametrize("build", [lambda: Tower(OldWeightNorm), lambda: Tower(WeightNorm), norm_in_the_root])
def test_parametrised_weights_train_as_alone(compare, build):
    def script(job):
        job.train(0, 1)
        job.see_output()

    compare(script, build=build)


# --- buffers and strides ------------------------------------------------------------------------------


def batch_norm_buffers(wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module]) -> list[dict]:
    """This rank's buffers after each of three steps, an evaluation after each."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(D_IN, D), nn.BatchNorm1d(D), nn.Tanh(), nn.BatchNorm1d(D), nn.Linear(D, D_OUT))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = wrap(model, optimizer)
    seen = []
    for step in range(3):
        x = torch.randn(ROWS, D_IN, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        called(x).square().mean().backward()
        optimizer.step()
        seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        model.eval()
        with torch.no_grad():
            seen[-1]["output"] = called(x)
        model.train()
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_batch_norm_buffers_are_those_of_torch_ddp_on_every_rank(ranks, stage):
    def as_stage(model, optimizer):
        zeroify(model, optimizer, stage=stage)
        return model

    def as_ddp(model, _):
        return nn.parallel.DistributedDataParallel(model)

    ours, theirs = (ranks(2).run(batch_norm_buffers, wrap) for wrap in (as_stage, as_ddp))
    for rank in range(2):
        for own, expected in zip(ours[rank], theirs[rank]):
            assert all(torch.equal(own[name], expected[name]) for name in expected)
    assert not torch.equal(ours[0][-1]["1.running_mean"], ours[1][-1]["1.running_mean"])  # as in DDP


class Convolutions(nn.Module):
    """Channels last, in the root and in blocks."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(2, 6, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.leave = nn.Linear(6, D_OUT)

    def forward(self, x):
        h = self.enter(x.view(-1, 2, 1, 2).expand(-1, 2, 3, 2).contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.leave(h.mean((2, 3)))


def test_a_channels_last_model_keeps_its_strides(compare):
    def script(job):
        def see_strides(*_):
            job.see([param.stride() for param in job.model.blocks[1].parameters()])

        job.model.blocks[1].register_forward_pre_hook(see_strides)  # in its turn
        job.train(0, 1)
        with job.full_params():
            job.see([param.stride() for param in job.model.parameters()])
            job.see(job.model.enter.weight.is_contiguous(memory_format=torch.channels_last))
        job.see([value.stride() for value in job.model.state_dict().values()])

    compare(script, build=lambda: Convolutions().to(memory_format=torch.channels_last))
