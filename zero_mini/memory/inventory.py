"""What a stage keeps alive, by category and by place, and what it sent.

    parameters      what the model computes with; without mixed precision this is the master copy
    gradients       in a flat buffer, in flight, or in .grad
    optimizer       its states, and in mixed precision the fp32 master (the paper counts it in K = 12)
    activations     inputs of checkpointed blocks on the host or in an arena; autograd's own cannot be listed
    communication   stage 3's slots; the buffers from which offload copies to the device
    other           buffers of the model, and the NaN views of parameters that are not gathered

A storage that is listed twice is counted once (`memory.walk`), so views may be listed. A stage that keeps more
overrides `tensors` (zero3.py, update/offload.py).
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

    places = ("device", "host")  # arguments of `memory`

    def memory(self, place: str | None = None) -> dict[str, int]:
        """Bytes that this rank keeps alive now, by category (`memory.walk`).

        place: "device", where the model computes, or "host", which has the states of offload and checkpointed
        activations; None: both. If the model computes on a CPU, tensors count for a place by their use.
        """
        if place not in (None, "device", "host"):
            raise ValueError(f"place must be 'device', 'host' or None (got {place!r})")
        total, at_host = walk(self), walk(SimpleNamespace(tensors=self.host_tensors))
        if place is None:
            return total
        return at_host if place == "host" else {name: total[name] - at_host[name] for name in total}

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(category, label, tensor) for every tensor that this rank keeps alive, views included."""
        for unit in self.units:
            if unit.full is not None:
                yield "parameters", unit.name, unit.full
            sent = unit.reducing[1:] if unit.reducing else ()
            for grad in (unit.own_grad, unit.grad, *sent, *unit.grads()):
                if grad is not None:
                    yield "gradients", unit.name, grad
            yield from self.states(unit)
            yield "other", unit.name, unit.nothing[0]
        for tensor in tensors_in(self.optimizer.state):  # those of units again, and those of no parameter
            yield "optimizer", "state", tensor
        for name, buffer in self.model.named_buffers():
            yield "other", name, buffer
        for place in waiting_places(self.model):
            for tensor in place.tensors():
                yield "activations", "checkpoint", tensor

    def states(self, unit: Unit) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The tensors of the unit's update: its master, and the optimizer's states of it."""
        # K = 12 counts the fp32 master copy as the optimizer's; without mixed precision it is the parameters.
        yield "optimizer" if self.mixed else "parameters", unit.name, unit.master
        for _, piece in unit.pieces:  # their .grad is a view of own_grad
            for tensor in tensors_in(self.optimizer.state.get(piece)):
                yield "optimizer", unit.name, tensor

    def host_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The part of `tensors` that is in host memory."""
        for place in waiting_places(self.model):
            if isinstance(place, HostMemory):
                for parcel in place.waiting():
                    for tensor in parcel.at_host:
                        yield "activations", "checkpoint", tensor
