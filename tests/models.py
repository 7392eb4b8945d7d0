"""A zoo of awkward models, and one loop that trains any of them under torch DDP, under a stage, or alone.

What a loop leaves behind is a `Run`: the loss, the mean gradients and the parameters of every step. A
test trains one model twice and asks for the differences of two runs. All of it runs inside a rank.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from zero_mini.units import merge_blocks
from zero_mini.zeroify import zeroify

B, D_IN, D, D_OUT = 3, 5, 6, 3  # rows a rank, widths
T, VOCAB = 4, 11  # for models that read token ids


@dataclass(frozen=True)
class Turn:
    """Whose batch it is, and when: what a model may let its way through the layers depend on."""

    rank: int
    world_size: int
    step: int


# --- the zoo --------------------------------------------------------------------------------------


class Block(nn.Module):
    """h + W2 gelu(W1 norm(h))."""

    def __init__(self, hidden: int = 9, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, hidden), nn.Linear(hidden, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.dropout(self.down(F.gelu(self.up(self.norm(h)))))


class Stack(nn.Module):
    """Blocks between two layers that belong to the root."""

    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.enter, self.leave = nn.Linear(D_IN, D), nn.Linear(D, D_OUT)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(4)])

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        return self.leave(self.through_blocks(self.enter(x), turn))

    def through_blocks(self, h: torch.Tensor, turn: Turn) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class NoRoot(nn.Sequential):
    """Every parameter belongs to a block, and the first block's input needs no gradient."""

    def __init__(self):
        super().__init__(nn.Linear(D_IN, D), Block(), Block(), nn.Linear(D, D_OUT))

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        return super().forward(x)


