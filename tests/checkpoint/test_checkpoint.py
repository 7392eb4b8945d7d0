"""Sharded checkpoints: a resumed run is the uninterrupted one to the bit, N and stage may change, no crash or flipped
bit is taken for a checkpoint."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import filelock
import pytest
import torch
import torch.distributed as dist
from models import RARE, ZOO, Block, Case, Stack, Turn
from parity import adamw, exactly, sgd
from says import naming, tells
from torch import nn

from zero_mini.binding.units import merge_blocks
from zero_mini.checkpoint import files, sharded
from zero_mini.checkpoint.files import Hashed, checkpoints, examine, problem_of, seal, step_of
from zero_mini.checkpoint.resharding import Stored, take_out
from zero_mini.checkpoint.sharded import CheckpointError, Checkpoints, Loaded, load
from zero_mini.course.ranks import RankError, Ranks
from zero_mini.update.loss_scale import LossScaler
from zero_mini.zeroify import zeroify

DROPOUT = Case(lambda: Stack(*[Block(dropout=0.25) for _ in range(3)]))


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def nadam(model):
    return torch.optim.NAdam([p for p in model.parameters() if p.requires_grad], lr=0.01)


class Job:
    """A run, of which this is one rank."""

    def __init__(self, stage: int, case: Case = DROPOUT, optimizer=adamw, dtype=None, seed: int = 0, merge: int = 0):
        torch.manual_seed(seed)
        self.case, self.model, self.step = case, case.build(), 0
        self.optimizer = optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        scaler = LossScaler(scale=2.0**19, growth_interval=2) if dtype is torch.float16 else None
        units = merge_blocks(self.model, merge) if merge else None
        self.zero = zeroify(self.model, self.optimizer, stage, dtype=dtype, scaler=scaler, units=units)
        torch.manual_seed(100 * seed + dist.get_rank())  # each rank has a dropout of its own

    def loss(self) -> torch.Tensor:
        turn = Turn(dist.get_rank(), dist.get_world_size(), self.step)
        x, y = self.case.batch(turn, 0)
        return self.case.loss(self.model(x, turn), y)

    def train(self, steps: int) -> list[torch.Tensor]:
        with exactly():
            return [self.train_step() for _ in range(steps)]

    def train_step(self) -> torch.Tensor:
        loss = self.loss()
        self.zero.scale(loss).backward()
        self.zero.clip_grad_norm_(0.5)
        self.optimizer.step()
        if self.zero.stepped:
            self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def save(self, folder: Path, keep: int = 2, background: bool = False) -> Checkpoints:
        to = Checkpoints(folder, self.zero, keep, self.step - 1, background)
        to.save(self.step, {"schedule": self.schedule.state_dict()})
        if not background:
            to.close()
        return to

    def load(self, path: Path) -> Loaded:
        found = load(path, self.zero)
        self.schedule.load_state_dict(found.extra["schedule"])
        self.step = found.step
        return found

    def everything(self) -> dict:
        return {"whole": self.zero.state_dict(), "step": self.step, "schedule": self.schedule.state_dict()}


def differences(a: object, b: object, where: str = "", within: float = 0.0) -> list[str]:
    """Where two trees of tensors and numbers are not equal, to the bit or `within`; types included."""
    if type(a) is not type(b):
        return [f"{where} is a {type(a).__name__} and a {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        alike = (a.dtype, a.shape) == (b.dtype, b.shape)
        alike = alike and (torch.allclose(a, b, rtol=within, atol=within) if within else torch.equal(a, b))
        return [] if alike else [f"{where} differs"]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{where} has {list(a)} and {list(b)}"]
        return [found for key in a for found in differences(a[key], b[key], f"{where}.{key}", within)]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where} has {len(a)} and {len(b)} items"]
        pairs = enumerate(zip(a, b))
        return [found for index, pair in pairs for found in differences(*pair, f"{where}[{index}]", within)]
    return [] if a == b else [f"{where} is {a} and {b}"]


def refused(action: Callable, *args) -> str:
    """The reason, where this rank must refuse."""
    with pytest.raises(CheckpointError) as refusal:
        action(*args)
    return str(refusal.value)


def one_reason(reasons: list[str]) -> str:
    """The same on every rank."""
    assert len(set(reasons)) == 1, reasons
    return reasons[0]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- to go on ---------------------------------------------------------------------------------


def interrupted(folder: Path, background: bool, **options) -> tuple[list[str], int]:
    """4 steps at once; and 2, then 2 by a model and an optimizer that began elsewhere."""
    whole = Job(**options)
    expected = whole.train(4), whole.everything(), torch.get_rng_state()
    first, trained = Job(**options), threading.Event()
    before = first.train(2)
    with pytest.MonkeyPatch.context() as patch:
        if background:  # nothing is written before the next steps are done
            write = sharded.write
            patch.setattr(sharded, "write", lambda *args: trained.wait() and write(*args))
        under_way = first.save(folder, background=background)
        undisturbed = first.train(2), first.everything(), torch.get_rng_state()
        trained.set()
        under_way.close()
    second = Job(**options, seed=7)
    second.train(1)
    second.load(folder)
    resumed = second.train(2), second.everything(), torch.get_rng_state()
    found = differences(expected, (before + resumed[0], *resumed[1:]), "resumed")
    found += differences(undisturbed, resumed, "not interrupted by the save")
    return found, whole.zero.scaler.skipped if whole.zero.scaler else 0


@pytest.mark.parametrize("N, stages", [(1, (3,)), (2, (0, 1, 2, 3)), pytest.param(3, (2,), marks=pytest.mark.check)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks, tmp_path, N, stages):
    kinds = {
        "AdamW": {"optimizer": adamw},
        "SGD, buffers": {"optimizer": sgd, "case": RARE["buffers"]},
        "bf16": {"optimizer": fused_adamw, "dtype": torch.bfloat16},
        "fp16": {"optimizer": adamw, "dtype": torch.float16},
    }

    def all_kinds():
        for stage in stages:
            for index, (name, options) in enumerate(kinds.items()):
                if stage < 2 and index % 2 != stage:  # which hold whole parameters, as 2 does
                    continue
                folder = tmp_path / f"{name} {stage}"
                found, skipped = interrupted(folder, background=(stage + index) % 2 == 0, stage=stage, **options)
                assert found == [], (name, stage)
                assert (skipped > 0) == (name == "fp16"), name

    ranks(N).run(all_kinds)


def test_new_ranks_draw_random_numbers_of_their_own(ranks, tmp_path):
    def begin():
        Job(1).train(1)
        job = Job(1)
        job.train(1)
        job.save(tmp_path)
        return torch.rand(3)

    def go_on():
        Job(1, seed=3).load(tmp_path)
        return torch.rand(3)

    before = ranks(2).run(begin)
    assert not torch.equal(*before)
    for N in (1, 3):
        after, again = (ranks(N).run(go_on) for _ in range(2))
        assert differences(before[: min(N, 2)], after[:2]) == []
        assert differences(after, again) == []
        assert len({tuple(drawn.tolist()) for drawn in after}) == N


# --- any stage, any number of ranks -----------------------------------------------------------


class Awkward(nn.Module):
    """Odd sizes, a tied head, frozen, 0-dim and 0-element parameters, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in ((7, 3), (3, 7)))
        self.blocks[1].weight.requires_grad_(False)
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.empty(0, 7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        h = self.wte(tokens)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return h * self.scale @ self.wte.weight.T + (h @ self.nothing.T).sum()


def awkward(stage: int, seed: int = 0):
    """In float64, with two param groups, of which one keeps more for each element."""
    torch.manual_seed(seed)
    model = Awkward().double()
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in trained if p.ndim >= 2], "amsgrad": True}
    others = {"params": [p for p in trained if p.ndim < 2]}
    return zeroify(model, torch.optim.AdamW([matrices, others], lr=0.05, fused=True), stage)


