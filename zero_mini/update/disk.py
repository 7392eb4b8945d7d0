"""Offload to a folder: master copy and optimizer states are in files, and in memory only during their update.

Source: ZeRO-Infinity, arXiv 2104.07857, section 6.3 (the offload engine: states on NVMe, in a bounded buffer).

    bytes a parameter   in files    24/N   = 2 (4 + 8): each unit has two generations
                        in memory    2/N   gradients, and 12 bytes for the parameters of three units: one is read,
                                           one is updated, one is written

    time -->   step
    read       u2  u1  u0
    CPU            u2  u1  u0
    write              u2  u1  u0  commit

The optimizer keeps its objects; outside a unit's turn, they are NaN tensors without memory. A step writes the
generation that is not in use; when all ranks have written all of it, they switch to it. So a full or missing disk
loses no state: every rank raises, and still has its gradients and the states and parameters from before the step.

Files are read and written, not mapped: if a mapped page cannot be read, the process dies without a message.

    FOLDER/states-of-rank-0/README.txt    which job wrote them
                           /lock          locked while the job runs: two jobs cannot share a folder
                           /12.0, /12.1   the generations of unit 12: its master slice, then its states

The files are temporary, not a checkpoint: they are deleted with the handle, or when the job ends. The next job that
uses the folder deletes the files of a killed job.

Left out: gradients and 16-bit parameters on disk; O_DIRECT (the operating system may cache the files).
"""

import contextlib
import copy
import fcntl
import gc
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import TextIOWrapper
from pathlib import Path

import torch
from torch import Tensor

from zero_mini.binding.checks import known_class
from zero_mini.binding.parameter import plainly, set_data
from zero_mini.binding.pieces import is_elementwise
from zero_mini.flat import Unit
from zero_mini.update.offload import Offload