class AllRoot(Stack):
    """No repeated blocks: everything is one unit."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.blocks = nn.ModuleList()

    def through_blocks(self, h, turn):
        return self.second(self.first(h))


class Tied(nn.Module):
    """The embedding is the head."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(D, VOCAB, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, turn: Turn) -> torch.Tensor:
        h = self.wte(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class TiedBlocks(Stack):
    """Two blocks share a matrix, so it can belong to neither."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class LowRank(nn.Module):
    """LoRA: a frozen matrix and two small ones beside it."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, D) / 3), nn.Parameter(torch.randn(D, 2) / 3)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(self.frozen(h) + h @ self.a.T @ self.b.T)


class Frozen(Stack):
    """Frozen parameters in the root, beside trainable ones, before all of them, and between them."""

    def __init__(self):
        super().__init__(Block().requires_grad_(False), LowRank(), Block().requires_grad_(False), LowRank(), Block())
        self.enter.requires_grad_(False)
        self.blocks[4].norm.requires_grad_(False)


class MaybeBlock(Block):
    """A block with a layer that some batches do not need."""

    def __init__(self):
        super().__init__()
        self.maybe = nn.Linear(D, D)

    def forward(self, h: torch.Tensor, needed: bool) -> torch.Tensor:
        return super().forward(torch.sin(self.maybe(h)) if needed else h)


class UnusedOnSomeRanks(Stack):
    """One rank in two has no gradient for a layer; which ones changes with the step."""

    def __init__(self):
        super().__init__(Block(), MaybeBlock(), Block(), MaybeBlock())

    def through_blocks(self, h, turn):
        for index, block in enumerate(self.blocks):
            needed = turn.world_size == 1 or (turn.rank + turn.step + index // 2) % 2 == 0
            h = block(h, needed) if isinstance(block, MaybeBlock) else block(h)
        return h


class SkippedOnSomeRanks(Stack):
    """Some ranks do not call a whole block. (At stage 3, where a call is a collective, that is an error.)"""

    def through_blocks(self, h, turn):
        for index, block in enumerate(self.blocks):
            if turn.world_size == 1 or index % 2 == 0 or (turn.rank + turn.step + index // 2) % 2 == 0:
                h = block(h)
        return h


class SometimesUnused(Stack):
    """A layer, and a whole block, that no rank uses in odd steps."""

    def __init__(self):
        super().__init__(Block(), MaybeBlock(), Block(), Block())

    def through_blocks(self, h, turn):
        odd = turn.step % 2 == 1
        h = self.blocks[1](self.blocks[0](h), needed=not odd)
        return self.blocks[3](h if odd else self.blocks[2](h))


class Odd(nn.Module):
    """Sizes that no number of ranks divides, some below any number of ranks, one far above the rest."""

    def __init__(self):
        super().__init__()
        widths = [D_IN, 7, 1, 53, 1, D_OUT]
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.blocks.append(nn.Linear(1, 1, bias=False))  # a unit of one element
        self.shift = nn.Parameter(torch.randn(D_OUT))

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        for block in self.blocks[:-1]:
            x = torch.tanh(block(x))
        return self.blocks[-1](x[..., None])[..., 0] + self.shift


class Degenerate(nn.Module):
    """A 0-dim scale and a 0-element matrix around a few numbers that count."""

    def __init__(self, counts: bool = True):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, D))
        self.bias = nn.Parameter(torch.randn(D)) if counts else None

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + torch.tanh(h * self.scale)
        if self.bias is not None:
            h = h + self.bias
        return torch.cat([h, h @ self.nothing.T], dim=-1)


class Empty(nn.Module):
    """A unit without a single element."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(D, 0))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.cat([h, h @ self.nothing], dim=-1)


class Twice(Stack):
    """Blocks that are called again in the same forward: at once, and later."""

    def through_blocks(self, h, turn):
        for index in (0, 1, 1, 0, 2, 0, 3):
            h = self.blocks[index](h)
        return h


class OrderChanges(Stack):
    """The way through the blocks is another one at each step."""

    ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0), (1, 3, 0, 2))

    def through_blocks(self, h, turn):
        for index in self.ORDERS[turn.step % 4]:
            h = self.blocks[index](h)
        return h


@dataclass
class Pair:
    h: torch.Tensor
    more: object


class Returning(nn.Module):
    """A block that returns its output inside something, beside a tensor that nobody uses."""

    def __init__(self, shape: str):
        super().__init__()
        self.shape, self.block, self.side = shape, Block(), nn.Linear(D, D)

    def forward(self, h: torch.Tensor):
        h = self.block(h)
        aside, unused = torch.sin(self.side(h)), h * 2
        if self.shape == "tuple":
            return aside, h, unused
        if self.shape == "dict":
            return {"unused": unused, "h": h, "aside": aside, "note": None}
        if self.shape == "dataclass":
            return Pair(h, aside)
        return Pair({"unused": unused, "h": [(h,)]}, [{"aside": aside}, "words", 3, torch.arange(2)])


class Structures(Stack):
    """Units, and the model itself, that return tuples, dicts, dataclasses and all of them nested."""

    def __init__(self):
        super().__init__(*[Returning(shape) for shape in ("tuple", "dict", "dataclass", "nested")])

    def forward(self, x: torch.Tensor, turn: Turn) -> Pair:
        h = self.enter(x)
        aside, h, _ = self.blocks[0](h)
        output = self.blocks[1](h + aside)
        output = self.blocks[2](output["h"] * output["aside"])
        output = self.blocks[3](output.more + output.h)
        (h,), aside = output.h["h"][0], output.more[0]["aside"]
        return Pair(self.leave(h), {"aside": self.leave(aside)})


class InPlace(Stack):
    """What the units return is changed in place."""

    def through_blocks(self, h, turn):
        for block in self.blocks:
            h = block(h).mul_(0.5).sin_()
        return h


class Normalised(Stack):
    """BatchNorm: buffers that each rank moves by its own data."""

    def __init__(self):
        layers = [nn.Sequential(nn.Linear(D, D, bias=False), nn.BatchNorm1d(D)) for _ in range(3)]
        super().__init__(*layers)


class Branches(Stack):
    """A way that forks, skips, stops, and is walked without a gradient first."""

    def through_blocks(self, h, turn):
        with torch.no_grad():
            target = self.blocks[1](self.blocks[0](h))
        left, right = self.blocks[0](h), self.blocks[1](h)
        joined = self.blocks[2](left * right)
        return self.blocks[3](joined.detach()) + joined * left - target


class TwoLists(Stack):
    """Lists of blocks inside one another (the outer one counts) and blocks of two lists in turns."""

    def __init__(self):
        super().__init__(*[nn.Sequential(nn.Linear(D, D), nn.Sequential(Block(), nn.Tanh())) for _ in range(2)])
        self.others = nn.ModuleList(Block() for _ in range(2))

    def through_blocks(self, h, turn):
        for one, other in zip(self.blocks, self.others):
            h = other(one(h)) + h
        return h


class Hooked(Stack):
    """Hooks that a user registered, and a weight that is computed from others."""

    def __init__(self):
        super().__init__()
        self.blocks[0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.blocks[1].register_forward_hook(lambda module, inputs, output: output * 1.5)
        self.blocks[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.7,))
        self.blocks[2].up.weight.register_hook(lambda grad: grad * 2)
        nn.utils.parametrizations.weight_norm(self.blocks[3].up)


class Convolutions(nn.Module):
    """Convolutions and BatchNorm, channels last."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(1, D, 2)
        layers = [nn.Sequential(nn.Conv2d(D, D, 3, padding=1), nn.BatchNorm2d(D)) for _ in range(3)]
        self.blocks, self.leave = nn.ModuleList(layers), nn.Linear(D, D_OUT)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        image = (x[:, None, :, None] * x[:, None, None, :]).contiguous(memory_format=torch.channels_last)
        h = self.enter(image)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.leave(h.mean((2, 3)))


class Recurrent(nn.Module):
    """Two LSTMs, each a unit: cuDNN's flat weights apart, a module that keeps a list of its own parameters."""

    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCAB, D), nn.Linear(2 * D, VOCAB)
        self.blocks = nn.ModuleList([nn.LSTM(D, D, batch_first=True), nn.LSTM(D, D, bidirectional=True)])

    def forward(self, ids: torch.Tensor, turn: Turn) -> torch.Tensor:
        h, (last, _) = self.blocks[0](self.wte(ids))
        h, _ = self.blocks[1](h + last[0][:, None])
        return self.head(h)


