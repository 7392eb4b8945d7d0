"""What an ordinary training script says means the same with zero_mini, or raises; nothing changes its meaning silently.

A test is a short script that runs twice: as it would on one device, on whole batches, and on two
ranks after zeroify(), where each rank has every second row. What the script looked at on its way
and the parameters at its end have to agree. It runs at every stage, in fp32 and with bf16 compute,
and every collective arrives as late as it may, so that nothing passes by good luck.

Two weaker promises are asked for by name. `may_raise`: an error, on every rank, is as good. `may_refuse`: a
read of a parameter may raise and name full_params(); the script goes on.

Tests use it by the fixtures `compare` and `compare_fp32` of conftest.py.
"""

import contextlib
import copy
import traceback
import types
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_mini.zeroify import zeroify

D_IN, D, D_OUT, ROWS = 4, 8, 3, 12  # ROWS a batch: 1, 2 and 3 ranks divide it
STAGES = (0, 1, 2, 3)
EXACT, MIXED = None, torch.bfloat16  # zeroify's dtype
# In mixed precision all that a script can tell apart is whether a rank has the 16-bit parameters (stage 1, and so
# stages 0 and 2) or gathers them (stage 3). In fp32, stage 1 hands over gradients as 0 does and values as 2 does.
PRECISIONS = [*((stage, EXACT) for stage in (0, 2, 3)), (1, MIXED), (3, MIXED)]
TOLERANCE = {EXACT: 1e-5, MIXED: 0.015}  # a script moves parameters by more than ten times as much
Note = Callable[[str, str], None]
REFUSED = "refused: zero.full_params() is named"
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


def double_tower() -> nn.Module:
    return Tower().double()


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
        try:
            self.notes.append(value.detach().clone() if isinstance(value, torch.Tensor) else value)
        except RuntimeError as error:
            if "zero.full_params()" not in str(error):
                raise
            self.notes.append(REFUSED)

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
        return [value] if self.zero is None else self.zero.comm.host.gather(value)

    def no_sync(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.zero is None else self.zero.no_sync()


def run_twice(script, build, optimizer, before, **wrap):
    """-> (start, alone, sharded): parameters at the start, and (notes, parameters, error) of both runs."""
    return *run_alone(script, build, optimizer, before), run_sharded(script, build, optimizer, before, **wrap)


def run_alone(script, build, optimizer, before):
    """-> (parameters at the start, (notes, parameters, no error))"""
    torch.manual_seed(0)
    alone = Job(build, optimizer, before)
    start = copy.deepcopy(alone.model.state_dict())
    script(alone)
    return start, (alone.notes, alone.model.state_dict(), None)


def run_sharded(script, build, optimizer, before, **wrap):
    """-> (notes, parameters, error)"""
    torch.manual_seed(dist.get_rank())  # rank 0's values are everybody's
    sharded = Job(build, optimizer, before, **wrap)
    try:
        script(sharded)
        state, error = sharded.model.state_dict(), None
    except Exception as raised:
        state, error = {}, f"{type(raised).__name__}\n{traceback.format_exc()}"
    return sharded.notes, state, error


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
        elementwise: bool = False,  # zeroify's
        may_refuse: bool = False,
        tolerance: float | None = None,
    ) -> str | None:
        """Returns the error that every rank raised, or None."""
        self.tolerance = TOLERANCE[self.dtype] if tolerance is None else tolerance
        results = self.ranks(2).run(
            run_twice, script, build, optimizer, before, stage=self.stage, dtype=self.dtype, elementwise=elementwise
        )
        errors = [error for _, _, (_, _, error) in results]
        if any(errors):
            first = next(filter(None, errors))
            assert may_raise and first.split()[0] in LOUD, first
            assert all(errors), f"one rank raised and the other did not: {first}"
        for start, (notes, state, _), (own_notes, own_state, error) in results:
            assert error or len(own_notes) == len(notes)
            for index, (own, expected) in enumerate(zip(own_notes, notes)):  # also what it saw before it raised
                self.check(f"note {index}", own, expected, may_refuse)
            assert error or list(own_state) == list(state)
            for name in own_state:
                self.check(name, own_state[name], state[name], may_refuse)
                self.check(f"{name} of rank 0", own_state[name], results[0][2][1][name], may_refuse, tolerance=0)
            farthest = max((state[name] - start[name]).abs().max() for name in state)
            assert farthest > 10 * TOLERANCE[self.dtype], "this script could not tell"
        result, _, says = ("as alone" if errors[0] is None else errors[0].splitlines()[-1]).partition(": ")
        self.note(result, says)
        return errors[0]

    def check(self, what: str, own, expected, may_refuse: bool, tolerance: float | None = None) -> None:
        if not isinstance(expected, torch.Tensor):
            assert own == expected, what
            return
        if may_refuse and own == REFUSED:
            return
        assert isinstance(own, torch.Tensor), f"{what}: {own}"
        assert own.shape == expected.shape, what
        tolerance = self.tolerance if tolerance is None else tolerance
        close = torch.allclose(own.double(), expected.double(), atol=tolerance, rtol=tolerance)
        assert close, f"{what} is {own}, alone {expected}"


def fail(*_):
    raise KeyError("from a hook")


def failing_backward(job, step: int, block: int) -> None:
    """A backward that raises once it has left the blocks after this one."""
    hook = job.model.blocks[block].register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    loss = job.loss(step)
    hook.remove()
    with pytest.raises(KeyError):
        loss.backward()
