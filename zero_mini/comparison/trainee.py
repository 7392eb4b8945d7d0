"""A model in training, as measure.py sees it, and the parts of a training loop that most systems share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_mini.comparison.works import ADAMW, Work
from zero_mini.memory import formulas
from zero_mini.script import Script


@dataclass
class Trainee:
    """A model in training. `step(tokens)` is timed, from forward to zero_grad; the loss stays on the device."""

    model: nn.Module
    step: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer | None = None
    zero: Script | None = None
    can_be_walked: bool = True

    def state_bytes(self) -> int | None:
        """Bytes of parameters, gradients and optimizer states; None if this code cannot list them."""
        if not self.can_be_walked:
            return None
        if self.zero is not None:
            return sum(formulas.walk(self.zero).values())
        tensors = [t for param in self.model.parameters() for t in (param, param.grad) if t is not None]
        inner = getattr(self.optimizer, "optim", self.optimizer)  # ZeroRedundancyOptimizer's own
        for state in inner.state.values() if inner else ():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]  # of a DTensor
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def adamw(model: nn.Module, work: Work) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=work.lr, **ADAMW)


def stepper(call: Callable[..., Tensor], optimizer: torch.optim.Optimizer, autocast: bool = False):
    """The usual body of a training loop."""

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