class Experts(Block):
    """A mixture of experts inside a block: the data decide who computes, so that a rank may leave some out."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.route(h - h.detach().mean(-1, keepdim=True)).softmax(-1).max(-1)
        mixed = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                mixed = mixed.index_add(0, rows, weight[rows, None] * expert(h[rows]))
        return super().forward(h + mixed)


class Giant(nn.Module):
    """One layer that holds nearly all of the model, among tiny ones."""

    def __init__(self):
        super().__init__()
        widths = [D_IN, 2, 900, 2, 1, D_OUT]
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        for block in self.blocks:
            x = torch.sin(block(x))
        return x


class OnlyBiases(Stack):
    """Most is frozen, and the first block wholly."""

    def __init__(self):
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_(name.endswith("bias") and not name.startswith(("enter", "blocks.0")))


class ViewsInPlace(Stack):
    """Units return views of what they computed, which are changed in place."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, inputs, output: output[:, :])

    def through_blocks(self, h, turn):
        for block in self.blocks:
            h = block(h).mul_(0.5)
        return h


class Checkpointed(Stack):
    """`spans` says which blocks are computed again together, dropout included."""

    def __init__(
        self, use_reentrant: bool, spans=((0,), (1,), (2,), (3,)), early_stop: bool = True, frozen: bool = False
    ):
        blocks = [Block(dropout=0.25) for _ in range(4)]
        if frozen:
            blocks = [LowRank(), Block().requires_grad_(False), LowRank(), Block(dropout=0.25)]
        super().__init__(*blocks)
        self.use_reentrant, self.spans, self.early_stop = use_reentrant, spans, early_stop

    def through_blocks(self, h, turn):
        with set_checkpoint_early_stop(self.early_stop):
            for span in self.spans:
                h = self.again(self.some, h, span)
        return h

    def again(self, function: Callable, *args) -> torch.Tensor:
        return checkpoint(function, *args, use_reentrant=self.use_reentrant)

    def some(self, h: torch.Tensor, span: tuple[int, ...]) -> torch.Tensor:
        for index in span:
            h = self.blocks[index](h)
        return h


class CheckpointedInChangingOrder(Checkpointed):
    """One block at a time, in another order at each step."""

    def through_blocks(self, h, turn):
        for index in OrderChanges.ORDERS[turn.step % 4]:
            h = self.again(self.blocks[index], h)
        return h


class CheckpointInCheckpoint(Checkpointed):
    """Two blocks that are computed again together, and each once more by itself."""

    def some(self, h, span):
        for index in span:
            h = self.again(self.blocks[index], h)
        return h


class CheckpointedUnused(UnusedOnSomeRanks):
    """A checkpoint of something that some ranks do not use."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        for block in self.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)


class CheckpointedFromTheInput(Checkpointed):
    """The first checkpoint starts at the model's input: re-entrant, that input must require a gradient."""

    def __init__(self, use_reentrant: bool):
        super().__init__(use_reentrant)
        self.enter = nn.Identity()

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        return super().forward(F.pad(x, (0, D - D_IN)).requires_grad_(), turn)


