"""What a parameter becomes when its values live in a unit's flat buffer.

Operations see an ordinary parameter. What would silently mean something else now, raises: reading a
gradient that is only a shard, writing to values that the next step overwrites, copying views.

Left out: raising for in-place operations on the parameter itself; the step finds those
(`watch.check_untouched`).
"""

import torch
from torch import nn


class HeldParameter(nn.Parameter):
    """A parameter of `unit`, whose flat buffer has its values and takes its gradient."""

    @property
    def grad(self):
        """The gradient while autograd accumulates it; raises once a flat buffer has it."""
        if grad_of(self) is None and self.unit.holds_gradient:
            raise RuntimeError(
                f"the gradient of {self.unit.name} is in a flat buffer, perhaps only a shard of it: "
                "read it under zero.full_params(grads=True), clip it with zero.clip_grad_norm_()"
            )
        return grad_of(self)

    @grad.setter
    def grad(self, value):
        if grad_of(self) is None and self.unit.holds_gradient:
            raise RuntimeError(
                f"the gradient of {self.unit.name} is in a flat buffer, which this would not change: drop all of them "
                "with optimizer.zero_grad(), write to them under zero.full_params(grads=True)"
            )
        set_grad(self, value)

    @property
    def data(self):
        """To read. A write reaches the master under full_params(), and in fp32 at stages 0 to 2; else a step raises."""
        if self.unit.is_whole:
            return torch.Tensor.data.__get__(self)
        return self.detach()  # shares the count of writes, by which the step finds them

    @data.setter
    def data(self, value):
        if (value.data_ptr(), value.dtype) != (self.data_ptr(), self.dtype):  # model.to(same) is fine
            raise RuntimeError(
                f"a parameter of {self.unit.name} lives in a flat buffer of {self.dtype} on "
                f"{self.device}: move or cast the model before zeroify(), not after"
            )

    def _refuse_copy(self, *_):
        raise RuntimeError(NO_COPY)

    __deepcopy__ = __reduce_ex__ = _refuse_copy


NO_COPY = (
    "parameters are views of flat buffers that ranks share, so this model cannot be copied or pickled: "
    "copy model.state_dict() instead"
)


# What autograd has accumulated for a parameter, without a question: grad_of(param), set_grad(param, value).
grad_of, set_grad = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__
