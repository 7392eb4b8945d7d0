"""A zoo of awkward models: what they compute, what they are given, and how their output becomes a loss.

A `Case` is such a model with its batches; parity.py trains it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

B, D_IN, D, D_OUT = 3, 5, 6, 3  # rows a rank, widths
T, VOCAB = 4, 11  # for models that read token ids


@dataclass(frozen=True)
class Turn:
    """Whose batch it is, and when: what a model may let its way through the layers depend on."""

    rank: int
    world_size: int
    step: int


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