class Bag(nn.Module):
    """Parameters of whole 64ths whose gradients are the numbers they are given."""

    def __init__(self, *shapes: tuple[int, ...]):
        super().__init__()
        self.bag = nn.ParameterList(nn.Parameter(torch.randint(-256, 257, shape) / 64) for shape in shapes)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """sum(p c), with the same c for the first element of every parameter, and so on."""
        return sum((param * numbers[: param.numel()].view(param.shape)).sum() for param in self.bag)


class Integers(nn.Module):
    """sum((p c).sum()) over all parameters: its gradient is c, whatever the parameters are."""

    SHAPES = [((), (3,), (2, 5)), ((53, 7), (0, 4)), ((1,),), ((5, 13), (0,), (64,), ())]

    def __init__(self):
        super().__init__()
        self.root = Bag((7, 3), ())
        self.blocks = nn.ModuleList(Bag(*shapes) for shapes in self.SHAPES)
        self.blocks[3].bag[2].requires_grad_(False)

    def forward(self, numbers: torch.Tensor, turn: Turn) -> torch.Tensor:
        total = self.root(numbers)
        for index, block in enumerate(self.blocks, start=1):
            total = total + block(numbers[index:])
        return total


def generator(*numbers: int) -> torch.Generator:
    """A generator that the numbers (each below 100) determine."""
    seed = 1
    for number in numbers:
        seed = seed * 100 + number
    return torch.Generator().manual_seed(seed)


def some_numbers(turn: Turn, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, D_IN), y (B, D_OUT): other ones on each rank, in each step and micro-batch."""
    source = generator(turn.rank, turn.step, micro)
    return torch.randn(B, D_IN, generator=source), torch.randn(B, D_OUT, generator=source)


def some_tokens(turn: Turn, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids, targets (B, T)."""
    source = generator(turn.rank, turn.step, micro)
    return tuple(torch.randint(VOCAB, (B, T), generator=source) for _ in range(2))


def some_integers(turn: Turn, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiples of N in [-64 N, 64 N], so that the mean over ranks is a whole number; and nothing."""
    numbers = torch.randint(-64, 65, (400,), generator=generator(turn.rank, turn.step, micro))
    return (numbers * turn.world_size).float(), torch.zeros(())


def itself(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output


def squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output - y).square().mean()


def cross_entropy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def structures_error(output: Pair, y: torch.Tensor) -> torch.Tensor:
    return squared_error(output.h, y) + squared_error(output.more["aside"], y)


@dataclass(frozen=True)
class Case:
    """A model, what it reads, and what torch DDP has to be told about it."""

    build: Callable[[], nn.Module]
    batch: Callable = some_numbers
    loss: Callable = squared_error
    unused: bool = False  # some ranks leave parameters without a gradient
    static_graph: bool = False
    comes_twice: bool = False  # backward enters a unit a second time: two means are added, not the mean of a sum taken
    seeds_differ: bool = False  # ranks build different values; rank 0's count
    stages: tuple[int, ...] = (0, 1, 2, 3)


TWO_AT_ONCE, THREE_AND_ONE, CALLED_TWICE = ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (1,), (0,), (2,), (3,))

ZOO = {
    "plain blocks": Case(Stack),
    "tied embedding and head": Case(Tied, some_tokens, cross_entropy),
    "frozen": Case(Frozen),
    "unused on some ranks": Case(UnusedOnSomeRanks, unused=True),
    "odd sizes": Case(Odd),
    "0-dim and 0-element": Case(lambda: Stack(Degenerate(), Block(), Empty(), Degenerate(counts=False))),
    "ranks start differently": Case(Stack, seeds_differ=True),
    "unit called twice": Case(Twice),
    "order changes": Case(OrderChanges),
    "structured outputs": Case(Structures, loss=structures_error),
    "checkpoint": Case(lambda: Checkpointed(use_reentrant=False)),
    "checkpoint, re-entrant": Case(lambda: Checkpointed(use_reentrant=True)),
    "checkpoint of two": Case(lambda: Checkpointed(False, TWO_AT_ONCE)),
    "checkpoint of two, re-entrant": Case(lambda: Checkpointed(True, TWO_AT_ONCE)),
    "checkpoint from the input": Case(lambda: CheckpointedFromTheInput(use_reentrant=False)),
    "checkpoint from the input, re-entrant": Case(lambda: CheckpointedFromTheInput(use_reentrant=True)),
}

# More of them, which fewer tests take: at one number of ranks against torch DDP, at another against float64.
RARE = {
    "no root": Case(NoRoot),
    "all root": Case(AllRoot),
    "tied blocks": Case(TiedBlocks),
    "unit skipped on some ranks": Case(SkippedOnSomeRanks, unused=True, stages=(0, 1, 2)),
    "outputs changed in place": Case(InPlace),
    "buffers": Case(Normalised),
    "convolutions and batch norm, channels last": Case(Convolutions),
    "recurrent": Case(Recurrent, some_tokens, cross_entropy),
    "mixture of experts": Case(lambda: Stack(Block(), Experts(), Block()), unused=True),
    "one giant layer": Case(Giant),
    "branches": Case(Branches),
    "two lists": Case(TwoLists),
    "hooks and parametrisations": Case(Hooked),
    "only biases": Case(OnlyBiases),
    "checkpoint without early stop": Case(lambda: Checkpointed(False, TWO_AT_ONCE, early_stop=False)),
    "checkpoint of frozen": Case(lambda: Checkpointed(False, frozen=True)),
    "checkpoint of frozen, re-entrant": Case(lambda: Checkpointed(True, frozen=True)),
    "checkpoint of three": Case(lambda: Checkpointed(False, THREE_AND_ONE)),
    "checkpoint of three, re-entrant": Case(lambda: Checkpointed(True, THREE_AND_ONE)),
    "checkpoint of what is called twice": Case(lambda: Checkpointed(False, CALLED_TWICE)),
    "checkpoint of what is called twice, re-entrant": Case(
        lambda: Checkpointed(True, CALLED_TWICE), static_graph=True, comes_twice=True
    ),
    "checkpoint in changing order": Case(lambda: CheckpointedInChangingOrder(False)),
    "checkpoint in changing order, re-entrant": Case(lambda: CheckpointedInChangingOrder(True)),
    "checkpoint in checkpoint": Case(lambda: CheckpointInCheckpoint(False, TWO_AT_ONCE)),
    "checkpoint in checkpoint, re-entrant": Case(lambda: CheckpointInCheckpoint(True, TWO_AT_ONCE)),
    "checkpoint of what is unused on some ranks": Case(lambda: CheckpointedUnused(False), unused=True),
}

# torch DDP cannot train these.
BEYOND_DDP = {
    "checkpoint of what is unused on some ranks, re-entrant": Case(lambda: CheckpointedUnused(True), unused=True),
}

INTEGERS = Case(Integers, some_integers, itself)
SOMETIMES_UNUSED = Case(SometimesUnused, unused=True)


# --- optimizers -----------------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Frozen parameters are in its group, as `model.parameters()` has them."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: matrices decay, the rest does not. Frozen parameters are in neither."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": matrices}], lr=0.01, weight_decay=0.3)


def dyadic_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Its hyperparameters are powers of two: on whole numbers it does not round."""
    return torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)


