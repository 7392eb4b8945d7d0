"""Gradient clipping by norm, when each rank has a part of the gradient.

    total = (sum over ranks r of partial_r^p)^(1/p)      p-norm, from the norms of slices alone
    g <- g min(1, max_norm / (total + 1e-6))             as torch.nn.utils.clip_grad_norm_ does it

The norm of a whole is found from the norms of its parts in any division, so ranks need to tell each other one
number each. All stages divide alike, into N slices of every unit, so that the total is the same float at each.

Left out: clipping by value; `zero.full_params(grads=True)` shows gradients for that.
"""

import torch


class Clipping:
    """`self` is a stage: trainable units, comm, the script's moments."""

    def forget_coefficient(self) -> None:
        """Gradients are what they are: nothing is to be multiplied in."""
        # Of gradients, not multiplied in yet (0-dim): unscale, clip. A step in one pass leaves it so: gradients that
        # nobody zeroes stay clipped.
        self.coefficient: torch.Tensor | None = None
        self.clipped = False  # that of a clip is in it

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most `max_norm`.

        Returns the norm before (0-dim, on the device): the same float on every rank and at every
        stage, since each sums the same N partial norms, one for a slice of every unit.
        """
        self.collect_means()
        if self.clipped:
            self.before_step()
        partials = self.partial_norms(norm_type)  # (N)
        total = torch.linalg.vector_norm(partials, norm_type)
        unscale = self.coefficient  # 1 / the loss scale: a power of two, so it does not matter when it is multiplied in
        if unscale is not None:
            total = total * unscale
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        self.coefficient, self.clipped = coefficient if unscale is None else coefficient * unscale, True
        if not self.updates_itself():
            self.before_step()
        return total

    def partial_norms(self, norm_type: float) -> torch.Tensor:
        """The norm of each rank's slices (N). Stage 0 has all of them at hand."""
        return torch.stack([self.slice_norm(rank, norm_type) for rank in range(self.world_size)])

    def slice_norm(self, rank: int, norm_type: float) -> torch.Tensor:
        slices = []
        for unit in self.trainable:
            if unit.own_grad is not None:
                whole = unit.own_grad.numel() == unit.P
                slices.append(unit.own(unit.own_grad, rank) if whole else unit.own_grad)
        if not slices:
            return torch.zeros((), dtype=self.master_dtype, device=self.device)
        return torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(slices, norm_type, self.master_dtype)), norm_type
        )
