"""Offload: the same training with the optimizer's states elsewhere, to the bit where all of it is on a CPU."""

import errno
import gc
import itertools
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import Forked
from models import ZOO
from parity import CastDDP, Loop, TorchDDP, agree, parity
from says import tells
from test_train_gpt import REPOSITORY, SCRIPT, TINY, refusal, said
from torch import nn

from zero_mini.checkpoint.sharded import Checkpoints, load
from zero_mini.train_gpt import main
from zero_mini.trainer.gpt import GPT, GPTConfig
from zero_mini.update.loss_scale import LossScaler
from zero_mini.zeroify import zeroify

STAGES = (1, 2, 3)
CONFIG = GPTConfig(L=3, d=32, heads=2, vocab=64, T=16)


def parities(cases: list, loops: list[Loop], reference: type = TorchDDP) -> list[str]:
    found = []
    for case in cases:
        for loop in loops:
            found += [f"{loop}: {difference}" for difference in parity(case, loop, STAGES, reference)]
    return found


# --- against torch DDP, and against the same stage without offload --------------------------------


MODELS = (  # whose updates differ from each other's; a block that is computed again is updated as any other
    *("plain blocks", "tied embedding and head", "frozen", "unused on some ranks", "odd sizes", "0-dim and 0-element"),
    *("ranks start differently", "unit called twice", "order changes", "checkpoint, re-entrant"),
)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_as_under_torch_ddp(ranks, name):
    assert agree(ranks(2).run(parities, [ZOO[name]], [Loop("AdamW", offload="host", watch=False)]))


@pytest.mark.parametrize("world_size", [1, 4])
def test_on_other_numbers_of_ranks_too(ranks, world_size, tmp_path):
    loop = Loop("AdamW", steps=2, offload="host" if world_size == 1 else str(tmp_path))
    assert agree(ranks(world_size).run(parities, [ZOO["tied embedding and head"]], [loop]))


@pytest.mark.parametrize(
    "loop",
    [
        Loop("SGD", steps=2, micro_batches=3, no_sync=True),
        Loop("AdamW", steps=2, micro_batches=3),
        Loop("SGD", clip=(0.05, 2.0)),
        Loop("AdamW", evaluate=True, watch=False, merge=30),
    ],
    ids=["no_sync", "micro-batches", "clip", "undisturbed"],
)
def test_every_loop_trains_as_under_torch_ddp(ranks, loop, tmp_path):
    """At the host, micro-batches and clipping are in the next test."""
    if loop.micro_batches == 1 and loop.clip is None:
        assert agree(ranks(2).run(parities, [ZOO["frozen"]], [replace(loop, offload="host")]))
    assert agree(ranks(2).run(parities, [ZOO["tied embedding and head"]], [replace(loop, offload=str(tmp_path))]))


def test_means_that_are_added_late_are_waited_for(ranks):
    def work(loops: list[Loop]) -> list[str]:
        from zero_mini.update.offload import Offload

        add = Offload.add

        def late(self, *args):
            time.sleep(0.02)
            add(self, *args)

        Offload.add = late
        try:
            return parities([ZOO["tied embedding and head"]], loops)
        finally:
            Offload.add = add

    loops = [Loop("AdamW", steps=2, micro_batches=3), Loop("SGD", steps=2, micro_batches=2, clip=(0.05, 2.0))]
    assert agree(ranks(2).run(work, [replace(loop, offload="host") for loop in loops]))


@pytest.mark.parametrize("place", ["host", "disk"])
def test_in_bf16_it_is_torch_ddp_of_a_cast_copy(ranks, place, tmp_path):
    place, names = ("host", ("SGD", "AdamW")) if place == "host" else (str(tmp_path), ("AdamW",))
    loops = [Loop(name, compute_dtype=torch.bfloat16, offload=place) for name in names]
    assert agree(ranks(2).run(parities, [ZOO["plain blocks"]], loops, CastDDP))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


OPTIMIZERS = {
    "AdamW": adamw,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    "two groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    ),
}