class StateFiles:
    """One rank's files in a folder. OSError if they cannot be used; BlockingIOError if another job uses them."""

    def __init__(self, folder: Path, rank: int, about: str) -> None:
        self.path = folder / f"states-of-rank-{rank}"
        try:
            self.lock = self.take_lock()
        except BlockingIOError:
            gc.collect()  # a model with hooks is a reference cycle: an unused handle of this process may hold the lock
            self.lock = self.take_lock()
        for path in self.path.iterdir():
            if path.name != "lock":
                path.unlink()
        start_time = time.strftime("%Y-%m-%d %H:%M:%S")
        (self.path / "README.txt").write_text(
            f"Optimizer states of a job that is running: {about}, process {os.getpid()}, since {start_time}.\n"
            "They go when it ends. If there is no such process, this folder can be deleted.\n"
        )
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def take_lock(self) -> TextIOWrapper:
        """Lock the folder, as long as the returned file is open."""
        self.path.mkdir(exist_ok=True)
        lock = open(self.path / "lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock

    def write(self, name: str, tensors: list[Tensor]) -> None:
        """Write the bytes of the tensors, one after the other."""
        file = os.open(self.path / name, os.O_WRONLY | os.O_CREAT)
        try:
            for tensor in tensors:
                data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
                while data:
                    data = data[os.write(file, data) :]
        finally:
            os.close(file)

    def read(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        """Read into tensors of the same shapes and dtypes as were written; returns them."""
        file = os.open(self.path / name, os.O_RDONLY)
        try:
            for tensor in tensors:
                data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
                while data:
                    count = os.readv(file, [data])
                    if count == 0:
                        raise OSError(f"{name} is shorter than it was")
                    data = data[count:]
        finally:
            os.close(file)
        return tensors

    def nbytes(self) -> int:
        """Bytes of all generations."""
        return sum(file.stat().st_size for file in self.path.glob("*.[01]"))


class OnDisk(Offload):
    """`zero` is the handle of stage 1, 2 or 3."""

    places = ("device", "host", "disk")

    def __init__(self, zero, folder: Path) -> None:
        super().__init__(zero)
        self.folder, self.reason = folder, None  # reason: why this rank cannot use it
        self.generation = dict.fromkeys(zero.units, 0)  # the generation in use
        self.number = {unit: number for number, unit in enumerate(zero.units)}
        # After the master, a unit's file holds these: (number of the piece, key of its state, dtype).
        self.layout: dict[Unit, list[tuple[int, str, torch.dtype]]] = {unit: [] for unit in zero.units}
        is_adam = known_class(zero.optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        values = 3 if is_adam else 1  # master and two states; others: at least the master
        bytes_needed = 2 * sum(unit.S * unit.params[0].element_size() * values for unit in zero.units)
        about = f"rank {zero.rank} of {zero.world_size}, a {type(zero.model).__name__} of {len(zero.units)} units"
        try:
            self.files = StateFiles(folder, zero.rank, about)
            bytes_free = shutil.disk_usage(folder).free
            if bytes_free < bytes_needed:
                self.reason = f"{folder} has {bytes_free:,} bytes free, and a rank's states take {bytes_needed:,}"
        except BlockingIOError:
            self.reason = f"{folder} holds the states of another run that lives; choose another folder"
        except OSError as error:
            self.reason = f"{folder} cannot be used: {error.strerror}"
        self.refuse_together()
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="states")  # one reads, one writes

    def ready(self) -> None:
        """All masters are in their files, or every rank raises."""
        self.refuse_together()

    def refuse_together(self) -> None:
        """ValueError on every rank if one rank has a reason, so that no rank waits for one that has stopped."""
        for rank, reason in enumerate(self.zero.comm.host.gather(self.reason)):
            if reason is not None:
                raise ValueError(f"offload: rank {rank}: {reason}")

    def adopt(self, unit: Unit) -> None:
        """Move the master to the host, then write it to its file."""
        super().adopt(unit)
        try:
            self.files.write(f"{self.number[unit]}.0", [unit.master])
        except OSError as error:
            self.reason = self.reason or f"{self.folder}: {error.strerror or error}"
        self.set_aside(unit)

    # --- reading and writing a unit ----------------------------------------------------------

    def read(self, unit: Unit) -> list[Tensor]:
        """Read the unit's master and states into new memory."""
        tensors = [torch.empty(unit.S, dtype=self.zero.master_dtype)]
        for number, _, dtype in self.layout[unit]:
            tensors.append(torch.empty(unit.pieces[number][1].shape, dtype=dtype))
        return self.files.read(f"{self.number[unit]}.{self.generation[unit]}", tensors)

    def write(self, unit: Unit, tensors: list[Tensor]) -> None:
        """Write the tensors to the generation that is not in use."""
        self.files.write(f"{self.number[unit]}.{1 - self.generation[unit]}", tensors)

    def install(self, unit: Unit, tensors: list[Tensor]) -> None:
        """Make these tensors the master and states that the optimizer sees."""
        unit.master, *states = tensors
        with plainly():
            for (_, piece), (_, view) in zip(unit.pieces, unit.by_group(unit.master)):
                set_data(piece, view)
        for (number, key, _), value in zip(self.layout[unit], states):
            self.zero.optimizer.state[unit.pieces[number][1]][key] = value

    def collect(self, unit: Unit) -> list[Tensor]:
        """The unit's master and states, in the order of the file, which `layout` records."""
        tensors, layout = [unit.master], []
        for number, (_, piece) in enumerate(unit.pieces):
            for key, value in self.zero.optimizer.state.get(piece, {}).items():
                if is_elementwise(value, piece):
                    tensors.append(value)
                    layout.append((number, key, value.dtype))
        self.layout[unit] = layout
        return tensors

    def set_aside(self, unit: Unit) -> None:
        """Replace master and states by NaN of the same shapes, which use no memory."""
        nan = torch.full((), float("nan"), dtype=self.zero.master_dtype)
        self.install(unit, [nan.expand(unit.S)])
        for number, key, dtype in self.layout[unit]:
            piece = unit.pieces[number][1]
            self.zero.optimizer.state[piece][key] = nan.to(dtype).expand(piece.shape)

    @contextlib.contextmanager
    def in_memory(self, unit: Unit, write: bool = False) -> Iterator[None]:
        """Inside the block, the unit's master and states can be read, and with `write` changed."""
        try:
            self.install(unit, self.read(unit))
            yield
            if write:
                self.write(unit, self.collect(unit))
                self.generation[unit] = 1 - self.generation[unit]
        except OSError as error:
            raise RuntimeError(f"states of {unit.name} in {self.folder}: {error.strerror or error}") from error
        finally:
            self.set_aside(unit)

    # --- the moments -------------------------------------------------------------------------

    def update_all(self, units: list[Unit]) -> None:
        """Read one unit ahead, write one behind. If one fails: RuntimeError on every rank, and no state changes."""
        units_updated: list[Unit] = []
        before = {unit: (self.layout[unit], [self.numbers_of(piece) for _, piece in unit.pieces]) for unit in units}
        next_read: Future | None = self.threads.submit(self.read, units[0]) if units else None
        last_write: Future | None = None
        reason = None
        try:
            for unit, next_unit in zip(units, [*units[1:], None]):
                self.install(unit, next_read.result())
                next_read = self.threads.submit(self.read, next_unit) if next_unit else None
                units_updated.append(unit)
                self.update(unit)
                tensors = self.collect(unit)
                self.set_aside(unit)
                if last_write is not None:
                    last_write.result()
                last_write = self.threads.submit(self.write, unit, tensors)
                del tensors
            if last_write is not None:
                last_write.result()
        except OSError as error:
            reason = f"{self.folder}: {error.strerror or error}"
        reasons = {rank: why for rank, why in enumerate(self.zero.comm.host.gather(reason)) if why is not None}
        if not reasons:
            for unit in units:
                self.generation[unit] = 1 - self.generation[unit]
            return
        for future in (next_read, last_write):
            if future is not None:
                future.exception()
        is_restored = self.go_back({unit: before[unit] for unit in units_updated})
        rank, why = next(iter(reasons.items()))
        raise RuntimeError(
            f"step {self.zero.comm.ledger.steps}: states of rank {rank} in {why}. The step was not taken: "
            + (
                "states, parameters and gradients are what they were; make room and call optimizer.step() again"
                if is_restored
                else "and the states of the step before cannot be read, so load a checkpoint"
            )
        )

    def numbers_of(self, piece: Tensor) -> dict:
        """Copies of the piece's states that are not tensors of its shape, such as a step: they stay in memory."""
        state = self.zero.optimizer.state.get(piece, {})
        return {key: copy.deepcopy(value) for key, value in state.items() if not is_elementwise(value, piece)}

    def go_back(self, before: dict[Unit, tuple]) -> bool:
        """Restore optimizer and model from the generation in use, that of the step before. False if that fails."""
        for unit, (layout, numbers) in before.items():
            self.layout[unit] = layout
            for (_, piece), state in zip(unit.pieces, numbers):
                self.zero.optimizer.state[piece] = state
                piece.grad = None
            self.set_aside(unit)
        try:
            for unit in before:
                with self.in_memory(unit):
                    self.write_cast(unit)
                    self.wait_for_rising(unit)
        except RuntimeError:
            return False
        return True

    def replace(self, unit: Unit, values: Tensor) -> None:
        """Also write the values to the file."""
        with self.in_memory(unit, write=True):
            super().replace(unit, values)

    def forget_states(self) -> None:
        """Drop all states: those in the files are not read again."""
        self.layout = {unit: [] for unit in self.zero.units}
        super().forget_states()

    def bytes_on_disk(self) -> int:
        """Bytes of both generations."""
        return self.files.nbytes()
