"""Parts of parameters by name and offset: out of N ranks' slices, and into those of M ranks.

    weight, 10 elements     0 1 2 3 4 5 | 6 7 8 9        slices of N = 2
                            0 1 2 | 3 4 5 6 | 7 8 9      slices of M = 3: rank 1 reads 3 4 5 here and 6 there

A rank stores the elements in its slice of each unit, without padding, also at stage 0, where it holds more. So the
files depend neither on the stage nor on ALIGN, and can be loaded into other units. Offsets count in the order of the
parameter's memory; its description has the strides where they are not the usual ones.

    parts      NAME -> {"offset": in the parameter, "master": values, "states": {KEY: the same part of a momentum, say}}
    numbers    NAME -> KEY -> an optimizer state that is one number for all elements: Adam's step, a 0-dim tensor
    buffers    NAME -> values, whole, from rank 0

Left out: gradients (nothing is saved between backward and step).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zero_mini.binding.pieces import is_elementwise, set_apart_what_differs
from zero_mini.binding.state_dict import placed
from zero_mini.flat import Run, Unit
from zero_mini.script import Script


@dataclass(frozen=True)
class Part:
    """The part of a parameter that lies in a range of its unit's buffer."""

    index: int  # of the parameter in its unit
    name: str
    offset: int  # of its first element in the parameter
    low: int  # and in the buffer
    high: int


def parts(unit: Unit, begin: int, end: int) -> Iterator[Part]:
    """The parts of parameters in buffer[begin:end], without padding."""
    for index, (name, shape, start) in enumerate(zip(unit.names, unit.shapes, unit.offsets)):
        low, high = max(start, begin), min(start + shape.numel(), end)
        if low < high:
            yield Part(index, name, low - start, low, high)


def held_pieces(unit: Unit) -> Iterator[tuple[Run, int, torch.Tensor]]:
    """(run, begin, piece) of each of the unit's pieces in the optimizer; a frozen unit has none."""
    for run, (_, piece) in zip(unit.runs[unit.master.numel()], unit.pieces):
        yield run, unit.start_of(unit.master) + run.low, piece


def persistent_buffers(zero: Script) -> dict[str, torch.Tensor]:
    """The buffers that belong to the model's state."""
    return {
        name: module._buffers[key]
        for name, module, key in zero.buffers
        if module._buffers.get(key) is not None and key not in module._non_persistent_buffers_set
    }


def describe(zero: Script) -> dict[str, str]:
    """What must match between a checkpoint and a model: name -> words."""
    description = {
        "the optimizer": type(zero.optimizer).__name__,
        "the number of param groups": str(len(zero.optimizer.param_groups)),
    }
    for unit in zero.units:
        for name, shape, stride, group in zip(unit.names, unit.shapes, unit.strides, unit.groups):
            usual = stride == torch.empty(shape, device="meta").stride()
            words = [str(tuple(shape)), str(unit.master.dtype), f"group {group}" if unit.trainable else "frozen"]
            description[name] = ", ".join(words + [f"strides {stride}"] * (not usual))
    for name, buffer in persistent_buffers(zero).items():
        description[name] = f"{tuple(buffer.shape)}, {buffer.dtype}, buffer"
    return description


# --- out of the slices ------------------------------------------------------------------------


