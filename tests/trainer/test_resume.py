"""The trainer, left alone: whatever ends it, it goes on from its last checkpoint, and to the same bits."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import torch
import torch.distributed as dist
from says import naming, tells

from zero_mini import train_gpt
from zero_mini.checkpoint.files import checkpoints
from zero_mini.checkpoint.sharded import CheckpointError
from zero_mini.trainer.launch import Place, Refusal
from zero_mini.trainer.options import parse

REPOSITORY = Path(__file__).resolve().parents[2]
# The text has 5 batches an epoch: 7 steps end in the middle of the second one.
TINY = ["--L", "1", "--width", "32", "--heads", "2", "--global-batch", "4", "--sequence-length", "16", "--steps", "7"]
TINY += ["--log-every", "2", "--sample-length", "0", "--dropout", "0.2", "--lr", "0.02", "--stage", "2"]

COSTS = ("tokens_per_s", "memory_bytes", "wire_bytes")  # a first step gathers more


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(16 * 24)))
    return path


def train(*argv: object) -> torch.Tensor | str:
    """Train on this rank: where random numbers stand after it, or why it ended."""
    options = parse([*TINY, *map(str, argv)])
    place = Place(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    try:
        train_gpt.train(options, train_gpt.prepare(options, place), place)
    except (Refusal, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return torch.get_rng_state()


def learnt(folder: Path) -> list[dict]:
    """The metrics, without what time it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in COSTS} for line in lines]


def same_weights(a: Path, b: Path) -> bool:
    """To the bit."""
    weights, others = (torch.load(folder / "weights.pt") for folder in (a, b))
    return all(torch.equal(weights[name], others[name]) for name in weights | others)