def adam_without_eps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-30)


OPTIMIZERS = {"SGD": sgd, "AdamW": adamw, "dyadic SGD": dyadic_sgd, "Adam": adam_without_eps}


# --- the loop -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """How to train."""

    optimizer: str = "SGD"
    steps: int = 3
    micro_batches: int = 1
    no_sync: bool = False  # on all micro-batches but the last
    clip: tuple[float, float] | None = None  # (max_norm, norm_type); in the second step by a maximum out of reach
    evaluate: bool = False  # forwards that no backward follows, before each step
    watch: bool = True  # look at gradients and parameters after every step, or at the last ones only
    dtype: torch.dtype = torch.float32  # of the parameters
    compute_dtype: torch.dtype | None = None
    units: tuple[str, ...] | None = None  # names of modules, instead of the repeated blocks
    merge: int = 0  # units of several blocks, of that many parameters at least
    offload: str | None = None  # zeroify's: "host", or a folder


@dataclass
class Step:
    losses: list[torch.Tensor]
    norm: torch.Tensor | None = None
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)  # what the optimizer is given
    params: dict[str, torch.Tensor] = field(default_factory=dict)  # the state_dict after it, buffers too


@dataclass
class Run:
    start: dict[str, torch.Tensor]
    steps: list[Step]


