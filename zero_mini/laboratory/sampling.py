"""Sampling the model: in each step a random part of the elements is updated, the same part on every rank.

    step 0    # . . #  . # . .      #: updated
    step 1    . # . .  # . . #      p: the part of the elements that is updated, on average
    step 2    # . # .  . . # .

    rate          "as it is": the gradient of a sampled element is used as it is; updates are p as long on average
                  "adaptive": it is divided by p, so that an average over many steps is the whole gradient

What it saves is traffic: p x 2 Psi, if ranks draw the part from the same seed and send no indices. The gradient is
computed whole, since backward goes through every layer. Optimizer states exist for all elements: after t steps a part
1 - (1-p)^t of them has been sampled at least once. It is stochastic coordinate descent, an algorithm of its own: after
one step its parameters are not those of data parallelism, and no rounding explains the difference. ZeRO updates every
element in every step; one rank does it.

Left out: sampling layers so that backward can stop early; states for the sampled part alone.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zero_mini.laboratory.task import byte_model, gap, gradient_of, held_out_loss, parameters_of, set_gradient, train

RATES = ("as it is", "adaptive")


def sample(numel: int, p: float, step: int, seed: int = 0) -> Tensor:
    """Which elements a step updates (numel, bool), from the seed and the step alone. ValueError if p is no part.

    >>> sample(4, 1.0, step=0).tolist()
    [True, True, True, True]
    """
    if not 0 < p <= 1:
        raise ValueError(f"p is the part of the elements that is updated, above 0 and at most 1 (got {p})")
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return torch.rand(numel, generator=generator) < p


class SampledUpdate:
    """SGD in the place of an optimizer: means of sampled gradients, and an update of the sampled elements alone.

    sent_bytes: what this rank has sent. ValueError if `rate` is none of `RATES`.
    """

    def __init__(self, model: nn.Module, p: float, lr: float, rate: str = "as it is", seed: int = 0):
        if rate not in RATES:
            raise ValueError(f"rate must be one of {RATES} (got {rate!r})")
        self.model, self.p, self.seed = model, p, seed
        self.factor = 1 / p if rate == "adaptive" else 1.0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.steps, self.sent_bytes = 0, 0.0
        self.ever = torch.zeros(len(parameters_of(model)), dtype=torch.bool)  # which elements have been sampled

    def step(self) -> None:
        """After every rank's backward. Collective."""
        N, gradient = dist.get_world_size(), gradient_of(self.model)
        part = sample(len(gradient), self.p, self.steps, self.seed)
        self.ever |= part
        means = gradient[part] / N  # one message, without indices: all ranks have drawn the same part
        dist.all_reduce(means)
        self.sent_bytes += 2 * means.nbytes * (N - 1) / N
        gradient.zero_()
        gradient[part] = means * self.factor
        set_gradient(self.model, gradient)
        self.optimizer.step()
        self.steps += 1

    def zero_grad(self) -> None:
        self.model.zero_grad()


# --- the experiment ---------------------------------------------------------------------------


def compare_samples(steps: int = 300, parts: Sequence[float] = (1.0, 0.5, 0.1), lr: float = 0.5) -> dict[str, dict]:
    """On ranks: losses, loss on held-out text, bytes sent in a step, part ever sampled, gaps to torch DDP."""
    rank, N, results = dist.get_rank(), dist.get_world_size(), {}
    plain = byte_model()
    ddp = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=lr)
    losses = train(ddp, optimizer, 1, rank, N)
    after_one = parameters_of(plain)
    update = gap(after_one, parameters_of(byte_model()))
    losses += train(ddp, optimizer, steps - 1, rank, N, first=1)
    results["torch DDP"] = {"losses": losses, "held_out": held_out_loss(plain), "update": update}
    for p in parts:
        for rate in RATES if p < 1 else RATES[:1]:
            model = byte_model()
            sampled = SampledUpdate(model, p, lr, rate)
            losses = train(model, sampled, 1, rank, N)
            apart = gap(parameters_of(model), after_one)
            losses += train(model, sampled, steps - 1, rank, N, first=1)
            results[f"p = {p}, {rate}"] = {
                "losses": losses,
                "held_out": held_out_loss(model),
                "gap_after_one_step": apart,
                "gap": gap(parameters_of(model), parameters_of(plain)),
                "sent_bytes": sampled.sent_bytes / steps,
                "ever_sampled": sampled.ever.float().mean().item(),
            }
    return results
