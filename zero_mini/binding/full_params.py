"""Whole parameters, gradients and states, outside a unit's turn: to read, to change, to keep.

Between turns a parameter may be a slice on N ranks. `full_params()` shows all of it, in the
precision of the master copy, and carries changes back; `model.state_dict()` and
`model.load_state_dict()` do so by themselves, for the module they are called on; `state_dict()`
adds the optimizer's states under parameter names, so that any stage and any N can load them.

All of it is collective: every rank has to call it, and then holds all that is shown, in the master's
precision. To save a model, call `state_dict()` on every rank and write on one.
What `model.state_dict()` returns is a snapshot (stage 0 in fp32 alone returns the live values, as
torch does): to change parameters, use `load_state_dict` or `full_params`.

Left out: sharded checkpoints, which never need the whole (checkpoint/sharded.py).
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from zero_mini.binding import pieces, watch
from zero_mini.binding.hooks import backward_is_running
from zero_mini.binding.parameter import NO_COPY, set_grad
from zero_mini.flat import Unit


class Whole:
    """`self` is a stage: units, comm, master_dtype, ..."""

    @contextlib.contextmanager
    def full_params(self, grads: bool = False) -> Iterator[None]:
        """Within, every parameter is whole, in the master's dtype, and may be changed.

        With `grads`, its .grad is the mean over ranks, and may be changed too. What rank 0 has at
        the end counts, for all ranks. A forward without gradient runs on the whole parameters;
        training does not.
        """
        with self.comm.doing("zero.full_params()", collective=True):
            if grads:
                self.before_step()
            shown = [unit for unit in self.trainable if grads and unit.own_grad is not None]
            with self._showing(self.units, write=True), self._showing_grads(shown):
                yield

    @contextlib.contextmanager
    def _showing_grads(self, units: list[Unit]) -> Iterator[None]:
        """Within, .grad of their parameters is the mean over ranks, where any rank used them; changes count."""
        with torch.no_grad():
            wholes = [self._whole(unit, unit.own_grad) for unit in units]
        for unit, whole in zip(units, wholes):
            unit.shows_grads = True
            for index, (param, view) in enumerate(zip(unit.params, unit.views(whole))):
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
                    buffer = torch.empty(unit.P, dtype=self.master_dtype, device=self.device)
                    unit.fill(buffer, unit.grads())
                    self.comm.broadcast(buffer, unit.name).wait()
                    unit.own_grad.copy_(unit.kept(buffer))
                    for param in unit.params:
                        set_grad(param, None)

    def state_dict(self) -> dict:
        """{"model": name -> tensor, "optimizer": name -> key -> tensor or number, "groups": [options], "scaler": ...}.

        Whole, on the CPU, the same on every rank.
        """
        with self.comm.doing("zero.state_dict()", collective=True):
            return self._state_dict()

    def _state_dict(self) -> dict:
        model = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        states: dict[str, dict] = {}
        for unit in self.trainable:
            mine: dict[
                int, dict
            ] = {}  # parameter -> key -> number, or None where the key holds a value for each element
            for run, (_, piece) in zip(unit.runs[unit.master.numel()], unit.pieces):
                for index in range(run.first, run.after):
                    mine[index] = {
                        key: None if is_elementwise(value, piece) else on_cpu(value)
                        for key, value in self.optimizer.state.get(piece, {}).items()
                    }
            keys = {index: entry for ranks in self.comm.host_gather(mine) for index, entry in ranks.items() if entry}
            entries = [dict(keys.get(index, {})) for index in range(len(unit.names))]
            with self.in_memory(unit):
                for key in dict.fromkeys(key for entry in entries for key, value in entry.items() if value is None):
                    owned = torch.zeros_like(unit.master)
                    for (_, piece), (_, view) in zip(unit.pieces, unit.cut(owned)):
                        if key in self.optimizer.state.get(piece, {}):
                            view.copy_(self.optimizer.state[piece][key])
                    for entry, view in zip(entries, unit.views(self._whole(unit, owned))):
                        if key in entry:
                            entry[key] = view.cpu().clone()
            states |= zip(unit.names, entries)
        return {"model": model, "optimizer": states, **self.settings()}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, value) of every parameter, whole, in the master's dtype: an EMA's way. Collective, one unit at a time.

            for name, value in zero.named_parameters():
                average[name].lerp_(value, 0.001)

        Memory: one unit, which goes when the loop moves on. A value is a copy, not to be written to.
        """
        with self.comm.doing("zero.named_parameters()", collective=True):
            pass
        for unit in self.units:
            with torch.no_grad():
                watch.check_untouched(unit)
                self.wait_for_arrival(unit)
                with self.in_memory(unit):
                    whole = self._whole(unit, unit.master)
                views = unit.views(whole.clone() if whole is unit.master else whole)
            yield from zip(unit.names, views)

    def add_penalty(self, penalty: Callable[[str, torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
        """Add the gradient of a penalty on the weights; returns its value (0-dim), the sum over all parameters.

            loss.backward()
            zero.add_penalty(lambda name, p: 0.01 * p.square().sum())

        `penalty(name, whole parameter)` returns a 0-dim tensor, or None for no penalty on this one. Call it after the
        last backward of a step, and before clipping, on every rank. Memory: one unit, one after the other.
        """
        self.collect_means()
        total = torch.zeros((), dtype=self.master_dtype, device=self.device)
        for unit in self.trainable:
            with torch.no_grad():
                self.wait_for_arrival(unit)
                with self.in_memory(unit):
                    whole = self._whole(unit, unit.master).detach()
            leaves = [view.clone().requires_grad_() for view in unit.views(whole)]
            values = [penalty(name, leaf) for name, leaf in zip(unit.names, leaves)]
            named = [index for index, value in enumerate(values) if value is not None]
            if not named:
                continue
            with torch.enable_grad():
                part = sum(values[index] for index in named)
            grads = dict(zip(named, torch.autograd.grad(part, [leaves[index] for index in named])))
            with torch.no_grad():
                total += part
                whole = unit.fill(torch.empty_like(whole), [grads.get(index) for index in range(len(leaves))])
                self.add_gradient(unit, unit.kept(whole), named)
        return total

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict()` returned, at any stage and on any number of ranks.

        ValueError if it is of another model, or of other param groups.
        """
        missing = [name for unit in self.trainable for name in unit.names if name not in state["optimizer"]]
        if state["optimizer"] and missing:
            raise ValueError(f"the state has no optimizer entry for {missing[0]}: it is another model's")
        if len(state["groups"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the state has {len(state['groups'])} param groups, the optimizer {len(self.optimizer.param_groups)}: "
                "build the optimizer as it was when the state was saved"
            )
        with self.comm.doing("zero.load_state_dict()", collective=True):
            self.model.load_state_dict(state["model"])
            self.load_settings(state)
            self.load_optimizer_states(state["optimizer"])

    def settings(self) -> dict:
        """What is the same on every rank: {"groups": each param group's options, "scaler": the loss scale's state}."""
        groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"groups": groups, "scaler": self.scaler and self.scaler.state_dict()}

    def load_settings(self, settings: dict) -> None:
        """Take over what `settings()` returned, for as many param groups."""
        for group, options in zip(self.optimizer.param_groups, settings["groups"]):
            group.update(copy.deepcopy(options))
        if self.scaler is not None and settings.get("scaler"):  # what was saved in bf16 has none
            self.scaler.load_state_dict(settings["scaler"])

    def load_optimizer_states(self, states: dict[str, dict]) -> None:
        """name -> key -> tensor or number, whole -> the states of this rank's pieces."""
        self.optimizer.state.clear()
        shapes = {name: shape for unit in self.trainable for name, shape in zip(unit.names, unit.shapes)}
        # One parameter does not tell: where it is 0-dim, a momentum looks like a step.
        one_for_all = {
            key
            for name, shape in shapes.items()
            for key, value in states.get(name, {}).items()
            if not isinstance(value, torch.Tensor) or value.shape != shape
        }
        for unit in self.trainable if states else []:
            entries = [states[name] for name in unit.names]
            set_apart_what_differs(self, unit, [{k: e[k] for k in e if k in one_for_all} or bool(e) for e in entries])
            with self.in_memory(unit, write=True):
                for key in dict.fromkeys(key for entry in entries for key in entry):
                    if key not in one_for_all:
                        buffer = torch.empty(unit.P, dtype=self.master_dtype, device=self.device)
                        whole = unit.fill(buffer, [entry.get(key) for entry in entries])
                        parts = [view.to(unit.master.device, copy=True) for _, view in unit.cut(unit.kept(whole))]
                    for index, (run, (group, piece)) in enumerate(zip(unit.runs[unit.master.numel()], unit.pieces)):
                        if key in entries[run.first]:
                            value = entries[run.first][key]
                            is_number = key in one_for_all
                            self.optimizer.state[piece][key] = (
                                self.placed(value, group, piece) if is_number else parts[index]
                            )

    def in_memory(self, unit: Unit, write: bool = False) -> contextlib.AbstractContextManager:
        """Within, the unit's master and states can be read, and with `write` changed. They always can, here."""
        return contextlib.nullcontext()

    def placed(self, value: object, group: int, piece: torch.Tensor) -> object:
        """A number of the optimizer's, such as Adam's step, where that group keeps it."""
        options = self.optimizer.param_groups[group]
        on_device = options.get("fused") or options.get("capturable")
        if isinstance(value, torch.Tensor):
            return value.clone().to(piece.device if on_device else "cpu")
        return value

    # --- how ----------------------------------------------------------------------------------

    def wait_for_arrival(self, unit: Unit) -> None:
        """No gather into the unit's parameters is under way after this. At stage 3 slots are gathered into instead."""
        if unit.full is not None:
            self.before_forward(unit)

    def add_gradient(self, unit: Unit, grad: torch.Tensor, indices: list[int]) -> None:
        """To the mean (P or S) that the optimizer will get, for these parameters of the unit."""
        unscale = 1.0 if self.coefficient is None else 1 / self.coefficient  # it is multiplied in later, once
        grad = grad.to(unit.master.device) * unscale
        unit.own_grad = grad if unit.own_grad is None else unit.own_grad.to(self.master_dtype) + grad
        unit.used |= sum(1 << index for index in indices)
        unit.used_anywhere |= unit.used

    def _whole(self, unit: Unit, owned: torch.Tensor) -> torch.Tensor:
        """owned, (P) or slices (S) -> all of it (P)."""
        owned = owned.to(self.device)
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
        if backward_is_running():
            raise RuntimeError("whole parameters cannot be shown inside a backward")
        self.showing_whole = True
        before, wholes = [], []
        with torch.no_grad():
            for unit in units:
                watch.check_untouched(unit)
                self.wait_for_arrival(unit)  # a gather under way must not land in what is written
                with self.in_memory(unit):
                    whole = self._whole(unit, unit.master)
                before.append(unit.shown)
                wholes.append(whole)
                unit.show(unit.views(whole))
                unit.is_whole = True
        try:
            yield
        finally:
            self.showing_whole = False
            for unit, views in zip(units, before):
                unit.is_whole = False
                unit.show(views)
            with torch.no_grad():
                for unit, whole in zip(units, wholes) if write else ():
                    self.comm.broadcast(whole, unit.name).wait()
                    self.replace(unit, whole)
                    watch.note_versions(unit)

    def hook_state_dicts(self) -> None:
        """Let state_dict() and load_state_dict() of every module show whole values while they run."""
        self.showing_whole = False  # under full_params(), where hooks keep still
        self.open_calls: list[contextlib.AbstractContextManager] = []  # a module's lies inside its parent's
        for module in self.model.modules():
            module.register_state_dict_pre_hook(partial(self._enter_state_dict))
            module.register_state_dict_post_hook(partial(self._leave_state_dict))  # partial: torch marks its hooks
            module.register_load_state_dict_pre_hook(partial(self._enter_load))
            module.register_load_state_dict_post_hook(partial(self._leave_state_dict))

    def check_nothing_is_whole(self) -> None:
        """RuntimeError for a step under full_params()."""
        self.close_broken_calls()
        if self.showing_whole:
            raise RuntimeError(
                "optimizer.step() under zero.full_params(), whose end would put the old values back: leave it first"
            )

    def close_broken_calls(self) -> None:
        """Nothing runs inside a state_dict() call: one that is still open was ended by an exception."""
        while self.open_calls:
            self.open_calls.pop().__exit__(None, None, None)

    def _enter_state_dict(self, module: nn.Module, *_, write: bool = False) -> None:
        held = {id(param) for param in module.parameters()}
        units = [unit for unit in self.units if any(id(param) in held for param in unit.params)]
        is_collective = write or any(unit.master.numel() < unit.P for unit in units)
        self.open_calls.append(contextlib.ExitStack())
        if not self.showing_whole:
            call = "model.load_state_dict()" if write else "model.state_dict()"
            self.open_calls[-1].enter_context(self.comm.doing(call, is_collective))
        self.open_calls[-1].enter_context(self._showing(units, write))

    def _enter_load(self, module, state_dict, prefix, local_metadata, *_) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise RuntimeError("load_state_dict(assign=True) would replace parameters: use assign=False")
        self._enter_state_dict(module, write=True)

    def _leave_state_dict(self, *_) -> None:
        self.open_calls.pop().__exit__(None, None, None)

    def __reduce_ex__(self, protocol):
        raise RuntimeError(NO_COPY)


def on_cpu(value: object) -> object:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def set_apart_what_differs(zero, unit: Unit, numbers: list) -> None:
    """Parameters of one run whose optimizer states have other numbers, a step say, get pieces of their own."""
    differ = set()
    for run in unit.runs[unit.P]:
        members = range(run.first, run.after)
        if any(numbers[index] != numbers[run.first] for index in members):
            differ |= set(members)
    if differ:
        pieces.set_apart(zero, unit, differ)


def is_elementwise(value: object, piece: torch.Tensor) -> bool:
    """Does the optimizer keep a number for each element, as a momentum, or one for all, as a step?

    >>> is_elementwise(torch.zeros(3), torch.ones(3)), is_elementwise(torch.tensor(1.0), torch.ones(3))
    (True, False)
    """
    return isinstance(value, torch.Tensor) and value.shape == piece.shape
