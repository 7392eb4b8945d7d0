"""What a stage keeps alive, by category and by place, and what it sent.

    parameters      what the model computes with; without mixed precision this is the master copy
    gradients       in a flat buffer, in flight, or in .grad
    optimizer       its states, and in mixed precision the fp32 master (the paper counts it in K = 12)
    activations     inputs of checkpointed blocks on the host or in an arena; autograd's own cannot be listed
    communication   stage 3's slots; the buffers from which offload copies to the device
    other           buffers of the model, and the NaN views of parameters that are not gathered

A storage that is listed twice is counted once (`formulas.walk`), so views do no harm. Stage 3 adds its
slots (`Zero3.tensors`), an update what it keeps elsewhere (`tensors` in update/).
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from zero_mini.comm import Call
from zero_mini.flat import Unit
from zero_mini.memory.formulas import CATEGORIES, tensors_in, walk


def ledger(zero) -> list[Call]:
    """Every collective of the last whole step, in order."""
    return zero.comm.ledger.last_step


def places(zero) -> tuple[str, ...]:
    """The places that `memory` knows."""
    return zero.update.places


def memory(zero, place: str | None = None) -> dict[str, int]:
    """Bytes that are kept alive here now, by category (`formulas.walk`).

    place: "device", where the model computes, "host", where something waits (offload, checkpointed activations), or
    "disk", in files (offload to a folder); None: device and host, which on a CPU differ only in what they are for.
    ValueError if it is none of `zero.places`.
    """
    if place not in (None, *zero.places):
        raise ValueError(f"place must be {', '.join(map(repr, zero.places))} or None (got {place!r})")
    if place == "disk":
        return dict.fromkeys(CATEGORIES, 0) | {"optimizer": zero.update.bytes_on_disk()}
    everywhere, at_host = walk(zero), walk(SimpleNamespace(tensors=lambda: host_tensors(zero)))
    if place is None:
        return everywhere
    return at_host if place == "host" else {name: everywhere[name] - at_host[name] for name in everywhere}


def tensors(zero) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(category, label, tensor) for everything that is kept alive here, views included."""
    for unit in zero.units:
        if unit.full is not None:
            yield "parameters", unit.name, unit.full
        in_flight = unit.reducing[1:] if unit.reducing else ()  # the mean and the buffer
        for grad in (unit.mean_grad, unit.local_grad, *in_flight, *unit.grads()):
            if grad is not None:
                yield "gradients", unit.name, grad
        yield from states(zero, unit)
        yield "other", unit.name, unit.nan_views[0]
    for tensor in tensors_in(zero.optimizer.state):  # besides those of units, what is no parameter's own
        yield "optimizer", "state", tensor
    for name, buffer in zero.model.named_buffers():
        yield "other", name, buffer
    for place in waiting_places(zero.model):
        for tensor in place.tensors():
            yield "activations", "checkpoint", tensor
    yield from zero.update.tensors()


def states(zero, unit: Unit) -> Iterator[tuple[str, str, torch.Tensor]]:
    """What waits for the unit's update: its master, and the optimizer's states."""
    # K = 12 counts the fp32 master copy as the optimizer's; without mixed precision it is the parameters.
    yield "optimizer" if zero.mixed else "parameters", unit.name, unit.master
    for _, piece in unit.pieces:  # their .grad is a view of mean_grad
        for tensor in tensors_in(zero.optimizer.state.get(piece)):
            yield "optimizer", unit.name, tensor


def host_tensors(zero) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Those of `tensors` that wait in host memory."""
    for place in waiting_places(zero.model):
        for tensor in place.host_tensors():
            yield "activations", "checkpoint", tensor
    yield from zero.update.host_tensors()


def waiting_places(model: nn.Module) -> list:
    """Where inputs of the model's checkpointed blocks wait: `checkpoint_blocks` binds it to their forward as `host`."""
    forwards = [vars(module).get("forward") for module in model.modules()]
    places = [forward.keywords.get("host") for forward in forwards if isinstance(forward, partial)]
    return [place for place in dict.fromkeys(places) if hasattr(place, "host_tensors")]
