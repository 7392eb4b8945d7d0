"""What an ordinary training script says means the same with zero_mini, or raises; nothing changes its meaning silently.

A test is a short script that runs twice: as it would on one device, on whole batches, and on two
ranks after zeroify(), where each rank has every second row. What the script looked at on its way
and the parameters at its end have to agree. It runs at every stage, in fp32 and with bf16 compute,
and every collective arrives as late as it may, so that nothing passes by good luck.

Two weaker promises are asked for by name. `may_raise`: an error, on every rank, is as good. `may_be_nan`:
a tensor that is all NaN is as good, since nobody takes it for a value.
"""

import contextlib
import copy
import gc
import io
import itertools
import traceback
import types
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from zero_mini.zeroify import zeroify

D_IN, D, D_OUT, ROWS = 4, 8, 3, 12  # ROWS a batch: 1, 2 and 3 ranks divide it
STAGES = (0, 1, 2, 3)
EXACT, MIXED = None, torch.bfloat16  # zeroify's dtype
TOLERANCE = {EXACT: 1e-5, MIXED: 0.015}  # a script moves parameters by more than ten times as much
Note = Callable[[str, str], None]
LOUD = ("RuntimeError", "ValueError", "NotImplementedError", "AssertionError")  # others are accidents


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.out(torch.tanh(self.fc(self.norm(h))))


