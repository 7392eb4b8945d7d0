"""Mistakes that only show while training: each is found before it can change a number, and told with its remedy.

    a gradient was never sent, for want of a backward
      outside no_sync()                                    at the step                      check_reduced
    a parameter was written to where its master does not
      follow                                               at the step, and after a gather  check_untouched
    a module or parameter was put in another's place       at the step                      Layout.check

checks.py refuses what shows before training. A parameter refuses what is wrong at any time (parameter.py), and stage 3
what its slots would make of it (zero3.py).

Left out: writes that torch does not count, those through a NumPy array say.
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
    """A step, before which all that backward has brought was reduced. RuntimeError."""
    if unit.local_grad is not None:
        raise RuntimeError(
            f"step: gradients of {unit.name} were accumulated under no_sync() and never reduced; "
            "run the last backward of a step outside no_sync()"
        )


def note_versions(unit: Unit) -> None:
    """Remember how often each parameter has been written to, for `check_untouched`."""
    unit.versions = versions_of(unit)


def check_untouched(unit: Unit) -> bool:
    """Has the user written to its parameters, so that the master follows? RuntimeError if it does not follow."""
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
        """RuntimeError if a parameter has come since that no unit has. (One that has gone is like an unused one.)"""
        is_as_it_was = sum(map(len, self.tables)) == len(self.entries) and all(
            map(operator.is_, self.now(), self.entries)
        )
        if is_as_it_was:
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
