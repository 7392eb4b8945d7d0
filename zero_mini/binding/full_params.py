"""Whole parameters and gradients outside a unit's turn, to read and to change.

    full_params        all parameters at once, in the master's dtype; changes are kept
    named_parameters   one unit after the other, to read: for an average of the weights
    add_penalty        one unit after the other, to differentiate: for a penalty on the weights

Between turns the values of a parameter may be spread over N ranks, so each of these is collective: every rank must
call it, and every rank gets the whole values.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from zero_mini.binding import watch
from zero_mini.binding.out_of_turn import backward_is_running
from zero_mini.binding.parameter import set_grad
from zero_mini.flat import Unit


@contextlib.contextmanager
def full_params(zero, grads: bool = False) -> Iterator[None]:
    """Inside the block, every parameter is whole, in the master's dtype, and may be changed.

    With `grads`, its .grad is the mean over ranks, and may be changed too. At the end all ranks
    take rank 0's values. A forward without gradient works inside the block; training does not.
    Collective. RuntimeError inside a backward.
    """
    with zero.comm.host.doing("zero.full_params()", collective=True):
        if grads:
            zero.update.hand_means_to_optimizer()
        units = [unit for unit in zero.trainable if grads and unit.mean_grad is not None]
        with showing(zero, zero.units, write=True), showing_grads(zero, units):
            yield


@contextlib.contextmanager
def showing_grads(zero, units: list[Unit]) -> Iterator[None]:
    """Inside the block, .grad of a parameter that any rank used is the mean over ranks; changes are kept."""
    with torch.no_grad():
        means = [gather_whole(zero, unit, unit.mean_grad, "gradients of ") for unit in units]
    for unit, mean in zip(units, means):
        unit.shows_grads = True
        for index, (param, view) in enumerate(zip(unit.params, unit.views(mean))):
            if unit.used_anywhere >> index & 1:
                set_grad(param, view)
    try:
        yield
    finally:
        with torch.no_grad():
            for unit in units:
                unit.shows_grads = False
                unit.note_used(unit.grads())
                unit.used_anywhere |= unit.used
                buffer = torch.empty(unit.P, dtype=zero.master_dtype, device=zero.device)
                unit.fill(buffer, unit.grads())
                zero.comm.broadcast(buffer, f"gradients of {unit.name}").wait()
                unit.mean_grad.copy_(unit.part_of_master(buffer))
                for param in unit.params:
                    set_grad(param, None)


def named_parameters(zero) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) of every whole parameter, in the master's dtype, for example for an EMA. Collective, unit by unit.

        for name, value in zero.named_parameters():
            average[name].lerp_(value, 0.001)

    Memory: one unit, freed when the loop reaches the next one. A value is a copy: do not write to it.
    """
    with zero.comm.host.doing("zero.named_parameters()", collective=True):
        pass
    for unit in zero.units:
        with torch.no_grad():
            watch.check_untouched(unit)
            wait_for_arrival(zero, unit)
            with zero.update.in_memory(unit):
                whole = gather_whole(zero, unit, unit.master)
            views = unit.views(whole.clone() if whole is unit.master else whole)
        yield from zip(unit.names, views)


def add_penalty(zero, penalty: Callable[[str, torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
    """Add the gradient of a penalty on the weights; returns its value (0-dim), the sum over all parameters.

        loss.backward()
        zero.add_penalty(lambda name, p: 0.01 * p.square().sum())

    `penalty(name, whole parameter)` returns a 0-dim tensor, or None for no penalty on this one. Call it after the
    last backward of a step, and before clipping, on every rank. Memory: one unit at a time.
    """
    with zero.comm.host.doing("zero.add_penalty()"):
        zero.collect_means()
    total = torch.zeros((), dtype=zero.master_dtype, device=zero.device)
    for unit in zero.trainable:
        with torch.no_grad():
            wait_for_arrival(zero, unit)
            with zero.update.in_memory(unit):
                whole = gather_whole(zero, unit, unit.master).detach()
        leaves = [view.clone().requires_grad_() for view in unit.views(whole)]
        values = [penalty(name, leaf) for name, leaf in zip(unit.names, leaves)]
        indices = [index for index, value in enumerate(values) if value is not None]
        if not indices:
            continue
        with torch.enable_grad():
            part = sum(values[index] for index in indices)
        grads = dict(zip(indices, torch.autograd.grad(part, [leaves[index] for index in indices])))
        with torch.no_grad():
            total += part
            whole = unit.fill(torch.empty_like(whole), [grads.get(index) for index in range(len(leaves))])
            add_gradient(zero, unit, unit.part_of_master(whole), indices)
    return total


# --- helpers ------------------------------------------------------------------------------


def wait_for_arrival(zero, unit: Unit) -> None:
    """Wait until no gather into `unit.full` is in flight. Stage 3 has none: it gathers into slots."""
    if unit.full is not None:
        zero.before_forward(unit)


def add_gradient(zero, unit: Unit, grad: torch.Tensor, indices: list[int]) -> None:
    """Add `grad`, of these parameters of the unit, to the mean (P or S) that the optimizer will get."""
    unscale = 1.0 if zero.factor.value is None else 1 / zero.factor.value  # the factor multiplies it later
    grad = grad.to(unit.master.device) * unscale
    unit.mean_grad = grad if unit.mean_grad is None else unit.mean_grad.to(zero.master_dtype) + grad
    unit.used |= sum(1 << index for index in indices)
    unit.used_anywhere |= unit.used


def gather_whole(zero, unit: Unit, owned: torch.Tensor, what: str = "") -> torch.Tensor:
    """owned (P), or this rank's slice (S) -> the whole buffer (P). `what` they are, but for values."""
    owned = owned.to(zero.device)
    if owned.numel() == unit.P:
        return owned
    whole = torch.empty(unit.P, dtype=owned.dtype, device=owned.device)
    zero.comm.all_gather(whole, owned, what + unit.name).wait()
    return whole


@contextlib.contextmanager
def showing(zero, units: list[Unit], write: bool) -> Iterator[None]:
    """Inside the block, the parameters of these units are whole."""
    if zero.showing_whole:  # for example state_dict() under full_params()
        yield
        return
    if backward_is_running():
        raise RuntimeError("whole parameters cannot be shown inside a backward")
    zero.showing_whole = True
    old_views, buffers = [], []
    with torch.no_grad():
        for unit in units:
            watch.check_untouched(unit)
            wait_for_arrival(zero, unit)  # a gather in flight must not overwrite the user's writes
            with zero.update.in_memory(unit):
                buffer = gather_whole(zero, unit, unit.master)
            old_views.append(unit.visible)
            buffers.append(buffer)
            unit.show(unit.views(buffer))
            unit.is_whole = True
    try:
        yield
    finally:
        zero.showing_whole = False
        for unit, views in zip(units, old_views):
            unit.is_whole = False
            unit.show(views)
        with torch.no_grad():
            for unit, buffer in zip(units, buffers) if write else ():
                zero.comm.broadcast(buffer, unit.name).wait()
                zero.replace(unit, buffer)
                watch.note_versions(unit)
