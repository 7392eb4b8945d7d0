"""The work of every experiment: predict the next byte of a text from the eight bytes before it.

    text    that comes with Python (trainer/text.py)
    model   an embedding, two layers with tanh, an output layer: 50,624 parameters, four blocks for zeroify
    batch   `rows` examples a step, drawn from the seed and the step alone; rank r of N has the r-th part of them

So every N sees the same global batch in the same step, and a step on two CPU cores takes about a millisecond.

Left out: dropout, schedules, clipping. They are the same for every system that is compared here.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_mini.trainer import text

CONTEXT, VOCAB, CHANNELS, WIDTH = 8, 256, 16, 96

Batch = tuple[Tensor, Tensor]  # the bytes before (rows, CONTEXT), and the next byte (rows)


def byte_model(seed: int = 0, width: int = WIDTH, layers: int = 2, sparse: bool = False) -> nn.Sequential:
    """Parameters from the seed. sparse: the embedding's gradient has only the rows that a batch used.

    >>> sum(param.numel() for param in byte_model().parameters())
    50624
    """
    torch.manual_seed(seed)
    sizes = [CONTEXT * CHANNELS] + layers * [width]
    hidden = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, sizes[1:])]
    return nn.Sequential(
        nn.Sequential(nn.Embedding(VOCAB, CHANNELS, sparse=sparse), nn.Flatten()), *hidden, nn.Linear(width, VOCAB)
    )


@cache
def tokens() -> Tensor:
    return text.load().long()


def batch(step: int, rank: int = 0, world_size: int = 1, rows: int = 64, seed: int = 0) -> Batch:
    """This rank's part of the step's `rows` examples. ValueError if N does not divide them."""
    if rows % world_size:
        raise ValueError(f"{rows} rows are not a multiple of {world_size} ranks: give a multiple")
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(tokens()) - CONTEXT, (rows,), generator=generator).chunk(world_size)[rank]
    windows = tokens()[starts[:, None] + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


def loss_of(model: nn.Module, examples: Batch) -> Tensor:
    """The mean of the cross entropy."""
    x, y = examples
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD, whose update is the gradient: what a codec does to one shows in the other."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, whose steps show a gradient that is too large by a factor; Adam's do not."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module,
    optimizer,
    steps: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    first: int = 0,
) -> list[float]:
    """The ordinary loop from step `first` on, for a plain model, torch DDP and zeroify alike; this rank's losses."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, batch(step, rank, world_size, seed=seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """On 512 examples that `batch` draws for no step of a run."""
    return loss_of(model, batch(999_983, rows=512)).item()


def parameters_of(model: nn.Module) -> Tensor:
    """All values (Psi), a copy; for zeroify too, on every rank."""
    return torch.cat([value.detach().flatten() for value in model.state_dict().values()])


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two elements."""
    return (a - b).abs().max().item()


def gradient_of(model: nn.Module) -> Tensor:
    """All gradients (Psi), a copy."""
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def set_gradient(model: nn.Module, values: Tensor) -> None:
    """values (Psi) -> each parameter's .grad, a view."""
    params = list(model.parameters())
    for param, part in zip(params, values.split([param.numel() for param in params])):
        param.grad = part.view_as(param)


@torch.no_grad()
def set_parameters(model: nn.Module, values: Tensor) -> None:
    """values (Psi) -> each parameter, a copy."""
    params = list(model.parameters())
    for param, part in zip(params, values.split([param.numel() for param in params])):
        param.copy_(part.view_as(param))
