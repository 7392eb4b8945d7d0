"""What the package says when something is wrong, word for word: each function makes the mistake on two CPU ranks.

At the end are tables that are calculated or counted: nobody types their numbers.

Left out: line numbers and paths in tracebacks, which are those of the machine that builds the slides.
"""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from runs import CONFIG, N, first_losses, model_and_batch
from torch import nn

from zero_mini.course.lesson import recorded
from zero_mini.course.ranks import RankError, Ranks
from zero_mini.trainer.gpt import GPT
from zero_mini.zeroify import zeroify

ACROSS = 76  # characters


def whole_error_of(function: Callable[[], object], timeout_s: float = 60.0) -> str:
    """What `Ranks.run` raises."""
    try:
        with Ranks(N, timeout_s) as ranks:
            ranks.run(function)
    except RankError as error:
        return str(error)
    raise AssertionError(f"{function} was to fail")


def error_of(function: Callable[[], object]) -> str:
    """Its first line, the root cause, in lines that fit on a slide."""
    return textwrap.fill(whole_error_of(function).splitlines()[0], ACROSS)


@cache
def one_rank_late() -> str:
    """Rank 1 sleeps where its peer waits for it: the report of a deadlock, its files without their folders."""

    def program():
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(4))

    report = []
    for line in whole_error_of(program, timeout_s=5.0).splitlines():
        if found := re.match(r'  File ".*?([^/\\]+)", line \d+, in (\w+)', line):
            line = f"  {found[1]}, in {found[2]}"
        report.append(line)
    return "\n".join(report)


@cache
def other_shapes() -> str:
    """Ranks build models of different shapes."""

    def program():
        width = 64 if dist.get_rank() == 0 else 32
        model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
        zeroify(model, torch.optim.AdamW(model.parameters()))

    return error_of(program)


class Fork(nn.Module):
    """A branch that depends on the data: rank 0 takes the first of three layers, rank 1 the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2 * dist.get_rank()](x)


@cache
def other_modules() -> str:
    """Layers of one size: the ranks' collectives fit each other, and mean other things."""

    def program():
        model = Fork()
        optimizer = torch.optim.AdamW(model.parameters())
        zeroify(model, optimizer, stage=3)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    return error_of(program)


@cache
def optimizer_with_state() -> str:
    """zeroify() after the first step."""

    def program():
        model, inputs, targets = model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters())
        model(inputs, targets).backward()
        optimizer.step()
        zeroify(model, optimizer)

    return error_of(program)


@cache
def orphan() -> str:
    """A parameter that the optimizer was not given."""

    def program():
        model = GPT(CONFIG)
        zeroify(model, torch.optim.AdamW(model.blocks.parameters()))

    return error_of(program)


@cache
def gradient_read_too_early() -> str:
    """`p.grad` after a backward."""

    def program():
        model, inputs, targets = model_and_batch()
        zeroify(model, torch.optim.AdamW(model.parameters()), stage=2)
        model(inputs, targets).backward()
        return model.wte.weight.grad

    return error_of(program)


@cache
def never_finite() -> str:
    """A loss that is infinite at every scale."""
    from zero_mini.update.loss_scale import LossScaler

    def program():
        model, inputs, targets = model_and_batch()
        optimizer = torch.optim.AdamW(model.parameters())
        zero = zeroify(model, optimizer, dtype=torch.float16, scaler=LossScaler(most_in_a_row=3))
        for _ in range(5):
            zero.scale(model(inputs, targets) * float("inf")).backward()
            optimizer.step()
            optimizer.zero_grad()

    return error_of(program)


def mutants() -> str:
    """Ten of the bugs that tests/book/test_mutants.py puts in, and what the comparison with torch DDP shows of each."""
    from test_mutants import MUTANTS

    shown = {
        "grad of": "gradients",
        "param of": "parameters after the step",
        "loss": "loss of the next step",
        "norms": "norm for clipping",
        "at the start": "parameters at the start",
        "ranks have norms": "norm, other on each rank",
        "": "gradients, norm, parameters",
    }
    rows = [(name, shown[mutant.shows]) for name, mutant in MUTANTS.items()]
    chosen = [row for row in rows if row[0] in TEN]
    if len(chosen) != len(TEN):
        raise KeyError(f"test_mutants.py has no {', '.join(set(TEN) - {name for name, _ in chosen})}")
    widest = max(len(name) for name in TEN)
    return "\n".join([f"{'bug':{widest}}   shows in", *(f"{name:{widest}}   {where}" for name, where in chosen)])


TEN = (
    "gradients are summed, not averaged",
    "a shard begins one element late",
    "padding is not zeroed",
    "the last shard is not updated",
    "new values are not sent",
    "slots keep the values of the last step",
    "weight decay goes to the other group",
    "a tied weight counts twice in the norm",
    "the second gather of stage 3 is left out",
    "the slot is not waited for",
)


def days() -> str:
    """How long a training takes by 6 Psi tokens, if each GPU does what one did for 1.5B at stage 3."""
    flops, counts = 1e12 * recorded("speed")["works"]["1.5B"]["scores"]["zero-3"]["tflops"], (64, 1024, 16384, 131072)
    rows = ["parameters   N =" + "".join(f"{gpus:>10,}" for gpus in counts)]
    for name, psi in {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}.items():
        took = (6 * psi * 20 * psi / (gpus * flops) / 86400 for gpus in counts)
        rows.append(f"{name:>10}      " + "".join(f"{each:10.2g}" if each < 10 else f"{each:10,.0f}" for each in took))
    return "\n".join(rows)


def trap() -> str:
    """First losses that are true, and one that only looks true."""
    found = first_losses()
    rows = [f"{'':22}   first loss   states of the rank", f"{'ln V':22}   {math.log(CONFIG.vocab):10.6f}"]
    for name, (loss, nbytes) in found.items():
        rows.append(f"{name:22}   {loss:10.6f}" + (f"   {nbytes:,} bytes" if nbytes else ""))
    return "\n".join(rows)