def awkward_steps(zero, steps: range) -> list[torch.Tensor]:
    """The losses of 12 rows, however many ranks share them; 1, 2, 3 or 4 do so equally. And the loss after the last."""
    losses = []
    for step in range(steps.start, steps.stop + 1):
        rows = torch.arange(12).tensor_split(zero.world_size)[zero.rank]
        with torch.set_grad_enabled(step in steps):
            loss = nn.functional.cross_entropy(zero.model((rows * 5 + step) % 11), (rows + 3 * step) % 11)
        losses.append(loss.detach())
        if step in steps:
            loss.backward()
            zero.optimizer.step()
            zero.optimizer.zero_grad()
    return list(torch.stack(zero.comm.host.gather(torch.stack(losses))).mean(0))


def states_of(whole: dict, name: str) -> dict[str, torch.Tensor]:
    """What the optimizer keeps for each element; the whole has zeros too where a group of the unit keeps more."""
    is_matrix = whole["model"][name].ndim >= 2
    states = whole["optimizer"].get(name, {})
    return {key: value for key, value in states.items() if key != "step" and (is_matrix or key != "max_exp_avg_sq")}


def own_part(zero, whole: dict) -> list[str]:
    """What of this rank's share is not, to the bit, what it is in the `whole`."""
    taken, found = take_out(zero), []
    for name, part in taken["parts"].items():
        states = states_of(whole, name)
        for key, expected in {"master": whole["model"][name], **states}.items():
            values = part["master"] if key == "master" else part["states"][key]
            mine = expected.flatten()[part["offset"] :][: values.numel()]
            found += differences(mine, values, f"{name}.{key}")
        found += [name] * (part["states"].keys() != states.keys())
    for name, numbers in taken["numbers"].items():
        found += differences({"step": whole["optimizer"][name]["step"]}, numbers, name)
    return found + [key for key, value in taken["buffers"].items() if not torch.equal(value, whole["model"][key])]


