"""How the script of moments is tied to a model and its optimizer.

    the model's forward pre-hook and hook   before_model; inputs cast on the way in, outputs on the way out
    forward pre-hook of a unit's module     before_forward
    forward hook                            after_forward; hooks every output that needs a gradient
    the first of those outputs' gradients   send_ready, before_backward: backward enters the unit at its end
    a gradient from its middle              send_ready
    end of the outermost backward           after_backward
    the optimizer's step hooks              begin_step, after_step

A unit's output may be a tensor, or tuples, lists, dicts and dataclasses of tensors: full-backward
hooks of modules see only the first two, and stay silent for the rest. A recompute (activation
checkpointing) runs forward hooks in the middle of a backward. The end of a backward is asked for
at its first event, which lies in the outermost one: a request from inside a re-entrant recompute
would be answered at the end of that inner backward.

Left out: outputs hidden in other objects, say an attribute of the module. Their gradients arrive
unannounced, and the end of the backward says so.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from zero_mini.binding.parameter import plainly
from zero_mini.binding.precision import cast
from zero_mini.flat import Unit


class Hooks:
    """`self` is a stage: units, model, and the moments that are called here."""

    def connect(self) -> None:
        """Once. Pre-hooks run before the user's own, which may read weights; torch.compile does not trace hooks."""
        enter, leave = torch.compiler.disable(self._enter_forward), torch.compiler.disable(self._leave_forward)
        start, end = torch.compiler.disable(self._start), torch.compiler.disable(self._end)
        for unit in self.units:
            for module in unit.modules:
                module.register_forward_pre_hook(partial(enter, unit), prepend=True)
        self.model.register_forward_pre_hook(start, prepend=True, with_kwargs=True)
        self.model.register_forward_hook(end)  # first, so that the root's outputs are those that were cast
        for unit in self.units:
            for module in unit.modules:
                module.register_forward_hook(partial(leave, unit), with_kwargs=True)
            if unit.trainable:
                self.hook_middle(unit)

    def hook_middle(self, unit: Unit) -> None:
        """Backward says when it is half through the unit."""
        if not unit.is_root:
            with plainly():
                unit.middle.register_post_accumulate_grad_hook(partial(halfway, weakref.ref(self)))

    def _start(self, model, args, kwargs):
        self.close_broken_calls()
        if self.showing_whole:
            return None
        refuse_transforms()
        if not backward_is_running():  # not a recompute
            self.before_model()
            self.comm.recording = torch.is_grad_enabled()
            self.buffers_due = torch.is_grad_enabled() and self.syncing  # as torch DDP decides it
        return cast((args, kwargs), self.master_dtype, self.dtype) if self.mixed else None

    def _end(self, model, args, output):
        return cast(output, self.dtype, self.master_dtype) if self.mixed and not self.showing_whole else None

    @torch.no_grad()
    def _enter_forward(self, unit, module, args) -> None:
        if not self.showing_whole:
            refuse_transforms()
            if backward_is_running():
                self._begin_backward()  # a recompute: the outermost backward is known here, not later
            elif self.in_backward:
                self.forget_backward()  # that one failed
            self.before_forward(unit)

    def _leave_forward(self, unit, module, args, kwargs, output) -> None:
        if self.showing_whole:
            return
        # A recompute of a call that is already being waited for makes a graph that nobody enters.
        if not (backward_is_running() and (unit.outstanding or unit in self.entered)):
            self.hook_outputs(unit, output, (args, kwargs))
        if module is unit.modules[-1]:
            self.after_forward(unit)

    def hook_outputs(self, unit: Unit, output: object, inputs: object = ()) -> None:
        """Backward enters the unit with the first gradient of its outputs. An input that is handed on is no output."""
        passed = {id(tensor) for tensor in tensors_in(inputs)}
        outputs = list(tensors_in(output))
        outputs += [t._base for t in outputs if t._is_view()]  # changing a view in place cuts the view's own hook off
        tensors = [t for t in outputs if t.grad_fn is not None and id(t) not in passed]
        if tensors:
            unit.outstanding += 1
            entered_in: list[int] = []  # the last backward that came here, by whichever of the outputs was first
            for tensor in tensors:
                tensor.register_hook(partial(self._enter_backward, unit, entered_in))

    def _enter_backward(self, unit: Unit, entered_in: list[int], grad) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("backward(create_graph=True) is not supported: gradients are reduced away")
        this_backward = torch._C._current_graph_task_id()
        if entered_in != [this_backward]:
            if not entered_in:  # the first backward through this call; with retain_graph there may be more
                unit.outstanding = max(0, unit.outstanding - 1)
            entered_in[:] = [this_backward]
            self._begin_backward()
            self.send_ready()
            self.before_backward(unit)

    def _begin_backward(self) -> None:
        if not self.in_backward:
            # torch.autograd.grad() and backward(inputs=...) leave parameters alone: nothing to reduce then.
            self.in_backward, self.collecting = True, torch.autograd._is_checkpoint_valid()
            self.unsent = list(self.trainable) if self.collecting else []
            if self.collecting and self.coefficient is not None:  # clipping is of the gradients that were there then
                self.before_step()
            torch.autograd.Variable._execution_engine.queue_callback(torch.no_grad()(self.after_backward))


