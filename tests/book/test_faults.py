"""When one rank dies, raises, is late or goes another way, the others leave, and say which rank it was and where.

Every fault is a real one, in real processes on gloo. What the others said is row by row in
tests/FAILURES.md.
"""

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forked import job_of_two
from says import tells
from test_train_gpt import REPOSITORY, SCRIPT, TINY, free_port
from test_train_gpt import said as said_by_trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zero_mini.course.ranks import RankError, run
from zero_mini.trainer.launch import OwnRefusal, Place, open_store
from zero_mini.wire.lost_ranks import Whereabouts
from zero_mini.zeroify import zeroify

STAGES = (0, 1, 2, 3)
N = 3
WIDTH = 8
TIME_OUT_S = 2.0  # of collectives
WITHIN_S = 15.0
AT = 2  # the step in which it happens; zeroify() closes page 0 of the ledger, so there it is step 3

Fault = Callable[["Job"], None]


class NoMoreBatches(Exception):
    """A rank's data has come to its end."""


class Chain(nn.Module):
    """Blocks of one size and one that is larger, before a layer of the root."""

    def __init__(self):
        super().__init__()
        widths = [WIDTH, WIDTH, WIDTH, WIDTH, 4 * WIDTH]
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.leave = nn.Linear(widths[-1], 2)
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return self.leave(nn.functional.pad(x, (0, self.leave.in_features - x.shape[1])))


class Job:
    """A training on N ranks whose collectives have little patience."""

    def __init__(self, stage: int, world_size: int):
        group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=TIME_OUT_S))
        torch.manual_seed(0)
        self.model = Chain()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.zero = zeroify(self.model, self.optimizer, stage=stage, group=group)

    def train(self, fault: Fault, culprit: int) -> None:
        for step in range(AT + 2):
            if step == AT and dist.get_rank() == culprit:
                fault(self)
            self.model(torch.randn(2, WIDTH)).sum().backward()
            self.zero.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def train(stage: int, fault: Fault, culprit: int, world_size: int) -> None:
    try:
        Job(stage, world_size).train(fault, culprit)
    except NoMoreBatches:
        return  # and the process stays


def said_by_others(stage: int, fault: Fault, culprit: int, first: str, world_size: int = N) -> dict[int, str]:
    """Let it happen. {rank: what it says} of all that lose the others; `first` is how the error of the job begins."""
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(train, world_size, stage, fault, culprit, world_size)
    assert time.monotonic() - begin < WITHIN_S
    message = str(caught.value)
    assert re.match(first, message), message
    found = re.findall(r"^ranks? ([\d, ]+)\b.*LostRank: (.*)$", message, re.M)
    said = {int(rank): line for ranks, line in found for rank in ranks.split(", ")}
    assert said, message
    return {rank: without_address(said[rank]) for rank in sorted(said)}


def without_address(message: str) -> str:
    return re.sub(r" \[[\d.:]+\]:\d+", "", message)


def names_two_places(line: str) -> bool:
    """Where it waits itself, and the last that the culprit launched."""
    return all(len(re.findall(rf"\b{count} \d+", line)) >= 2 for count in ("number", "step"))


def clearest(said: dict[int, str], culprit: int) -> str:
    """Each names its own place, the culprit, and the last that the culprit launched. One at least names nobody else.

    (In a ring, a rank that the news has not reached yet is as silent as a dead one. The last to fail knows best.)
    """
    for rank, line in said.items():
        assert tells(line, f"rank {rank}", f"rank {culprit}") and names_two_places(line)
    best = [line for rank, line in said.items() if ranks_in(line) == {rank, culprit}]
    assert best, said
    return best[0]


def ranks_in(line: str) -> set[int]:
    return {int(rank) for rank in re.findall(r"\brank (\d+)", line)}


# --- a rank that is gone --------------------------------------------------------------------------


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_) -> None:
    raise KeyError("from the culprit")


