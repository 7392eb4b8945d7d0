"""The classes of a parameter whose values are in a unit's flat buffer.

    HeldParameter    a parameter of the model while its values are in place; operations see an ordinary parameter
    HiddenParameter  the same object while its values are elsewhere; shape, dtype, flags and hooks can be used
    Shard            what the optimizer has instead: a range of the master, a different one on each of N ranks

A read gives the true value or raises. An operation on a hidden parameter asks the stage for the values
(out_of_turn.py): at stages 1 and 2 they are in flight, and the stage waits for them; at stage 3 they are spread over
N ranks, and the stage gathers them if a module runs; otherwise the operation raises. Only `optimizer.step()` can use a
shard.

Code that would silently change its meaning raises too: reading a gradient that is only a shard, copying views.
"""

import sys
import weakref

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

# torch's own .grad, without the checks of these classes: grad_of(param), set_grad(param, value).
grad_of, set_grad = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__
set_data = torch.Tensor.data.__set__  # gives a parameter other memory, without a change of its version counter
plainly = torch._C.DisableTorchFunctionSubclass  # inside `with plainly():` subclasses act as plain tensors

NO_COPY = (
    "parameters are views of flat buffers that ranks share, so this model cannot be copied or pickled: "
    "copy model.state_dict() instead; make a torch AveragedModel before zeroify(), and update it under "
    "zero.full_params()"
)


class HeldParameter(nn.Parameter):
    """A parameter of `unit`, whose flat buffers hold its values and its gradient."""

    @property
    def name_in_model(self) -> str:
        return next(name for name, param in zip(self.unit.names, self.unit.params) if param is self)

    @property
    def grad(self):
        """The gradient while autograd accumulates it; raises once a flat buffer has it."""
        if grad_of(self) is None and self.unit.hides_gradient:
            if sys._getframe(1).f_code is nn.Module._apply.__code__:
                return None  # nothing for module.to() to move; `data` refuses another device
            raise RuntimeError(
                f"the gradient of {self.unit.name} is in a flat buffer, perhaps only a shard of it: "
                "read it under zero.full_params(grads=True), clip it with zero.clip_grad_norm_()"
            )
        return grad_of(self)

    @grad.setter
    def grad(self, value):
        if grad_of(self) is None and self.unit.hides_gradient:
            raise RuntimeError(
                f"the gradient of {self.unit.name} is in a flat buffer, which this would not change: drop all of them "
                "with optimizer.zero_grad(), write to them under zero.full_params(grads=True)"
            )
        set_grad(self, value)

    @property
    def data(self):
        """The values. A write reaches the master under full_params(), and in fp32 at stages 0 to 2; else it raises."""
        if self.unit.is_whole:
            return self.remembered(torch.Tensor.data.__get__(self))
        return self.detach()  # shares the version counter, so that the step detects writes

    @data.setter
    def data(self, value):
        if (value.shape, value.dtype, value.device.type) != (self.shape, self.dtype, self.device.type):
            raise RuntimeError(
                f"{self.name_in_model} lives in a flat buffer as {tuple(self.shape)} of {self.dtype} on {self.device}, "
                f"and was given {tuple(value.shape)} of {value.dtype} on {value.device}: "
                "move or cast the model before zeroify(), not after"
            )
        if value is not self and value.data_ptr() != address(self):  # module.to() to the same place is harmless
            with torch.no_grad():
                self.detach()  # values in flight must have arrived
                for tensor in self.living_views():
                    set_data(tensor, tensor.clone())  # `old = p.data; p.data = new`: `old` keeps the old values
                self.copy_(value)

    def detach(self):
        """A view of the values, as torch's. It keeps them if the parameter is given other `data` later."""
        return self.remembered(super().detach())

    def remembered(self, view: torch.Tensor) -> torch.Tensor:
        """The view itself, which `data = ...` must find again."""
        self.views_given = [weakref.ref(each) for each in (*self.living_views(), view)]
        return view

    def living_views(self) -> list[torch.Tensor]:
        """What `data` and `detach()` returned, as far as somebody still has it."""
        views = [reference() for reference in vars(self).get("views_given", ())]
        return [view for view in views if view is not None]

    @property
    def requires_grad(self):
        """A parameter may be frozen at any time. To be unfrozen, it must be in a param group."""
        return torch.Tensor.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value):
        self.requires_grad_(value)

    def to(self, *args, **kwargs):
        """The parameter itself if it already has that device and dtype; "cpu:0" is "cpu"."""
        with plainly():
            result = torch.Tensor.to(self, *args, **kwargs)
            same_place = result.device.type == self.device.type and (self.is_cpu or result.device == self.device)
            if same_place and result.dtype == self.dtype and not kwargs.get("copy"):
                return self
        return run_out_of_turn(torch.Tensor.to, (self, *args), kwargs) if type(self) is HiddenParameter else result

    def requires_grad_(self, requires_grad=True):
        if requires_grad and not self.unit.trainable:
            self.unit.stage().unfreeze(self)
        with plainly():
            return super().requires_grad_(requires_grad)

    def _refuse_copy(self, *_):
        raise RuntimeError(NO_COPY)

    __deepcopy__ = __reduce_ex__ = _refuse_copy


