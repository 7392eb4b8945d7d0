"""Sparse gradients: only some elements cross the wire, each with its index.

Sources: Deep Gradient Compression, arXiv 1712.01887 (top-k with what is left kept for later).

    gradient   [0.1 -2.0  0.3  0.0  1.5 -0.2  0.1  0.4]
    top 2      indices 1 4, values -2.0 1.5                      sent: 4 + 4 bytes an element
    residual   [0.1  0.0  0.3  0.0  0.0 -0.2  0.1  0.4]          error feedback: added to the next gradient

    top-k on N ranks     8 k (N-1) bytes: ranks choose other elements, so each message goes to every rank
    all-reduce, fp32     8 P (N-1)/N bytes
    break-even           k/P = 1/N; on N = 64 ranks a density of 1.6 %

Gradients of an embedding are another case. Rows of tokens that no rank had are zero, so leaving them out is exact:

    rank 0 used rows 3 7        indices 3 7 | 3 5          sum: row 3 of both, 5, 7
    rank 1 used rows 3 5        rows    a b | c d

Left out: quantised values, indices in fewer bits, momentum correction and warm-up of the density.
"""

import time
from collections.abc import Sequence
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_mini.laboratory.compression import Compressed, run
from zero_mini.wire.host_words import all_gather


class TopK:
    """A codec: the elements of largest size, ceil(density x P) of them, as indices (int32) and values (fp32).

    ValueError if the density is not above 0 and at most 1.
    """

    def __init__(self, density: float):
        if not 0 < density <= 1:
            raise ValueError(f"density is the part of the elements that is sent, above 0 and at most 1 (got {density})")
        self.density = density

    def encode(self, values: Tensor) -> Tensor:
        k = ceil(self.density * values.numel())
        indices = values.abs().topk(k, sorted=False).indices
        return torch.cat([indices.int().view(torch.uint8), values[indices].view(torch.uint8)])

    def decode(self, message: Tensor, numel: int) -> Tensor:
        indices, values = message.view(2, -1)
        return torch.zeros(numel).index_put((indices.view(torch.int32).long(),), values.view(torch.float32))


def sum_rows(rows: Tensor, indices: Tensor, height: int) -> tuple[Tensor, int]:
    """rows (n, d) at distinct `indices` (n) of a matrix (height, d) -> their sum over ranks (height, d), bytes sent.

    n may differ from rank to rank: ranks agree on the largest first, and fill up with rows of zeros.
    """
    N, (n, d) = dist.get_world_size(), rows.shape
    most = torch.tensor([n])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    padded, where = rows.new_zeros(int(most), d), torch.zeros(int(most), dtype=torch.int32)
    padded[:n], where[:n] = rows, indices
    all_rows, all_where = rows.new_empty(N * len(padded), d), where.new_empty(N * len(where))
    all_gather(all_rows, padded)
    all_gather(all_where, where)
    total = rows.new_zeros(height, d)
    for part, at in zip(all_rows.chunk(N), all_where.chunk(N)):  # in the order of ranks
        total.index_add_(0, at, part)
    return total, (N - 1) * (padded.nbytes + where.nbytes) + most.nbytes * 2 * (N - 1) // N


# --- the experiments --------------------------------------------------------------------------


def compare_densities(steps: int = 300, densities: Sequence[float] = (1.0, 0.1, 0.01, 0.001)) -> dict[str, dict]:
    """On ranks: what `compression.run` returns, beside the all-reduce, for each density with and without feedback."""
    results = {"all-reduce": run(0, None, steps)}
    for density in densities:
        for feedback in (True, False):
            name = f"top {density:.1%}" + (", feedback" if feedback else "")
            results[name] = run(0, lambda: Compressed(TopK(density), feedback), steps)  # noqa: B023
    return results


def break_even(numel: int = 2**20, densities: Sequence[float] = (0.5, 0.25, 0.1, 0.03, 0.01), repeats: int = 5) -> dict:
    """On ranks: milliseconds of an all-reduce of `numel` elements, and of top-k in its place, chosen and summed.

    The shortest of `repeats`, since other programs can only make them longer.
    """
    values = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    N, times = dist.get_world_size(), {}

    def top_k(codec: TopK) -> None:
        message = codec.encode(values)
        rows = message.new_empty(N * len(message))
        all_gather(rows, message)
        total = sum(codec.decode(row, numel) for row in rows.chunk(N))
        assert len(total) == numel

    work = {"all-reduce": lambda: dist.all_reduce(values.clone())}
    work |= {f"top {density:.0%}": lambda density=density: top_k(TopK(density)) for density in densities}
    for name, call in work.items():
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        times[name] = 1e3 * min(seconds)
    return times


def exchange_embedding(vocab: int = 4096, channels: int = 32, tokens: int = 64) -> dict:
    """On ranks: the gap of rows to torch's all-reduce of the whole gradient, and the bytes of both."""
    N = dist.get_world_size()
    torch.manual_seed(0)
    weights = torch.randn(vocab, channels)
    torch.manual_seed(1 + dist.get_rank())
    used, target = torch.randint(vocab // 8, (tokens,)), torch.randn(tokens, channels)
    gradients = {}
    for sparse in (False, True):
        embedding = nn.Embedding(vocab, channels, _weight=weights.clone(), sparse=sparse)
        ((embedding(used) - target) ** 2).mean().backward()
        gradients[sparse] = embedding.weight.grad
    dense, rows = gradients[False].clone(), gradients[True].coalesce()
    dist.all_reduce(dense)
    total, sent = sum_rows(rows.values(), rows.indices()[0], vocab)
    return {
        "gap": (total - dense).abs().max().item(),
        "largest": dense.abs().max().item(),
        "row_bytes": sent,
        "all_reduce_bytes": 2 * dense.nbytes * (N - 1) // N,
        "rows": len(rows.values()),
    }