class Training:
    """A small GPT in training, with what a test wants to see of it."""

    def __init__(self, stage: int, offload: str | None, make=adamw, dtype=torch.bfloat16, scaler=None):
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        self.optimizer = make(self.model)
        options = {} if scaler is None else {"scaler": scaler}
        self.zero = zeroify(self.model, self.optimizer, stage=stage, dtype=dtype, offload=offload, **options)
        self.losses, self.skipped = [], 0

    def backward(self, number: int) -> None:
        torch.manual_seed(1000 * number + dist.get_rank())
        tokens = torch.randint(CONFIG.vocab, (2, CONFIG.T + 1))
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        self.losses.append(loss.item())
        self.zero.scale(loss).backward()

    def step(self, number: int, clip: float | None = 0.1) -> None:
        self.backward(number)
        if clip:
            self.losses.append(self.zero.clip_grad_norm_(clip).item())
        self.optimizer.step()
        self.skipped += not self.zero.stepped
        self.optimizer.zero_grad()

    def outcome(self) -> list[torch.Tensor]:
        state = self.zero.state_dict()
        states = [entry[key] for entry in state["optimizer"].values() for key in sorted(entry)]
        tensors = [value for value in states if isinstance(value, torch.Tensor)]
        losses = torch.tensor(self.losses).nan_to_num(7.0)  # an overflow's norm is NaN
        return [losses, torch.tensor(self.skipped), *state["model"].values(), *tensors]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer_does_what_it_does_without_offload(ranks, name, tmp_path):
    """The first at all stages and in two precisions: the stages update in one way, whatever the optimizer is."""
    every = itertools.product(STAGES, (torch.float32, torch.bfloat16)) if name == "AdamW" else [(2, torch.bfloat16)]

    def work(make: Callable, folder: str, combinations: list) -> list[str]:
        found = []
        for stage, dtype in combinations:
            runs = {}
            for place in (None, "host", folder):
                training = Training(stage, place, make, dtype)
                for number in range(3):
                    training.step(number, clip=None if number == 2 else 0.1)
                runs[place] = training.outcome()
            found += [f"{place}, stage {stage}, {dtype}" for place in runs if not same(runs[None], runs[place])]
        return found

    assert agree(ranks(2).run(work, OPTIMIZERS[name], str(tmp_path), list(every)))


def test_in_fp16_the_same_steps_are_skipped(ranks, tmp_path):
    def work(folder: str) -> list[str]:
        found = []
        for stage in STAGES:
            runs = {}
            for place in (None, "host", folder):
                training = Training(stage, place, dtype=torch.float16, scaler=LossScaler(scale=2.0**24))
                for number in range(12):
                    training.step(number)
                assert 0 < training.skipped < 12
                runs[place] = training.outcome()
            found += [f"{place}, stage {stage}" for place in runs if not same(runs[None], runs[place])]
        return found

    assert agree(ranks(2).run(work, str(tmp_path)))


class Counting(torch.optim.Optimizer):
    """A user's own: elementwise, but it counts how often it is called."""

    def __init__(self, params):
        self.calls = 0
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"] / self.calls)


def test_an_optimizer_that_is_not_known_is_called_once_a_step_or_refused(ranks, tmp_path):
    def work(folder: str) -> str:
        weights = []
        for place in (None, "host"):
            torch.manual_seed(0)
            model = GPT(CONFIG)
            optimizer = Counting(model.parameters())
            zero = zeroify(model, optimizer, 2, offload=place, elementwise=True)
            for number in range(2):
                torch.manual_seed(number)
                tokens = torch.randint(CONFIG.vocab, (2, CONFIG.T + 1))
                model(tokens[:, :-1], tokens[:, 1:]).backward()
                zero.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.calls == 2
            weights.append(list(model.state_dict().values()))
        assert same(*weights)
        model = GPT(CONFIG)
        with pytest.raises(ValueError) as refusal:
            zeroify(model, Counting(model.parameters()), 2, offload=folder, elementwise=True)
        return str(refusal.value)

    assert tells(ranks(2).run(work, str(tmp_path))[0], "Counting")


def test_states_move_between_places_stages_and_numbers_of_ranks(ranks, tmp_path):
    def save(stage: int, place: str | None) -> dict:
        training = Training(stage, place)
        for number in range(2):
            training.step(number)
        return training.zero.state_dict()

    def load(stage: int, place: str | None, state: dict) -> dict:
        training = Training(stage, place)
        training.step(7)  # other values, and states, than those that come
        training.zero.load_state_dict(state)
        found = training.zero.state_dict()
        training.step(2)
        return found | {"losses": training.losses[-2:]}

    losses = {}
    for stage, place, other in [(3, "host", None), (1, "disk", "host"), (2, None, "disk"), (3, "disk", "disk")]:
        folders = [
            tmp_path / f"{stage}-{place}-{number}" for number in range(3)
        ]  # a pool's last handle lives until the next
        for folder in folders:
            folder.mkdir()
        state = ranks(2).run(save, stage, str(folders[0]) if place == "disk" else place)[0]
        for world_size in (1, 2):
            to = str(folders[world_size]) if other == "disk" else other
            for found in ranks(world_size).run(load, 4 - stage, to, state):
                for key in ("model", "optimizer"):
                    assert str(found[key]) == str(state[key])  # names, values
                losses.setdefault(world_size, []).append(found["losses"])
    for of_one_size in losses.values():
        norms = {norm for _, norm in of_one_size}
        assert len(norms) == 1