class HiddenParameter(HeldParameter):
    """A HeldParameter outside its unit's turn."""

    @classmethod
    def __torch_function__(cls, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation in METADATA:
            with plainly():
                return operation(*args, **kwargs)
        if operation in GRADIENTS:  # with respect to this parameter: its graph edge is enough
            with plainly():
                args, kwargs = tree_map_only(HiddenParameter, torch.autograd.graph.get_gradient_edge, (args, kwargs))
            return operation(*args, **kwargs)
        if operation in CONVERSIONS:
            with plainly():
                result = operation(*args, **kwargs)
            if result is args[0]:  # it already has that device and dtype
                return result
        return run_out_of_turn(operation, args, kwargs)

    def __repr__(self, **_):
        return f"Parameter {self.name_in_model} {tuple(self.shape)} of {self.dtype}, its values not in place"


class Shard(nn.Parameter):
    """A range of `unit`'s master, which the optimizer updates. Inside step() it is a plain Parameter."""

    @classmethod
    def __torch_function__(cls, operation, types, args=(), kwargs=None):
        if operation in METADATA:
            with plainly():
                return operation(*args, **(kwargs or {}))
        raise RuntimeError(
            f"{name_of(operation)} of a parameter of optimizer.param_groups, which holds this rank's shards: outside "
            "optimizer.step() read and write the model's parameters under zero.full_params(), clip with "
            "zero.clip_grad_norm_(), or change the shards on all ranks under zero.updating()"
        )

    @property
    def grad(self):
        """None, or raises: the mean may be in flight, and is only a shard."""
        self._refuse_gradient()
        return grad_of(self)

    @grad.setter
    def grad(self, value):
        self._refuse_gradient()
        if value is not None:
            raise RuntimeError("a gradient for this rank's shard: write to gradients under full_params(grads=True)")

    def _refuse_gradient(self):
        if self.unit.holds_gradient:
            raise RuntimeError(
                "optimizer.param_groups hold this rank's shards, whose gradients are ready in optimizer.step() alone: "
                "clip with zero.clip_grad_norm_(), unscale with zero.scale(), read and write gradients of the model's "
                "parameters under zero.full_params(grads=True)"
            )

    def __repr__(self, **_):
        return f"Shard of {self.unit.name}, {self.numel()} elements of {self.dtype}"


def give_memory(param: nn.Parameter, values: torch.Tensor) -> None:
    """A parameter on the meta device gets the memory of `values`, and keeps attributes, hooks and identity."""
    hooks, hooks_after = param._backward_hooks, param._post_accumulate_grad_hooks
    real = nn.Parameter(values.data, param.requires_grad)  # .data: a count of writes of its own
    vars(real).update(vars(param))
    torch.utils.swap_tensors(param, real)
    if hooks:
        param._backward_hooks = hooks
    if hooks_after:
        param._post_accumulate_grad_hooks = hooks_after


def run_out_of_turn(operation, args: tuple, kwargs: dict):
    from zero_mini.binding.out_of_turn import run  # not at the top: it imports this module

    return run(operation, args, kwargs)


def address(tensor: torch.Tensor) -> int:
    with plainly():
        return tensor.data_ptr()


def name_of(operation) -> str:
    """The name of a torch operation in error messages."""
    name = getattr(operation, "__name__", str(operation))
    if name in ("__get__", "__set__"):
        return getattr(getattr(operation, "__self__", None), "__name__", name)
    return name


def existing(owner: object, names: str) -> set:
    """The attributes of `owner` with these names, those that this release of torch has."""
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


# Operations that do not read this parameter's values.
METADATA = (
    {
        attribute.__get__
        for attribute in existing(
            torch.Tensor,
            "shape dtype device layout requires_grad grad grad_fn is_leaf ndim names name itemsize nbytes output_nr "
            "retains_grad grad_dtype _version _backward_hooks _post_accumulate_grad_hooks _grad is_cpu is_cuda is_meta "
            "is_mps is_xpu is_xla is_ipu is_hpu is_mtia is_maia is_vulkan is_sparse is_sparse_csr is_mkldnn is_nested "
            "is_quantized",
        )
    }
    | {
        attribute.__set__
        for attribute in existing(torch.Tensor, "requires_grad grad _backward_hooks _post_accumulate_grad_hooks _grad")
    }
    | existing(
        torch.Tensor,
        "size numel nelement dim ndimension element_size is_floating_point is_complex is_signed is_inference "
        "is_pinned is_shared get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad "
        "is_same_size _is_view has_names is_conj is_neg new_empty new_zeros new_ones new_full new_tensor "
        "new_empty_strided __hash__ __len__ __dir__",
    )
    | existing(
        torch,
        "empty_like zeros_like ones_like full_like rand_like randn_like randint_like is_floating_point is_complex "
        "is_signed is_inference is_same_size numel result_type is_conj is_neg _has_compatible_shallow_copy_type",
    )
)
GRADIENTS = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
CONVERSIONS = existing(torch.Tensor, "cpu cuda float double half bfloat16 type type_as")
