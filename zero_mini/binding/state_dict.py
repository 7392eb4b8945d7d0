"""Whole states under parameter names, so that any stage and any number of ranks can load them.

    zero.state_dict()    model, optimizer, param groups and loss scale
    model.state_dict()   the model alone, as for any model: hooks show whole values while it runs

Both are collective, and every rank gets the whole state: to save, call it on every rank and write on one.
`model.state_dict()` returns a snapshot (only stage 0 in fp32 returns the live values, as torch does): to change
parameters, use `load_state_dict` or `full_params`.

Left out: sharded checkpoints, which never gather the whole state (checkpoint/sharded.py).
"""

import contextlib
import copy
from functools import partial

import torch
from torch import nn

from zero_mini.binding.full_params import gather_whole, showing
from zero_mini.binding.pieces import is_elementwise, set_apart_what_differs


def state_dict(zero) -> dict:
    """{"model": name -> tensor, "optimizer": name -> key -> tensor or number, "groups": [options], "scaler": ...}.

    Whole, on the CPU, the same on every rank.
    """
    with zero.comm.host.doing("zero.state_dict()", collective=True):
        return whole_state(zero)


def whole_state(zero) -> dict:
    model = {name: value.detach().cpu().clone() for name, value in zero.model.state_dict().items()}
    states: dict[str, dict] = {}
    for unit in zero.trainable:
        numbers: dict[int, dict] = {}  # parameter -> key -> number, or None if there is a value for each element
        for run, (_, piece) in zip(unit.runs[unit.master.numel()], unit.pieces):
            for index in range(run.first, run.after):
                numbers[index] = {
                    key: None if is_elementwise(value, piece) else on_cpu(value)
                    for key, value in zero.optimizer.state.get(piece, {}).items()
                }
        keys = {index: entry for ranks in zero.comm.host.gather(numbers) for index, entry in ranks.items() if entry}
        entries = [dict(keys.get(index, {})) for index in range(len(unit.names))]
        with zero.update.in_memory(unit):
            for key in dict.fromkeys(key for entry in entries for key, value in entry.items() if value is None):
                owned = torch.zeros_like(unit.master)
                for (_, piece), (_, view) in zip(unit.pieces, unit.by_group(owned)):
                    if key in zero.optimizer.state.get(piece, {}):
                        view.copy_(zero.optimizer.state[piece][key])
                whole = gather_whole(zero, unit, owned, f"{key} of ")
                for entry, view in zip(entries, unit.views(whole)):
                    if key in entry:
                        entry[key] = view.cpu().clone()
        states |= zip(unit.names, entries)
    return {"model": model, "optimizer": states, **settings(zero)}


@torch.no_grad()
def load_state_dict(zero, state: dict) -> None:
    """Load what `state_dict()` returned, at any stage and on any number of ranks.

    ValueError if it is from another model, or has other param groups.
    """
    absent_names = [name for unit in zero.trainable for name in unit.names if name not in state["optimizer"]]
    if state["optimizer"] and absent_names:
        raise ValueError(f"the state has no optimizer entry for {absent_names[0]}: it is another model's")
    if len(state["groups"]) != len(zero.optimizer.param_groups):
        raise ValueError(
            f"the state has {len(state['groups'])} param groups, the optimizer {len(zero.optimizer.param_groups)}: "
            "build the optimizer as it was when the state was saved"
        )
    with zero.comm.host.doing("zero.load_state_dict()", collective=True):
        zero.model.load_state_dict(state["model"])
        load_settings(zero, state)
        load_optimizer_states(zero, state["optimizer"])


def settings(zero) -> dict:
    """What is the same on every rank: {"groups": each param group's options, "scaler": the loss scale's state}."""
    groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in zero.optimizer.param_groups]
    return {"groups": groups, "scaler": zero.factor.scaler and zero.factor.scaler.state_dict()}


def load_settings(zero, settings: dict) -> None:
    """Load what `settings()` returned; the number of param groups must be the same."""
    for group, options in zip(zero.optimizer.param_groups, settings["groups"]):
        group.update(copy.deepcopy(options))
    if zero.factor.scaler is not None and settings.get("scaler"):  # a state saved in bf16 has none
        zero.factor.scaler.load_state_dict(settings["scaler"])