class Tower(nn.Module):
    """Three blocks between two layers of the root."""

    def __init__(self, block: Callable[[], nn.Module] = Block):
        super().__init__()
        self.enter, self.leave = nn.Linear(D_IN, D), nn.Linear(D, D_OUT)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.through(self.enter(x)))

    def through(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; momentum and decay move a parameter whose gradient is zero, and leave one without."""
    params = [p for p in model.parameters() if p.requires_grad]
    decaying = [p for p in params if p.ndim > 1]
    return torch.optim.SGD(
        [{"params": decaying, "weight_decay": 0.1}, {"params": [p for p in params if p.ndim < 2]}], lr=0.1, momentum=0.9
    )


def descent(model: nn.Module) -> torch.optim.Optimizer:
    """Nothing but p -= lr * grad, so that no gradient and a zero gradient are the same."""
    return torch.optim.SGD(model.parameters(), lr=0.2)


class Late:
    """Makes every collective arrive as late as it may: when it is waited for.

    Until then its output reads as NaN, and nothing that happens to its input reaches it. One that is
    not waited for arrives after the next one that writes to the same memory.
    """

    def __init__(self, comm):
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []  # (output, what will be in it)
        self.prompt = {kind: getattr(comm, kind) for kind in ("all_reduce", "reduce_scatter", "all_gather")}
        comm.all_reduce, comm.reduce_scatter, comm.all_gather = self.all_reduce, self.reduce_scatter, self.all_gather

    def all_reduce(self, buffer, unit):
        result = buffer.clone()
        self.prompt["all_reduce"](result, unit).wait()
        buffer.fill_(torch.nan)
        return self.arrival(buffer, result)

    def reduce_scatter(self, shard, buffer, unit):
        result = torch.empty_like(shard)
        self.prompt["reduce_scatter"](result, buffer.clone(), unit).wait()
        buffer.fill_(torch.nan)
        return self.arrival(shard, result)

    def all_gather(self, buffer, shard, unit):
        own, result = shard.clone(), torch.empty_like(buffer)
        self.prompt["all_gather"](result, own, unit).wait()
        buffer.fill_(torch.nan)
        shard.copy_(own)  # it may be a slice of buffer
        return self.arrival(buffer, result)

    def arrival(self, output: torch.Tensor, result: torch.Tensor):
        entry = (output, result)
        self.pending.append(entry)

        def wait():
            waited = [each for each in self.pending if each is entry]
            forgotten = [each for each in self.pending if each is not entry and each[0].data_ptr() == output.data_ptr()]
            self.pending = [each for each in self.pending if each[0].data_ptr() != output.data_ptr()]
            for late_output, late_result in waited + forgotten:
                late_output.copy_(late_result)

        return types.SimpleNamespace(wait=wait)


class Job:
    """A model in training, alone (`zero` is None) or as one rank of several, and what its script looked at."""

    def __init__(self, build, optimizer, before: Callable[["Job"], None] | None, **wrap):
        self.rank, self.world_size, self.wrap = dist.get_rank(), dist.get_world_size(), wrap
        self.model = build()
        self.optimizer = optimizer(self.model)
        self.notes: list = []
        self.zero = None
        if before is not None:
            before(self)
        if wrap:
            self.zero = zeroify(self.model, self.optimizer, **wrap)
            Late(self.zero.comm)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(step)
        x, y = torch.randn(ROWS, D_IN, generator=source), 4 * torch.randn(ROWS, D_OUT, generator=source)
        dtype = next(iter(self.model.state_dict().values())).dtype if self.zero is None else self.zero.master_dtype
        rows = slice(None) if self.zero is None else slice(self.rank, None, self.world_size)
        return x[rows].to(dtype), y[rows].to(dtype)

    def loss(self, step: int) -> torch.Tensor:
        x, y = self.batch(step)
        return (self.model(x) - y).square().mean()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.loss(step).backward()
            self.optimizer.step()

    def see(self, value: object) -> None:
        """Keep a copy of a value that has to be the same, alone and on every rank."""
        self.notes.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)

    def see_rows(self, rows: torch.Tensor) -> None:
        """Keep the rows of this rank."""
        self.see(rows[self.rank :: self.world_size] if self.zero is None else rows)

    def see_params(self) -> None:
        """Read every parameter as it stands."""
        for param in self.model.parameters():
            self.see(param)

    def see_output(self, step: int = 90) -> None:
        """What the model says now."""
        with torch.no_grad():
            self.see_rows(self.model(self.batch(step)[0]))

    def see_state(self, module: nn.Module | None = None) -> None:
        state = (module or self.model).state_dict()
        self.see(list(state))
        for value in state.values():
            self.see(value.dtype)
            self.see(value)

    def see_error(self, operation: Callable[[], object]) -> None:
        """The operation raises, alone and on every rank, in the same words."""
        with pytest.raises(Exception) as caught:  # noqa: B017
            operation()
        self.see(f"{type(caught.value).__name__}: {caught.value}")

    def full_params(self, **options) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.zero is None else self.zero.full_params(**options)

    def every(self, value: object) -> list:
        """Each rank's value."""
        return [value] if self.zero is None else self.zero.comm.host_gather(value)

    def no_sync(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.zero is None else self.zero.no_sync()


def run_twice(script, build, optimizer, before, **wrap):
    """-> (start, alone, sharded): parameters at the start, and (notes, parameters, error) of both runs."""
    torch.manual_seed(0)
    alone = Job(build, optimizer, before)
    start = copy.deepcopy(alone.model.state_dict())
    script(alone)
    torch.manual_seed(dist.get_rank())  # rank 0's values are everybody's
    sharded = Job(build, optimizer, before, **wrap)
    try:
        script(sharded)
        state, error = sharded.model.state_dict(), None
    except Exception as raised:
        state, error = {}, f"{type(raised).__name__}\n{traceback.format_exc()}"
    return start, (alone.notes, alone.model.state_dict(), None), (sharded.notes, state, error)


class Compare:
    """compare(script): run it both ways at this stage and precision, and hold the two against each other."""

    def __init__(self, ranks, stage: int, dtype: torch.dtype | None, note: Note = lambda result, says: None):
        self.ranks, self.stage, self.dtype = ranks, stage, dtype
        self.note = note  # of what came of it

    def __call__(
        self,
        script: Callable[[Job], None],
        build: Callable[[], nn.Module] = Tower,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
        before: Callable[[Job], None] | None = None,  # what the script does before zeroify()
        may_raise: bool = False,
        may_be_nan: bool = False,
        tolerance: float | None = None,
    ) -> str | None:
        """Returns the error that every rank raised, or None."""
        self.tolerance = TOLERANCE[self.dtype] if tolerance is None else tolerance
        results = self.ranks(2).run(run_twice, script, build, optimizer, before, stage=self.stage, dtype=self.dtype)
        errors = [error for _, _, (_, _, error) in results]
        if any(errors):
            first = next(filter(None, errors))
            assert may_raise and first.split()[0] in LOUD, first
            assert all(errors), f"one rank raised and the other did not: {first}"
        for start, (notes, state, _), (own_notes, own_state, error) in results:
            assert error or len(own_notes) == len(notes)
            for index, (own, expected) in enumerate(zip(own_notes, notes)):  # also what it saw before it raised
                self.check(f"note {index}", own, expected, may_be_nan)
            assert error or list(own_state) == list(state)
            for name in own_state:
                self.check(name, own_state[name], state[name], may_be_nan)
                self.check(f"{name} of rank 0", own_state[name], results[0][2][1][name], may_be_nan, tolerance=0)
            farthest = max((state[name] - start[name]).abs().max() for name in state)
            assert farthest > 10 * TOLERANCE[self.dtype], "this script could not tell"
        result, _, says = ("as alone" if errors[0] is None else errors[0].splitlines()[-1]).partition(": ")
        self.note(result, says)
        return errors[0]

    def check(self, what: str, own, expected, may_be_nan: bool, tolerance: float | None = None) -> None:
        if not isinstance(expected, torch.Tensor):
            assert own == expected, what
            return
        assert own.shape == expected.shape, what
        if may_be_nan and own.isnan().all():
            return
        tolerance = self.tolerance if tolerance is None else tolerance
        close = torch.allclose(own.double(), expected.double(), atol=tolerance, rtol=tolerance)
        assert close, f"{what} is {own}, alone {expected}"


# In mixed precision stage 2 has the parameters of stage 1 and the gradients of stage 3, line by line.
@pytest.fixture(
    params=[(stage, dtype) for stage in STAGES for dtype in (EXACT, MIXED) if (stage, dtype) != (2, MIXED)],
    ids=lambda param: f"stage{param[0]}-{'bf16' if param[1] else 'fp32'}",
)
def compare(request, ranks, row) -> Compare:
    return Compare(ranks, *request.param, noting(request, row, request.param[0]))


@pytest.fixture(params=STAGES, ids=lambda stage: f"stage{stage}")
def compare_fp32(request, ranks, row) -> Compare:
    """For tests of many cases."""
    return Compare(ranks, request.param, EXACT, noting(request, row, request.param))


def noting(request, row, stage: int) -> Note:
    return lambda result, says: row("models", request.node.originalname, stage, result=result, says=says)


# --- reading a parameter ------------------------------------------------------------------------------


def test_a_parameter_read_between_turns_is_true_or_nan(compare):
    def script(job):
        job.see_params()
        for step in range(3):
            loss = job.loss(step)
            job.see_params()
            loss.backward()
            job.see_params()
            job.optimizer.step()
            job.see_params()
            job.optimizer.zero_grad()
            job.see_params()
            job.see_output()
            job.see_params()

    compare(script, may_be_nan=compare.stage > 0)


def test_a_parameter_read_in_another_units_turn_is_true_or_nan(compare):
    def script(job):
        for module in (*job.model.blocks, job.model.leave):
            module.register_forward_hook(lambda *_: job.see_params())
        for param in (job.model.leave.bias, *(block.norm.bias for block in job.model.blocks)):
            param.register_hook(lambda _: job.see_params())
        job.train(0, 1, 2)

    compare(script, may_be_nan=compare.stage > 0)


def test_names_shapes_flags_and_counts_of_parameters_stay_what_they_were(compare):
    def script(job):
        for _ in range(2):
            for name, param in job.model.named_parameters():
                job.see((name, tuple(param.shape), param.numel(), param.device.type))
                job.see((param.requires_grad, param.is_leaf, isinstance(param, nn.Parameter)))
            job.see([type(module).__name__ for module in job.model.modules()])
            job.train(0)

    compare(script)


# --- state_dict ---------------------------------------------------------------------------------------


def test_state_dict_is_whole_true_and_fp32_at_every_moment(compare):
    def script(job):
        job.see_state()
        for step in range(2):
            loss = job.loss(step)
            job.see_state()
            loss.backward()
            job.see_state()
            job.see_state(job.model.blocks[1])
            job.optimizer.step()
            job.see_state()
            job.optimizer.zero_grad()
            with torch.no_grad():
                job.see_state()
            with torch.inference_mode():
                job.see_output()
                job.see_state()
            with job.full_params():
                job.see_state()
                job.see_state(job.model.blocks[2].fc)
        job.train(2)

    compare(script)


def test_state_dict_of_a_submodule_right_after_a_step_is_true_and_harms_nothing(compare):
    def script(job):
        for step, module in enumerate((job.model.blocks[1], job.model.leave, job.model.blocks[0].norm)):
            job.train(step)
            job.see_state(module)
        job.train(3)

    compare(script)


def test_state_dict_in_the_midst_of_a_forward_is_true_and_harms_nothing(compare):
    def script(job):
        hook = job.model.blocks[1].register_forward_hook(lambda *_: job.see_state())
        job.train(0, 1)
        hook.remove()
        job.train(2)

    compare(script)


def test_a_copied_state_dict_keeps_its_values_and_can_be_saved(compare):
    def script(job):
        job.train(0)
        copied = copy.deepcopy(job.model.state_dict())
        file = io.BytesIO()
        torch.save(job.model.state_dict(), file)
        job.train(1)
        file.seek(0)
        for state in (copied, torch.load(file, weights_only=True)):
            for value in state.values():
                job.see(value)
        plain = Tower()
        plain.load_state_dict(copied)
        job.see_rows(plain(Job.batch(job, 7)[0]))

    compare(script)


def test_state_dict_keep_vars_gives_true_values_or_nan(compare):
    def script(job):
        job.train(0)
        for value in job.model.state_dict(keep_vars=True).values():
            job.see(value)
        job.train(1)

    compare(script, may_raise=True, may_be_nan=True)


def test_a_state_dict_hook_that_raises_leaves_a_usable_model(compare):
    def script(job):
        def fail(*_):
            raise RuntimeError("from a hook")

        job.train(0)
        hook = job.model.blocks[1].register_state_dict_post_hook(fail)
        job.see_error(job.model.state_dict)
        hook.remove()
        job.train(1, 2)
        job.see_state()

    compare(script)


# --- load_state_dict ----------------------------------------------------------------------------------


def other_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return Tower().state_dict()


def test_load_state_dict_reaches_what_the_optimizer_updates(compare):
    def script(job):
        job.see(str(job.model.load_state_dict(other_state())))
        job.see_output()
        job.train(0, 1)
        job.model.load_state_dict(other_state())
        job.train(2)

    compare(script)


def test_load_state_dict_between_backward_and_step_keeps_the_gradients(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.loss(1).backward()
        job.model.load_state_dict(other_state())
        job.optimizer.step()

    compare(script)


def test_load_state_dict_into_a_submodule_changes_that_one_alone(compare):
    def script(job):
        job.train(0)
        part = {name.removeprefix("blocks.1."): v for name, v in other_state().items() if name.startswith("blocks.1.")}
        job.model.blocks[1].load_state_dict(part)
        job.see_state()
        job.model.blocks[2].fc.load_state_dict({"weight": part["fc.weight"], "bias": part["fc.bias"]})
        job.train(1)

    compare(script)


def test_what_rank_0_loads_counts(compare):
    def script(job):
        state = other_state()
        if job.rank > 0 and job.zero is not None:
            state = {name: value + 1 for name, value in state.items()}
        job.model.load_state_dict(state)
        job.train(0)

    compare(script)


def test_errors_of_load_state_dict_are_torchs_and_leave_a_usable_model(compare):
    def script(job):
        job.train(0)
        state = other_state()
        missing = {name: value for name, value in state.items() if name != "blocks.1.fc.weight"}
        job.see_error(lambda: job.model.load_state_dict(missing))
        job.see_error(lambda: job.model.load_state_dict(state | {"unknown": torch.ones(1)}))
        job.see_error(lambda: job.model.load_state_dict(state | {"enter.bias": torch.ones(D + 1)}))
        job.see_error(lambda: job.model.load_state_dict(state | {"enter.bias": "text"}))
        job.see_error(lambda: job.model.load_state_dict(None))
        job.see(str(job.model.load_state_dict(missing | {"unknown": torch.ones(1)}, strict=False)))
        job.train(1, 2)

    compare(script)


# --- full_params --------------------------------------------------------------------------------------


def test_full_params_shows_all_values_in_the_precision_of_the_master_copy(compare):
    def script(job):
        for step in range(2):
            with job.full_params():
                job.see_params()
                job.see([param.dtype for param in job.model.parameters()])
            loss = job.loss(step)
            with job.full_params():
                job.see_params()
            loss.backward()
            job.optimizer.step()
            with job.full_params():
                job.see_params()

    compare(script)


def test_a_write_under_full_params_counts_for_training(compare):
    def script(job):
        job.train(0)
        with job.full_params(), torch.no_grad():
            job.model.enter.weight.mul_(2)
            job.model.blocks[1].fc.weight.add_(0.5)
            nn.init.ones_(job.model.leave.bias)
        job.see_output()
        job.train(1)

    compare(script)


def test_what_rank_0_writes_under_full_params_counts_on_all_ranks(compare):
    def script(job):
        with job.full_params(), torch.no_grad():
            for param in job.model.parameters():
                param.add_(0.05 if job.rank == 0 or job.zero is None else 7.0)
        job.see_state()
        job.train(0)

    compare(script)


def test_a_write_to_data_under_full_params_counts_or_raises(compare):
    def script(job):
        with job.full_params():
            job.model.blocks[1].fc.weight.data.mul_(2)
            job.model.leave.weight.data = job.model.leave.weight.data * 2
        job.see_state()
        job.train(0)

    compare(script, may_raise=True)


def test_full_params_with_grads_shows_the_mean_gradient(compare):
    def script(job):
        with job.full_params(grads=True):
            job.see([param.grad for param in job.model.parameters()])
        for step in range(2):
            job.loss(step).backward()
            with job.full_params(grads=True):
                for param in job.model.parameters():
                    job.see(param.grad)
                    job.see((param.grad.shape, param.grad.dtype))
            job.optimizer.step()

    compare(script)


def test_a_gradient_changed_under_full_params_is_what_the_step_uses(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.loss(1).backward()
        with job.full_params(grads=True):
            for param in job.model.parameters():
                param.grad.mul_(-3)
        job.optimizer.step()

    compare(script)


def test_a_gradient_that_rank_0_changes_under_full_params_counts_on_all_ranks(compare):
    def script(job):
        job.loss(0).backward()
        with job.full_params(grads=True):
            for param in job.model.parameters():
                if job.rank == 0 or job.zero is None:
                    param.grad.fill_(3.0)
        job.optimizer.step()

    compare(script)


def test_a_gradient_replaced_under_full_params_is_what_the_step_uses_or_raises(compare):
    def script(job):
        job.loss(0).backward()
        with job.full_params(grads=True):
            job.model.leave.bias.grad = torch.ones(D_OUT)
            job.model.blocks[1].fc.weight.grad = None
        job.optimizer.step()

    compare(script, optimizer=descent, may_raise=True)


def test_a_forward_under_full_params_runs_on_them(compare):
    def script(job):
        job.train(0)
        with job.full_params(), torch.no_grad():
            job.model.blocks[1].fc.bias.add_(1)
            job.see_rows(job.model(job.batch(5)[0]))
            job.see_rows(job.model(job.batch(6)[0]))
        job.see_output()
        job.train(1)

    compare(script)


def test_training_under_full_params_works_or_raises(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        with job.full_params():
            job.loss(1).backward()
        job.optimizer.step()
        job.train(2)

    compare(script, may_raise=True)


def test_a_graph_made_under_full_params_trains_or_raises_later(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        with job.full_params():
            loss = job.loss(1)
        loss.backward()
        job.optimizer.step()

    compare(script, may_raise=True)


def test_full_params_can_be_nested(compare):
    def script(job):
        job.loss(0).backward()
        with job.full_params():
            with torch.no_grad():
                job.model.enter.weight.mul_(2)
            with job.full_params(grads=True):
                job.see(job.model.leave.weight.grad)
                with torch.no_grad():
                    job.model.leave.weight.mul_(2)
            job.see_params()
            job.see_state()
            with torch.no_grad():
                job.model.blocks[0].fc.weight.mul_(2)
        job.optimizer.step()
        job.train(1)

    compare(script)


def test_an_exception_under_full_params_leaves_a_usable_model_with_what_was_written(compare):
    def script(job):
        job.train(0)
        for grads in (False, True):
            with contextlib.suppress(KeyError), job.full_params(grads=grads), torch.no_grad():
                job.model.blocks[1].fc.weight.add_(1)
                raise KeyError
        job.see_state()
        job.train(1)

    compare(script)


def test_an_exception_while_gradients_are_shown_leaves_them_as_they_were(compare):
    def script(job):
        job.loss(0).backward()
        with contextlib.suppress(KeyError), job.full_params(grads=True):
            raise KeyError
        job.loss(1).backward()
        job.optimizer.step()

    compare(script)


def test_full_params_between_forward_and_backward_harms_nothing(compare):
    def script(job):
        for step in range(2):
            loss = job.loss(step)
            with job.full_params():
                job.see_params()
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()

    compare(script)


# --- writing a parameter ------------------------------------------------------------------------------


PARTS = {
    "root": lambda model: model.leave.weight,
    "block": lambda model: model.blocks[2].out.weight,
}


@pytest.mark.parametrize("moment", ["start", "evaluation", "backward", "step", "end"])
@pytest.mark.parametrize("part", PARTS)
def test_a_write_in_place_counts_or_raises(compare, moment, part):
    def script(job):
        def now(name):
            if name == moment:
                with torch.no_grad():
                    PARTS[part](job.model).mul_(2)

        now("start")
        job.see_output()
        now("evaluation")
        job.see_output()
        job.loss(0).backward()
        now("backward")
        job.see_output()
        job.optimizer.step()
        now("step")
        job.see_output()
        now("end")
        job.see_output()
        job.train(1)

    compare(script, may_raise=True)


@pytest.mark.parametrize("part", PARTS)
def test_a_write_in_place_is_in_the_state_dict_or_raises(compare, part):
    def script(job):
        job.train(0)
        job.see_output()
        with torch.no_grad():
            PARTS[part](job.model).mul_(2)
        job.see_state()

    compare(script, may_raise=True)


@pytest.mark.parametrize("part", PARTS)
def test_a_write_in_place_between_forward_and_backward_raises_as_in_torch(compare, part):
    def script(job):
        job.train(0)
        loss = job.loss(1)
        with torch.no_grad():
            PARTS[part](job.model).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    compare(script, may_raise=True)


def test_a_write_in_place_to_a_frozen_parameter_counts_or_raises(compare):
    def freeze(job):
        job.model.blocks[1].requires_grad_(False)

    def script(job):
        job.train(0)
        job.see_output()
        with torch.no_grad():
            job.model.blocks[1].out.weight.mul_(2)
        job.see_output()
        job.train(1)

    compare(script, before=freeze, may_raise=True)


def test_a_hand_written_optimizer_works_or_raises(compare):
    def script(job):
        job.loss(0).backward()
        with torch.no_grad():
            for param in job.model.parameters():
                param -= 0.5 * param.grad
        job.see_output()

    compare(script, may_raise=True)


def test_moving_to_where_it_is_harms_nothing(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.model.to("cpu")
        job.model.cpu()
        if job.zero is None or not job.zero.mixed:
            job.model.float()
        job.see_state()
        job.train(1)

    compare(script)


def test_a_parameter_frozen_after_zeroify_stays_as_it_is_or_raises(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.model.blocks[1].requires_grad_(False)
        job.train(1, 2)

    compare(script, may_raise=True)


def test_a_parameter_unfrozen_after_zeroify_trains_or_raises(compare):
    def freeze(job):
        job.model.blocks[1].requires_grad_(False)

    def script(job):
        job.train(0)
        job.model.blocks[1].requires_grad_(True)
        job.train(1, 2)

    compare(script, optimizer=descent, before=freeze, may_raise=True)


# --- gradients ----------------------------------------------------------------------------------------


def test_there_is_no_gradient_before_a_backward_and_after_zero_grad(compare):
    def script(job):
        for step in range(2):
            job.see([param.grad for param in job.model.parameters()])
            job.see(torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0))
            job.train(step)
            job.optimizer.zero_grad()

    compare(script)


def test_a_frozen_parameter_has_no_gradient_after_a_backward(compare):
    def freeze(job):
        job.model.blocks[1].requires_grad_(False)
        job.model.enter.bias.requires_grad_(False)

    def script(job):
        job.loss(0).backward()
        job.see([param.grad for param in job.model.parameters() if not param.requires_grad])
        job.optimizer.step()

    compare(script, before=freeze)


@pytest.mark.parametrize(
    "discard",
    [
        lambda job: job.optimizer.zero_grad(),
        lambda job: job.optimizer.zero_grad(set_to_none=False),
        lambda job: job.optimizer.zero_grad(False),
        lambda job: job.model.zero_grad(),
        lambda job: job.model.zero_grad(set_to_none=False),
    ],
    ids=["optimizer", "optimizer-zeros", "optimizer-positional", "model", "model-zeros"],
)
def test_zero_grad_discards_gradients_wherever_they_are(compare, discard):
    def script(job):
        job.train(0)
        job.loss(1).backward()
        discard(job)
        job.loss(2).backward()
        job.optimizer.step()
        discard(job)
        job.optimizer.step()

    compare(script)


def test_zero_grad_to_zeros_lets_momentum_and_decay_go_on_and_to_none_stops_them(compare):
    def script(job):
        job.optimizer.zero_grad(set_to_none=False)
        job.optimizer.step()
        job.see_state()
        job.train(0)
        job.optimizer.zero_grad(set_to_none=False)
        for _ in range(3):
            job.optimizer.step()
        job.see_state()
        job.optimizer.zero_grad(set_to_none=True)
        job.optimizer.step()

    compare(script)


def test_zero_grad_under_no_sync_discards_what_was_accumulated(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        with job.no_sync():
            job.loss(1).backward()
            job.optimizer.zero_grad(set_to_none=False)
        job.optimizer.step()
        with job.no_sync():
            job.loss(2).backward()
        job.optimizer.zero_grad()
        job.loss(3).backward()
        job.optimizer.step()

    compare(script)


def test_zero_grad_between_forward_and_backward_keeps_the_new_gradients(compare):
    def script(job):
        for step in range(3):
            loss = job.loss(step)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()

    compare(script)


def test_zero_grad_of_a_submodule_discards_its_gradients_or_raises(compare):
    def script(job):
        job.loss(0).backward()
        job.model.blocks[1].zero_grad()
        job.optimizer.step()

    compare(script, optimizer=descent, may_raise=True)


def test_setting_every_grad_to_none_discards_gradients_or_raises(compare):
    def script(job):
        job.train(0)
        for param in job.model.parameters():
            param.grad = None
        job.loss(1).backward()
        job.optimizer.step()

    compare(script, may_raise=True)


def test_a_grad_set_by_hand_is_what_the_step_uses_or_raises(compare):
    def script(job):
        for param in job.model.parameters():
            param.grad = torch.ones_like(param)
        job.optimizer.step()
        job.train(1)

    compare(script, may_raise=True)


def test_without_zero_grad_gradients_add_up_over_steps(compare):
    def script(job):
        for step in range(3):
            job.loss(step).backward()
            job.optimizer.step()
        job.optimizer.step()

    compare(script)


def test_a_step_without_a_backward_changes_nothing(compare):
    def script(job):
        job.optimizer.step()
        job.see_state()
        job.train(0)
        job.optimizer.zero_grad()
        job.optimizer.step()
        job.optimizer.step()
        job.train(1)

    compare(script)


def test_a_forward_without_a_backward_changes_nothing(compare):
    def script(job):
        job.train(0)
        job.loss(9)
        job.train(1)
        kept = job.loss(9)
        job.train(2)
        job.see(kept.requires_grad)

    compare(script)


def test_two_backwards_through_one_graph_add_up(compare):
    def script(job):
        for step in range(2):
            loss = job.loss(step)
            job.optimizer.zero_grad()
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            job.optimizer.step()

    compare(script)


def test_two_losses_of_one_forward_add_up(compare):
    def script(job):
        for step in range(2):
            x, y = job.batch(step)
            output = job.model(x)
            job.optimizer.zero_grad()
            (output - y).square().mean().backward(retain_graph=True)
            output[:, 0].sin().mean().backward()
            job.optimizer.step()

    compare(script)


def test_a_second_backward_without_retain_graph_raises_as_in_torch(compare):
    def script(job):
        loss = job.loss(0)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        job.train(1, 2)

    compare(script)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["oldest-first", "newest-first"])
def test_two_forwards_then_two_backwards_add_up(compare, order):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            losses = job.loss(10 * step), job.loss(10 * step + 1)
            for index in order:
                losses[index].backward()
            job.optimizer.step()

    compare(script)


def test_one_backward_of_two_forwards_adds_up(compare):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            (job.loss(10 * step) + 2 * job.loss(10 * step + 1)).backward()
            job.optimizer.step()

    compare(script)


def test_micro_batches_add_up_with_and_without_no_sync(compare):
    def script(job):
        for step in range(3):
            job.optimizer.zero_grad()
            for micro in range(3):
                with job.no_sync() if step != 1 and micro < 2 else contextlib.nullcontext():
                    job.loss(10 * step + micro).backward()
            job.optimizer.step()

    compare(script)


def test_unequal_micro_batches_weighted_by_their_rows_are_one_batch(compare):
    """A rank's mean counts as much as another's, however many rows it is of: so the loss is a sum, times N over all."""

    def script(job):
        for step in range(2):
            x, y = Job.batch(types.SimpleNamespace(zero=None, model=job.model), step)
            bounds = [[0, 1, 5], [5, 8, ROWS]][job.rank] if job.zero is not None else [0, 2, ROWS]
            scale = (1 if job.zero is None else job.world_size) / y.numel()
            job.optimizer.zero_grad()
            for first, after in itertools.pairwise(bounds):
                errors = job.model(x[first:after].float()) - y[first:after].float()
                (scale * errors.square().sum()).backward()
            job.optimizer.step()

    compare(script)


def test_a_backward_for_some_parameters_alone_leaves_the_others(compare):
    def script(job):
        job.loss(0).backward(inputs=[job.model.leave.weight, job.model.blocks[1].fc.bias])
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.loss(1).backward(inputs=list(job.model.parameters()))
        job.optimizer.step()

    compare(script, optimizer=descent, may_raise=True)


def test_clipping_by_the_optimizers_own_parameters_works_or_raises(compare_fp32):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            job.loss(step).backward()
            torch.nn.utils.clip_grad_norm_([p for group in job.optimizer.param_groups for p in group["params"]], 0.5)
            job.optimizer.step()

    compare_fp32(script, may_raise=True)


# --- the optimizer and what is built on it ------------------------------------------------------------

SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 0.5**t, lambda t: 1 + t]),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=6),
}


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_built_before_or_after_zeroify_sets_the_learning_rate(compare_fp32, name, built):
    def build(job):
        job.scheduler = SCHEDULERS[name](job.optimizer)

    def script(job):
        if built == "after":
            build(job)
        for step in range(4):
            job.train(step)
            job.scheduler.step()
            job.see([group["lr"] for group in job.optimizer.param_groups])
            job.see(job.scheduler.get_last_lr())

    compare_fp32(script, before=build if built == "before" else None)


def test_options_of_a_group_can_be_changed_by_hand(compare):
    def script(job):
        job.train(0)
        job.optimizer.param_groups[0]["lr"] = 0.5
        job.optimizer.param_groups[1]["weight_decay"] = 0.5
        job.train(1)

    compare(script)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_step_with_a_closure_runs_it_once_and_returns_its_loss(compare, as_keyword):
    def script(job):
        for step in range(3):

            def closure(step=step):
                job.see("called")
                job.optimizer.zero_grad()
                loss = job.loss(step)
                loss.backward()
                return loss

            loss = job.optimizer.step(closure=closure) if as_keyword else job.optimizer.step(closure)
            job.see(loss.requires_grad)

    compare(script)


def test_a_closure_that_raises_leaves_a_usable_optimizer(compare):
    def script(job):
        def closure():
            job.loss(0).backward()
            raise KeyError("from the closure")

        job.train(1)
        job.see_error(lambda: job.optimizer.step(closure))
        job.train(2, 3)

    compare(script)


def test_step_hooks_of_the_user_run_once_a_step(compare):
    def register(job):
        job.optimizer.register_step_pre_hook(lambda *_: job.see("before the step"))
        job.optimizer.register_step_post_hook(lambda *_: job.see("after it"))

    compare(lambda job: job.train(0, 1), before=register)
    compare(lambda job: (register(job), job.train(0, 1)))


def scaled_steps(job, scaler, unscale: bool = False) -> None:
    for step in range(3):
        job.optimizer.zero_grad()
        scaler.scale(job.loss(step)).backward()
        if unscale:
            scaler.unscale_(job.optimizer)
        scaler.step(job.optimizer)
        scaler.update()


def test_a_disabled_grad_scaler_changes_nothing(compare):
    compare(lambda job: scaled_steps(job, torch.amp.GradScaler("cpu", enabled=False)))
    compare(lambda job: scaled_steps(job, torch.amp.GradScaler("cpu", enabled=False), unscale=True))


@pytest.mark.parametrize("unscale", [False, True])
def test_an_enabled_grad_scaler_works_or_raises(compare, unscale):
    compare(lambda job: scaled_steps(job, torch.amp.GradScaler("cpu", init_scale=4.0), unscale), may_raise=True)


def test_autocast_around_the_model_means_what_it_means_alone(compare):
    def script(job):
        for step in range(3):
            job.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = job.loss(step)
            loss.backward()
            job.optimizer.step()

    compare(script, tolerance=TOLERANCE[MIXED])


# --- zero.state_dict ----------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[::2], "weight_decay": 0.3}, {"params": params[1::2]}], lr=0.03)


def double_tower() -> nn.Module:
    return Tower().double()


def train_on(steps, build, optimizer, saved=None, already=(), **wrap) -> tuple[dict, dict]:
    """Train, from `saved` if it is given; -> (zero.state_dict(), model.state_dict())."""
    torch.manual_seed(0 if saved is None else 1)
    job = Job(build, optimizer, None, **wrap)
    job.train(*already)
    if saved is not None:
        job.zero.load_state_dict(saved)
    job.train(*steps)
    return job.zero.state_dict(), copy.deepcopy(job.model.state_dict())


def train_alone(steps, build, optimizer) -> dict:
    torch.manual_seed(0)
    job = Job(build, optimizer, None)
    job.train(*steps)
    return job.model.state_dict()


def farthest(one: dict, other: dict) -> float:
    assert list(one) == list(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("optimizer", [momentum, adamw])
@pytest.mark.parametrize("build, tolerance", [(Tower, 2e-6), (double_tower, 1e-9)], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    "source, target",
    [
        ((0, 1), (3, 2)),
        ((1, 2), (0, 3)),
        ((2, 3), (1, 1)),
        ((3, 2), (2, 3)),
        ((2, 2), (3, 1)),
        ((3, 3), (1, 2)),
    ],
    ids=lambda place: "stage{}-n{}".format(*place),
)
def test_training_goes_on_from_a_saved_state_at_another_stage_and_number_of_ranks(
    ranks, source, target, build, tolerance, optimizer
):
    saved, _ = ranks(source[1]).run(train_on, (0, 1), build, optimizer, stage=source[0])[0]
    for _, state in ranks(target[1]).run(train_on, (2, 3), build, optimizer, saved, already=(7,), stage=target[0]):
        assert farthest(state, ranks(1).run(train_alone, (0, 1, 2, 3), build, optimizer)[0]) < tolerance


@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_at_the_same_stage_and_number_of_ranks_a_saved_state_goes_on_to_the_bit(compare, optimizer):
    wrap = dict(stage=compare.stage, dtype=compare.dtype)
    saved, _ = compare.ranks(2).run(train_on, (0, 1), Tower, optimizer, **wrap)[0]
    resumed = compare.ranks(2).run(train_on, (2, 3), Tower, optimizer, saved, already=(7,), **wrap)
    whole = compare.ranks(2).run(train_on, (0, 1, 2, 3), Tower, optimizer, **wrap)
    for (_, one), (_, other) in zip(resumed, whole):
        assert farthest(one, other) == 0


def test_a_state_saved_before_the_first_step_starts_anew(compare):
    wrap = dict(stage=compare.stage, dtype=compare.dtype)
    saved, _ = compare.ranks(2).run(train_on, (), Tower, adamw, **wrap)[0]
    resumed = compare.ranks(2).run(train_on, (0, 1), Tower, adamw, saved, already=(7, 8), **wrap)
    whole = compare.ranks(2).run(train_on, (0, 1), Tower, adamw, **wrap)
    for (_, one), (_, other) in zip(resumed, whole):
        assert farthest(one, other) == 0


def test_the_learning_rate_that_a_scheduler_reached_is_saved_and_loaded(compare):
    """As torch's own pair of optimizer.state_dict() and scheduler.state_dict() has it."""

    def script(job):
        torch.manual_seed(3)
        fresh = Job(Tower, momentum, None, **job.wrap)
        schedules = [SCHEDULERS["StepLR"](each.optimizer) for each in (job, fresh)]
        for step in range(2):
            job.train(step)
            schedules[0].step()
        schedules[1].load_state_dict(schedules[0].state_dict())
        if job.zero is None:
            fresh.model.load_state_dict(job.model.state_dict())
            fresh.optimizer.load_state_dict(job.optimizer.state_dict())
        else:
            fresh.zero.load_state_dict(job.zero.state_dict())
        for step in range(2, 4):
            fresh.train(step)
            schedules[1].step()
            job.see([group["lr"] for group in fresh.optimizer.param_groups])
        job.see_state(fresh.model)

    compare(script)


# --- exceptions ---------------------------------------------------------------------------------------


def fail(*_):
    raise KeyError("from a hook")


@pytest.mark.parametrize("before", [False, True], ids=["after-its-forward", "before-its-forward"])
@pytest.mark.parametrize("where", ["enter", "blocks.0", "blocks.1", "blocks.2", "leave"])
def test_training_goes_on_after_an_exception_in_forward(compare_fp32, where, before):
    def script(job):
        job.train(0)
        for step in (1, 2):
            module = job.model.get_submodule(where)
            hook = module.register_forward_pre_hook(fail) if before else module.register_forward_hook(fail)
            with pytest.raises(KeyError):
                job.loss(step)
            hook.remove()
            job.see_output()
            job.train(step)

    compare_fp32(script)


def failing_backward(job, step: int, block: int) -> None:
    """A backward that raises once it has left the blocks after this one."""
    hook = job.model.blocks[block].register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    loss = job.loss(step)
    hook.remove()
    with pytest.raises(KeyError):
        loss.backward()


@pytest.mark.parametrize("block", [0, 1, 2])
def test_training_goes_on_after_an_exception_in_backward(compare, block):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        failing_backward(job, 1, block)
        job.train(2)
        job.see_state()
        failing_backward(job, 3, block)
        job.train(4)

    compare(script)


def test_the_gradients_of_a_failed_backward_count_as_in_torch_or_raise(compare):
    def accumulated(job):
        job.train(0)
        job.optimizer.zero_grad()
        failing_backward(job, 1, block=1)
        job.loss(2).backward()
        job.optimizer.step()

    def stepped(job):
        job.train(0)
        job.optimizer.zero_grad()
        failing_backward(job, 1, block=1)
        job.optimizer.step()

    compare(accumulated, optimizer=descent, may_raise=True)
    compare(stepped, optimizer=descent, may_raise=True)


def test_a_state_dict_after_an_exception_is_true(compare):
    def script(job):
        job.train(0)
        hook = job.model.blocks[1].register_forward_hook(fail)
        with pytest.raises(KeyError):
            job.loss(1)
        hook.remove()
        job.see_state()
        failing_backward(job, 1, block=1)
        job.see_state()
        with job.full_params():
            job.see_params()
        job.train(2)

    compare(script)


# --- other ways to differentiate ----------------------------------------------------------------------


def test_gradients_with_respect_to_inputs_are_true_and_harm_nothing(compare):
    def script(job):
        for step in range(2):
            job.train(step)
            x = job.batch(5)[0].requires_grad_()
            job.see_rows(torch.autograd.grad(job.model(x).sin().sum(), x)[0])

    compare(script, may_raise=True)


def test_gradients_with_respect_to_inputs_are_none_for_the_optimizer(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        x = job.batch(5)[0].requires_grad_()
        torch.autograd.grad(job.model(x).sum(), x)
        job.optimizer.step()

    compare(script, may_raise=True)


def test_gradients_with_respect_to_a_parameter_are_this_ranks_or_raise(compare):
    def script(job):
        job.train(0)
        weight = job.model.blocks[1].fc.weight
        rows = job.model(job.batch(5)[0])
        rows = rows[job.rank :: job.world_size] if job.zero is None else rows
        job.see(torch.autograd.grad(rows.square().mean(), weight)[0])
        job.train(1)

    compare(script, may_raise=True)


def test_a_gradient_penalty_works_or_raises(compare):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            x = job.batch(step)[0].requires_grad_()
            (slope,) = torch.autograd.grad(job.model(x).sin().sum(), x, create_graph=True)
            (job.loss(step) + slope.square().mean()).backward()
            job.optimizer.step()

    compare(script, may_raise=True)


def test_training_goes_on_after_a_refused_create_graph(compare):
    def script(job):
        job.train(0)
        loss = job.loss(1)
        with contextlib.suppress(RuntimeError):
            loss.backward(create_graph=True)
        job.train(2, 3)

    compare(script)


def test_functional_call_uses_the_tensors_it_is_given(compare):
    def script(job):
        job.train(0)
        state = {name: 2 * value for name, value in job.model.state_dict().items()}
        with torch.no_grad():
            job.see_rows(torch.func.functional_call(job.model, state, (job.batch(5)[0],)))
        job.train(1)

    compare(script, may_raise=True)


# --- forwards that no backward follows ----------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_evaluation_between_steps_is_right_and_harms_nothing(compare, mode):
    def script(job):
        for step in range(3):
            job.model.eval()
            with mode():
                for batch in (50, 51):
                    job.see_rows(job.model(job.batch(batch)[0]))
            job.model.train()
            job.train(step)

    compare(script)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_generation_that_feeds_outputs_back_is_right(compare, mode):
    def script(job):
        job.train(0)
        with mode():
            x = job.batch(50)[0]
            for _ in range(5):
                x = F.pad(job.model(x), (0, D_IN - D_OUT))
            job.see_rows(x)
        job.train(1)

    compare(script)


def test_a_generation_whose_ranks_stop_at_different_lengths_is_right_if_they_take_equal_steps(compare):
    """At stage 3 every forward is a collective: who is done goes on until all are."""

    def script(job):
        job.train(0)
        with torch.inference_mode():
            x = job.batch(50)[0]
            kept, lengths = x.clone(), torch.zeros(len(x))
            running = torch.ones(len(x), dtype=torch.bool)
            while any(job.every(running.any().item())):
                x = F.pad(job.model(x), (0, D_IN - D_OUT))
                kept[running] = x[running]
                lengths += running
                running &= x[:, 0] > 1.6 * lengths - 3
            job.see_rows(kept)
            job.see_rows(lengths)
        job.train(1)

    compare(script)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_forward_and_backward_is_right_and_harms_nothing(compare, mode):
    def script(job):
        for step in range(3):
            job.optimizer.zero_grad()
            loss = job.loss(step)
            with mode():
                job.see_rows(job.model(job.batch(50)[0]))
            loss.backward()
            with mode():
                job.see_rows(job.model(job.batch(50)[0]))
            job.optimizer.step()

    compare(script)


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
@pytest.mark.parametrize("owner, turn", [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (2, 0), (2, 2)])
def test_a_block_used_outside_its_own_call_works_or_is_loud(compare_fp32, model, owner, turn):
    compare_fp32(watched_steps, build=lambda: model(owner, turn), may_raise=True, may_be_nan=True)


def test_a_forward_called_directly_works_or_is_loud(compare):
    compare(watched_steps, build=CallsForward, may_raise=True, may_be_nan=True)


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

    compare(script, may_raise=True, may_be_nan=True)


def test_a_block_called_alone_works_or_is_loud(compare):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            h = F.pad(job.batch(step)[0], (0, D - D_IN))
            job.model.blocks[1](h).sin().mean().backward()
            job.optimizer.step()
            job.see_state()
        job.train(2)

    compare(script, optimizer=descent, may_raise=True, may_be_nan=True)


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
    compare(watched_steps, build=UnpacksOutputs, may_raise=True, may_be_nan=True)


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
    assert compare.stage < 3 or "ranks ran different modules" in error


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


# --- what is kept -------------------------------------------------------------------------------------


def objects_and_tensor_bytes() -> tuple[int, int]:
    gc.collect()
    objects = gc.get_objects()
    storages = [each.untyped_storage() for each in objects if issubclass(type(each), torch.Tensor)]
    return len(objects), sum({each._cdata: each.nbytes() for each in storages}.values())


def growth(stage: int, dtype: torch.dtype | None, what: str) -> tuple[int, int]:
    """Objects and tensor bytes that 95 rounds of training or of evaluation leave behind, if 95 more do so as well."""
    job = Job(Tower, momentum, None, stage=stage, dtype=dtype)
    counts = []
    for step in range(201):
        if what == "training":
            job.train(step)
            job.zero.clip_grad_norm_(1.0)
        else:
            with torch.no_grad():
                job.model(job.batch(step)[0])
        if step in (10, 105, 200):
            counts.append(objects_and_tensor_bytes())
    return tuple(min(second - first, third - second) for first, second, third in zip(*counts))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["training", "evaluation"])
def test_nothing_is_left_behind_in_200_steps(ranks, stage, what):
    for objects, tensor_bytes in ranks(2).run(growth, stage, EXACT, what):
        assert tensor_bytes <= 0
        assert objects < 50  # less than one object every second round