MOMENTS = {
    "forward": lambda job, act: job.model.blocks[2].register_forward_pre_hook(act),
    "backward": lambda job, act: job.model.blocks[1].register_full_backward_hook(act),
    "step": lambda job, act: job.optimizer.register_step_pre_hook(act),
}


@pytest.mark.parametrize("stage", [*STAGES[:3], pytest.param(3, marks=pytest.mark.check)])
@pytest.mark.parametrize("moment", MOMENTS)
def test_when_a_rank_is_killed_the_others_leave_and_name_it(row, moment, stage):
    culprit = (stage + list(MOMENTS).index(moment)) % N  # every rank in every moment
    said = said_by_others(stage, lambda job: MOMENTS[moment](job, die), culprit, rf"rank {culprit}\b.*SIGKILL\n")
    row("faults", f"kill -9 in {moment}", stage=stage, culprit=culprit, says=clearest(said, culprit))


@pytest.mark.parametrize("moment, stage, culprit", [("forward", 3, 0), ("backward", 2, 1), ("step", 1, 2)])
def test_when_a_rank_raises_the_others_leave_and_name_it(row, moment, stage, culprit):
    def fault(job):
        MOMENTS[moment](job, fail)

    said = said_by_others(stage, fault, culprit, rf"rank {culprit}\b.*KeyError: 'from the culprit'\n")
    row("faults", f"an exception in {moment}", stage=stage, culprit=culprit, says=clearest(said, culprit))


# --- a rank that the others wait for --------------------------------------------------------------


def is_late(job: Job) -> None:
    time.sleep(60)


def has_no_more_batches(job: Job) -> None:
    raise NoMoreBatches


def test_a_rank_that_is_late_is_named_by_those_who_waited(row, stage=3, culprit=1):
    said = said_by_others(stage, is_late, culprit, r"rank \d\b.*LostRank")
    assert all("2000ms" in line for line in said.values())
    row("faults", "a rank is late", stage=stage, culprit=culprit, says=clearest(said, culprit))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_with_fewer_batches_is_named_by_those_who_have_more(row, stage):
    culprit = stage % N
    said = said_by_others(stage, has_no_more_batches, culprit, r"rank \d\b.*LostRank")
    row("faults", "a rank has fewer batches", stage=stage, culprit=culprit, says=clearest(said, culprit))


# --- a rank that goes another way -----------------------------------------------------------------


def skips_a_unit(job: Job) -> None:
    job.model.order = [0, 2, 3]


def takes_another_unit(job: Job) -> None:
    job.model.order = [1, 0, 2, 3]


def takes_a_larger_unit(job: Job) -> None:
    job.model.order = [0, 3]


def does_not_clip(job: Job) -> None:
    job.zero.clip_grad_norm_ = lambda max_norm: None


def generates_longer(job: Job) -> None:
    with torch.no_grad():
        job.model(torch.randn(2, WIDTH))


def saves_alone(job: Job) -> None:
    job.model.state_dict()


# what one rank does -> (stage, what the others launch there, what it launches)
WAYS = {
    "skips a unit": (skips_a_unit, 3, "all_gather of blocks.1", "reduce_scatter of blocks.3"),
    "gathers another unit": (takes_another_unit, 3, "all_gather of blocks.0", "all_gather of blocks.1"),
    "gathers a larger unit": (takes_a_larger_unit, 3, "all_gather of blocks.2", "all_gather of blocks.3"),
    "generates one token more": (generates_longer, 3, "all_gather of root", "all_gather of root"),
    "does not clip": (does_not_clip, 2, "zero.clip_grad_norm_()", "in a step"),
    "issues another collective": (saves_alone, 1, "", "model.state_dict()"),
}


