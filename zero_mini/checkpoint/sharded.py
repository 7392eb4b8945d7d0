"""Sharded checkpoints: every rank writes its own slices, and any number of ranks at any stage can resume from them.

    FOLDER/lock                    held by the job that writes here, until its process ends, also by a crash
    FOLDER/step-20/rank-0.pt       rank 0's slices of everything, and its own random states and `extra`
                   rank-1.pt       ... and so on; torch.load(FILE, weights_only=True) reads them too
                   manifest.json   size and sha256 of each, names and shapes; its last entry is its own sha256

Files do not depend on the stage, and a reader may have another N than the writer (see resharding.py).

A save. A crash at any point leaves the last checkpoint unchanged:

    rank 0   make step-20.tmp |              | manifest, fsync, rename to step-20, fsync | drop the oldest
    rank 0                    | write, fsync |                                           |
    rank 1                    | write, fsync |                                           |
                              ^   barriers   ^   if a rank failed: the same error on all; .tmp is deleted

The manifest is written last, so it vouches for all the rest, and only then one rename gives the folder its name.
A folder that ends in .tmp is never loaded. A save in the background does the same in a thread, from copies.

A load checks everything first (each file is hashed by one rank), and then changes the model.

Left out: folders that only some ranks see; modules' get_extra_state(); random numbers of Python and numpy.
"""

import copy
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import filelock
import torch

from zero_mini.binding.state_dict import load_settings, settings
from zero_mini.checkpoint.files import FORMAT, REPAIR, checkpoints, commit, examine, problem_of, prune, step_of, write
from zero_mini.checkpoint.resharding import Stored, describe, put_in, take_out
from zero_mini.script import Script
from zero_mini.wire.host_words import HostWords

T = TypeVar("T")
ROOM = "make room, or choose a folder that every rank can write to; what was saved before is as it was"
REBUILD = "build model, optimizer and param groups as they were when it was saved"


class CheckpointError(ValueError):
    """Some rank cannot save, or load; every rank raises the same error. Earlier checkpoints are unchanged."""