@pytest.fixture(scope="module")
def whole(ranks, text, tmp_path_factory) -> Path:
    """A run of two ranks that nothing ended, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("whole")
    (rng, other) = ranks(2).run(train, "--data", text, "--out", folder, "--save-every", 1, "--keep", 9)
    assert not torch.equal(rng, other)  # each rank has a dropout of its own
    torch.save([rng, other], folder / "rng")
    return folder


def test_a_run_that_is_stopped_anywhere_goes_on_to_the_bit(ranks, text, whole, tmp_path):
    def go_on_from_each():
        return [
            train("--data", text, "--out", tmp_path / str(step), "--resume", "auto", "--save-every", 2, *background)
            for step, background in zip(range(1, 8), 4 * [[], ["--save-in-background"]])
        ]

    assert [path.name for path in checkpoints(whole)] == [f"step-{step}" for step in range(7, 0, -1)]
    for step in range(1, 8):
        shutil.copytree(whole / f"step-{step}", tmp_path / str(step) / f"step-{step}")
        shutil.copy(whole / "metrics.jsonl", tmp_path / str(step))  # also what came after it, and half a line
        with (tmp_path / str(step) / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')
    rngs = ranks(2).run(go_on_from_each)
    expected = torch.load(whole / "rng")
    for step in range(1, 8):
        if step < 7:  # else there was nothing left to do, but to validate once more
            assert learnt(tmp_path / str(step)) == learnt(whole), step
        assert same_weights(tmp_path / str(step), whole), step
        assert all(torch.equal(rngs[rank][step - 1], expected[rank]) for rank in (0, 1)), step
    assert [path.name for path in checkpoints(tmp_path / "1")] == ["step-7", "step-6"]


def test_other_ranks_and_another_stage_go_on_with_the_same_data(ranks, text, tmp_path):
    argv = ["--data", text, "--dropout", 0, "--save-every", 3]
    ranks(2).run(train, *argv, "--out", tmp_path / "whole")
    ranks(2).run(train, *argv, "--out", tmp_path / "two", "--steps", 3)
    ranks(1).run(train, *argv, "--out", tmp_path / "one", "--resume", tmp_path / "two" / "step-3", "--stage", 3)
    losses = [[line["loss"] for line in learnt(tmp_path / run) if "loss" in line] for run in ("whole", "one")]
    assert losses[1] == pytest.approx(losses[0][1:], rel=1e-5)  # at steps 4, 6 and 7


def test_a_number_of_ranks_that_does_not_divide_the_batch_goes_on_with_another_batch(ranks, text, tmp_path):
    argv = ["--data", text, "--save-every", 3, "--out", tmp_path, "--sequence-length", 8]
    ranks(2).run(train, *argv, "--steps", 3)
    place = Place(0, 3, 0, 3)
    with pytest.raises(ValueError, match=naming(3, 6)):
        train_gpt.prepare(parse([*TINY, *map(str, argv)]), place)
    ended = ranks(3).run(train, *argv, "--resume", "auto", "--global-batch", 6)
    assert not any(isinstance(reason, str) for reason in ended)
    assert [line["step"] for line in learnt(tmp_path) if "loss" in line] == [2, 3, 4, 6, 7]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_one_rank_saves_on_all_at_one_step(ranks, text, whole, tmp_path, row, number):
    def train_until_told():
        steps, accumulate = 0, train_gpt.accumulate

        def told(*args):
            nonlocal steps
            steps += 1
            if steps == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), signal.SIGTERM)  # torchrun passes on what the terminal sent to all
            return accumulate(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "accumulate", told)
            handler = signal.getsignal(number)
            ended = train(*argv, "--save-in-background")
            assert signal.getsignal(number) == handler
        return ended

    argv = ["--data", text, "--out", tmp_path / "run", "--save-every", 100, "--resume", "auto"]
    message, other = ranks(2).run(train_until_told)
    assert message == other and tells(message, "Stopped", number.name, "step 3", "--resume auto")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-3"]
    ranks(2).run(train, *argv)
    assert learnt(tmp_path / "run") == learnt(whole) and same_weights(tmp_path / "run", whole)
    result = "all ranks save at the end of one step and leave with status 143"
    if number == signal.SIGTERM:
        row("saving", "one rank receives SIGTERM", result=result, says=message.removeprefix("Stopped: "))


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "keeps-nothing"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_a_run_in_one_line_with_the_shells_status(
    alone, capsys, monkeypatch, text, tmp_path, number, saves
):
    if number == signal.SIGTERM and not saves:
        return  # which ends the process at once
    accumulate = train_gpt.accumulate
    monkeypatch.setattr(train_gpt, "accumulate", lambda *args: (os.kill(os.getpid(), number), accumulate(*args))[1])
    keeping = ["--out", str(tmp_path), "--save-every", "100"] if saves else []
    with pytest.raises(SystemExit) as stop:
        train_gpt.main([*TINY, "--data", str(text), *keeping])
    assert stop.value.code == 128 + number
    (line,) = capsys.readouterr().err.splitlines()
    assert tells(line, "train_gpt.py: error:", number.name, "step 1")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-1"] * saves


def test_torchrun_starts_ranks_again_and_they_go_on_by_themselves(ranks, text, whole, tmp_path, row):
    (tmp_path / "killing.py").write_text(
        f"""
import os, signal, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from zero_mini import train_gpt

def dying(*args):
    global steps
    steps += 1
    if steps == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return accumulate(*args)

steps, accumulate = 0, train_gpt.accumulate
train_gpt.accumulate = dying
train_gpt.main()
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node"]
    command += ["2", tmp_path / "killing.py", *TINY, "--data", text, "--out", tmp_path / "run", "--save-every", "2"]
    threads = ranks(2).run(torch.get_num_threads)[0]  # a matrix product rounds otherwise with another number of threads
    environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([*command, "--resume", "auto"], env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "run" / "step-2") in done.stdout
    assert learnt(tmp_path / "run") == learnt(whole) and same_weights(tmp_path / "run", whole)
    row(
        "saving",
        "a rank is killed (SIGKILL) under torchrun --max-restarts",
        result="all start again and end with the bits of a run that nothing ended",
        says="goes on from DIR/step-2",
    )


# --- what does not go on ----------------------------------------------------------------------


