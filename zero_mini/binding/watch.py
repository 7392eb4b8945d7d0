"""Mistakes that appear only during training: each raises before it changes a number, and names its remedy.

    a gradient was never sent, because no backward ran
      outside no_sync()                                    at the step                      check_reduced
    a write to a parameter does not reach its master       at the step, and after a gather  check_untouched
    a module or parameter was replaced by another          at the step                      Layout.check

Other files find other mistakes: checks.py before training, parameter.py at any operation on a parameter, zero3.py those
that come from its slots.

Left out: writes that torch does not count, for example through a NumPy array.
"""

import operator
from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn

from zero_mini.binding.parameter import plainly
from zero_mini.flat import Unit

version_of = torch.Tensor._version.__get__


def check_reduced(unit: Unit) -> None:
    """At the step: all gradients of the unit were reduced. RuntimeError if not."""
    if unit.local_grad is not None:
        raise RuntimeError(
            f"step: gradients of {unit.name} were accumulated under no_sync() and never reduced; "
            "run the last backward of a step outside no_sync()"
        )


def note_versions(unit: Unit) -> None:
    """Remember how often each parameter has been written to, for `check_untouched`."""
    unit.versions = versions_of(unit)


def count_update(unit: Unit) -> None:
    """Increase the version of each updated parameter, so that a backward through an older graph raises, as in torch."""
    with plainly():
        torch.autograd.graph.increment_version(
            [param for index, param in enumerate(unit.params) if unit.used_anywhere >> index & 1]
        )
    note_versions(unit)


def check_untouched(unit: Unit) -> bool:
    """Has the user written to the unit's parameters? RuntimeError if a write does not reach the master."""
    versions = versions_of(unit)
    if versions == unit.versions:
        return False
    if not follows_writes(unit):
        name = next(n for n, before, now in zip(unit.names, unit.versions, versions) if before != now)
        raise RuntimeError(
            f"{name} was changed in place, but what counts is its master copy, "
            "which was not: write to parameters under zero.full_params()"
        )
    return not unit.is_whole


class Layout:
    """Which modules and parameters a model had at zeroify()."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.look()

    def look(self) -> None:
        modules = list(self.model.modules())
        self.tables = [module._modules for module in modules] + [module._parameters for module in modules]
        self.entries = list(self.now())

    def now(self) -> Iterator[object]:
        return chain.from_iterable(map(dict.values, self.tables))

    def check(self) -> None:
        """RuntimeError if the model has a parameter that no unit has. (A removed parameter counts as unused.)"""
        is_unchanged = sum(map(len, self.tables)) == len(self.entries) and all(
            map(operator.is_, self.now(), self.entries)
        )
        if is_unchanged:
            return
        for name, param in self.model.named_parameters():
            if not hasattr(param, "unit"):
                raise RuntimeError(
                    f"{name} came into the model after zeroify(), so no unit holds it: replace or "
                    "add modules first, then wrap"
                )
        self.look()


def versions_of(unit: Unit) -> list[int]:
    with plainly():
        return list(map(version_of, unit.params))


def follows_writes(unit: Unit) -> bool:
    """Does a write to the parameters reach the master: by shared memory, or when full_params() ends?"""
    return unit.is_whole or unit.visible[0].untyped_storage()._cdata == unit.master.untyped_storage()._cdata