def test_any_stage_and_any_number_of_ranks_load_what_any_number_of_ranks_saved(ranks, tmp_path):
    """The states to the bit, and a step more as the uninterrupted run takes it.

    Each number of ranks saves at one stage, another one each: files do not depend on it, as the next test shows. Each
    number of ranks loads what each saved, and so does each stage, but not each stage on each number of ranks.
    """

    def begin():
        stage = (dist.get_world_size() + 1) % 4
        zero = awkward(stage)
        awkward_steps(zero, range(2))
        place = f"{zero.world_size}-{stage}"
        Checkpoints(tmp_path / place, zero).save(2, {})
        return {place: zero.state_dict()}

    def uninterrupted():
        zero = awkward(0)
        return awkward_steps(zero, range(3))[2:]

    def go_on(saved, expected):
        for stage in range(4):
            zero = awkward(stage, seed=1)
            awkward_steps(zero, range(5, 6))
            for place, state in list(saved.items())[(stage + zero.world_size) % 2 :: 2]:
                assert load(tmp_path / place, zero).step == 2
                assert own_part(zero, state) == [], (place, stage)
                assert differences(expected, awkward_steps(zero, range(2, 3)), within=1e-9) == [], (place, stage)

    (expected,) = ranks(1).run(uninterrupted)
    saved = {place: state for N in (1, 2, 3, 4) for place, state in ranks(N).run(begin)[0].items()}
    assert len(saved) == 4
    for M in (1, 2, 3, 4):
        ranks(M).run(go_on, saved, expected)


def test_files_hold_every_element_once_whatever_the_stage(ranks, tmp_path):
    def begin():
        zero = awkward(0)
        awkward_steps(zero, range(2))
        Checkpoints(tmp_path / "0", zero).save(2, {})
        for stage in (1, 2, 3):
            other = awkward(stage, seed=1)
            load(tmp_path / "0", other)
            Checkpoints(tmp_path / str(stage), other).save(2, {})
        return zero.state_dict()

    whole, *_ = ranks(4).run(begin)
    files = [[torch.load(tmp_path / f"{stage}/step-2/rank-{rank}.pt") for rank in range(4)] for stage in range(4)]
    assert all(differences(files[0], others) == [] for others in files)
    for name, tensor in whole["model"].items():
        if name != "seen":
            found = sorted(
                (file["parts"][name] for file in files[0] if name in file["parts"]), key=lambda p: p["offset"]
            )
            assert [part["offset"] for part in found] == [0, *_ends(found)[:-1]][: len(found)]
            for key, expected in {"master": tensor, **states_of(whole, name)}.items():
                values = [part["master"] if key == "master" else part["states"][key] for part in found]
                assert torch.equal(torch.cat([torch.empty(0), *values]), expected.flatten()), (name, key)


def _ends(found: list[dict]) -> list[int]:
    return [part["offset"] + part["master"].numel() for part in found]