def load_optimizer_states(zero, states: dict[str, dict]) -> None:
    """Whole states (name -> key -> tensor or number) -> the states of this rank's pieces."""
    zero.update.forget_states()
    shapes = {name: shape for unit in zero.trainable for name, shape in zip(unit.names, unit.shapes)}
    # Look at all parameters: in a 0-dim one, a momentum has the shape of a step.
    one_for_all = {
        key
        for name, shape in shapes.items()
        for key, value in states.get(name, {}).items()
        if not isinstance(value, torch.Tensor) or value.shape != shape
    }
    for unit in zero.trainable if states else []:
        entries = [states[name] for name in unit.names]
        set_apart_what_differs(zero, unit, [{k: e[k] for k in e if k in one_for_all} or bool(e) for e in entries])
        with zero.update.in_memory(unit, write=True):
            for key in dict.fromkeys(key for entry in entries for key in entry):
                if key not in one_for_all:
                    buffer = torch.empty(unit.P, dtype=zero.master_dtype, device=zero.device)
                    whole = unit.fill(buffer, [entry.get(key) for entry in entries])
                    parts = [
                        view.to(unit.master.device, copy=True) for _, view in unit.by_group(unit.part_of_master(whole))
                    ]
                for index, (run, (group, piece)) in enumerate(zip(unit.runs[unit.master.numel()], unit.pieces)):
                    if key in entries[run.first]:
                        value = entries[run.first][key]
                        is_number = key in one_for_all
                        zero.optimizer.state[piece][key] = (
                            placed(zero, value, group, piece) if is_number else parts[index]
                        )


def placed(zero, value: object, group: int, piece: torch.Tensor) -> object:
    """A number of the optimizer, such as Adam's step, on the device where that group keeps it."""
    options = zero.optimizer.param_groups[group]
    on_device = options.get("fused") or options.get("capturable")
    if isinstance(value, torch.Tensor):
        return value.clone().to(piece.device if on_device else "cpu")
    return value


def on_cpu(value: object) -> object:
    return value.cpu() if isinstance(value, torch.Tensor) else value


# --- model.state_dict() and model.load_state_dict() ------------------------------------------


def hook_state_dicts(zero) -> None:
    """Let state_dict() and load_state_dict() of every module show whole values while they run."""
    for module in zero.model.modules():
        # torch sets attributes of a hook: a separate partial for each
        module.register_state_dict_pre_hook(partial(enter_call, zero))
        module.register_state_dict_post_hook(partial(leave_call, zero))
        module.register_load_state_dict_pre_hook(partial(enter_load, zero))
        module.register_load_state_dict_post_hook(partial(leave_call, zero))


def refuse_step_inside(zero) -> None:
    """RuntimeError for a step under full_params()."""
    close_broken_calls(zero)
    if zero.showing_whole:
        raise RuntimeError(
            "optimizer.step() under zero.full_params(), whose end would put the old values back: leave it first"
        )


def close_broken_calls(zero) -> None:
    """End calls that raised: nothing else runs during a state_dict() call, so a call that is still open has failed."""
    while zero.open_calls:
        zero.open_calls.pop().__exit__(None, None, None)


def enter_call(zero, module: nn.Module, *_, write: bool = False) -> None:
    param_ids = {id(param) for param in module.parameters()}
    units = [unit for unit in zero.units if any(id(param) in param_ids for param in unit.params)]
    is_collective = write or any(unit.master.numel() < unit.P for unit in units)
    zero.open_calls.append(contextlib.ExitStack())
    if not zero.showing_whole:
        call = "model.load_state_dict()" if write else "model.state_dict()"
        zero.open_calls[-1].enter_context(zero.comm.host.doing(call, is_collective))
    zero.open_calls[-1].enter_context(showing(zero, units, write))


def enter_load(zero, module, state_dict, prefix, local_metadata, *_) -> None:
    if local_metadata.get("assign_to_params_buffers"):
        raise RuntimeError("load_state_dict(assign=True) would replace parameters: use assign=False")
    enter_call(zero, module, write=True)


def leave_call(zero, *_) -> None:
    zero.open_calls.pop().__exit__(None, None, None)