class Stage:
    """One of zero_mini's stages."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop, stage: int):
        self.model, self.module, self.optimizer = model, model, optimizer
        units = None if loop.units is None else [model.get_submodule(name) for name in loop.units]
        units = merge_blocks(model, loop.merge) if loop.merge else units
        self.zero = zeroify(model, optimizer, stage=stage, dtype=loop.compute_dtype, units=units, offload=loop.offload)
        self.shares = [dist.get_rank()]
        self.no_sync = self.zero.no_sync

    def after_backward(self) -> None:
        """Nothing to do."""

    def before_step(self) -> None:
        """Nothing to do."""

    def clip(self, max_norm: float, norm_type: float, _) -> torch.Tensor:
        return self.zero.clip_grad_norm_(max_norm, norm_type).clone()

    def grads(self) -> dict[str, torch.Tensor | None]:
        with self.zero.full_params(grads=True):
            return {name: copy_of(param.grad) for name, param in self.model.named_parameters()}


class Alone:
    """Plain PyTorch: this rank alone, or in place of all of them."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop, shares=None):
        self.model, self.module, self.optimizer = model, model, optimizer
        self.shares = range(dist.get_world_size()) if shares is None else shares
        self.no_sync = contextlib.nullcontext

    def after_backward(self) -> None:
        """Nothing to do."""

    def before_step(self) -> None:
        """Nothing to do."""

    def clip(self, max_norm: float, norm_type: float, norm: torch.Tensor | None) -> torch.Tensor:
        """Returns torch's own norm; with `norm`, scales by its coefficient, so that bits can be compared."""
        params = [param for param in self.module.parameters() if param.grad is not None]
        before = [param.grad.clone() for param in params]
        own_norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        if norm is not None:
            for param, grad in zip(params, before):
                param.grad.copy_(grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0)))
        return own_norm

    def grads(self) -> dict[str, torch.Tensor | None]:
        return {name: copy_of(param.grad) for name, param in self.module.named_parameters()}


class TorchDDP(Alone):
    """torch DistributedDataParallel."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop, **options):
        super().__init__(case, model, optimizer, loop, shares=[dist.get_rank()])
        self.model = DistributedDataParallel(
            model, find_unused_parameters=case.unused, static_graph=case.static_graph, **options
        )
        self.no_sync = self.model.no_sync


class ZerosForNone(TorchDDP):
    """torch DDP, with a zero gradient for what no rank used."""

    def before_step(self) -> None:
        for param in self.module.parameters():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)


class CastDDP(TorchDDP):
    """torch DDP in mixed precision by hand: it trains a copy in `compute_dtype`, the optimizer an fp32 master."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop):
        super().__init__(case, copy.deepcopy(model).to(loop.compute_dtype), optimizer, loop)
        self.ddp, self.model, self.master, self.dtype = self.model, self.forward, model, loop.compute_dtype

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        with torch.no_grad():
            for param, master in zip(self.module.parameters(), self.master.parameters()):
                param.copy_(master)
        return self.ddp(x.to(self.dtype), turn).float()

    def before_step(self) -> None:
        for param, master in zip(self.module.parameters(), self.master.parameters()):
            master.grad, param.grad = param.grad.float(), None

    def grads(self) -> dict[str, torch.Tensor | None]:
        return {name: copy_of(param.grad) for name, param in self.master.named_parameters()}


class Magnitudes(Alone):
    """Its gradients are the sums of |g| over ranks and micro-batches: the scale of rounding errors."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop):
        super().__init__(case, model, optimizer, loop, shares=[dist.get_rank()])
        self.sums = {name: torch.zeros_like(param) for name, param in model.named_parameters()}

    def after_backward(self) -> None:
        for name, param in self.module.named_parameters():
            if param.grad is not None:
                self.sums[name] += param.grad.abs()
        self.module.zero_grad()

    def grads(self) -> dict[str, torch.Tensor | None]:
        sums, self.sums = self.sums, {name: torch.zeros_like(total) for name, total in self.sums.items()}
        for total in sums.values():
            dist.all_reduce(total)
        return sums


def build(case: Case, loop: Loop, seed: int = 0) -> nn.Module:
    """The model as this rank makes it; with the default seed, as rank 0 does."""
    torch.manual_seed(seed)
    return case.build().to(place(), loop.dtype)


def train(case: Case, loop: Loop, side: type, follow: Run | None = None, **options) -> Run:
    """Train a fresh model by `side`, one of the classes above.

    With `follow` each step starts from the parameters which that run had, and clips by its norm.
    Two runs that differ by rounding so stay comparable at every step; where the two are equal to the
    bit, it changes nothing.
    """
    starts_differ = case.seeds_differ and issubclass(side, (Stage, TorchDDP))
    model = build(case, loop, seed=dist.get_rank() if starts_differ else 0)
    optimizer = OPTIMIZERS[loop.optimizer](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    side = side(case, model, optimizer, loop, **options)
    run = Run(copies_of(model.state_dict()), [])
    for number in range(loop.steps):
        if follow is not None and number > 0 and follow.steps[number - 1].params:
            model.load_state_dict(follow.steps[number - 1].params)
        step = Step(losses=evaluate(case, loop, side, number) if loop.evaluate else [])
        for micro in range(loop.micro_batches):
            last = micro == loop.micro_batches - 1
            with side.no_sync() if loop.no_sync and not last else contextlib.nullcontext():
                for share in side.shares:
                    loss = loss_of(case, loop, side.model, share, number, micro) / loop.micro_batches
                    (loss / len(side.shares)).backward()
                    side.after_backward()
                    step.losses.append(loss.detach().clone())
        side.before_step()
        if loop.clip:
            max_norm, norm_type = loop.clip
            norm = follow and follow.steps[number].norm
            step.norm = side.clip(1e6 if number == 1 else max_norm, norm_type, norm)
        look = loop.watch or number == loop.steps - 1
        if look:
            step.grads = side.grads()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if look:
            step.params = copies_of(model.state_dict())
        run.steps.append(step)
    return run


def place() -> torch.device:
    """Where this rank trains: its GPU if ranks talk by NCCL."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def loss_of(case: Case, loop: Loop, model: nn.Module, rank: int, step: int, micro: int) -> torch.Tensor:
    turn = Turn(rank, dist.get_world_size(), step)
    batch = [part.to(place()) for part in case.batch(turn, micro)]
    batch = [part.to(loop.dtype) if part.is_floating_point() else part for part in batch]
    torch.manual_seed(100 * rank + step)  # for dropout
    return case.loss(model(batch[0], turn), batch[1])


