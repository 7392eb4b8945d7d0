"""What a parameter becomes when its values live in a unit's flat buffer.

Operations see an ordinary parameter. What would silently mean something else now, raises: reading a
gradient that is only a shard, writing to values that the next step overwrites, copying views.

Left out: raising for in-place operations on the parameter itself; the step finds those
(`Unit.check_untouched`).
"""

import torch
from torch import nn


class HeldParameter(nn.Parameter):
    """A parameter of `unit`, whose flat buffer has its values and takes its gradient."""

    @property
    def grad(self):
        """The gradient while autograd accumulates it; raises once a flat buffer has it."""
        grad = torch.Tensor.grad.__get__(self)
        if grad is None and self.unit.holds_gradient:
            raise RuntimeError(
                f"the gradient of {self.unit.name} is in a flat buffer, perhaps only a shard of it: "
                "read it under zero.full_params(grads=True), clip it with zero.clip_grad_norm_()"
            )
        return grad

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)

    @property
    def data(self):
        """Raises: a write to it might reach a copy that the next step overwrites."""
        raise RuntimeError(
            f"a parameter of {self.unit.name} lives in a flat buffer: write to it under "
            "zero.full_params(); to read, use parameter.detach()"
        )

    @data.setter
    def data(self, value):
        if (value.data_ptr(), value.dtype) != (self.data_ptr(), self.dtype):  # model.to(same) is fine
            raise RuntimeError(
                f"a parameter of {self.unit.name} lives in a flat buffer of {self.dtype} on "
                f"{self.device}: move or cast the model before zeroify(), not after"
            )

    def _refuse_copy(self, *_):
        raise RuntimeError(
            f"a parameter of {self.unit.name} is a view of a flat buffer and cannot be copied or "
            "pickled with its model: copy model.state_dict() instead"
        )

    __deepcopy__ = __reduce_ex__ = _refuse_copy