def saved_state(folder: Path, **options) -> dict:
    job = Job(**options)
    job.train(2)
    job.save(folder)
    return job.everything()


def loaded_state(folder: Path, **options) -> dict:
    job = Job(seed=5, **options)
    job.train(1)
    job.load(folder)
    state = job.everything()
    assert job.train(1)[0].isfinite()
    return state


class Picture(nn.Module):
    """A matrix in another memory order."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

    def forward(self, x, turn):
        return self.conv(x.mean() * torch.ones(1, 3, 3, 3)).sum()


class Lopsided(nn.Module):
    """One of two param groups has no elements: a rank has a piece for it, of padding, or not, as N will have it."""

    def __init__(self):
        super().__init__()
        self.bias, self.nothing = nn.Parameter(torch.randn(32)), nn.Parameter(torch.empty(0, 4))

    def forward(self, x, turn):
        return (x.mean() * self.bias).square().sum() + self.nothing.sum()


def test_units_precision_and_memory_order_may_be_others(ranks, tmp_path):
    alone = {"loss": lambda output, _: output}
    cases = {  # saved by two ranks, loaded by three
        "units": ({"stage": 3}, {"stage": 2, "merge": 200}),
        "bf16 to fp32": ({"stage": 3, "dtype": torch.bfloat16}, {"stage": 1}),
        "fp32 to fp16": ({"stage": 2}, {"stage": 3, "dtype": torch.float16}),
        "NAdam, frozen": ({"stage": 1, "case": ZOO["frozen"], "optimizer": nadam},) * 2,
        "channels_last": ({"stage": 1, "case": Case(Picture, **alone), "optimizer": sgd},) * 2,
    }

    def begin():
        return {name: saved_state(tmp_path / name, **options) for name, (options, _) in cases.items()}

    def go_on(saved):
        for name, (_, options) in cases.items():
            loaded = loaded_state(tmp_path / name, **options)
            for kind in ("model", "optimizer", "groups"):
                assert differences(saved[name]["whole"][kind], loaded["whole"][kind]) == [], name

    ranks(3).run(go_on, ranks(2).run(begin)[0])
    manifest = examine(tmp_path / "channels_last" / "step-2")
    assert (
        "strides (27, 1, 9, 3)" in manifest["model"]["conv.weight"] and "strides" not in manifest["model"]["conv.bias"]
    )

    def counts():
        job = Job(1, case, seed=1)
        job.load(tmp_path / "lopsided")
        job.train(1)
        return {key: states["step"].item() for key, states in job.zero.state_dict()["optimizer"].items()}

    case = Case(Lopsided, **alone)
    ranks(1).run(saved_state, tmp_path / "lopsided", stage=1, case=case)
    assert ranks(2).run(counts) == [{"bias": 3.0, "nothing": 3.0}] * 2  # a piece of padding counts its steps too


def test_a_load_is_no_part_of_a_steps_ledger(ranks, tmp_path):
    def ledger():
        saved_state(tmp_path, stage=1)
        for stage in range(4):
            plain, loading = Job(stage), Job(stage)
            plain.train(2)
            loading.train(1)
            loading.load(tmp_path)
            loading.train(1)
            assert plain.zero.ledger == loading.zero.ledger

    ranks(2).run(ledger)


def test_what_no_file_holds_is_not_made_up():
    half = {"offset": 2, "master": torch.arange(3.0), "states": {}}
    stored = Stored([{"parts": {"w": half}, "numbers": {}, "buffers": {}}])

    class Unit:
        names, shapes, offsets, groups = ["w"], [torch.Size([5])], [0], [0]

    stored.fill(target := torch.full((3,), 7.0), Unit, 3)
    assert target.tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match=naming(2, "w")):
        stored.fill(torch.zeros(5), Unit, 0)


# --- what cannot be saved ---------------------------------------------------------------------


@contextlib.contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def told(text: str, folder: Path) -> str:
    """A message without what is another one each time."""
    return re.sub(
        r"sha256 \w+\.\.\., the manifest says \w+", "sha256 X..., the manifest says Y", text.replace(str(folder), "DIR")
    )


def test_a_full_disk_is_the_same_error_on_all_ranks_and_harms_nothing(ranks, tmp_path, row):
    commit = sharded.commit

    def full(victim, limit, at_the_manifest, background):
        folder = tmp_path / f"{victim}-{limit}"
        job = Job(2)
        job.train(1)
        to = Checkpoints(folder, job.zero, background=background)
        to.save(1, {})
        expected = job.zero.state_dict()
        job.train(1)
        to.wait()
        mine = file_size_limit(limit) if dist.get_rank() == victim else contextlib.nullcontext()

        def commit_in_a_full_disk(*args):
            with mine:
                return commit(*args)

        sharded.commit = commit_in_a_full_disk if at_the_manifest else commit
        with contextlib.nullcontext() if at_the_manifest else mine:
            reason = refused(lambda: (to.save(2, {}), to.wait()))
        sharded.commit = commit
        assert dist.get_rank() > 0 or names_in(folder) == ["lock", "step-1"]
        to.save(2, {})  # there is room again
        to.close()
        other = Job(0, seed=1)
        assert load(folder / "step-1", other.zero).step == 1
        assert differences(expected, other.zero.state_dict()) == []
        return reason

    for victim, limit, name in (
        (1, 9000, "rank-1.pt"),
        (0, 0, "rank-0.pt"),
        (1, 3000, "rank-1.pt"),
        (0, 99, "manifest.json"),
    ):
        at_the_manifest = name == "manifest.json"
        reason = one_reason(ranks(2).run(full, victim, limit, at_the_manifest, background=limit == 3000))
        folder = tmp_path / f"{victim}-{limit}"
        assert tells(reason, f"rank {victim}", "File too large") and f"{folder}/step-2" in reason
        assert names_in(folder) == ["lock", "step-1", "step-2"]
    result = "the save fails on all ranks, earlier checkpoints stay"
    row("saving", "the disk is full during a save", result=result, says=told(reason, folder))


def test_a_folder_that_must_not_be_written_to(ranks, row):
    def read_only(folder):
        job = Job(1)
        owner = os.geteuid()
        os.seteuid(owner or 65534)  # root may write anywhere
        try:
            return refused(lambda: job.save(folder))
        finally:
            os.seteuid(owner)

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        for path in (Path(folder), Path(folder) / "new"):
            reason = one_reason(ranks(2).run(read_only, path))
            assert tells(reason, "rank 0", path, "Permission denied")
        assert os.listdir(folder) == []
    row("saving", "the folder is read-only", result="refused on all ranks", says=told(reason, Path(folder)))


def test_what_a_checkpoint_cannot_hold_is_refused(ranks, tmp_path):
    def odd():
        mine = {"a": [torch.Generator()]} if dist.get_rank() == 1 else {}
        function = {"a": lambda: 0} if dist.get_rank() == 1 else {}
        job = Job(1)
        to = Checkpoints(tmp_path, job.zero)
        reasons = [refused(to.save, 1, mine), refused(to.save, 2, function)]
        for stage in range(4):
            job = Job(stage)
            job.loss().backward()
            reasons.append(refused(Checkpoints(tmp_path / str(stage), job.zero).save, 1, {}))
            job.optimizer.step()
            job.optimizer.zero_grad(set_to_none=False)
            Checkpoints(tmp_path / f"{stage}-zero", job.zero).save(1, {})
        to.save(2, {})
        with pytest.raises(ValueError, match=naming("step 2")):
            to.save(2, {})
        assert names_in(tmp_path / "3") == ["lock"]
        return reasons

    (generator, function, *gradients), other = ranks(2).run(odd)
    assert other == [generator, function, *gradients]
    assert tells(generator, "rank 1", "extra") and "Generator" in generator
    assert tells(function, "rank 1", tmp_path / "step-2.tmp" / "rank-1.pt")
    assert len(gradients) == 4 and tells(one_reason(gradients), "rank 0", "step()", "zero_grad()")
    assert [name for name in names_in(tmp_path) if name.startswith("step")] == ["step-2"]


def test_two_jobs_in_one_folder(ranks, tmp_path, row):
    (tmp_path / "step-1.tmp").mkdir()
    with filelock.FileLock(tmp_path / "lock"):
        reason = one_reason(ranks(2).run(lambda: refused(lambda: Checkpoints(tmp_path, Job(1).zero))))
        assert names_in(tmp_path) == ["lock", "step-1.tmp"]
    assert tells(reason, "rank 0", tmp_path)
    result = "the second is refused on all ranks"
    row("saving", "two jobs write to one folder", result=result, says=told(reason, tmp_path))

    def in_turns():
        first, second = Job(1), Job(1)
        to = Checkpoints(tmp_path, first.zero)
        to.save(1, {})
        assert tells(refused(lambda: Checkpoints(tmp_path, second.zero)), tmp_path)
        to.close()
        return refused(lambda: Checkpoints(tmp_path, second.zero))

    reason = one_reason(ranks(2).run(in_turns))
    assert names_in(tmp_path) == ["lock", "step-1"]
    assert tells(reason, "rank 0", tmp_path / "step-1", "step 0")


def test_the_last_complete_ones_are_kept_and_a_damaged_one_makes_room(ranks, tmp_path):
    def several(keep, begun, steps):
        to = Checkpoints(tmp_path, Job(1).zero, keep, begun)
        for step in steps:
            to.save(step, {})
        to.close()

    (tmp_path / "step-x").mkdir()  # not ours
    ranks(2).run(several, 3, 0, [7, 8, 9, 10])
    assert names_in(tmp_path) == ["lock", "step-10", "step-8", "step-9", "step-x"]
    (tmp_path / "step-10" / "rank-1.pt").unlink()
    ranks(2).run(several, 2, 9, [11])
    assert names_in(tmp_path) == ["lock", "step-10", "step-11", "step-9", "step-x"]
    flip(tmp_path / "step-11" / "rank-1.pt", 8000)
    ranks(2).run(several, 2, 9, [10, 11])
    assert names_in(tmp_path) == ["lock", "step-10", "step-11", "step-x"]
    assert [problem_of(path) for path in checkpoints(tmp_path)] == [None, None]


# --- what cannot be loaded --------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    """A folder with checkpoints of steps 1 and 2, by two ranks. Copy it."""

    def begin(folder):
        job = Job(1)
        for _ in range(2):
            job.train(1)
            job.save(folder)

    folder = tmp_path_factory.mktemp("saved")
    ranks(2).run(begin, folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


def unloadable(paths: list[Path], options: list[dict]) -> list[str]:
    """Why each cannot be loaded into a job of each options; nothing has changed nevertheless."""
    reasons = []
    for others in options:
        job = Job(**{"stage": 2, "seed": 4, **others})
        job.train(2)
        before = job.everything(), torch.get_rng_state()
        reasons += [refused(load, path, job.zero) for path in paths]
        assert differences(before, (job.everything(), torch.get_rng_state())) == []
    return reasons


@pytest.mark.check
def test_300_flipped_bits_are_found(copy):
    random.seed(0)
    files = sorted((copy / "step-2").iterdir())
    sizes = [file.stat().st_size for file in files]
    for number in range(300):  # a third of them in the manifest, which is small
        file = files[0] if number % 3 == 0 else random.choices(files, sizes)[0]
        bit = random.randrange(8 * file.stat().st_size)
        flip(file, bit)
        assert str(file) in problem_of(copy / "step-2"), (file, bit)
        flip(file, bit)
    assert problem_of(copy / "step-2") is None


def test_damage_is_the_same_error_on_all_ranks_and_changes_nothing(ranks, copy, tmp_path, row):
    ranks(2).run(partial(saved_state, tmp_path / "other", stage=1, optimizer=fused_adamw))
    good = tmp_path / "good"
    (copy / "step-2").rename(good)
    size = (good / "rank-1.pt").stat().st_size

    def of_the_future(step):
        text = (step / "manifest.json").read_bytes().partition(b',\n "sha256": "')[0]
        body = (step / "manifest.json").read_bytes()[: -len(seal(b""))]
        assert body.startswith(text)
        (step / "manifest.json").write_bytes(seal(body.replace(b'"format": 1', b'"format": 2')))

    damages = {
        "a file is truncated": (lambda step: truncate(step / "rank-1.pt"), ["rank-1.pt", size - 1, size]),
        "a file is missing": (lambda step: (step / "rank-1.pt").unlink(), ["rank-1.pt"]),
        "a bit has flipped": (lambda step: flip(step / "rank-1.pt", 90000), ["rank-1.pt", "sha256"]),
        "a bit has flipped in rank 0's": (lambda step: flip(step / "rank-0.pt", 90000), ["rank-0.pt", "sha256"]),
        "a file is of another save": (lambda step: shutil.copy(copy / "step-1/rank-0.pt", step), ["rank-0.pt"]),
        "a file is of another run": (
            lambda step: shutil.copy(tmp_path / "other/step-2/rank-0.pt", step), ["rank-0.pt"],
        ),
        "the manifest is missing": (lambda step: (step / "manifest.json").unlink(), ["manifest.json"]),
        "the manifest is truncated": (lambda step: truncate(step / "manifest.json"), ["manifest.json"]),
        "a bit has flipped in the manifest": (lambda step: flip(step / "manifest.json", 4000), ["manifest.json"]),
        "the manifest is another file": (lambda step: (step / "manifest.json").write_text("{}"), ["manifest.json"]),
        "the format is of the future": (of_the_future, ["format", 2, 1]),
        "it is not there": (shutil.rmtree, []),
    }  # fmt: skip
    for number, (damage, _) in enumerate(damages.values()):
        damage(shutil.copytree(good, tmp_path / str(number) / "step-2"))
    paths = [tmp_path / str(number) / "step-2" for number in range(len(damages))]
    for M in (1, 2, 3):
        reasons = ranks(M).run(unloadable, paths, [{}])
        assert reasons == [reasons[0]] * M
    for (name, (_, things)), path, reason in zip(damages.items(), paths, reasons[0]):
        assert str(path) in reason and tells(reason.replace(f"{path}/", ""), *things)
        result = "refused on all ranks, nothing is changed"
        row("saving", f"asked for by name: {name}", result=result, says=told(reason, path.parent))


def test_the_newest_whole_one_is_loaded_and_what_was_skipped_is_said(ranks, copy, row):
    shutil.copytree(copy / "step-2", copy / "step-3.tmp")
    shutil.copytree(copy / "step-2", copy / "step-10")
    (copy / "step-10" / "rank-0.pt").unlink()
    flip(copy / "step-2" / "rank-1.pt", 70000)

    def go_on():
        job = Job(3, seed=6)
        found = job.load(copy)
        with pytest.raises(ValueError, match=naming("step 1")):
            Checkpoints(copy, job.zero, begun=1).save(1, {})
        return found.path, found.step, found.skipped

    (path, step, skipped), *others = ranks(3).run(go_on)
    assert others == [(path, step, skipped)] * 2
    assert (path, step) == (copy / "step-1", 1)
    assert len(skipped) == 2 and tells(skipped[0], "rank 0", copy / "step-10" / "rank-0.pt")
    assert tells(skipped[1], "rank 1", copy / "step-2" / "rank-1.pt", "sha256")
    says = told("skipped: " + skipped[1], copy)
    row("saving", "the newest checkpoint is damaged", result="the one before is used", says=says)
    (copy / "step-1" / "manifest.json").unlink()
    for reason in {tuple(reasons) for reasons in ranks(2).run(unloadable, [copy], [{}])}.pop():
        assert tells(reason, "rank 0") and reason.count(str(copy)) == 3
    assert ranks(2).run(lambda: load(copy / "nowhere", Job(1).zero).path) == [None, None]


def frozen_first(model: Stack) -> Stack:
    model.enter.requires_grad_(False)
    return model


@pytest.mark.check
def test_another_models_checkpoint_is_refused(ranks, copy, row):
    others = [
        (
            {"case": Case(lambda: Stack(*[Block(hidden=8) for _ in range(3)]))},
            ["blocks.0.up.bias", "(9,)", "(8,)", "torch.float32", "group 0"],
        ),
        ({"case": ZOO["plain blocks"]}, ["blocks.3.norm.weight", "(6,)"]),
        ({"case": Case(lambda: Stack(Block(), Block()))}, ["blocks.2.norm.weight", "(6,)"]),
        ({"optimizer": sgd}, ["AdamW", "SGD"]),
        ({"optimizer": fused_adamw}, ["param groups", 2, 1]),
        (
            {"case": Case(lambda: frozen_first(Stack(*[Block() for _ in range(3)])))},
            ["enter.bias", "(6,)", "group 0", "frozen"],
        ),
    ]
    first, second = ranks(2).run(unloadable, [copy], [options for options, _ in others])
    assert first == second
    for (_, things), reason in zip(others, first):
        assert tells(reason, copy / "step-2", *things)
    result = "refused on all ranks, nothing is changed"
    row("saving", "a checkpoint of another model", result=result, says=told(first[0], copy))


# --- a crash ----------------------------------------------------------------------------------


def dying(folder: Path, victim: int, number: int) -> int:
    """Save step 3; `victim` is killed before its durable action `number`, or, after all of them, at the end."""
    job = Job(1)
    job.load(folder)
    job.train(1)
    count = 0

    def act() -> None:
        nonlocal count
        if dist.get_rank() == victim and count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def counted(original: Callable, every: int) -> Callable:
        calls = 0

        def action(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls % every == 0:
                act()
            return original(*args, **kwargs)

        return action

    with contextlib.ExitStack() as stack:
        for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
            stack.enter_context(patch.object(os, name, counted(getattr(os, name), 1)))
        stack.enter_context(patch.object(files, "seal", counted(seal, 1)))
        stack.enter_context(patch.object(Hashed, "write", counted(Hashed.write, 120)))  # in the midst of a file
        job.save(folder, background=number % 2 == 1).close()
    act()
    return count


def next_saves(folders: list[Path], steps: dict[int, dict]) -> None:
    for folder in folders:
        job = Job(0, seed=9)
        found = job.load(folder)
        assert found.skipped == [] and differences(steps[found.step], job.everything()) == []
        job.train(1)
        job.save(folder)  # leftovers are in nobody's way
        assert [name for name in names_in(folder) if name.endswith(".tmp")] == []
        assert problem_of(folder / f"step-{job.step}") is None


def test_a_kill_at_any_durable_action_leaves_a_checkpoint_that_loads(ranks, saved, tmp_path, row):
    whole = shutil.copytree(saved, tmp_path / "whole")
    counts = ranks(2).run(dying, whole, victim=-1, number=0)
    assert counts[0] >= 14 and counts[1] >= 3
    outcomes, folders = [], []
    with Ranks(2) as mortals:
        for victim, count in enumerate(counts):
            for number in range(count):
                folders.append(shutil.copytree(saved, tmp_path / f"{victim}-{number}"))
                with pytest.raises(RankError, match=naming(f"rank {victim}", "SIGKILL")):
                    mortals.run(dying, folders[-1], victim, number)
                there = checkpoints(folders[-1])
                assert [problem_of(path) for path in there] == [None] * len(there)
                steps = [step_of(path) for path in there]
                assert steps in ([2, 1], [3, 2, 1], [3, 2]), (victim, number)
                outcomes.append((victim, steps[0]))
    assert {(0, 2), (0, 3), (1, 2), (1, 3)} == set(outcomes)

    def state(path):
        job = Job(3, seed=8)
        job.load(path)
        return job.everything()

    steps = {step: ranks(2).run(state, whole / f"step-{step}")[0] for step in (2, 3)}
    ranks(1).run(next_saves, folders, steps)
    row(
        "saving",
        "a rank is killed (SIGKILL) in a save",
        result="the newest checkpoint is the last one that was committed",
        says=f"killed before each of {counts[0]} durable actions of rank 0 and {counts[1]} of rank 1: all "
        f"{len(folders)} folders load, to the bit",
    )


# --- what earlier editions wrote ----------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_of_the_first_edition_loads_at_every_stage(ranks, stage):
    """Written by two ranks at stage 3 with AdamW and two param groups; its values lie beside it."""
    folder = Path(__file__).parents[1] / "data" / "first_edition"
    expected = json.loads((folder / "expected.json").read_text())

    def loaded() -> dict:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
        matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        zero = zeroify(model, torch.optim.AdamW(groups, lr=0.5), stage=stage)
        found = load(folder, zero)
        assert found.step == 2 and found.extra == {"note": "first edition"}
        assert zero.optimizer.param_groups[0]["lr"] == 0.01
        return zero.state_dict()

    for state in ranks(2).run(loaded):
        for name, values in expected["model"].items():
            assert state["model"][name].flatten().tolist() == values
            assert state["optimizer"][name]["exp_avg"].flatten().tolist() == expected["exp_avg"][name]
            assert float(state["optimizer"][name]["step"]) == expected["step"][name] == 2