def hook_optimizer(zero: Hooks) -> None:
    """Let step() and zero_grad() run the script's moments; let what would mislead, raise."""
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

    def only_shards(_, state=None):
        if zero.comm.steps == 1 and not (state["state"] if state else optimizer.state):
            return  # before the first step there is nothing to lose, and accelerate does so
        raise RuntimeError(
            "the optimizer holds this rank's shards, so its own state_dict is no whole state: "
            "use zero.state_dict() and zero.load_state_dict()"
        )

    def no_copy(*_):
        raise RuntimeError(
            "the optimizer holds this rank's shards, so it can be neither copied nor pickled: use zero.state_dict()"
        )

    def no_new_groups(*_):
        raise RuntimeError("add_param_group: name every parameter before zeroify(); frozen ones may be in a group")

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(lambda *_: zero.after_step())
    optimizer.register_state_dict_pre_hook(only_shards)
    optimizer.register_load_state_dict_pre_hook(only_shards)
    optimizer.add_param_group = no_new_groups
    optimizer.__deepcopy__ = optimizer.__reduce_ex__ = no_copy
    for name in ("train", "eval"):  # schedule-free optimizers exchange parameters for averages there
        if callable(getattr(optimizer, name, None)):
            setattr(optimizer, name, within(zero.updating, getattr(optimizer, name)))
    optimizer.zero_grad = zero.model.zero_grad = zero.zero_grad


def within(context: Callable, method: Callable) -> Callable:
    """The method, called within context()."""

    def call(*args, **kwargs):
        with context():
            return method(*args, **kwargs)

    return call


def halfway(zero: weakref.ref, _) -> None:
    """Half of a unit's gradients have arrived. Garbage collection does not look into hooks of a tensor."""
    zero().send_ready()


def refuse_transforms() -> None:
    """RuntimeError under a function transform or a trace, to which hooks and collectives are foreign."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if is_transformed or torch.jit.is_tracing():
        what = "a transform of torch.func" if is_transformed else "torch.jit.trace"
        raise RuntimeError(
            f"{what} of a model that zeroify() has hooked: run it under zero.full_params(), on every rank, where "
            "parameters are whole and hooks do nothing"
        )


def backward_is_running() -> bool:
    """Is this thread inside a backward pass (of a recompute's forward, say)?"""
    return torch._C._current_graph_task_id() != -1


def tensors_in(tree) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses.

    >>> [t.item() for t in tensors_in({"a": (torch.tensor(1), [torch.tensor(2)]), "b": None})]
    [1, 2]
    """
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from (tensor for value in tree.values() for tensor in tensors_in(value))
    elif isinstance(tree, (tuple, list)):
        yield from (tensor for value in tree for tensor in tensors_in(value))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for part in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, part.name))
