"""The optimizer's step in one pass over memory: 16-bit gradients in, 16-bit parameters out.

In mixed precision a step reads gradients of 2 bytes and writes parameters of 2 bytes, but the optimizer
in between computes in fp32 only. Bytes an element, read + written:

    three passes   upcast 2 + 4,  AdamW 16 + 12,  copy back 4 + 2     40, and fp32 gradients of the whole shard
    one pass       AdamW (12 + 2) + (12 + 2)                          28, and none

Memory traffic limits a step, so this also saves time: 1.4 times less of it. On CUDA one Triton kernel does
it; elsewhere the three passes run piece by piece, so that the gradients of only one piece at a time are fp32.
The states stay torch's own (`step`, `exp_avg`, `exp_avg_sq` of each piece). The optimizer's own step()
then finds no gradient and does nothing.

    m = m + (1 - beta1) (g - m)          v = beta2 v + (1 - beta2) g^2
    p = (1 - lr wd) p - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Source: AdamW, arXiv 1711.05101, algorithm 2. It is used for `torch.optim.AdamW(fused=True)`.

Left out: other optimizers, amsgrad, a learning rate that is a tensor: they use the three passes.
"""

import torch

from zero_mini.binding.checks import known_class

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs does not include it
    triton = None

BLOCK = 2048  # elements per Triton program


def can_fuse(zero) -> bool:
    """Mixed precision, plain fused AdamW, and gradients that were not handed to the optimizer yet."""
    return zero.mixed and zero.means_due and is_fusible(zero.optimizer)


def is_fusible(optimizer: torch.optim.Optimizer) -> bool:
    """Does this file implement the optimizer's update?"""
    return known_class(optimizer) is torch.optim.AdamW and all(
        group["fused"] and not (group["amsgrad"] or group["maximize"] or isinstance(group["lr"], torch.Tensor))
        for group in optimizer.param_groups
    )


def step(zero) -> None:
    """Update every piece that has a gradient, times `zero.factor.value` (0-dim) if there is one, and write its cast.

    Units are updated in the order in which means arrive: the first ones while the last means are in flight.
    """
    groups = zero.optimizer.param_groups
    units = [unit for unit in reversed(zero.trainable) if unit.holds_gradient]
    pieces: list[list[torch.Tensor]] = [[] for _ in groups]
    for unit in units:
        for group, piece, _ in unit.used_pieces(unit.master):
            pieces[group].append(piece)
    factors = [step_factors(zero.optimizer, options, group) for options, group in zip(groups, pieces)]
    counts = [0] * len(groups)
    for unit in units:
        zero.finish_reduction(unit)
        whole_cast = zero.update.cast_of(unit)
        casts = [None] * len(unit.pieces)
        if whole_cast is not None:
            casts = [view for _, _, view in unit.used_pieces(whole_cast)]
        for (group, piece, grad), cast in zip(unit.used_pieces(unit.mean_grad), casts):
            state = zero.optimizer.state[piece]
            parts = (piece.detach(), grad, state["exp_avg"], state["exp_avg_sq"], cast)
            if factors[group] is None:
                update(*parts, state["step"], zero.factor.value, groups[group])
            else:
                launch(*parts, *factors[group], counts[group], zero.factor.value, groups[group])
            counts[group] += 1
            piece.grad = None
    zero.means_due = False


def step_factors(optimizer: torch.optim.Optimizer, options: dict, pieces: list[torch.Tensor]):
    """Count a step of every piece. Returns the two factors of each piece for the kernel; None without kernel.

    They depend on the step count. The device computes them for a group's pieces at once; the host would have to wait.
    """
    steps = [state_of(optimizer, piece)["step"] for piece in pieces]
    if steps:
        torch._foreach_add_(steps, 1)
    if triton is None or not steps or not steps[0].is_cuda:
        return None
    counts = torch.stack(steps).double()
    beta1, beta2 = options["betas"]
    return (options["lr"] / (1 - beta1**counts)).float(), (1 - beta2**counts).sqrt().float()


def state_of(optimizer: torch.optim.Optimizer, piece: torch.Tensor) -> dict[str, torch.Tensor]:
    """The piece's state; before its first step, AdamW's initial state."""
    state = optimizer.state[piece]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=piece.device)
        state["exp_avg"] = torch.zeros_like(piece, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(piece, requires_grad=False)
    return state


def update(master, grad, exp_avg, exp_avg_sq, cast, step, coefficient, options: dict) -> None:
    """Three passes for one piece: upcast, torch's own fused update, copy back."""
    grad = grad.to(master.dtype)
    if coefficient is not None:
        grad = grad * coefficient
    settings = {name: options[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    settings["beta1"], settings["beta2"] = options["betas"]
    torch._fused_adamw_([master], [grad], [exp_avg], [exp_avg_sq], [], [step], **settings)
    if cast is not None:
        cast.copy_(master)


def launch(master, grad, exp_avg, exp_avg_sq, cast, rates, roots, index: int, coefficient, options: dict) -> None:
    """One kernel for one piece; its step's factors are rates[index] and roots[index]."""
    beta1, beta2 = options["betas"]
    adamw_kernel[(triton.cdiv(master.numel(), BLOCK),)](
        *(master, grad, exp_avg, exp_avg_sq, master if cast is None else cast),
        *(rates, roots, rates if coefficient is None else coefficient, index, master.numel()),
        *(1 - options["lr"] * options["weight_decay"], 1 - beta1, beta2, 1 - beta2, options["eps"]),
        HAS_COEFFICIENT=coefficient is not None,
        HAS_CAST=cast is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )


if triton is not None:

    @triton.jit(do_not_specialize=["index"])
    def adamw_kernel(
        master_ptr,
        grad_ptr,
        exp_avg_ptr,
        exp_avg_sq_ptr,
        cast_ptr,
        rates_ptr,
        roots_ptr,
        coefficient_ptr,
        index,
        numel,
        decay,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        eps,
        HAS_COEFFICIENT: tl.constexpr,
        HAS_CAST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        g = tl.load(grad_ptr + at, mask=inside).to(tl.float32)
        p = tl.load(master_ptr + at, mask=inside)
        m = tl.load(exp_avg_ptr + at, mask=inside)
        v = tl.load(exp_avg_sq_ptr + at, mask=inside)
        if HAS_COEFFICIENT:
            g = g * tl.load(coefficient_ptr)
        m = m + one_minus_beta1 * (g - m)
        v = beta2 * v + one_minus_beta2 * g * g
        p = p * decay - tl.load(rates_ptr + index) * m / (tl.sqrt(v) / tl.load(roots_ptr + index) + eps)
        tl.store(master_ptr + at, p, mask=inside)
        tl.store(exp_avg_ptr + at, m, mask=inside)
        tl.store(exp_avg_sq_ptr + at, v, mask=inside)
        if HAS_CAST:
            tl.store(cast_ptr + at, p.to(cast_ptr.dtype.element_ty), mask=inside)
