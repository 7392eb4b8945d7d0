"""An operation on a hidden parameter gets the true values, or raises at that line.

    stages 1, 2   the values are in flight to every rank: wait for them; other ranks need not do anything
    stage 3       if a module of the model runs (the encoder alone, a head on parts of a sequence, a block's forward
                  that is called directly), it runs on all ranks: gather the unit, for this one operation. Anything
                  else raises: a loop over model.parameters() on one rank would wait for the others forever

At stage 3 such an operation is a turn of its own. Its outputs get the hooks of a unit's outputs, so that backward
gathers the unit again before it reaches this operation. A view of the parameter would outlive the turn, so the caller
gets a copy of it. Writes do not reach the master, so they raise.

Left out: views that were taken in the unit's turn and are read after it; reads that torch does not see (NumPy's).
"""

import sys
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from zero_mini.binding.parameter import HiddenParameter, name_of
from zero_mini.flat import Unit

CALL = nn.Module._call_impl.__code__


def run(operation: Callable, args: tuple, kwargs: dict) -> object:
    """operation(*args, **kwargs), after all hidden parameters among its arguments got their values. RuntimeError."""
    hidden_params = [tensor for tensor in tree_iter((args, kwargs)) if isinstance(tensor, HiddenParameter)]
    units: list[Unit] = list(dict.fromkeys(param.unit for param in hidden_params))
    what = f"{name_of(operation)} of {hidden_params[0].name_in_model}"
    for unit in units:
        unit.stage().fetch(unit, what)
    if any(isinstance(param, HiddenParameter) for param in hidden_params):
        raise RuntimeError(
            f"{what}: it needs {' and '.join(unit.name for unit in units)} at once, for which stage 3 has no room: "
            "do it under zero.full_params()"
        )
    versions = [param._version for param in hidden_params]
    result = operation(*args, **kwargs)
    for param, version in zip(hidden_params, versions):
        if param._version != version:
            param.unit.stage().check_write(param.unit, what)
    for unit in units:
        result = unit.stage().after_operation(unit, result)
    return result


def refuse(what: str) -> None:
    raise RuntimeError(
        f"{what}: its values are spread over the ranks outside its unit's turn; "
        "read and write parameters under zero.full_params(), on every rank, or call a module of the model; "
        "for an average of weights or a penalty on them see zero.named_parameters() and zero.add_penalty()"
    )


def forward_is_running(model: nn.Module) -> bool:
    """Does a module of the model run its forward now, on this thread?"""
    modules = set(map(id, model.modules()))
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CALL and id(frame.f_locals["self"]) in modules:
            return True
        frame = frame.f_back
    return False


def backward_is_running() -> bool:
    """Is this thread inside a backward pass (for example in the forward of a recompute)?"""
    return torch._C._current_graph_task_id() != -1


class Copies:
    """Copies that replaced views of a unit's parameters. A write to one would be lost, so `check` raises."""

    def __init__(self) -> None:
        self.entries: list[tuple[weakref.ref, int, str]] = []

    def detached_from(self, unit: Unit, result: object) -> object:
        """The result, with copies in place of views of the unit's parameters."""
        memory = unit.visible[0].untyped_storage()._cdata

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, nn.Parameter) or tensor.untyped_storage()._cdata != memory:
                return tensor
            clone = tensor.clone()
            self.entries.append((weakref.ref(clone), clone._version, unit.name))
            return clone

        return tree_map_only(torch.Tensor, copy, result)

    def check(self) -> None:
        """RuntimeError if a copy was written to."""
        entries, self.entries = self.entries, []
        for reference, version, name in entries:
            clone = reference()
            if clone is None:
                continue
            if clone._version != version:
                raise RuntimeError(
                    f"a view of a parameter of {name} was written to outside its unit's turn, which changes a copy: "
                    "write to parameters under zero.full_params()"
                )
            self.entries.append((reference, version, name))
