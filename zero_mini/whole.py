"""Whole parameters, gradients and states, outside a unit's turn: to read, to change, to keep.

Between turns a parameter may be a slice on N ranks. `full_params()` shows all of it, in the
precision of the master copy, and carries changes back; `model.state_dict()` and
`model.load_state_dict()` do so by themselves, for the module they are called on; `state_dict()`
adds the optimizer's states under parameter names, so that any stage and any N can load them.

All of it is collective: every rank has to call it. It costs one rank's memory for what is shown.

Left out: sharded checkpoints, which never need the whole.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from zero_mini.flat import Unit


class Whole:
    """What a stage offers besides the script. `self` is a stage: units, comm, master_dtype, ..."""

    @contextlib.contextmanager
    def full_params(self, grads: bool = False) -> Iterator[None]:
        """Within, every parameter is whole, in the master's dtype, and may be changed.

        With `grads`, its .grad is the mean over ranks. What rank 0 has at the end counts, for
        all ranks. A forward without gradient runs on the whole parameters; training does not.
        """
        if grads:
            self.before_step()
        with self._showing(self.units, write=True), torch.no_grad():
            with_grad = [unit for unit in self.trainable if grads and unit.own_grad is not None]
            whole_grads = {unit: self._whole(unit, unit.own_grad) for unit in with_grad}
            for unit, grad in whole_grads.items():
                for param, view in zip(unit.params, unit.views(grad)):
                    param.grad = view
            with torch.enable_grad():
                yield
            for unit, grad in whole_grads.items():
                if unit.own_grad.numel() < grad.numel():
                    unit.own_grad.copy_(unit.own(grad))
                for param in unit.params:
                    param.grad = None

    def state_dict(self) -> dict:
        """{"model": name -> tensor, "optimizer": name -> key -> tensor or number}, whole, on the CPU."""
        model = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        states: dict[str, dict] = {}
        for unit in self.trainable:
            mine = {}  # key -> number, or None where the key holds a value for each element
            for _, piece in unit.pieces:
                for key, value in self.optimizer.state.get(piece, {}).items():
                    mine[key] = None if is_elementwise(value, piece) else value
            keys = {key: value for ranks in self.comm.host_gather(mine) for key, value in ranks.items()}
            for key, value in keys.items():
                if value is None:
                    owned = torch.zeros_like(unit.master)
                    for (_, piece), (_, view) in zip(unit.pieces, unit.cut(owned)):
                        if key in self.optimizer.state.get(piece, {}):
                            view.copy_(self.optimizer.state[piece][key])
                    values = [view.cpu().clone() for view in unit.views(self._whole(unit, owned))]
                else:
                    values = [value] * len(unit.names)
                for name, part in zip(unit.names, values):
                    states.setdefault(name, {})[key] = part
        return {"model": model, "optimizer": states}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict()` returned, at any stage and on any number of ranks."""
        missing = [name for unit in self.trainable for name in unit.names if name not in state["optimizer"]]
        if state["optimizer"] and missing:
            raise ValueError(f"the state has no optimizer entry for {missing[0]}: it is another model's")
        self.model.load_state_dict(state["model"])
        self.optimizer.state.clear()
        for unit in self.trainable if state["optimizer"] else []:
            entries = [state["optimizer"][name] for name in unit.names]
            for key, example in entries[0].items():
                if isinstance(example, torch.Tensor) and example.shape == unit.shapes[0]:
                    buffer = torch.empty(unit.P, dtype=self.master_dtype, device=self.device)
                    whole = unit.fill(buffer, [entry[key] for entry in entries])
                    owned = whole if unit.master.numel() == unit.P else unit.own(whole)
                    parts = [view.clone() for _, view in unit.cut(owned)]
                else:
                    parts = [example.clone() if isinstance(example, torch.Tensor) else example for _ in unit.pieces]
                for (_, piece), part in zip(unit.pieces, parts):
                    self.optimizer.state[piece][key] = part

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(category, label, tensor) for everything that is kept alive here, views included."""
        for unit in self.units:
            # K = 12 counts the fp32 master copy as the optimizer's; without mixed precision it is the parameters.
            yield "optimizer" if self.mixed else "parameters", unit.name, unit.master
            if unit.full is not None:
                yield "parameters", unit.name, unit.full
            sent = unit.reducing[1:] if unit.reducing else ()
            for grad in (unit.own_grad, unit.grad, *sent, *(torch.Tensor.grad.__get__(p) for p in unit.params)):
                if grad is not None:
                    yield "gradients", unit.name, grad
            for _, piece in unit.pieces:
                for value in (piece.grad, *self.optimizer.state.get(piece, {}).values()):
                    if isinstance(value, torch.Tensor):
                        yield "gradients" if value is piece.grad else "optimizer", unit.name, value
            yield "other", unit.name, unit.nothing[0]
        for name, buffer in self.model.named_buffers():
            yield "other", name, buffer

    # --- how ----------------------------------------------------------------------------------

    def _whole(self, unit: Unit, owned: torch.Tensor) -> torch.Tensor:
        """owned, (P) or slices (S) -> all of it (P)."""
        if owned.numel() == unit.P:
            return owned
        whole = torch.empty(unit.P, dtype=owned.dtype, device=owned.device)
        self.comm.all_gather(whole, owned, unit.name).wait()
        return whole

    @contextlib.contextmanager
    def _showing(self, units: list[Unit], write: bool) -> Iterator[None]:
        """Within, the parameters of these units are whole."""
        if self.showing_whole:  # state_dict() under full_params(), say
            yield
            return
        if self.in_backward:
            raise RuntimeError("whole parameters cannot be shown inside a backward")
        self.showing_whole = True
        wholes = []
        with torch.no_grad():
            for unit in units:
                if unit.full is not None:
                    self.before_forward(unit)  # a gather under way must not land in what is written
                whole = self._whole(unit, unit.master)
                wholes.append(whole)
                unit.show(unit.views(whole))
        try:
            yield
        finally:
            self.showing_whole = False
            with torch.no_grad():
                for unit, whole in zip(units, wholes):
                    if write:
                        self.comm.broadcast(whole, unit.name).wait()
                        unit.master.copy_(whole if unit.master.numel() == unit.P else unit.own(whole))
                        self.publish(unit)
                        unit.note_versions()
                    self.restore(unit)

    def hook_state_dicts(self) -> None:
        """Let state_dict() and load_state_dict() of every module show whole values while they run."""
        calls: list[contextlib.AbstractContextManager] = []

        def enter(module: nn.Module, write: bool) -> None:
            held = {id(param) for param in module.parameters()}
            units = [unit for unit in self.units if any(id(param) in held for param in unit.params)]
            calls.append(self._showing(units, write))
            calls[-1].__enter__()

        def leave(*_) -> None:
            calls.pop().__exit__(None, None, None)

        def enter_load(module, state_dict, prefix, local_metadata, *_) -> None:
            if local_metadata.get("assign_to_params_buffers"):
                raise RuntimeError("load_state_dict(assign=True) would replace parameters: use assign=False")
            enter(module, write=True)

        for module in self.model.modules():
            module.register_state_dict_pre_hook(lambda module, *_: enter(module, write=False))
            module.register_state_dict_post_hook(leave)
            module.register_load_state_dict_pre_hook(enter_load)
            module.register_load_state_dict_post_hook(leave)


def is_elementwise(value: object, piece: torch.Tensor) -> bool:
    """Does the optimizer keep a number for each element, as a momentum, or one for all, as a step?

    >>> is_elementwise(torch.zeros(3), torch.ones(3)), is_elementwise(torch.tensor(1.0), torch.ones(3))
    (True, False)
    """
    return isinstance(value, torch.Tensor) and value.shape == piece.shape
