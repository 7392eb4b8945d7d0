"""Hooks of a model and its optimizer that run the moments of the script.

    the model's forward pre-hook and hook   begin_forward; casts inputs and outputs
    forward pre-hook of a unit's module     before_forward
    forward hook                            after_forward; hooks every output that needs a gradient
    the first of those outputs' gradients   send_ready, before_backward: the unit's backward begins
    the gradient of its `middle` parameter  send_ready
    end of the outermost backward           end_backward
    the optimizer's step hooks              begin_step, after_step

A unit's output may be a tensor, or tuples, lists, dicts and dataclasses of tensors: full-backward
hooks of modules work for the first two only, and do not run for the rest. A recompute (activation
checkpointing) runs forward hooks in the middle of a backward. The callback for the end of a
backward is queued at its first event, which is in the outermost backward: a callback queued inside a
re-entrant recompute would run at the end of that inner backward.

Left out: outputs in other objects, for example an attribute of the module. Hooks do not see their
gradients arrive, and the end of the backward raises.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from zero_mini.binding.out_of_turn import backward_is_running
from zero_mini.binding.parameter import plainly
from zero_mini.binding.precision import cast
from zero_mini.binding.state_dict import close_broken_calls
from zero_mini.flat import Unit


def connect(zero) -> None:
    """Called once. Pre-hooks run before the user's own, which may read weights; torch.compile does not trace hooks."""
    enter, leave = (torch.compiler.disable(partial(function, zero)) for function in (enter_forward, leave_forward))
    start, end = (torch.compiler.disable(partial(function, zero)) for function in (start_forward, end_forward))
    for unit in zero.units:
        for module in unit.modules:
            module.register_forward_pre_hook(partial(enter, unit), prepend=True)
    zero.model.register_forward_pre_hook(start, prepend=True, with_kwargs=True)
    zero.model.register_forward_hook(end)  # first, so that the root's hook gets outputs after their cast
    for unit in zero.units:
        for module in unit.modules:
            module.register_forward_hook(partial(leave, unit), with_kwargs=True)
        if unit.trainable:
            hook_middle(zero, unit)


