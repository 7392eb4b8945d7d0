"""The models and batches that a student's stages train. Each has `blocks`, an nn.ModuleList; the rest is the root."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from zero_mini.trainer.gpt import GPT, GPTConfig

CONFIG = GPTConfig(L=12, d=16, heads=2, vocab=64, T=16)


class Uneven(nn.Module):
    """Whole numbers, blocks of 24, 35, 32 and 25 elements, and a root of 15 that is used before and after them."""

    def __init__(self, frozen: bool = False, unused: bool = False):
        super().__init__()
        self.tied = nn.Linear(5, 3, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(5, 4), nn.Linear(4, 7), nn.Linear(7, 4), nn.Linear(4, 5)])
        if unused:
            self.unused = nn.Parameter(torch.ones(4))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape))
        if frozen:
            self.blocks[1].weight.requires_grad_(False)
            self.blocks[2].requires_grad_(False)

    def forward(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        x = x @ self.tied.weight
        for block in self.blocks:
            x = block(x).relu()
        return (nn.functional.linear(x, self.tied.weight) * factors).sum()


def uneven_batch(step: int, micro: int) -> tuple[torch.Tensor, ...]:
    """Whole numbers; factors are multiples of N, so that the mean over ranks is a whole number as well."""
    torch.manual_seed(1000 * step + 100 * micro + dist.get_rank())
    x = torch.randint(-2, 3, (4, 3)).float()
    return x, dist.get_world_size() * torch.randint(-1, 2, (4, 3)).float()


def tokens(step: int, micro: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1000 * step + 100 * micro + dist.get_rank())
    x = torch.randint(CONFIG.vocab, (2, 9))
    return x[:, :-1], x[:, 1:]


@dataclass(frozen=True)
class Case:
    """A model, its batches and its optimizer."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[torch.Tensor, ...]]  # (step, micro-batch) -> inputs of the model
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    unused: bool = False  # torch DDP must look for unused parameters


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2**-6)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


CASES = {
    "gpt": Case(lambda: GPT(CONFIG), tokens, adamw),
    "gpt, SGD": Case(lambda: GPT(CONFIG), tokens, momentum),
    "uneven": Case(Uneven, uneven_batch, sgd),
    "frozen": Case(lambda: Uneven(frozen=True), uneven_batch, sgd),
    "unused": Case(lambda: Uneven(unused=True), uneven_batch, sgd, unused=True),
}
