"""Balance: ranks with unequal numbers of examples or tokens, and the bias of a mean of means.

    rank 0   examples a b c     loss of the rank = mean of 3          mean of means  (mean(a b c) + d) / 2
    rank 1   example  d         loss of the rank = d                  what is meant  (a + b + c + d) / 4

Data parallelism, and ZeRO at every stage, take the mean of the ranks' gradients. It is the gradient of the joint batch
only if all ranks divide by equal counts. `weighted` makes it so for any counts: each rank divides its *sum* by the mean
count of all ranks, one number to be reduced.

Two places where counts become unequal:

    the last batch    a sampler pads (some examples count twice in an epoch), drops (some count never), or leaves ranks
                      with unequal numbers, and then a rank waits in a collective where others do not come
    tokens            sequences of unequal length: masked tokens are not part of the loss

Left out: samplers that sort by length, and `join`, which lets ranks run out of batches one after the other.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from zero_mini import zeroify
from zero_mini.laboratory.task import batch, byte_model, gradient_of


def weighted(total: Tensor, count: int) -> Tensor:
    """The rank's sum of losses and its number of terms -> the loss whose gradients have the right mean. Collective."""
    counts = torch.tensor(float(count))
    dist.all_reduce(counts)
    return total * dist.get_world_size() / counts


def times_seen(examples: int, world_size: int, drop_last: bool) -> list[int]:
    """How often an epoch of torch's DistributedSampler has each example, over all ranks.

    >>> times_seen(5, 2, drop_last=False), times_seen(5, 2, drop_last=True)
    ([2, 1, 1, 1, 1], [1, 1, 1, 1, 0])
    """
    seen = [0] * examples
    for rank in range(world_size):
        options = {"num_replicas": world_size, "rank": rank, "shuffle": False, "drop_last": drop_last}
        for index in DistributedSampler(range(examples), **options):
            seen[index] += 1
    return seen


# --- the experiments --------------------------------------------------------------------------


def compare_shards(sizes: tuple[int, ...] | None = None) -> dict[str, float]:
    """On ranks: the gradient of unequal parts of a batch beside the gradient of the joint batch, in plain PyTorch.

    sizes: the examples of each rank; None: 24, 8, 8, ... Gaps are relative to the norm of the joint gradient.
    """
    rank, N = dist.get_rank(), dist.get_world_size()
    sizes = sizes or (24,) + (N - 1) * (8,)
    parts = [part.split(list(sizes)) for part in batch(0, rows=sum(sizes))]
    x, y = (part[rank] for part in parts)
    joint = byte_model()
    F.cross_entropy(joint(torch.cat(parts[0])), torch.cat(parts[1])).backward()
    expected, gaps = gradient_of(joint), {}
    for name in ("mean of means", "weighted"):
        for system in ("torch DDP", *range(4)):
            model = byte_model()
            if system == "torch DDP":
                zero, run = None, DistributedDataParallel(model)
            else:
                zero, run = zeroify(model, torch.optim.SGD(model.parameters(), lr=0.5), system), model
            losses = F.cross_entropy(run(x), y, reduction="sum")
            (losses / len(y) if name == "mean of means" else weighted(losses, len(y))).backward()
            if zero is None:
                gradient = gradient_of(model)
            else:
                with zero.full_params(grads=True):
                    gradient = gradient_of(model)
            key = f"{name}, {system if zero is None else f'stage {system}'}"
            gaps[key] = ((gradient - expected).norm() / expected.norm()).item()
    return gaps


def compare_tokens(lengths: tuple[int, ...] | None = None, length: int = 16) -> dict[str, float]:
    """On ranks: losses of sequences with unequal numbers of tokens that count. All numbers are in nats.

    lengths: the tokens that count in the sequence of each rank; None: 2, then all.
    """
    rank, N = dist.get_rank(), dist.get_world_size()
    lengths = lengths or (2,) + (N - 1) * (length,)
    model = byte_model()
    x, y = batch(0, rows=N * length)
    losses = F.cross_entropy(model(x), y, reduction="none").view(N, length).detach()
    losses = losses * (1 + torch.arange(N))[:, None]  # the text of each rank is of another difficulty
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    mine = losses[rank][mask[rank]]
    found = {}
    for name, loss in (("mean of means", mine.mean()), ("weighted", weighted(mine.sum(), len(mine)))):
        mean = loss.clone()
        dist.all_reduce(mean)
        found[name] = (mean / N).item()
    return found | {"joint": losses[mask].mean().item()}


def compare_samplers(examples: int = 61, world_size: int = 4) -> dict[str, float]:
    """In one process: the loss of a whole epoch of a padding and of a dropping sampler, beside the plain mean.

    Examples are sorted by difficulty, as in a file that begins with the short ones.
    """
    model = byte_model()
    x, y = batch(0, rows=examples)
    losses = F.cross_entropy(model(x), y, reduction="none").detach().double().sort().values
    found = {"plain": losses.mean().item()}
    for name, drop_last in (("padded", False), ("dropped", True)):
        seen = torch.tensor(times_seen(examples, world_size, drop_last), dtype=torch.float64)
        found[name] = ((seen * losses).sum() / seen.sum()).item()
        found[f"{name}, examples"] = float(seen.sum() - examples)
    return found