# --- what it costs --------------------------------------------------------------------------------


def test_what_is_sent_between_ranks_is_what_the_stage_sends(ranks, tmp_path):
    def work(folder: str) -> bool:
        for stage in STAGES:
            pages = []
            for place in (None, "host", folder):
                training = Training(stage, place)
                for number in range(2):
                    training.step(number)
                pages.append(training.zero.ledger)
            assert pages[0] == pages[1] == pages[2]
        return True

    assert all(ranks(2).run(work, str(tmp_path)))


@pytest.mark.parametrize("world_size", [1, 4])
def test_bytes_are_those_of_the_table(ranks, world_size, tmp_path):
    """update/offload.py: 2 or 2/N of parameters stay, 14/N are at the host; disk.py: 24/N in files, 2/N at the host."""

    def work(folder: str) -> list[str]:
        found, N = [], dist.get_world_size()
        for stage in STAGES:
            for place in ("host", folder):
                training = Training(stage, place)
                training.step(0)
                training.step(1)
                training.backward(2)
                zero = training.zero
                P = sum(unit.P for unit in zero.units)
                device, host = zero.memory("device"), zero.memory("host")
                slots = device["communication"]
                expected = {
                    "device parameters": (device["parameters"], 2 * P / N if stage == 3 else 2 * P),
                    "device gradients": (device["gradients"], 0),
                    "device optimizer": (device["optimizer"], 0),
                    "host gradients": (host["gradients"], 2 * P / N + 4 * max(unit.S for unit in zero.units)),
                }
                steps = 4 * len({id(v) for s in training.optimizer.state.values() for v in s.values() if v.dim() == 0})
                if place == "host":
                    expected["host optimizer"] = (host["optimizer"], 12 * P / N + steps)
                else:
                    nothing = 4 * sum(1 + 3 * len(unit.pieces) for unit in zero.units)
                    expected["disk"] = (zero.memory("disk")["optimizer"], 24 * P / N)
                    assert host["optimizer"] <= nothing
                assert sum(zero.memory().values()) == sum(device.values()) + sum(host.values())
                assert (slots > 0) is (stage == 3)
                found += [f"stage {stage}, {name}: {a} and {b}" for name, (a, b) in expected.items() if a != b]
        return found

    assert agree(ranks(world_size).run(work, str(tmp_path)))


def test_three_units_at_most_are_in_memory(ranks, tmp_path):
    def work(folder: str) -> int:
        from zero_mini.update.disk import StateFiles

        training = Training(2, folder)
        training.step(0)
        alive: list[weakref.ref] = []
        most = 0
        read = StateFiles.read

        def counting(self, name, tensors):
            nonlocal most
            alive.append(weakref.ref(tensors[0]))
            most = max(most, sum(reference() is not None for reference in alive))
            return read(self, name, tensors)

        StateFiles.read = counting
        try:
            training.step(1)
        finally:
            StateFiles.read = read
        assert len(alive) == len(training.zero.units) == 4
        return most

    assert ranks(1).run(work, str(tmp_path))[0] <= 3


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_cannot_be_written_is_not_taken_on_any_rank_and_can_be_repeated(ranks, stage, failing, tmp_path):
    """In the first step and in a later one; the disk of one rank alone is full, in the midst of the units."""

    def work(folder: str) -> list[str]:
        from zero_mini.update.disk import StateFiles

        write = StateFiles.write
        left = 0

        def full(self, name, tensors):
            nonlocal left
            left -= 1
            if left == 0 and dist.get_rank() == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(self, name, tensors)

        expected = Training(stage, "host")
        training = Training(stage, folder)
        messages = []
        StateFiles.write = full
        try:
            for number in range(3):
                expected.step(number)
                before = None if number == 0 else training.outcome()[2:]
                training.backward(number)
                training.losses.append(training.zero.clip_grad_norm_(0.1).item())
                left = 3 if number != 1 else 0
                if left:
                    with pytest.raises(RuntimeError) as error:
                        training.optimizer.step()
                    messages.append(str(error.value))
                    if before is not None:
                        assert same(before, training.outcome()[2:])
                training.optimizer.step()
                training.optimizer.zero_grad()
        finally:
            StateFiles.write = write
        assert same(expected.outcome(), training.outcome())
        return messages

    for messages in ranks(2).run(work, str(tmp_path)):
        assert len(messages) == 2
        for message in messages:
            assert tells(message, f"rank {failing}", tmp_path, "No space left on device")


