"""Short runs on two CPU ranks, for pictures and messages that come out of them the same everywhere.

Each function runs once in a build. What takes a GPU is recorded in zero_mini/measured/ instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from zero_mini.activations.checkpointing import checkpoint_blocks
from zero_mini.comm import Comm
from zero_mini.course.plots.gantt import Span
from zero_mini.course.ranks import run
from zero_mini.simulate.setup import Setup
from zero_mini.simulate.values import Values
from zero_mini.trainer.gpt import GPT, GPTConfig, init_rule
from zero_mini.trainer.text import load
from zero_mini.update.loss_scale import LossScaler
from zero_mini.wire.throttled import ThrottledComm
from zero_mini.zeroify import zeroify

if TYPE_CHECKING:
    from zero_mini.course.plots.holdings import Holding, Layout
    from zero_mini.course.plots.moments import Story

CONFIG = GPTConfig(L=4, d=64, heads=4, T=32)
N = 2


def model_and_batch(config: GPTConfig = CONFIG, batch: int = 4) -> tuple[GPT, torch.Tensor, torch.Tensor]:
    """The same model everywhere, other tokens on each rank: inputs and targets, each (batch, T)."""
    torch.manual_seed(0)
    model = GPT(config)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(256, (batch, config.T + 1))
    return model, tokens[:, :-1], tokens[:, 1:]


# --- bytes ------------------------------------------------------------------------------------


@cache
def holdings_of(stages: tuple[int, ...]) -> tuple[Layout, dict[int, list[Holding]]]:
    """The layout of block 0, and stage -> what both ranks hold of it after a backward in bf16."""
    from zero_mini.course.plots.holdings import holdings, layout

    def one(stage: int):
        model, inputs, targets = model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zeroify(model, optimizer, stage=stage, dtype=torch.bfloat16)
        for step in (optimizer.step, lambda: None):  # a step makes Adam's states; then look after a backward
            optimizer.zero_grad()
            model(inputs, targets).backward()
            step()
        zero.wait()
        return layout(zero.units[1]), holdings(zero, zero.units[1])

    found = run(lambda: [one(stage) for stage in stages], N)
    flat = found[0][0][0]
    return flat, {stage: [held for rank in found for held in rank[at][1]] for at, stage in enumerate(stages)}


@cache
def stories_of_checkpointing() -> dict[str, Story]:
    """A step of stage 3 with all activations kept, and with every block's computed again."""
    from zero_mini.course.plots.moments import last_step
    from zero_mini.memory.recorder import Recorder

    def record(every: int) -> Story:
        with Recorder(device="cpu") as recorder:
            model, inputs, targets = model_and_batch(GPTConfig(L=8, d=64, heads=4, T=64), batch=8)
            if every:
                checkpoint_blocks(model, every)
            optimizer = torch.optim.AdamW(model.parameters())
            recorder.follow(zeroify(model, optimizer, stage=3))
            for _ in range(2):
                recorder.mark("forward")
                loss = model(inputs, targets)
                recorder.mark("backward")
                loss.backward()
                del loss
                recorder.mark("step")
                optimizer.step()
                optimizer.zero_grad()
                recorder.mark("end")
        return last_step(recorder).thinned()

    kept, again = run(lambda: [record(0), record(1)], N)[0]
    return {"all kept": kept, "every block again": again}


# --- precision --------------------------------------------------------------------------------


@cache
def exponents_of_gradients(steps: int = 100) -> dict[str, dict[int, int]]:
    """Of a batch of 4096 tokens after some steps on Python's reference, on one process; kind -> its exponents."""
    from zero_mini.course.plots.exponents import exponents

    torch.manual_seed(0)
    text, model, seen = load().long(), GPT(CONFIG), []
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for step in range(steps + 1):
        first = torch.randint(len(text) - CONFIG.T, (8 if step < steps else 128, 1))
        tokens = text[first + torch.arange(CONFIG.T + 1)]
        seen.clear()
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        if step < steps:
            optimizer.step()
    of_parameters = [p.grad for p in model.parameters()]
    return {"of activations": exponents(seen), "of parameters": exponents(of_parameters)}


