"""Sharded checkpoints: every rank writes its own slices, and any number of ranks at any stage can go on from them.

    FOLDER/lock                    held by the job that writes here, until it ends, however it ends
    FOLDER/step-20/rank-0.pt       rank 0's slices of everything, and what it alone needs
                   rank-1.pt       ... and so on; torch.load(FILE, weights_only=True) reads them too
                   manifest.json   size and sha256 of each, names and shapes; its last entry is its own sha256

Files do not depend on the stage, and a reader need not have the writer's N (resharding.py says how).

A save. Whenever a crash comes, the last checkpoint is what it was:

    rank 0   make step-20.tmp |              | manifest, fsync, rename to step-20, fsync | drop the oldest
    rank 0                    | write, fsync |                                           |
    rank 1                    | write, fsync |                                           |
                              ^   barriers   ^   is a rank not well? the same error on all; .tmp goes

The manifest is written last, so it vouches for all the rest, and only then one rename gives the folder its name.
What ends in .tmp is never loaded. In the background the same happens in a thread, after copies were taken.

A load checks everything first (each file is hashed by one rank), and then changes the model.

Left out: folders that not every rank sees; what modules keep by get_extra_state(); random numbers of Python and numpy.
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
    """Some rank cannot save, or load; every rank raises the same. What was saved before is as it was."""


# --- save -------------------------------------------------------------------------------------


class Checkpoints:
    """What one job saves to one folder, the last `keep` of it.

    begun: the step the job begins at. The folder may hold no later ones, which would be another run's, and steps grow.
    background: what `save` copied is written while training goes on. (It copies first in any case, to host memory: this
    rank's share of master weights and optimizer states.)

    All methods are collective, and raise the same CheckpointError on every rank if any rank cannot: another job writes
    to the folder, it is read-only or full, ...
    """

    def __init__(self, folder: Path, zero: Script, keep: int = 2, begun: int = 0, background: bool = False):
        self.folder, self.zero, self.keep, self.last = Path(folder), zero, keep, begun
        self.host = zero.comm.host.another()  # what a thread says must not mix with what a step says
        self.lock = filelock.FileLock(self.folder / "lock")
        self.thread = ThreadPoolExecutor(1) if background else None
        self.under_way: Future | None = None
        together(self.host, self._open, self.folder)

    def save(self, step: int, extra: dict) -> None:
        """Write the checkpoint of `step`, then drop all but the last `keep`. Not between a backward and its step.

        extra: what this rank needs besides model, optimizer, loss scale and torch's random numbers: tensors, numbers,
        strings, None, and dicts, lists and tuples of them.
        """
        self.wait()
        if step <= self.last:
            raise ValueError(f"step {step} is not after step {self.last}, which was saved or gone on from")
        self.zero.check_step()
        content = together(self.host, lambda: self._copy(extra), self.folder)
        told = {"format": FORMAT, "step": step, "model": describe(self.zero)}
        if self.thread is None:
            self._write(told, content)
        else:
            self.under_way = self.thread.submit(self._write, told, content)

    def wait(self) -> None:
        """Return when what was saved in the background is on the disk."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait, and let another job write to the folder."""
        self.wait()
        self.lock.release()

    def _open(self) -> None:
        """Rank 0 locks the folder, and clears what a crash has left."""
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

    def _write(self, told: dict, content: dict) -> None:
        host, final = self.host, self.folder / f"step-{told['step']}"
        comm = self.zero.comm
        unfinished = final.with_name(f"{final.name}.tmp")
        file = unfinished / f"rank-{comm.rank}.pt"

        def first(action: Callable, *arguments: object) -> None:
            together(host, lambda: comm.number or action(*arguments), final)

        try:
            first(unfinished.mkdir)
            entry = together(host, lambda: None if comm.replica else write(file, content), file)
            files = [entry for entry in host.gather(entry) if entry is not None]
            first(commit, {**told, "files": files}, unfinished, final)
            self.last = told["step"]
            first(prune, self.folder, self.keep)
        except CheckpointError:
            if comm.number == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise


# --- load -------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """What was loaded: where it was (None: there is no checkpoint), its `extra`, and why newer ones were skipped."""

    path: Path | None
    step: int
    extra: dict
    skipped: list[str]


def load(path: Path, zero: Script) -> Loaded:
    """Go on from a checkpoint, or from the newest in a folder that is whole. Collective; any stage, number of ranks.

    Restores model, optimizer, loss scale and torch's random numbers. `extra` is what this rank gave to `save`; of
    more ranks than there were, rank r gets that of rank r mod N.

    CheckpointError, on every rank, if nothing there is whole, or it is of another model; nothing is changed then.
    """
    comm, path = zero.comm, Path(path)
    zero.check_step()
    is_one = re.fullmatch(r"step-\d+", path.name)
    skipped = []
    for candidate in [path] if is_one else comm.host.gather(checkpoints(path))[0]:
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
    """What each rank wrote; tensors come from the disk when they are used. ValueError if it is another model's."""
    there, here = manifest["model"], describe(zero)
    for name in there | here:
        if there.get(name) != here.get(name):
            one, other = (side.get(name, "missing") for side in (there, here))
            raise ValueError(f"{path} is of another model: {name} is {one} there and {other} here; {REBUILD}")
    names = [told["name"] for told in manifest["files"]]
    return [torch.load(path / name, map_location="cpu", mmap=True, weights_only=True) for name in names]


def apply(zero: Script, files: list[dict]) -> dict:
    """From here on nothing can be wrong with a file. Collective; returns this rank's `extra`."""
    put_in(zero, Stored(files))
    load_settings(zero, files[0])
    mine = files[zero.rank % len(files)]
    restore_rng(zero, mine["rng"])
    return copy.deepcopy(mine["extra"])  # out of the file, which will be dropped one day


# --- random numbers ---------------------------------------------------------------------------


def rng_states(zero: Script) -> dict:
    """Where torch's random numbers of this rank stand, for dropout say."""
    cuda = torch.cuda.get_rng_state(zero.device) if zero.device.type == "cuda" else None
    return {"rank": zero.comm.number, "cpu": torch.get_rng_state(), "cuda": cuda}


def restore_rng(zero: Script, states: dict) -> None:
    """Go on with the random numbers where `rng_states` stood.

    A rank that did not exist then has got another one's: it begins a sequence of its own, which follows from that.
    """
    torch.set_rng_state(states["cpu"])
    if zero.device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], zero.device)
    if states["rank"] != zero.comm.number:
        torch.manual_seed(torch.randint(2**62, ()).item() + zero.comm.number)


# --- how --------------------------------------------------------------------------------------


def together(host: HostWords, action: Callable[[], T], where: Path, remedy: str = ROOM) -> T:
    """This rank's result, when all ranks have one. CheckpointError on every rank, the same, if any has none."""
    result = problem = cause = None
    try:
        result = action()
    except OSError as error:
        cause, problem = error, f"{error.filename or where}: {error.strerror or error}; {remedy}"
    except Exception as error:
        told = str(error) if isinstance(error, ValueError) else f"{where}: {type(error).__name__}: {error}"
        cause, problem = error, told
    for rank, told in enumerate(host.gather(problem)):
        if told is not None:
            raise CheckpointError(f"rank {rank}: {told}") from cause
    return result
