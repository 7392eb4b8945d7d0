"""What a stage keeps alive, by what it is for and where it waits, and what it sent.

    parameters      what the model computes with; without mixed precision the master copy is that
    gradients       in a flat buffer or on the wire, and what autograd has brought
    optimizer       its states, and in mixed precision the fp32 master (the paper's K = 12 counts it so)
    activations     inputs of checkpointed blocks that wait at the host or in an arena; autograd's are not in reach
    communication   stage 3's slots; what offload copies up from
    other           buffers of the model, and the numbers that give parameters out of turn their shapes

A storage that is listed twice is counted once (`memory.walk`), so views do no harm. What a stage keeps beside this, it
adds by overriding `tensors` (zero3.py, update/offload.py).
"""

from collections.abc import Iterator
from types import SimpleNamespace

import torch

from zero_mini.activations.checkpointing import waiting_places
from zero_mini.activations.on_host import HostMemory
from zero_mini.comm import Call
from zero_mini.flat import Unit
from zero_mini.memory.formulas import tensors_in, walk


class Inventory:
    """`self` is a stage: model, optimizer, units, comm, ..."""

    @property
    def ledger(self) -> list[Call]:
        """Every collective of the last whole step, in order."""
        return self.comm.last_step

    places = ("device", "host")  # that `memory` knows

    def memory(self, place: str | None = None) -> dict[str, int]:
        """Bytes that are kept alive here now, by category (`memory.walk`).

        place: "device", where the model computes, or "host", where something waits (offload, checkpointed
        activations); None: both. On a CPU the two are told apart by what they are for.
        """
        if place not in (None, "device", "host"):
            raise ValueError(f"place must be 'device', 'host' or None (got {place!r})")
        held, at_host = walk(self), walk(SimpleNamespace(tensors=self.host_tensors))
        if place is None:
            return held
        return at_host if place == "host" else {name: held[name] - at_host[name] for name in held}

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(category, label, tensor) for everything that is kept alive here, views included."""
        for unit in self.units:
            if unit.full is not None:
                yield "parameters", unit.name, unit.full
            sent = unit.reducing[1:] if unit.reducing else ()
            for grad in (unit.own_grad, unit.grad, *sent, *unit.grads()):
                if grad is not None:
                    yield "gradients", unit.name, grad
            yield from self.states(unit)
            yield "other", unit.name, unit.nothing[0]
        for tensor in tensors_in(self.optimizer.state):  # besides those of units, what is no parameter's own
            yield "optimizer", "state", tensor
        for name, buffer in self.model.named_buffers():
            yield "other", name, buffer
        for place in waiting_places(self.model):
            for tensor in place.tensors():
                yield "activations", "checkpoint", tensor

    def states(self, unit: Unit) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Those that wait for the unit's update: its master, and what the optimizer has made for it."""
        # K = 12 counts the fp32 master copy as the optimizer's; without mixed precision it is the parameters.
        yield "optimizer" if self.mixed else "parameters", unit.name, unit.master
        for _, piece in unit.pieces:  # their .grad is a view of own_grad
            for tensor in tensors_in(self.optimizer.state.get(piece)):
                yield "optimizer", unit.name, tensor

    def host_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Those of `tensors` that wait in host memory."""
        for place in waiting_places(self.model):
            if isinstance(place, HostMemory):
                for parcel in place.waiting():
                    for tensor in parcel.at_host:
                        yield "activations", "checkpoint", tensor
