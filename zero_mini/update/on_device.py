"""The update on the device of the model: torch's own optimizer step, or one fused pass.

`zero.update` is the only interface between the script of a step and the update of the masters:

    adopt, replace            a unit gets its master, or other values
    after_reduce, receive,
    wait_for_mean             a mean is in flight, has arrived, is where the optimizer reads it
    step                      the masters get new values
    write_cast, settle_cast   the parameters that the model computes with follow the master
    source                    the slice from which stage 3 gathers
    in_memory                 master and states can be read

update/offload.py keeps masters and states in host memory, update/disk.py in files. `Script.__init__`
says how a stage class brings a subclass of its own.
"""

import contextlib
from collections.abc import Iterator

import torch

from zero_mini.binding.parameter import plainly, set_grad
from zero_mini.flat import Unit
from zero_mini.update import one_pass


class OnDevice:
    """`zero` is the handle of a stage."""

    places = ("device", "host")  # the places that `zero.memory` reports

    def __init__(self, zero) -> None:
        self.zero = zero
        self.casts_written = False  # the step itself wrote the casts

    def adopt(self, unit: Unit) -> None:
        """Called once for a unit, when the stage has created its master."""

    def ready(self) -> None:
        """Called once, when all units are adopted."""

    def after_reduce(self, unit: Unit) -> None:
        """A reduction of the unit's gradients has started."""

    def end_backward(self) -> None:
        """All reductions of a backward have started."""

    def receive(self, unit: Unit, mean: torch.Tensor) -> None:
        """A mean (P or S, in the dtype of the reduction) has arrived: add it to the unit's, in the master's dtype.

        The first mean is kept in the dtype that it has.
        """
        if unit.mean_grad is None:
            unit.mean_grad = mean
        else:
            unit.mean_grad = unit.mean_grad.to(self.zero.master_dtype) + mean

    def wait_for_mean(self, unit: Unit) -> None:
        """Wait until the unit's mean is where the optimizer reads it."""
        self.zero.finish_reduction(unit)

    def applies_factor(self) -> bool:
        """Will `step` multiply gradients by the factor itself, as it reads them?"""
        return one_pass.can_fuse(self.zero)

    def step(self) -> None:
        """Update the masters, or hand the means to the optimizer, whose own step runs next."""
        self.casts_written = self.applies_factor()
        if self.casts_written:
            self.zero.check_step()
            self.update_masters()
        else:
            self.hand_means_to_optimizer()

    def update_masters(self) -> None:
        """The update that multiplies by the factor itself."""
        one_pass.step(self.zero)

    @torch.no_grad()
    def hand_means_to_optimizer(self) -> None:
        """Set each piece's .grad to its mean times the factor, in the master's dtype. May be called twice."""
        zero = self.zero
        zero.collect_means()
        for unit in zero.trainable:
            if unit.mean_grad is not None:
                unit.mean_grad = unit.mean_grad.to(zero.master_dtype)
                if zero.factor.value is not None:
                    unit.mean_grad.mul_(zero.factor.value.to(unit.mean_grad.device))
                with plainly():
                    for _, piece, grad in unit.used_pieces(unit.mean_grad):
                        set_grad(piece, grad)
        zero.means_due = False
        zero.factor.forget()

    def settle_cast(self, unit: Unit) -> None:
        """After a step: the parameters that the model computes with have the master's new values."""
        if not self.casts_written:  # a fused step wrote those of units with a gradient; others did not change
            self.write_cast(unit)

    def write_cast(self, unit: Unit) -> None:
        """master -> this rank's part of the parameters that the model computes with."""
        cast = self.cast_of(unit)
        if self.zero.mixed and cast is not None:
            cast.copy_(unit.master)

    def cast_of(self, unit: Unit) -> torch.Tensor | None:
        """What follows the master in the dtype of the computation, shaped like it; None at stage 3: it casts later."""
        return None if unit.full is None else unit.part_of_master(unit.full)

    def source(self, unit: Unit) -> torch.Tensor:
        """This rank's slice (S), from which stage 3 gathers."""
        return unit.master

    def replace(self, unit: Unit, values: torch.Tensor) -> None:
        """Give the unit other values (P), the same on all ranks."""
        unit.master.copy_(unit.part_of_master(values))
        if unit.full is not None:
            unit.full.copy_(values)

    def in_memory(self, unit: Unit, write: bool = False) -> contextlib.AbstractContextManager:
        """Inside the block, the unit's master and states can be read, and with `write` changed."""
        return contextlib.nullcontext()

    def forget_states(self) -> None:
        """Drop the optimizer's states: others will be loaded."""
        self.zero.optimizer.state.clear()

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(category, label, tensor) of tensors that are neither a unit's nor optimizer states."""
        return iter(())

    def host_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(category, label, tensor) of all tensors in host memory."""
        return iter(())