@pytest.mark.parametrize("stage", STAGES)
def test_an_addition_whose_wait_was_interrupted_is_not_left_to_the_next_gradients(ranks, stage):
    """A Ctrl-C while zero_grad() waits for the last addition; then zero_grad() again, and training goes on."""

    def work() -> bool:
        from zero_mini.update.offload import Offload

        add, may_add, waits = Offload.add, threading.Event(), 0

        def held_back(self, total, mean, event):
            if mean is self.landing[self.zero.units[0]]:
                may_add.wait(60)
            add(self, total, mean, event)

        def interrupted_once() -> None:
            nonlocal waits
            waits += 1
            if waits == 1:
                raise KeyboardInterrupt
            may_add.set()
            wait()

        expected, training = Training(stage, None), Training(stage, "host")
        Offload.add = held_back
        try:
            for one in (expected, training):
                one.backward(0)
                one.backward(1)
            falling, root = training.zero.update.falling, training.zero.units[0]
            wait, falling[root] = falling[root], interrupted_once
            with pytest.raises(KeyboardInterrupt):
                training.optimizer.zero_grad()
            for one in (expected, training):
                one.optimizer.zero_grad()
                one.backward(2)
                one.backward(3)
            may_add.set()
            for one in (expected, training):
                one.step(4)
        finally:
            Offload.add = add
        return same(expected.outcome(), training.outcome())

    assert all(ranks(2).run(work))


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_step_is_not_taken_without_a_mean_that_could_not_be_added(ranks, place, tmp_path):
    """Neither at once nor when it is called again."""

    def work(place: str) -> list[str]:
        from zero_mini.update.offload import Offload

        def fails(self, total, mean, event):
            if mean is self.landing[self.zero.units[-1]]:
                raise RuntimeError("this mean is lost")
            add(self, total, mean, event)

        training, add, messages = Training(2, place), Offload.add, []
        before = training.outcome()
        training.backward(0)
        Offload.add = fails
        try:
            training.backward(1)
        finally:
            Offload.add = add
        for _ in range(2):
            with pytest.raises(RuntimeError) as error:
                training.optimizer.step()
            messages.append(str(error.value))
        training.losses = []
        assert same(before, training.outcome())
        return messages

    for messages in ranks(2).run(work, "host" if place == "host" else str(tmp_path)):
        assert messages == ["this mean is lost"] * 2


def test_a_folder_that_is_taken_away_is_a_clear_error(ranks, tmp_path):
    def work(folder: str) -> tuple[str, str]:
        training = Training(2, folder)
        training.step(0)
        for file in Path(folder, f"states-of-rank-{dist.get_rank()}").iterdir():
            file.unlink()
        training.backward(1)
        with pytest.raises(RuntimeError) as in_step:
            training.optimizer.step()
        with pytest.raises(RuntimeError) as in_reading:
            training.zero.state_dict()
        return str(in_step.value), str(in_reading.value)

    for in_step, in_reading in ranks(2).run(work, str(tmp_path)):
        assert "No such file or directory" in in_step and str(tmp_path) in in_step
        assert "No such file or directory" in in_reading


def test_a_disk_that_is_really_full(tmp_path):
    """A limit on the size of files stands for it: the trainer ends in one line."""
    limited = tmp_path / "limited.py"
    limited.write_text(
        f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (60 * 1024, 60 * 1024))