# --- save -------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints that one job saves to one folder; the last `keep` stay.

    begun: the step the job begins at. The folder may hold no later ones (they would be another run's), and steps grow.
    background: `save` writes in a thread while training goes on. (In both cases it first copies this rank's share of
    master weights and optimizer states to host memory.)

    All methods are collective, and raise the same CheckpointError on every rank if any rank fails: another job writes
    to the folder, it is read-only or full, ...
    """

    def __init__(self, folder: Path, zero: Script, keep: int = 2, begun: int = 0, background: bool = False):
        check_all_here(zero)
        self.folder, self.zero, self.keep, self.last = Path(folder), zero, keep, begun
        self.host = zero.comm.host.another()  # its own: the thread's words must not mix with those of a step
        self.lock = filelock.FileLock(self.folder / "lock")
        self.thread = ThreadPoolExecutor(1) if background else None
        self.pending: Future | None = None
        together(self.host, self._open, self.folder)

    def save(self, step: int, extra: dict) -> None:
        """Write the checkpoint of `step`, then delete all but the last `keep`. Not between a backward and its step.

        extra: this rank's state besides model, optimizer, loss scale and torch's random numbers: tensors, numbers,
        strings, None, and dicts, lists and tuples of them.
        """
        self.wait()
        if step <= self.last:
            raise ValueError(f"step {step} is not after step {self.last}, which was saved or gone on from")
        self.zero.check_step()
        content = together(self.host, lambda: self._copy(extra), self.folder)
        manifest = {"format": FORMAT, "step": step, "model": describe(self.zero)}
        if self.thread is None:
            self._write(manifest, content)
        else:
            self.pending = self.thread.submit(self._write, manifest, content)

    def wait(self) -> None:
        """Return when the save in the background is on the disk."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and let another job write to the folder."""
        self.wait()
        self.lock.release()

    def _open(self) -> None:
        """Rank 0 locks the folder, and deletes unfinished checkpoints of a crash."""
        if self.zero.comm.number != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire(blocking=False)
        except filelock.Timeout as error:
            raise ValueError(f"another job is writing to {self.folder}: give each a folder of its own") from error
        for leftover in self.folder.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        for path in checkpoints(self.folder):
            if step_of(path) > self.last and problem_of(path) is None:
                raise ValueError(
                    f"{path} is later than step {self.last}, at which this job begins: go on from it, delete it, or "
                    "choose another folder"
                )

    def _copy(self, extra: dict) -> dict:
        zero = self.zero
        zero.wait()
        if any(unit.mean_grad is not None and unit.mean_grad.any() for unit in zero.units):
            raise ValueError("there are gradients, which no checkpoint holds: save after step() and zero_grad()")
        others = copy.deepcopy({**settings(zero), "extra": extra})
        return {**take_out(zero), **others, "rng": rng_states(zero)}

    def _write(self, manifest: dict, content: dict) -> None:
        host, final = self.host, self.folder / f"step-{manifest['step']}"
        comm = self.zero.comm
        unfinished = final.with_name(f"{final.name}.tmp")
        file = unfinished / f"rank-{comm.rank}.pt"

        def on_rank_0(action: Callable, *arguments: object) -> None:
            together(host, lambda: comm.number or action(*arguments), final)

        try:
            on_rank_0(unfinished.mkdir)
            entry = together(host, lambda: None if comm.replica else write(file, content), file)
            entries = [entry for entry in host.gather(entry) if entry is not None]
            on_rank_0(commit, {**manifest, "files": entries}, unfinished, final)
            self.last = manifest["step"]
            on_rank_0(prune, self.folder, self.keep)
        except CheckpointError:
            if comm.number == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise


# --- load -------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """The result of `load`: the checkpoint's path (None: there is none), its `extra`, why newer ones were skipped."""

    path: Path | None
    step: int
    extra: dict
    skipped: list[str]


def load(path: Path, zero: Script) -> Loaded:
    """Resume from a checkpoint, or from the newest whole one in a folder. Collective; any stage, number of ranks.

    Restores model, optimizer, loss scale and torch's random numbers. `extra` is what this rank gave to `save`; with
    more ranks than the N that saved, rank r gets that of rank r mod N.

    CheckpointError, on every rank, if no checkpoint is whole, or it is of another model; nothing is changed then.
    """
    check_all_here(zero)
    comm, path = zero.comm, Path(path)
    zero.check_step()
    is_checkpoint = re.fullmatch(r"step-\d+", path.name)
    skipped = []
    for candidate in [path] if is_checkpoint else comm.host.gather(checkpoints(path))[0]:
        try:
            manifest = together(comm.host, partial(examine, candidate, comm.rank, comm.world_size), candidate, REPAIR)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        files = together(comm.host, partial(read, candidate, manifest, zero), candidate, REPAIR)
        return Loaded(candidate, manifest["step"], apply(zero, files), skipped)
    if skipped:
        raise CheckpointError("no checkpoint is whole: " + "; ".join(skipped))
    return Loaded(None, 0, {}, [])


def read(path: Path, manifest: dict, zero: Script) -> list[dict]:
    """The files of all ranks; tensors are read from the disk when they are used. ValueError if of another model."""
    there, here = manifest["model"], describe(zero)
    for name in there | here:
        if there.get(name) != here.get(name):
            one, other = (side.get(name, "missing") for side in (there, here))
            raise ValueError(f"{path} is of another model: {name} is {one} there and {other} here; {REBUILD}")
    names = [entry["name"] for entry in manifest["files"]]
    return [torch.load(path / name, map_location="cpu", mmap=True, weights_only=True) for name in names]


def apply(zero: Script, files: list[dict]) -> dict:
    """Load files, all of which have been checked. Collective; returns this rank's `extra`."""
    put_in(zero, Stored(files))
    load_settings(zero, files[0])
    own_file = files[zero.rank % len(files)]
    restore_rng(zero, own_file["rng"])
    return copy.deepcopy(own_file["extra"])  # in memory: the file will be deleted later


# --- random numbers ---------------------------------------------------------------------------


def rng_states(zero: Script) -> dict:
    """The states of torch's random generators on this rank (dropout uses them)."""
    cuda = torch.cuda.get_rng_state(zero.device) if zero.device.type == "cuda" else None
    return {"rank": zero.comm.number, "cpu": torch.get_rng_state(), "cuda": cuda}


def restore_rng(zero: Script, states: dict) -> None:
    """Restore the random generators to what `rng_states` returned.

    If the states are another rank's (the job has more ranks now), this rank seeds a sequence of its own from them.
    """
    torch.set_rng_state(states["cpu"])
    if zero.device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], zero.device)
    if states["rank"] != zero.comm.number:
        torch.manual_seed(torch.randint(2**62, ()).item() + zero.comm.number)


# --- how --------------------------------------------------------------------------------------


def check_all_here(zero: Script) -> None:
    """CheckpointError if ranks are absent (simulate/absent.py), since each rank writes and reads its own slices."""
    N = zero.comm.world_size
    if zero.comm.group is None and N > 1:
        raise CheckpointError(f"a checkpoint is of all {N} ranks, and {N - 1} are absent: start them with torchrun")


def together(host: HostWords, action: Callable[[], T], where: Path, remedy: str = ROOM) -> T:
    """Run `action` on every rank; this rank's result. If it fails on any rank, all raise the same CheckpointError."""
    result = problem = cause = None
    try:
        result = action()
    except OSError as error:
        cause, problem = error, f"{error.filename or where}: {error.strerror or error}; {remedy}"
    except Exception as error:
        words = str(error) if isinstance(error, ValueError) else f"{where}: {type(error).__name__}: {error}"
        cause, problem = error, words
    for rank, reason in enumerate(host.gather(problem)):
        if reason is not None:
            raise CheckpointError(f"rank {rank}: {reason}") from cause
    return result
