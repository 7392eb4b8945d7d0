"""Hybrid sharding: the ranks of a node share the states, and every node has a replica of them.

    node 0    rank 0   rank 1      a half each        inside a node: reduce-scatter and all-gather, over fast links
    node 1    rank 2   rank 3      the same halves    across nodes: all-reduce of a rank's shard, over slow links

    bytes a parameter    those of N = ranks of a node
    wire, elements       inside 2 Psi (at stage 3 up to 3 Psi) times (N-1)/N; across 2 Psi/N times (M-1)/M, M nodes

Source: PyTorch FSDP, arXiv 2304.11277, section 3.2.2 (hybrid sharding); MiCS, arXiv 2205.00119.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/hybrid_shard.py --ranks-per-node 2 --stage 3

All that is particular to it is `HybridComm`, a Comm of two process groups, which `zeroify(comm=...)` takes. To see what
the links do on one machine, make those across nodes slow (zero_mini/wire/throttled.py):

    HybridComm(2, across=partial(ThrottledComm, latency_s=1e-3, bytes_per_s=1e6))
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from zero_mini import zeroify
from zero_mini.comm import Comm, Launched
from zero_mini.wire.host_words import HostWords, same_ranks


class Then:
    """A collective in flight, and another one that starts when it has arrived."""

    def __init__(self, first: Launched, start: Callable[[], Launched]):
        self.first, self.start = first, start

    def wait(self) -> None:
        self.first.wait()
        self.start().wait()


class HybridComm(Comm):
    """Means are over all ranks, shards over the ranks of a node. Collective.

    across: makes the Comm of the ranks that have the same shard on every node.
    """

    def __init__(self, ranks_per_node: int, across: Callable[[dist.ProcessGroup], Comm] = Comm, **options):
        total = dist.get_world_size()
        node, _ = dist.new_subgroups(ranks_per_node)
        columns = [list(range(rank, total, ranks_per_node)) for rank in range(ranks_per_node)]
        column, _ = dist.new_subgroups_by_enumeration(columns)  # the ranks that have the same shard
        super().__init__(node, **options)
        self.across = across(column)
        self.across.ledger = self.ledger  # one ledger for both; entries across nodes say so
        self.replica = self.across.rank  # checkpoints are written by the first one
        self.host = HostWords(same_ranks(dist.group.WORLD, "gloo"), self.ledger, total)  # all ranks must agree

    def all_reduce(self, buffer: torch.Tensor, unit: str) -> Then:
        return Then(super().all_reduce(buffer, unit), lambda: self.across.all_reduce(buffer, f"{unit} across nodes"))

    def reduce_scatter(self, shard: torch.Tensor, buffer: torch.Tensor, unit: str) -> Then:
        first = super().reduce_scatter(shard, buffer, unit)
        return Then(first, lambda: self.across.all_reduce(shard, f"{unit} across nodes"))

    def broadcast(self, buffer: torch.Tensor, unit: str) -> Launched:
        self.across.broadcast(buffer, f"{unit} across nodes").wait()
        return super().broadcast(buffer, unit)


def wire(zero) -> dict[str, float]:
    """Elements of the last step over one rank's wire, inside a node and across nodes."""
    elements = {"inside a node": 0.0, "across nodes": 0.0}
    for call in zero.ledger:
        is_across = call.unit.endswith("across nodes")
        ranks = zero.comm.across.world_size if is_across else zero.world_size
        elements["across nodes" if is_across else "inside a node"] += call.wire_numel(ranks)
    return elements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if options.ranks_per_node < 1 or dist.get_world_size() % options.ranks_per_node:
        parser.error(f"{dist.get_world_size()} ranks are not a multiple of --ranks-per-node {options.ranks_per_node}")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    zero = zeroify(model, optimizer, options.stage, comm=HybridComm(options.ranks_per_node))
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(32, 64)  # each rank has a batch of its own
    for step in range(20):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        psi = sum(param.numel() for param in model.parameters())
        for where, elements in wire(zero).items():
            print(f"{where}: {elements:,.0f} elements a step, {elements / psi:.2f} x {psi:,} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
