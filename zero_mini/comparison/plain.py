"""What one GPU needs without ranks: forward and backward, then also the update of its share of the parameters.

    plain                 forward, backward
    plain + 1/N update    forward, backward, AdamW of 1/N of the parameters in one pass (update/one_pass.py)

The second is what a rank of stages 1 to 3 cannot avoid. What a stage takes beyond it is the cost of sharding: copies,
collectives, and whatever waits for them.

    28 bytes an element of a slice   fp32 master, m and v read and written, a bf16 gradient read, a bf16 parameter
                                     written; the kernel and the numels of its calls are those of the stages

The slices have values of their own: copying gradients of the model into a flat buffer belongs to the cost of sharding,
so it is left out here. The model itself keeps its first weights.
"""

import torch
from torch import Tensor, nn

from zero_mini.binding.units import find_blocks, make_units, units_by_size
from zero_mini.comparison.models import give_values, make_model
from zero_mini.comparison.trainee import Trainee
from zero_mini.comparison.works import ADAMW, Work
from zero_mini.update import one_pass


def build_plain(work: Work, device: torch.device, updates: int = 0) -> Trainee:
    """`updates` is the N of 1/N; 0 for no update."""
    model = make_model(work, device)
    give_values(model, device, torch.bfloat16 if work.bf16 else torch.float32)
    if work.bf16:
        model.bfloat16()
    update = UpdateOfSlices(model, work, device, updates) if updates else None

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if update is not None:
            update.step()
        model.zero_grad()
        return loss.detach()

    return Trainee(model, step, can_be_walked=update is None)


class UpdateOfSlices:
    """AdamW of one slice (S) of each unit of the model, where N ranks share a unit."""

    def __init__(self, model: nn.Module, work: Work, device: torch.device, N: int) -> None:
        modules = units_by_size(model) if device.type == "cuda" else [[block] for _, block in find_blocks(model)]
        blocks = [(str(index), unit) for index, unit in enumerate(modules)]
        units = make_units(model, blocks, {id(param): 0 for param in model.parameters()}, 0, N)
        dtype = torch.bfloat16 if work.bf16 else torch.float32
        self.is_mixed = work.bf16
        self.masters = [nn.Parameter(0.02 * torch.randn(unit.S, device=device)) for unit in units]
        self.grads = [1e-3 * torch.randn(unit.S, device=device, dtype=dtype) for unit in units]
        self.casts = [torch.empty_like(grad) for grad in self.grads] if self.is_mixed else []
        self.optimizer = torch.optim.AdamW(self.masters, lr=work.lr, **ADAMW)

    @torch.no_grad()
    def step(self) -> None:
        """One pass in mixed precision; torch's own fused step in fp32."""
        if not self.is_mixed:
            for master, grad in zip(self.masters, self.grads):
                master.grad = grad
            self.optimizer.step()
            return
        (options,) = self.optimizer.param_groups
        factors = one_pass.step_factors(self.optimizer, options, self.masters)
        for index, (master, grad, cast) in enumerate(zip(self.masters, self.grads, self.casts)):
            state = self.optimizer.state[master]
            parts = (master.detach(), grad, state["exp_avg"], state["exp_avg_sq"], cast)
            if factors is None:  # without the kernel
                one_pass.update(*parts, state["step"], None, options)
            else:
                one_pass.launch(*parts, *factors, index, None, options)
