"""All of ZeRO on one page: one training step over a list of blocks, at stage 0, 1, 2 or 3.

Source: arXiv 1910.02054, sections 5 (memory) and 7 (volume). Psi parameters, N ranks, AdamW in fp32.

    stage                       0            1               2               3
    a rank holds after a step (N = 4); stage 3 also the parameters of a block while it computes
      parameters                ####         ####            ####            #...
      gradients                 ####         ####            #...            #...
      optimizer states          ####         #...            #...            #...
    bytes a parameter           4 + 4 + 8    4 + 4 + 8/N     4 + (4 + 8)/N   (4 + 4 + 8)/N
    (1) the optimizer updates   full (P)     shard (S)       shard (S)       shard (S)
    (2) before a forward                                                     all-gather
    (3) before a backward                                                    all-gather
    (4) after a backward        all-reduce   reduce-scatter  reduce-scatter  reduce-scatter
    (5) after the update                     all-gather      all-gather
    elements sent, x (N-1)/N    2 Psi        2 Psi           2 Psi           3 Psi

The parameters of a block lie in one flat buffer of P elements. A shard is a slice of it, of S = P/N elements, one for
each rank. The code has an `if stage` at each of (1) to (5). A name in brackets, [Zero1.publish], is the method that
does the same in this package. Left out: overlap, 16-bit precision, models that are not a list of blocks.
"""

import torch
import torch.distributed as dist
from torch import nn

volumes = []  # how many elements this rank has sent, one entry for each call of the next three functions


def all_reduce(full):  # full (P) <- the sum of full over ranks [Comm.all_reduce]
    volumes.append(2 * (full.numel() - shard_of(full).numel()))  # a reduce-scatter, then an all-gather
    dist.all_reduce(full)


def reduce_scatter(shard, full):  # shard (S) <- this rank's slice of the sum of full (P) [Comm.reduce_scatter]
    volumes.append(full.numel() - shard.numel())
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(shard, full)  # torch 2.13 renamed it


def all_gather(full, shard):  # full (P) <- the shards (S) of all ranks, in rank order [Comm.all_gather]
    volumes.append(full.numel() - shard.numel())
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(full, shard)


def flatten(tensors):  # one new buffer (P), with zeros at its end so that N divides P [Unit.take_values]
    full = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return nn.functional.pad(full, (0, -full.numel() % dist.get_world_size()))


def shard_of(full):  # this rank's slice (S) of full (P), a view [Unit.slice_of]
    return full.chunk(dist.get_world_size())[dist.get_rank()]


class Block:
    """A module, its parameters in one flat buffer, and the part of the buffer that this rank's optimizer updates."""

    def __init__(self, module, stage):
        self.module, self.params = module, list(module.parameters())
        self.full = flatten(self.params)  # (P)
        dist.broadcast(self.full, src=0)  # all ranks start with the same parameters [Comm.broadcast]
        nn.utils.vector_to_parameters(self.full, self.params)  # each parameter becomes a view of full [Unit.show]
        self.shard = self.full if stage == 0 else shard_of(self.full)  # (1) (P) [DDP.adopt] or (S) [Zero1.adopt]
        if stage == 3:
            self.shard = self.shard.clone()  # a copy, because full is freed [Zero3.adopt]
            self.free()

    def gather(self):  # allocate full, and fill it with the shards of all ranks [Zero3.gather]
        self.full.untyped_storage().resize_(self.full.nbytes)
        all_gather(self.full, self.shard)
        nn.utils.vector_to_parameters(self.full, self.params)

    def free(self):  # free the memory of full; until the next gather, parameters read as NaN [Zero3.vacate]
        for param in self.params:
            param.data = torch.tensor(torch.nan).expand_as(param)
        self.full.untyped_storage().resize_(0)  # autograd saved views of full; the next gather makes them valid again


def train_step(blocks, optimizer, x, target, stage):
    """Forward, backward and update. x, target (B, ...) are this rank's part of the batch; returns its loss (0-dim)."""
    optimizer.zero_grad()
    graphs = []
    for block in blocks:
        if stage == 3:  # (2)
            block.gather()  # [Zero3.before_forward]
        x = x.detach().requires_grad_()  # so that each block has its own autograd graph, from x to y
        y = block.module(x)
        graphs.append((x, y))
        if stage == 3:
            block.free()  # [Zero3.after_forward]
        x = y
    loss = nn.functional.mse_loss(y, target)
    (grad_y,) = torch.autograd.grad(loss, y)
    for block in reversed(blocks):
        if stage == 3:  # (3)
            block.gather()  # [Zero3.before_backward]
        x, y = graphs.pop()  # x is the y of the block before, so its gradient is the next grad_y
        grad_y, *grads = torch.autograd.grad(y, [x, *block.params], grad_y)
        if stage == 3:
            block.free()
        grad = flatten(grads) / dist.get_world_size()  # (P) the sum of these over ranks is the mean [Unit.take_grads]
        if stage == 0:  # (4)
            all_reduce(grad)  # [DDP.reduce]
            block.shard.grad = grad  # (P)
        else:  # stage 1 keeps a view, so all of grad stays in memory; stages 2 and 3 keep S elements
            block.shard.grad = shard_of(grad) if stage == 1 else torch.empty_like(block.shard)  # (S)
            reduce_scatter(block.shard.grad, grad)  # [Zero1.reduce] [Zero2.reduce]
        del grad, grads  # at stages 2 and 3 this frees the full gradient
    optimizer.step()
    if stage in (1, 2):  # (5)
        for block in blocks:
            all_gather(block.full, block.shard)  # each rank has updated another shard [Zero1.publish]
    return loss.detach()


if __name__ == "__main__":  # torchrun --standalone --nproc-per-node 2 zero_mini/by_hand.py
    dist.init_process_group("gloo")
    for stage in range(4):
        torch.manual_seed(dist.get_rank())  # each rank has its own data
        blocks = [Block(nn.Sequential(nn.Linear(63, 63), nn.Tanh()), stage) for _ in range(4)]
        optimizer = torch.optim.AdamW([block.shard for block in blocks], lr=0.01)
        volumes.clear()
        losses = [round(train_step(blocks, optimizer, x, x, stage).item(), 5) for x in torch.randn(3, 16, 63)]
        tensors = [t for b in blocks for t in (b.full, b.shard, b.shard.grad, *optimizer.state[b.shard].values())]
        size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.dim()}.values())
        N, psi = dist.get_world_size(), sum(block.full.numel() for block in blocks)
        nbytes, volume = (16, 8 + 8 / N, 4 + 12 / N, 16 / N)[stage] * psi, (2, 2, 2, 3)[stage] * psi * (N - 1) / N
        if dist.get_rank() == 0:
            measured = f"{size} bytes (formula {nbytes:.0f}), {sum(volumes) // 3} elements sent (formula {volume:.0f})"
            print(f"stage {stage}: losses {losses}, {measured}")
    dist.destroy_process_group()