def test_another_run_is_refused(ranks, text, whole, tmp_path, row):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("a", "b"))
    shutil.copytree(whole / "step-3", tmp_path / "run" / "step-3")
    argv = ["--data", text, "--out", tmp_path / "run", "--resume", "auto"]
    run = tmp_path / "run"
    changes = [  # what is asked for, what the refusal names; the last one begins anew
        (["--global-batch", 6], ["--global-batch", 4, run / "step-3", 6]),
        (["--lr", 0.1], ["--lr", 0.02, run / "step-3", 0.1]),
        (["--heads", 4], ["--heads", 2, run / "step-3", 4]),
        (["--data", other], ["--data", 345]),
        (["--L", 2], [run / "step-3", "blocks.1.qkv.weight", "(96, 32)"]),
        (["--resume", run / "step-9"], [run / "step-9"]),
        (["--resume", tmp_path / "nowhere"], [tmp_path / "nowhere"]),
        (None, [run / "step-3", "step 0"]),
    ]

    def tried():
        return [train(*argv, *change) if change else train(*argv[:-2]) for change, _ in changes]

    first, second = ranks(2).run(tried)
    assert first == second
    for (_, things), reason in zip(changes, first):
        assert tells(reason, *things)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lock", "step-3"]
    reason = first[0].replace(str(tmp_path / "run"), "DIR").removeprefix("Refusal: ")
    row("saving", "a run goes on with other arguments", result="refused on all ranks", says=reason)


def test_a_second_job_leaves_the_first_ones_metrics_alone(ranks, text, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("of the first")
    with filelock.FileLock(tmp_path / "lock"):
        for reason in ranks(2).run(train, "--data", text, "--out", tmp_path):
            assert tells(reason, tmp_path, "--out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == "of the first"


def test_a_state_that_is_not_finite_is_not_saved(ranks, text, tmp_path, row):
    argv = ["--data", text, "--out", tmp_path, "--save-every", 1, "--log-every", 100]
    ranks(2).run(train, *argv, "--steps", 2)

    def exploding():
        def poisoned(*args):
            return accumulate(*args) * float("nan")

        accumulate = train_gpt.accumulate
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "accumulate", poisoned)
            return train(*argv, "--resume", "auto")

    reasons = set(ranks(2).run(exploding))
    (reason,) = reasons
    assert tells(reason, "Refusal", "nan", "step 3", "rank 0", "--lr", 0.02)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-2", "step-1"]
    says = reason.removeprefix("Refusal: ")
    row("saving", "the loss is not finite", result="ends on all ranks, and is not saved", says=says)


@pytest.mark.parametrize(
    "argv, things",
    [
        ("--save-every 5", ["--save-every", "--out DIR"]),
        ("--tensorboard", ["--tensorboard", "--out DIR"]),
        ("--resume auto", ["--resume auto", "--out DIR", "--resume PATH"]),
        ("--save-in-background --out x", ["--save-in-background", "--save-every N"]),
        ("--save-every 0 --out x", ["--save-every", 1, 0]),
        ("--keep 0", ["--keep", 1, 0]),
        ("--dropout 1", ["dropout", 0, 1.0]),
    ],
)
def test_flags_that_do_not_go_together_are_refused(argv, things):
    with pytest.raises(ValueError) as refusal:
        train_gpt.prepare(parse(argv.split()), Place(0, 1, 0, 1))
    assert tells(str(refusal.value), *things)


def test_an_extra_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for flag, extra in (
        ("--tensorboard", "tensorboard"),
        ("--export-gpt2", "safetensors"),
        ("--init-from a.safetensors", "safetensors"),
    ):
        with pytest.raises(ValueError, match=naming(flag, f'pip install -e ".[{extra}]"')):
            train_gpt.prepare(parse([*flag.split(), "--out", str(tmp_path)]), Place(0, 1, 0, 1))


def test_tensorboard_has_what_metrics_have(ranks, text, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    argv = ["--data", text, "--out", tmp_path, "--save-every", 2, "--tensorboard"]
    ranks(2).run(train, *argv, "--steps", 4)
    ranks(2).run(train, *argv, "--resume", "auto")
    board = events.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for name in ("loss", "validation_loss"):
        lines = [(line["step"], line[name]) for line in learnt(tmp_path) if name in line]
        shown = [(event.step, event.value) for event in board.Scalars(name)]
        assert [step for step, _ in lines] == [step for step, _ in shown]
        assert [value for _, value in lines] == pytest.approx([value for _, value in shown])