runpy.run_path({str(REPOSITORY / SCRIPT)!r}, run_name="__main__")
"""
    )
    code, _, err = Forked(tmp_path, limited, *TINY, "--steps", "3", "--offload", tmp_path).finish()
    assert code == 2
    (line,) = said(err)
    assert tells(line, "rank 0", tmp_path, "File too large")


def refusal_of(folder: str, stage: int = 2, **options) -> str:
    model = GPT(CONFIG)
    with pytest.raises(ValueError) as error:
        zeroify(model, adamw(model), stage, offload=folder, **options)
    return str(error.value)


def test_what_cannot_be_is_refused_on_every_rank(ranks, tmp_path):
    def work(folder: str) -> dict[str, str]:
        found = {"stage 0": refusal_of("host", stage=0), "missing": refusal_of(folder + "/none")}
        model = GPT(CONFIG)
        with pytest.raises(ValueError) as error:
            zeroify(model, torch.optim.Adam(model.parameters(), capturable=True), 2, offload="host")
        found["capturable"] = str(error.value)
        failing = dist.get_rank() == 1
        patches = {
            "read-only": (os, "access", lambda *_: not failing),
            "small": (shutil, "disk_usage", lambda _: SimpleNamespace(free=7)),
        }
        for name, (owner, attribute, value) in patches.items():
            original = getattr(owner, attribute)
            setattr(owner, attribute, value)
            try:
                found[name] = refusal_of(folder)
            finally:
                setattr(owner, attribute, original)
        first = Training(1, folder)
        found["in use"] = refusal_of(folder)
        assert first.zero.sharded == ("optimizer",)
        return found

    first, second = ranks(2).run(work, str(tmp_path))
    assert tells(first["stage 0"], "1, 2 or 3")
    assert tells(first["missing"], tmp_path / "none")
    assert "capturable" in first["capturable"]
    assert tells(first["read-only"], "rank 1", "offload") and tells(second["read-only"], "offload", tmp_path)
    assert tells(first["small"], 7)
    assert str(tmp_path) in first["in use"]


def test_the_folder_says_what_it_holds_and_is_empty_afterwards(ranks, tmp_path):
    def work(folder: str) -> tuple[str, list[str]]:
        training = Training(3, folder)
        training.step(0)
        own = Path(folder, f"states-of-rank-{dist.get_rank()}")
        return (own / "README.txt").read_text(), sorted(file.name for file in own.iterdir())

    def nothing_left() -> bool:
        gc.collect()
        return True

    for rank, (text, names) in enumerate(ranks(2).run(work, str(tmp_path))):
        assert tells(text, f"rank {rank}", 2, "GPT", 4)
        assert names == sorted(
            ["README.txt", "lock", *(f"{unit}.{generation}" for unit in range(4) for generation in (0, 1))]
        )
    assert all(ranks(2).run(nothing_left))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_job_left_is_removed_by_the_next(alone, capsys, tmp_path, tmp_path_factory):
    arguments = [*TINY, "--offload", str(tmp_path)]
    said_by_job = tmp_path_factory.mktemp("job")
    job = Forked(said_by_job, REPOSITORY / SCRIPT, *arguments, "--steps", "100000")
    second_generation = tmp_path / "states-of-rank-0" / "1.1"
    deadline = time.monotonic() + 60
    while not second_generation.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    refused = refusal(capsys, *arguments, "--steps", "1")
    dist.destroy_process_group()
    job.process.kill()
    job.finish()
    assert str(tmp_path) in refused
    assert second_generation.exists()
    main([*arguments, "--steps", "1"])
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_the_trainer_shows_where_bytes_are(alone, capsys, tmp_path):
    for place, columns in (("host", ["device", "host"]), (str(tmp_path), ["device", "host", "disk"])):
        main([*TINY, "--steps", "2", "--offload", place])
        shown = capsys.readouterr().out
        (header,) = [line for line in shown.splitlines() if line.startswith("rank 0")]
        assert header.split()[5:] == columns


def test_the_trainer_refuses_what_cannot_be_offloaded(alone, capsys, tmp_path):
    assert tells(refusal(capsys, *TINY, "--stage", "0", "--offload", "host"), "--offload", 0, "--stage 1, 2 or 3")
    assert tells(refusal(capsys, *TINY, "--offload", str(tmp_path / "none")), tmp_path / "none")


def test_a_checkpoint_goes_on_to_the_bit_at_any_place(ranks, tmp_path):
    def work(folder: str) -> list[str]:
        found = []
        for stage, place, other in [(1, "host", "disk"), (2, "disk", "host"), (3, "disk", "disk"), (3, None, "host")]:
            folders = {"host": "host", "disk": f"{folder}/{stage}-{place}", None: None}
            if dist.get_rank() == 0:
                Path(folders["disk"]).mkdir()
            dist.barrier()
            training = Training(stage, folders[place])
            for number in range(2):
                training.step(number)
            saved = Checkpoints(Path(folder, f"saved-{stage}-{place}"), training.zero)
            saved.save(2, {})
            saved.close()
            training.losses = []
            training.step(2)
            expected = training.outcome()
            del training, saved
            again = Training(stage, folders[other])
            again.step(7)
            assert load(Path(folder, f"saved-{stage}-{place}"), again.zero).step == 2
            again.losses = []
            again.step(2)
            found += [] if same(expected, again.outcome()) else [f"stage {stage}, {place} to {other}"]
        return found

    assert agree(ranks(2).run(work, str(tmp_path)))