def keep_in_buffers(model: nn.Module) -> None:
    """cuDNN moves the weights of an LSTM to a buffer of its own, whenever the model moves: not out of a unit's.

    An LSTM has weak references to its weights, and torch swaps no tensor that has one. model.to() makes new ones.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = nothing_to_do
            module._flat_weight_refs = []


def nothing_to_do() -> None:
    """In place of nn.LSTM.flatten_parameters."""


def hook_middle(zero, unit: Unit) -> None:
    """Call `halfway` when backward is half-way through the unit."""
    if not unit.is_root:
        with plainly():
            unit.middle.register_post_accumulate_grad_hook(partial(halfway, weakref.ref(zero)))


def start_forward(zero, model, args, kwargs):
    close_broken_calls(zero)
    if zero.showing_whole:
        return None
    refuse_transforms()
    if not backward_is_running():  # not a recompute
        zero.begin_forward()
        zero.comm.ledger.recording = torch.is_grad_enabled()
        zero.buffers_due = torch.is_grad_enabled() and zero.syncing  # the same rule as torch DDP
    return cast((args, kwargs), zero.master_dtype, zero.dtype) if zero.mixed else None


def end_forward(zero, model, args, output):
    return cast(output, zero.dtype, zero.master_dtype) if zero.mixed and not zero.showing_whole else None


@torch.no_grad()
def enter_forward(zero, unit: Unit, module, args) -> None:
    if not zero.showing_whole:
        refuse_transforms()
        if backward_is_running():
            begin_backward(zero)  # a recompute: this event is in the outermost backward, the next may not be
        elif zero.backward.running:
            zero.backward = type(zero.backward)()  # an earlier backward failed: drop its state
        zero.before_forward(unit)


def leave_forward(zero, unit: Unit, module, args, kwargs, output) -> None:
    if zero.showing_whole:
        return
    # A recompute builds a second graph for a call whose backward is already pending; it needs no hooks.
    if not (backward_is_running() and (unit.pending[module] or unit in zero.backward.entered)):
        hook_outputs(zero, unit, module, output, (args, kwargs))
    if module is unit.modules[-1]:
        zero.after_forward(unit)


def hook_outputs(zero, unit: Unit, module: nn.Module | None, output: object, inputs: object = ()) -> None:
    """The unit's backward begins at the first gradient of an output. A returned input does not count as an output.

    module    of the unit, which returned them; None: an operation outside of the modules' turns.
    """
    input_ids = {id(tensor) for tensor in tensors_in(inputs)}
    outputs = tensors_in(output)
    outputs += [t._base for t in outputs if t._is_view()]  # an in-place change of a view disables its hook
    tensors = [t for t in outputs if t.grad_fn is not None and id(t) not in input_ids]
    if tensors:
        unit.pending[module] += 1
        last_backward: list[int] = []  # id of the last backward that reached any of these outputs
        for tensor in tensors:
            tensor.register_hook(partial(enter_backward, zero, unit, module, last_backward))


def enter_backward(zero, unit: Unit, module: nn.Module | None, last_backward: list[int], grad) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("backward(create_graph=True) is not supported: gradients are reduced away")
    this_backward = torch._C._current_graph_task_id()
    if last_backward != [this_backward]:
        if not last_backward:  # the first backward through this call; with retain_graph there may be more
            unit.pending[module] = max(0, unit.pending[module] - 1)
        last_backward[:] = [this_backward]
        begin_backward(zero)
        zero.send_ready()
        zero.before_backward(unit)


def begin_backward(zero) -> None:
    """Once in each backward: list the units that it must reduce, and queue `end_backward`."""
    backward = zero.backward
    if not backward.running:
        # torch.autograd.grad() and backward(inputs=...) do not collect gradients in all parameters: reduce nothing.
        backward.running, backward.collecting = True, torch.autograd._is_checkpoint_valid()
        backward.unsent = list(zero.trainable) if backward.collecting else []
        if backward.collecting and zero.factor.value is not None:  # the factor must not scale this backward's gradients
            zero.update.hand_means_to_optimizer()
        torch.autograd.Variable._execution_engine.queue_callback(torch.no_grad()(zero.end_backward))


def hook_optimizer(zero) -> None:
    """step() and zero_grad() run the script's moments; methods that would see or copy only shards raise."""
    optimizer = zero.optimizer

    def before_step(_, args, kwargs):
        by_position = len(args) > 1  # args[0] is the optimizer
        closure = args[1] if by_position else kwargs.get("closure")
        if closure is None:
            zero.begin_step()
            return None

        def closure_then_means():
            loss = closure()
            zero.begin_step()
            return loss

        if by_position:
            return (args[0], closure_then_means, *args[2:]), kwargs
        return args, kwargs | {"closure": closure_then_means}

    def refuse_shards(_, state=None):
        if zero.comm.ledger.steps == 1 and not (state["state"] if state else optimizer.state):
            return  # before the first step there is no state to lose; accelerate calls it then
        raise RuntimeError(
            "the optimizer holds this rank's shards, so its own state_dict is no whole state: "
            "use zero.state_dict() and zero.load_state_dict()"
        )

    def refuse_copy(*_):
        raise RuntimeError(
            "the optimizer holds this rank's shards, so it can be neither copied nor pickled: use zero.state_dict()"
        )

    def refuse_new_groups(*_):
        raise RuntimeError("add_param_group: name every parameter before zeroify(); frozen ones may be in a group")

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(lambda *_: zero.after_step())
    optimizer.register_state_dict_pre_hook(refuse_shards)
    optimizer.register_load_state_dict_pre_hook(refuse_shards)
    optimizer.add_param_group = refuse_new_groups
    optimizer.__deepcopy__ = optimizer.__reduce_ex__ = refuse_copy
    for name in ("train", "eval"):  # here schedule-free optimizers replace parameters by averages
        if callable(getattr(optimizer, name, None)):
            setattr(optimizer, name, within(zero.updating, getattr(optimizer, name)))
    optimizer.zero_grad = zero.model.zero_grad = zero.zero_grad


def within(context: Callable, method: Callable) -> Callable:
    """A function that calls the method inside context()."""

    def call(*args, **kwargs):
        with context():
            return method(*args, **kwargs)

    return call


def halfway(zero: weakref.ref, _) -> None:
    """Half of a unit's gradients have arrived. `zero` is weak: garbage collection does not see a tensor's hooks."""
    zero().send_ready()


def refuse_transforms() -> None:
    """RuntimeError under a function transform or a trace: they support neither hooks nor collectives."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if is_transformed or torch.jit.is_tracing():
        what = "a transform of torch.func" if is_transformed else "torch.jit.trace"
        raise RuntimeError(
            f"{what} of a model that zeroify() has hooked: run it under zero.full_params(), on every rank, where "
            "parameters are whole and hooks do nothing"
        )


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses.

    >>> [t.item() for t in tensors_in({"a": (torch.tensor(1), [torch.tensor(2)]), "b": None})]
    [1, 2]
    """
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        parts = tree
    elif isinstance(tree, Mapping):
        parts = tree.values()
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = [getattr(tree, part.name) for part in dataclasses.fields(tree)]
    else:
        return []
    return [tensor for part in parts for tensor in tensors_in(part)]
