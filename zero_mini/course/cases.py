"""Ten faults, what each of them leaves behind, and a judge for the lesson that asks for their names.

    python zero_mini/course/cases.py       plants each fault in a small training on 3 ranks, and writes what was seen
                                           to measured/cases.json: a report of an error, or a table of numbers

    from zero_mini.course.cases import NAMES, judge, seen
    print(seen(3))                         what fault 3 left behind
    judge(3, ("a rank is slow", 2))        AssertionError that says what tells the two apart; silence if it is right

Left out: GPUs; NCCL's own reports look different, and ask the same questions.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from zero_mini import zeroify
from zero_mini.comm import Comm
from zero_mini.course.lesson import recorded
from zero_mini.course.ranks import RankError, Ranks
from zero_mini.memory.recorder import Recorder
from zero_mini.trainer import text
from zero_mini.trainer.gpt import GPT, GPTConfig
from zero_mini.zero3 import Zero3

N, STEPS, TIMEOUT_S = 3, 6, 8

Answer = tuple[str, "int | None"]  # (name of the fault, the rank that has it; None: all alike)

# A name, and what the fault would show. Fewer of them were planted than are listed here.
NAMES = {
    "a rank died": "the operating system ends one process, with a signal, and others lose a connection",
    "ranks run units in another order": "two ledgers differ in the unit of one and the same entry",
    "a rank has fewer batches": "one rank has returned from its loop, and the others wait in a training step",
    "a collective under an if that asks for the rank": "every rank waits, one of them where the others never come",
    "a batch without a target": "the loss of one rank is nan in one step, with zeros as gradients; training goes on",
    "the learning rate is too high": "losses of all ranks grow together for some steps before they are inf or nan",
    "a resume repeats data": "digests of batches come back after the load, and the losses do not show it as an error",
    "every rank reads the same data": "two ranks have the same digest, and the same loss, in one and the same step",
    "a load forgets the master copy": "the loss jumps back up, to that of an untrained model, a step after the load",
    "graphs of old steps are kept": "memory after a step grows by the same number of bytes in every step",
    "the model is too large": "memory is as large in the first step as in the last, and the first step is refused",
    "a rank is slow": "one rank waits for nobody, and all others wait in every step as long as it is late",
    "the wire is slow": "all ranks wait, and about equally long",
    "nothing is prefetched": "a gather is waited for as soon as it is launched; no forward of a block is between them",
}

# The fault of each number, the rank that has it, and what in *this* observation gives it away.
FAULTS: list[tuple[str, int | None, str]] = [
    ("a collective under an if that asks for the rank", 0, "no rank has returned; look in which line each one waits"),
    ("graphs of old steps are kept", None, "take differences of successive rows"),
    ("a rank died", 2, "look at the first line, which is about a process and not about a collective"),
    ("a resume repeats data", None, "compare the column of digests before and after the load"),
    ("a rank is slow", 2, "compare the waiting times of the three ranks within a row"),
    ("ranks run units in another order", 1, "the first line has one number of one step, and two different units"),
    ("a batch without a target", 1, "look at the rows before and after the nan"),
    ("a rank has fewer batches", 1, "the first line says which ranks did not finish, and which did"),
    (
        "nothing is prefetched",
        None,
        "look at what is between each launch and its wait; the loss is that of a right run",
    ),
    ("every rank reads the same data", None, "compare the columns of the ranks within a row"),
]


def seen(number: int) -> str:
    """What fault `number` (1 to 10) left behind: a report or a table, as it was recorded."""
    return recorded("cases")["cases"][str(number)]


def judge(number: int, answer: Answer) -> None:
    """AssertionError unless `answer` is (name, rank) of fault `number`; it says what tells right and wrong apart."""
    right, rank, look = FAULTS[number - 1]
    assert isinstance(answer, tuple) and len(answer) == 2, f"case {number}: {answer!r} is not (name, rank or None)"
    assert answer[0] in NAMES, f"case {number}: {answer[0]!r} is none of the names; print(*NAMES, sep='\\n')"
    assert answer[0] == right, (
        f"case {number} is not {answer[0]!r}, which would show this: {NAMES[answer[0]]}. "
        f"That is not what you see: {look}"
    )
    whose = "no rank more than another" if answer[1] is None else f"rank {answer[1]}"
    unsure = right == "ranks run units in another order" and answer[1] is None  # two ranks differ: which one is right?
    assert answer[1] == rank or unsure, (
        f"case {number}: the name is right, but you say {whose}. Who waits is not who is the cause, "
        f"and a fault of the script that all ranks run has no rank (None): {look}"
    )


# --- what is planted ----------------------------------------------------------------------------


def begin(stage: int = 2, comm: Comm | None = None):
    torch.manual_seed(0)
    model = GPT(GPTConfig(L=3, d=32, heads=4, T=16))
    return zeroify(model, torch.optim.AdamW(model.parameters(), lr=2e-3), stage, comm=comm)


def batch(step: int, rank: int) -> torch.Tensor:
    first = (step * N + rank) * 4 * 17
    return text.load()[first : first + 4 * 17].view(4, 17).long()


def loss_of(zero, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    return zero.model(x[:, :-1], x[:, 1:] if y is None else y)


def update(zero, loss: torch.Tensor) -> float:
    loss.backward()
    zero.optimizer.step()
    zero.optimizer.zero_grad()
    return loss.item()


def digest(x: torch.Tensor) -> str:
    return f"{zlib.crc32(x.numpy().tobytes()):08x}"


def save_checkpoint(zero) -> None:
    if zero.rank == 0:
        torch.distributed.barrier()


def waits_at_a_barrier() -> None:
    zero = begin()
    for step in range(STEPS):
        update(zero, loss_of(zero, batch(step, zero.rank)))
        if step == 1:
            save_checkpoint(zero)


def dies() -> None:
    zero = begin()
    for step in range(STEPS):
        loss = loss_of(zero, batch(step, zero.rank))
        if step == 3 and zero.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        update(zero, loss)


def swaps_units() -> None:
    zero = begin(stage=3)
    if zero.rank == 1:
        blocks = zero.model.blocks
        blocks[0], blocks[1] = blocks[1], blocks[0]
    for step in range(STEPS):
        update(zero, loss_of(zero, batch(step, zero.rank)))


def ends_early() -> None:
    zero = begin()
    for step in range(STEPS - (zero.rank == 1)):
        update(zero, loss_of(zero, batch(step, zero.rank)))


def keeps_graphs() -> list[str]:
    with Recorder() as recorder:
        zero, curve = begin(), []
        rows = ["step   loss on rank 0   bytes alive on rank 0 after the step"]
        for step in range(STEPS):
            loss = update(zero, loss_of(zero, batch(step, zero.rank)))
            curve.append(loss_of(zero, batch(STEPS, zero.rank)))  # for the validation curve; .item() is missing
            rows.append(f"{step:<6} {loss:<16.3f} {recorder.live_bytes():>10,}")
    return rows


def repeats_data() -> list[str]:
    zero, rows = begin(), ["step   digest of rank 0's batch   mean loss of the ranks"]
    for step in range(2 * STEPS):
        if step == STEPS:
            saved, zero = zero.state_dict(), begin()
            zero.load_state_dict(saved)
            rows.append(f"       step {STEPS} loaded")
        x = batch(step % STEPS, zero.rank)
        rows.append(f"{step:<6} {digest(x):<25} {over_ranks(update(zero, loss_of(zero, x))).mean():.3f}")
    return rows


def over_ranks(value: float) -> torch.Tensor:
    values = torch.zeros(N)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values


class Timed:
    """A collective whose `wait` is timed."""

    def __init__(self, launched, comm):
        self.launched, self.comm = launched, comm

    def wait(self) -> None:
        start = time.perf_counter()
        self.launched.wait()
        self.comm.waited_s += time.perf_counter() - start


class TimedComm(Comm):
    waited_s = 0.0

    def launch(self, *what):
        return Timed(super().launch(*what), self)


def is_slow() -> list[str]:
    zero = begin(stage=0, comm=TimedComm())
    rows = ["step   ms that rank 0, 1, 2 waited for collectives   ms of forward and backward"]
    for step in range(STEPS):
        dist.barrier()
        start, zero.comm.waited_s = time.perf_counter(), 0.0
        if zero.rank == 2:
            time.sleep(0.06)  # a hot processor, or a slow disk
        loss_of(zero, batch(step, zero.rank)).backward()
        zero.wait()
        waited = "  ".join(f"{1e3 * each:5.1f}" for each in over_ranks(zero.comm.waited_s))
        rows.append(f"{step:<6} {waited:<46} {1e3 * (time.perf_counter() - start):6.1f}")
        zero.optimizer.step()
        zero.optimizer.zero_grad()
    return rows[:1] + rows[2:]  # the first step warms up


def has_no_target() -> list[str]:
    zero, rows = begin(), ["step   losses of rank 0, 1, 2"]
    for step in range(STEPS):
        x = batch(step, zero.rank)
        y = x[:, 1:].clone()
        if step == 3 and zero.rank == 1:
            y[:] = -100  # what cross entropy ignores: the mean of nothing
        loss = loss_of(zero, x, y)
        loss.backward()
        zero.optimizer.step()
        zero.optimizer.zero_grad()
        rows.append(f"{step:<6} " + "  ".join(f"{each:5.3f}" for each in over_ranks(loss.item())))
    return rows


class Said:
    """A collective that says when it is waited for."""

    def __init__(self, launched, line, events):
        self.launched, self.line, self.events = launched, line, events

    def wait(self) -> None:
        self.events.append(f"wait for {self.line}")
        self.launched.wait()


class Talking(Comm):
    def launch(self, kind, unit, *what):
        self.events.append(f"launch {kind} of {unit}")
        return Said(super().launch(kind, unit, *what), f"{kind} of {unit}", self.events)


def does_not_prefetch() -> list[str]:
    Zero3.prefetch, right = lambda self, unit, neighbour: None, Zero3.prefetch
    try:
        comm = Talking()
        comm.events = []
        zero = begin(stage=3, comm=comm)
        for number, block in enumerate(zero.model.blocks):
            block.register_forward_hook(
                lambda *_, number=number: comm.events.append(f"    forward of block {number} ends")
            )
        for step in range(3):
            comm.events.clear()
            loss = update(zero, loss_of(zero, batch(step, zero.rank)))
        return ["the third step on rank 0:", *comm.events, f"loss {loss:.6f}, as without the fault"]
    finally:
        Zero3.prefetch = right


def reads_the_same() -> list[str]:
    zero = begin()
    rows = ["step   digests of the batches of rank 0, 1, 2     losses of rank 0, 1, 2"]
    for step in range(STEPS):
        x = batch(step, 0)
        names: list = [None] * N
        dist.all_gather_object(names, digest(x))
        losses = "  ".join(f"{each:.3f}" for each in over_ranks(update(zero, loss_of(zero, x))))
        rows.append(f"{step:<6} {'  '.join(names)}     {losses}")
    return rows


PLANTED: list[Callable] = [
    waits_at_a_barrier,
    keeps_graphs,
    dies,
    repeats_data,
    is_slow,
    swaps_units,
    has_no_target,
    ends_early,
    does_not_prefetch,
    reads_the_same,
]


def observe(number: int) -> str:
    """Plant fault `number` and return what is seen: rank 0's rows, or the report of the error without folders."""
    with Ranks(N, timeout_s=TIMEOUT_S, device="cpu") as ranks:
        try:
            return "\n".join(ranks.run(PLANTED[number - 1])[0])
        except RankError as error:
            return without_folders(str(error))


def without_folders(report: str) -> str:
    """A report with the names of files alone, and without names that tell what was planted.

    >>> without_folders('File "/a/b/cases.py", line 3, in ends_early')
    'File "cases.py", line 3, in train'
    """
    report = re.sub(r'File "[^"]*[/\\]', 'File "', report)
    return re.sub("|".join(function.__name__ for function in PLANTED), "train", report)


def main() -> None:
    cases = {str(number): observe(number) for number in range(1, len(FAULTS) + 1)}
    machine = {"cards": 0, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    place = Path(__file__).parents[1] / "measured" / "cases.json"
    place.write_text(json.dumps({"machine": machine, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