@cache
def loss_scales() -> list[tuple[float, bool]]:
    """(scale, was the step taken?) of 30 steps in fp16 that begin with a scale of 2^24, far too large."""

    def train():
        model, inputs, targets = model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = LossScaler(2.0**24, growth_interval=6)
        zero = zeroify(model, optimizer, stage=2, dtype=torch.float16, scaler=scaler)
        seen = []
        for _ in range(30):
            scale = zero.scaler.scale
            zero.scale(model(inputs, targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((scale, zero.stepped))
        return seen

    return run(train, N)[0]


# --- the wire ---------------------------------------------------------------------------------

BLOCKS, BLOCK_D, WIRE_MS = 8, 128, 8  # equal blocks; the link takes so long for a gather or a reduction of one


class Clock:
    """Time that passes when somebody sleeps, and not otherwise: what comes out is the same on every machine."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Busy(torch.autograd.Function):
    """Takes some seconds in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, seconds: float, compute: Callable) -> torch.Tensor:
        ctx.seconds, ctx.compute = seconds, compute
        compute(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        ctx.compute(2 * ctx.seconds)
        return grad, None, None


class BusyBlock(nn.Linear):
    """A block that computes for so long."""

    def __init__(self, seconds: float, compute: Callable) -> None:
        super().__init__(BLOCK_D, BLOCK_D, bias=False)
        self.seconds, self.compute = seconds, compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Busy.apply(super().forward(x), self.seconds, self.compute)


class Traced(ThrottledComm):
    """Notes when its link carries what, as (rank, lane, label, start, end) in ms."""

    def launch(self, kind: str, unit: str, *what):
        launched = super().launch(kind, unit, *what)
        end = self.link.free_at
        start = end - self.link.seconds(self.ledger.calls[-1], self.world_size)
        self.spans.append((self.rank, "wire", f"{kind} {unit}", 1e3 * start, 1e3 * end))
        return launched


@cache
def steps_on_a_slow_link(*blocks_ms: float) -> list[tuple[list[Span], float]]:
    """The second step at stage 3, its spans and its ms, for each time that a block computes in forward."""

    def step(ms: float) -> tuple[list[tuple], float]:
        clock = Clock()
        comm = Traced(bytes_per_s=BLOCK_D**2 * 4 / 2 / (1e-3 * WIRE_MS), clock=clock, sleep=clock.sleep)
        comm.spans = []

        def compute(seconds: float) -> None:
            comm.spans.append((comm.rank, "compute", "matmul", 1e3 * clock.now, 1e3 * (clock.now + seconds)))
            clock.sleep(seconds)

        model = nn.Sequential(*(BusyBlock(1e-3 * ms, compute) for _ in range(BLOCKS)))
        zero = zeroify(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, comm=comm)
        for _ in range(2):
            begun = 1e3 * clock.now
            model(torch.ones(2, BLOCK_D)).sum().backward()
            zero.optimizer.step()
            zero.optimizer.zero_grad()
            zero.wait()
        shown = [(*what, start - begun, end - begun) for *what, start, end in comm.spans if end > begun]
        return shown, 1e3 * clock.now - begun

    found = run(lambda: [step(ms) for ms in blocks_ms], N)[0]
    return [([Span(*row) for row in rows], ms) for rows, ms in found]


# --- absent ranks -----------------------------------------------------------------------------


@cache
def first_losses(world_size: int = 64) -> dict[str, tuple[float, int | None]]:
    """The first loss of a small GPT at stage 3 in fp32, and bytes of states: on real ranks, and alone in two ways."""
    setup = Setup(CONFIG, world_size=world_size, precision="fp32", checkpoint=False)

    def real() -> float:
        values = Values(partial(init_rule, L=CONFIG.L))
        with torch.device("meta"):
            model = GPT(CONFIG, setup.loss_chunks)
        zero = zeroify(model, torch.optim.AdamW(model.parameters()), 3, device="cpu", initialise=values.initialise)
        return setup.training().compute(zero).item()

    found: dict[str, tuple[float, int | None]] = {f"{N} real ranks": (run(real, N)[0], None)}
    for name, own_slice in {"Absent": False, "OwnSlice": True}.items():
        result = replace(setup, own_slice=own_slice).run(steps=1)[1]
        found[f"rank 0 of {world_size}, {name}"] = result["losses"][0], result["states_bytes"]
    return found


# --- bugs -------------------------------------------------------------------------------------


@contextlib.contextmanager
def sums_for_means() -> Iterator[None]:
    """A bug that is easily made: nobody divides by N."""
    right = Comm._prepare_mean
    Comm._prepare_mean = lambda self, buffer: dist.ReduceOp.SUM
    try:
        yield
    finally:
        Comm._prepare_mean = right


@cache
def losses_of_sums_for_means(optimizer: str) -> dict[str, list[float]]:
    """Losses of 40 steps at stage 2, right and with gradients summed over ranks: "AdamW", or "SGD" with momentum."""

    def losses() -> list[float]:
        model, inputs, targets = model_and_batch()
        if optimizer == "AdamW":
            built = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            built = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        zeroify(model, built, stage=2)
        seen = []
        for _ in range(40):
            loss = model(inputs, targets)
            loss.backward()
            built.step()
            built.zero_grad()
            seen.append(loss.item())
        return seen

    def both():
        right = losses()
        with sums_for_means():
            return right, losses()

    right, wrong = run(both, N)[0]
    return {"mean over ranks": right, "sum over ranks": wrong}
