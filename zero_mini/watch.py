"""Mistakes that only show while training: each is found before it can change a number, and told with its remedy.

    a gradient came outside its unit's turn                at the end of the backward       check_turns
    a gradient came from no backward of the model,
      or was never sent, for want of a backward outside
      no_sync()                                            at the step                      check_gradients
    a parameter was written to where its master does not
      follow, was frozen or unfrozen                       at the step, and after a gather  check_untouched

What shows before training is refused in checks.py; a parameter itself refuses what is wrong at any time (held.py), and
stage 3 what its slots would make of it (zero3.py).

Left out: writes that torch does not count, those through a NumPy array say.
"""

from zero_mini.flat import Unit


def check_turns(units: list[Unit]) -> None:
    """The end of a backward, where flat buffers have taken all gradients that came in turn. RuntimeError."""
    for unit in units:
        if unit.grads_arrived():
            raise RuntimeError(
                f"{unit.name} got a gradient outside its turn: its weights were used without calling "
                "its module, or its output was a view that was changed in place, or it was unfrozen "
                "after zeroify(); call the module itself, clone() its output, or wrap again"
            )


def check_gradients(unit: Unit) -> None:
    """A step, before which all that backward has brought was reduced. RuntimeError."""
    if unit.grads_arrived():
        raise RuntimeError(
            f"{unit.name} has a gradient that no backward of the model brought: it was written by hand, or "
            "backward did not pass through an output of the model; return tensors, and clone() an output "
            "that is a view before changing it in place"
        )
    if unit.grad is not None:
        raise RuntimeError(
            f"step: gradients of {unit.name} were accumulated under no_sync() and never reduced; "
            "run the last backward of a step outside no_sync()"
        )


def note_versions(unit: Unit) -> None:
    """Remember how often each parameter has been written to, for `check_untouched`."""
    unit.versions = [param._version for param in unit.params]


def check_untouched(unit: Unit) -> None:
    """RuntimeError if the user changed what a flat buffer cannot follow."""
    for name, param, version in zip(unit.names, unit.params, unit.versions):
        if param._version != version and not follows_writes(unit):
            raise RuntimeError(
                f"{name} was changed in place, but what counts is its master copy, "
                "which was not: write to parameters under zero.full_params()"
            )
        if param.requires_grad is not unit.trainable:
            raise RuntimeError(
                f"{name} was {'frozen' if unit.trainable else 'unfrozen'} after zeroify(), which laid out "
                f"{unit.name} by what requires a gradient: set requires_grad first, then wrap"
            )


def follows_writes(unit: Unit) -> bool:
    """Does a write to the parameters reach the master: by shared memory, or when full_params() ends?"""
    return unit.is_whole or unit.shown[0].untyped_storage()._cdata == unit.master.untyped_storage()._cdata