def copy_of(value: object) -> object:
    """A copy on the CPU, which the next step does not change."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def take_out(zero: Script) -> dict[str, dict]:
    """Copies of what this rank stores: {"parts": ..., "numbers": ..., "buffers": ...}."""
    stored, numbers = {}, {}
    for unit in zero.units:
        with zero.update.in_memory(unit):
            here = {run.first for run in unit.runs[unit.S]}  # runs with parameters, or padding, in this rank's slice
            pieces = {
                index: (begin, piece)
                for run, begin, piece in held_pieces(unit)
                if run.first in here
                for index in range(run.first, run.after)
            }
            for part in parts(unit, unit.rank * unit.S, (unit.rank + 1) * unit.S):
                begin, piece = pieces.get(part.index, (0, None))
                states = {
                    key: copy_of(value[part.low - begin : part.high - begin])
                    for key, value in zero.optimizer.state.get(piece, {}).items()
                    if is_elementwise(value, piece)
                }
                start = unit.start_of(unit.master)
                master = copy_of(unit.master[part.low - start : part.high - start])
                stored[part.name] = {"offset": part.offset, "master": master, "states": states}
            for index, name in enumerate(unit.names):  # all of them: an empty parameter has a step count too
                _, piece = pieces.get(index, (0, None))
                for key, value in zero.optimizer.state.get(piece, {}).items():
                    if not is_elementwise(value, piece):
                        numbers.setdefault(name, {})[key] = copy_of(value)
    buffers = {name: copy_of(buffer) for name, buffer in persistent_buffers(zero).items()}
    return {"parts": stored, "numbers": numbers, "buffers": buffers if zero.rank == 0 else {}}


# --- into the slices --------------------------------------------------------------------------


class Stored:
    """The content of all ranks' files, each as `take_out` returned it."""

    def __init__(self, files: list[dict]):
        self.parts: dict[str, list[dict]] = {}
        self.dtypes: dict[str, dict[str, torch.dtype]] = {}  # of each parameter's states
        self.numbers: dict[str, dict] = {}
        for file in files:
            self.numbers |= file["numbers"]
            for name, part in file["parts"].items():
                self.parts.setdefault(name, []).append(part)
                self.dtypes[name] = {key: values.dtype for key, values in part["states"].items()}
        self.buffers = files[0]["buffers"]

    def fill(self, target: torch.Tensor, unit: Unit, begin: int, key: str | None = None) -> None:
        """target (n) <- the values of buffer[begin:][:n]: master copies, or states of a key; zero in the gaps."""
        target.zero_()
        for part in parts(unit, begin, begin + target.numel()):
            missing = part.high - part.low
            for stored in self.parts.get(part.name, []):
                values = stored["master"] if key is None else stored["states"][key]
                ahead = stored["offset"] - part.offset  # of the stored values' first element
                low, high = max(0, ahead), min(part.high - part.low, ahead + values.numel())
                if low < high:
                    target[part.low - begin :][low:high].copy_(values[low - ahead : high - ahead])
                    missing -= high - low
            if missing:
                raise ValueError(f"{missing} elements of {part.name} lie in no file of the checkpoint")

    def state_of(self, piece: torch.Tensor, unit: Unit, begin: int, run: Run, old: dict) -> dict:
        """The optimizer's state of a piece that begins at `begin`; reuses the memory of the `old` state if it fits."""
        names = unit.names[run.first : run.after]
        if not any(shape.numel() for shape in unit.shapes[run.first : run.after]):
            names = unit.names  # the piece is all padding: it takes the step count of the others
        known = next((name for name in names if self.steps_of(name)), names[0])
        state = {}
        for key, dtype in {key: dtype for name in names for key, dtype in self.dtypes.get(name, {}).items()}.items():
            state[key] = old.get(key)
            if not is_elementwise(state[key], piece) or state[key].dtype != dtype:
                state[key] = torch.empty_like(piece, dtype=dtype, requires_grad=False, pin_memory=piece.is_pinned())
            self.fill(state[key], unit, begin, key)
        return state | self.numbers.get(known, {})

    def steps_of(self, name: str) -> object:
        """What the parameters of a piece must share: the optimizer's numbers, or whether there is a state."""
        return self.numbers.get(name) or bool(self.dtypes.get(name))


@torch.no_grad()
def put_in(zero: Script, stored: Stored) -> None:
    """Load it into the model and the optimizer, in place, on whatever device they are. Collective."""
    zero.zero_grad()
    for unit in zero.units:
        if unit.trainable:
            set_apart_what_differs(zero, unit, [stored.steps_of(name) for name in unit.names])
        with zero.update.in_memory(unit, write=True):
            stored.fill(unit.master, unit, unit.start_of(unit.master))
            zero.update.write_cast(unit)
            for run, begin, piece in held_pieces(unit):
                state = stored.state_of(piece, unit, begin, run, zero.optimizer.state.pop(piece, {}))
                for key, value in state.items():
                    is_placed = is_elementwise(value, piece)
                    zero.optimizer.state[piece][key] = value if is_placed else placed(zero, value, run.group, piece)
        zero.publish(unit)
    for name, buffer in persistent_buffers(zero).items():
        buffer.copy_(stored.buffers[name])
    zero.comm.ledger.end_step()  # the gathers above are no part of a training step's ledger