def evaluate(case: Case, loop: Loop, side, step: int) -> list[torch.Tensor]:
    """Losses of an eval() forward without gradients, and of a forward whose graph is thrown away."""
    side.model.eval()
    with torch.no_grad():
        losses = [loss_of(case, loop, side.model, share, step, 50) for share in side.shares]
    side.model.train()
    if not loop.no_sync:  # torch DDP would take the next backward for this forward's, and reduce under no_sync
        losses += [loss_of(case, loop, side.model, share, step, 51).detach() for share in side.shares]
    return losses


def replay(case: Case, loop: Loop, run: Run) -> Run:
    """What the plain optimizer makes of the gradients that the run had."""
    model = build(case, loop)
    optimizer = OPTIMIZERS[loop.optimizer](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    steps = []
    for step in run.steps:
        for name, param in model.named_parameters():
            param.grad = copy_of(step.grads[name])
        optimizer.step()
        schedule.step()
        updated = {name: copy_of(param) for name, param in model.named_parameters(remove_duplicate=False)}
        steps.append(replace(step, params={**step.params, **updated}))  # buffers are no optimizer's
    return Run(run.start, steps)


def copy_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def copies_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: copy_of(tensor) for name, tensor in tensors.items()}


# --- comparing ------------------------------------------------------------------------------------

Close = Callable[[torch.Tensor, torch.Tensor], bool]


def differences(
    label: str, one: Run, other: Run, equal: Close = torch.equal, what=("losses", "grads", "params")
) -> list[str]:
    """What is not equal in two runs, in words: which step, what, by how much. [] if they agree."""
    found = []

    def compare(name: str, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        if (a is None) != (b is None):
            found.append(f"{label}: {name} is {'None' if a is None else 'a tensor'} here and not there")
        elif a is not None and not equal(a, b):
            gap = (a - b).abs().max().item() if a.shape == b.shape else f"shapes {a.shape} and {b.shape}"
            found.append(f"{label}: {name} differs by {gap}")

    if "params" in what:
        for name in one.start:
            compare(f"{name} at the start", one.start[name], other.start[name])
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True)):
        if "losses" in what:
            for micro, (loss, other_loss) in enumerate(zip(a.losses, b.losses, strict=True)):
                compare(f"step {number}, loss {micro}", loss, other_loss)
        for kind in {"grads", "params"} & set(what):
            ours, theirs = getattr(a, kind), getattr(b, kind)
            if ours and theirs:
                if list(ours) != list(theirs):
                    found.append(f"{label}: step {number}, {kind} have names {list(ours)}, {list(theirs)}")
                else:
                    for name in ours:
                        compare(f"step {number}, {kind[:-1]} of {name}", ours[name], theirs[name])
    return found


