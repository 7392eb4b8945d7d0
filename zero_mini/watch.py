"""Mistakes that only show while training: each is found before it can change a number, and told with its remedy.

    a gradient was never sent, for want of a backward
      outside no_sync()                                    at the step                      check_reduced
    a parameter was written to where its master does not
      follow                                               at the step, and after a gather  check_untouched
    a module or parameter was put in another's place       at the step                      check_modules

What shows before training is refused in checks.py; a parameter itself refuses what is wrong at any time (held.py), and
stage 3 what its slots would make of it (zero3.py).

Left out: writes that torch does not count, those through a NumPy array say.
"""

import operator

from torch import nn

from zero_mini.flat import Unit
from zero_mini.held import plainly


def check_reduced(unit: Unit) -> None:
    """A step, before which all that backward has brought was reduced. RuntimeError."""
    if unit.grad is not None:
        raise RuntimeError(
            f"step: gradients of {unit.name} were accumulated under no_sync() and never reduced; "
            "run the last backward of a step outside no_sync()"
        )


def note_versions(unit: Unit) -> None:
    """Remember how often each parameter has been written to, for `check_untouched`."""
    unit.versions = versions_of(unit)


def check_untouched(unit: Unit) -> None:
    """RuntimeError if the user changed what a flat buffer cannot follow."""
    versions = versions_of(unit)
    if versions != unit.versions and not follows_writes(unit):
        name = next(n for n, before, now in zip(unit.names, unit.versions, versions) if before != now)
        raise RuntimeError(
            f"{name} was changed in place, but what counts is its master copy, "
            "which was not: write to parameters under zero.full_params()"
        )


def was_written_to(unit: Unit) -> bool:
    """By the user, so that the master follows: ranks may have written other values."""
    return unit.full is not None and versions_of(unit) != unit.versions and follows_writes(unit)


class Layout:
    """Which modules and parameters a model had at zeroify()."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.look()

    def look(self) -> None:
        tables = [table for module in self.model.modules() for table in (module._modules, module._parameters)]
        self.tables = [(table, tuple(table.values())) for table in tables]

    def check(self) -> None:
        """RuntimeError if a parameter has come since that no unit has. (One that has gone is like an unused one.)"""
        for table, before in self.tables:
            if len(table) != len(before) or not all(map(operator.is_, table.values(), before)):
                break
        else:
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
        return [param._version for param in unit.params]


def follows_writes(unit: Unit) -> bool:
    """Does a write to the parameters reach the master: by shared memory, or when full_params() ends?"""
    return unit.is_whole or unit.shown[0].untyped_storage()._cdata == unit.master.untyped_storage()._cdata
