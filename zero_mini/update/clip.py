"""Gradient clipping by norm, when each rank has a part of the gradient.

    total = (sum over ranks r of partial_r^p)^(1/p)      p-norm, from the norms of slices alone
    g <- g min(1, max_norm / (total + 1e-6))             as torch.nn.utils.clip_grad_norm_ does it

The norm of a vector can be computed from the norms of its parts, so each rank sends one number. All
stages divide every unit into the same N slices, so that the total is the same float at every stage.

Left out: clipping by value; `zero.full_params(grads=True)` shows gradients for that.
"""

import torch


@torch.no_grad()
def clip_grad_norm_(zero, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients so that their norm over all parameters is at most `max_norm`.

    Returns the norm before clipping (0-dim, on the device): the same float on every rank and at every
    stage, because each rank sums the same N partial norms. Partial norm r is that of slice r of all units.
    """
    with zero.comm.host.doing("zero.clip_grad_norm_()"):
        zero.collect_means()
    factor = zero.factor
    if factor.clipped:
        zero.update.hand_means_to_optimizer()
    total = zero.comm.total_norm(zero.partial_norms(norm_type), norm_type)
    unscale = factor.value  # 1 / the loss scale: a power of two, so the order of multiplications does not matter
    if unscale is not None:
        total = total * unscale
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    factor.value, factor.clipped = coefficient if unscale is None else coefficient * unscale, True
    if not zero.update.applies_factor():
        zero.update.hand_means_to_optimizer()
    return total


def slice_norm(zero, rank: int, norm_type: float) -> torch.Tensor:
    """The norm (0-dim) of the gradient slices of rank `rank`: of those that this rank has."""
    slices = []
    for unit in zero.trainable:
        if unit.mean_grad is not None:
            is_whole = unit.mean_grad.numel() == unit.P
            slices.append(unit.slice_of(unit.mean_grad, rank) if is_whole else unit.mean_grad)
    if not slices:
        return torch.zeros((), dtype=zero.master_dtype, device=zero.device)
    norms = torch._foreach_norm(slices, norm_type, zero.master_dtype)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).to(zero.device)