def parity(case: Case, loop: Loop, stages: tuple[int, ...] = (0, 1, 2, 3), reference: type = TorchDDP) -> list[str]:
    """Train the case at all stages and under torch DDP; return this rank's differences.

    Stages that add in the same order must agree to the bit, at every N. With torch DDP they must do so
    wherever it adds in that order too. Where it does not, gradients at equal parameters may differ by
    the rounding of two sums of that many terms, and the update must be the plain optimizer's to the bit.

    Reading is not free of effect: full_params() before a step empties the slots of stage 3, so a loop that
    watches cannot see values of the last step in them. Only loops with watch=False train undisturbed.
    """
    world_size, found = dist.get_world_size(), []
    with exactly():
        for alike, exact in alike_stages(case, loop, world_size):
            alike = [stage for stage in alike if stage in case.stages and stage in stages]
            if not alike:
                continue
            first, *others = [train(case, loop, Stage, stage=stage) for stage in alike]
            for stage, run in zip(alike[1:], others):
                label = f"stages {alike[0]} and {stage}"
                found += differences(label, first, run) + differences_of_norms(label, first, run, tolerance=0)
            theirs = train(case, loop, reference, follow=first)
            label = f"stage {alike[0]} and torch DDP"
            found += differences(label, first, theirs, what=("losses",))
            found += differences_of_norms(label, first, theirs, tolerance=1e-6)
            if exact:
                found += differences(label, first, theirs, what=("grads", "params"))
            else:
                scale = train(case, loop, Magnitudes, follow=first)
                terms = world_size * loop.micro_batches * (1 + case.comes_twice)
                found += differences_beyond(2 * (terms - 1) * 2**-24, scale, label, first, theirs)
                found += differences("the plain optimizer", first, replay(case, loop, first), what=("params",))
            norms = [step.norm and step.norm.item() for step in first.steps]
            dist.all_gather_object(everyone := [None] * world_size, norms)
            found += [f"ranks have norms {a} and {b}" for a, b in zip(everyone, everyone[1:]) if a != b]
    return found


def alike_stages(case: Case, loop: Loop, world_size: int) -> list[tuple[tuple[int, ...], bool]]:
    """[(stages that add in the same order, does torch DDP add in that order too?)].

    Two terms have one sum, three have several: at N >= 3 DDP's order depends on its buckets. And NCCL may add in a tree
    for an all-reduce, which stage 0 does, while its reduce-scatter is a ring.
    """
    if world_size > 2 and dist.get_backend() == "nccl":
        return [((0,), False), *([((1, 2, 3), False)] if not loop.no_sync else [((1,), False), ((2, 3), False)])]
    if loop.micro_batches == 1:
        return [((0, 1, 2, 3), world_size == 1 or (world_size == 2 and not case.comes_twice))]
    if not loop.no_sync:  # DDP averages the sum of its last mean and this gradient, a stage adds two means
        return [((0, 1, 2, 3), world_size == 1)]
    return [((0, 1), world_size <= 2), ((2, 3), world_size == 1)]  # 2 and 3 reduce every micro-batch


def differences_beyond(unit: float, scale: Run, label: str, one: Run, other: Run) -> list[str]:
    """The gradients in two runs that are further apart than `unit` times those of `scale`."""
    found = []
    for number, (a, b, bounds) in enumerate(zip(one.steps, other.steps, scale.steps, strict=True)):
        for name in a.grads:
            if (a.grads[name] is None) != (b.grads[name] is None):
                found.append(f"{label}: step {number}, gradient of {name} is None in one of them")
            elif a.grads[name] is not None:
                excess = (a.grads[name].double() - b.grads[name].double()).abs() - unit * bounds.grads[name].double()
                if not (excess <= 0).all():  # a NaN is no small number
                    found.append(f"{label}: step {number}, gradient of {name} is {excess.max()} beyond the bound")
    return found


def differences_of_norms(label: str, one: Run, other: Run, tolerance: float) -> list[str]:
    pairs = [(a.norm, b.norm) for a, b in zip(one.steps, other.steps, strict=True) if a.norm is not None]
    return [f"{label}: norms {a} and {b}" for a, b in pairs if not (a - b).abs() <= tolerance * b.abs()]


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """One thread and deterministic algorithms, so that equal programs give equal bits.

    torch.empty() is full of NaN then, so that nothing can be right by reading what nobody wrote.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def empties_full_of(value: float) -> Iterator[None]:
    """What torch.empty() and its kin return is filled with a value that could pass for data."""
    makers = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in makers]

    def filling(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args, **kwargs) -> torch.Tensor:
            tensor = original(*args, **kwargs)
            return tensor.fill_(value) if tensor.is_floating_point() else tensor

        return make

    for (owner, name), original in zip(makers, originals):
        setattr(owner, name, filling(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(makers, originals):
            setattr(owner, name, original)