@pytest.mark.parametrize("what", WAYS)
def test_a_rank_that_goes_another_way_is_an_error_that_names_both_ways(row, what):
    fault, stage, ours, theirs = WAYS[what]
    said = said_by_others(stage, fault, 1, "rank")
    for line in said.values():
        assert theirs in line and ours in line
        assert line.count(ours) >= 2 or ours != theirs
    row("faults", f"a rank {what}", stage=stage, culprit=1, says=next(iter(said.values())))


def test_the_trainer_leaves_with_one_line_when_rank_0_is_killed(row, tmp_path):
    """The rank that keeps the store, in which the others would look for each other."""
    argv = [*TINY, "--stage", "3", "--steps", "1000000"]
    job = job_of_two(tmp_path, free_port(), REPOSITORY / SCRIPT, argv, argv)
    while not job[0].out.exists() or "GPT of" not in job[0].out.read_text():  # training begins
        assert job[0].process.is_alive()
        time.sleep(0.05)
    job[0].process.kill()
    status, _, err = job[1].finish()
    (line,) = said_by_trainer(err)
    assert status == 2
    assert tells(line, "train_gpt.py: error:", "rank 1", "rank 0") and re.search(r"\bnumber \d+", line)
    row("faults", "kill -9 of the trainer's rank 0", stage=3, culprit=0, says=without_address(line))


def test_fsdp2_says_nothing_when_ranks_gather_different_units(ranks):
    """What is caught here is worth catching: each rank computes with halves of two weights."""

    def forward() -> list[float]:
        blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        for value, block in enumerate(blocks, start=1):
            nn.init.constant_(block.weight, value)
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        with torch.no_grad():
            return blocks[dist.get_rank()](torch.ones(4)).tolist()

    assert ranks(2).run(forward) == [[4.0, 4.0, 8.0, 8.0]] * 2


def test_a_taken_port_is_said(row):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(OwnRefusal) as caught:
            open_store(Place(0, 2, 0, 2), environ, timedelta(seconds=2))
    assert tells(str(caught.value), port, "MASTER_PORT", "--standalone")
    row("faults", "the port is taken", culprit=0, says=str(caught.value).replace(str(port), "29500"))


# --- what pages show ------------------------------------------------------------------------------


def pages(*lines: str) -> dict[tuple[int, int], str]:
    return {(7, number): line for number, line in enumerate(lines, start=1)}


@pytest.mark.parametrize(
    "read, silent, named, things",
    [
        ([pages("a", "b"), pages("a")], [1], {1}, ["a", "number 1", "step 7"]),
        ([pages("a", "b"), pages("a"), pages("a")], [1], {1}, ["a", "number 1", "step 7"]),
        ([pages("a", "b"), pages("a"), pages("a", "b")], [1, 2], {1}, ["a", "number 1", "step 7"]),
        ([pages("a", "b"), pages("a", "b", "c")], [1], {1}, ["c", "number 3", "step 7"]),
        ([pages("a", "b"), {}], [1], {1}, []),
        ([pages("a", "b"), pages("a", "c")], [], {0, 1}, ["number 2", "step 7", "b on rank 0", "c on rank 1"]),
        ([pages("a", "b"), pages("a", "b")], [], set(), []),
    ],
)
def test_the_pages_of_all_ranks_show_who_is_missing(read, silent, named, things):
    said = Whereabouts(dist.HashStore(), 0, len(read)).judge(read, (7, 2), silent)
    assert ranks_in(said) == named and tells(said, *things)


def test_pages_hold_the_last_steps_and_do_not_grow():
    store = dist.HashStore()
    here = Whereabouts(store, 0, 1)
    for step in range(4):
        here.note("all_gather of root", (step, 1))
        here.begin_page(step + 1, 0)
    assert here.read(0) == {(3, 1): "all_gather of root"}
    for number in range(1, 25_001):  # an evaluation without end
        here.note("all_gather of root", (4, number))
    assert 10_000 <= len(here.read(0)) <= 20_000 and max(here.read(0)) == (4, 25_000)
