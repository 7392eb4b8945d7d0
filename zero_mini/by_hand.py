"""ZeRO on one page: data parallelism and the three stages of ZeRO, as one training step over a list of blocks.

Source: arXiv 1910.02054, sections 5 (memory) and 7 (volume). Psi parameters, N ranks, AdamW in fp32.

    stage                       0            1               2               3
    a rank holds (N = 4)
      parameters                ####         ####            ####            #...
      gradients                 ####         ####            #...            #...
      optimizer states          ####         #...            #...            #...
    bytes a parameter           16           8 + 8/N         4 + 12/N        16/N
    (1) the optimizer updates   full (P)     shard (S)       shard (S)       shard (S)
    (2) before a forward                                                     all-gather
    (3) before a backward                                                    all-gather
    (4) after a backward        all-reduce   reduce-scatter  reduce-scatter  reduce-scatter
    (5) after the update                     all-gather      all-gather
    elements sent, x (N-1)/N    2 Psi        2 Psi           2 Psi           3 Psi

The parameters of a block lie in one buffer of P elements; each rank's shard is a slice of S = P/N elements.
The code has an `if stage` at each of the places (1) to (5). Comments name the methods that do the same work in
the other files. Left out: 16-bit precision, overlap, any model that is not a list of blocks.
"""

import torch
import torch.distributed as dist
from torch import nn

sent: list[int] = []  # elements that this rank has sent, one entry a collective


def all_reduce(full):  # full (P) <- its sum over ranks  Comm.all_reduce
    sent.append(2 * (full.numel() - own_slice(full).numel()))  # it is a reduce-scatter and an all-gather
    dist.all_reduce(full)


def reduce_scatter(shard, full):  # shard (S) <- own slice of the sum of full (P) over ranks  Comm.reduce_scatter
    sent.append(full.numel() - shard.numel())
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(shard, full)  # renamed in torch 2.13


def all_gather(full, shard):  # full (P) <- the shards (S) of all ranks, in rank order  Comm.all_gather
    sent.append(full.numel() - shard.numel())
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(full, shard)


def flatten(tensors):  # one buffer (P), with zeros at its end so that N divides P  Unit.flatten
    full = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return nn.functional.pad(full, (0, -full.numel() % dist.get_world_size()))


def own_slice(full):  # full (P) -> this rank's slice (S), a view  Unit.own
    return full.chunk(dist.get_world_size())[dist.get_rank()]


class Block:
    """A module, its parameters in one buffer, and the part of it that this rank's optimizer updates."""

    def __init__(self, module: nn.Module, stage: int):
        self.module, self.params = module, list(module.parameters())
        self.full = flatten(self.params)  # (P)
        dist.broadcast(self.full, src=0)  # all ranks start with the same values  Comm.broadcast
        sizes = [param.numel() for param in self.params]
        for param, values in zip(self.params, self.full[: sum(sizes)].split(sizes)):
            param.data = values.view_as(param)  # Unit.show
        if stage == 0:  # (1)
            self.shard = nn.Parameter(self.full)  # (P), the same memory  DDP.own
        elif stage < 3:
            self.shard = nn.Parameter(own_slice(self.full))  # (S), the same memory  Zero1.own
        else:
            self.shard = nn.Parameter(own_slice(self.full).clone())  # (S), and full goes  Zero3.own
            self.free()

    def gather(self):  # Zero3.gather
        self.full.untyped_storage().resize_(4 * self.full.numel())
        all_gather(self.full, self.shard.data)

    def free(self):  # Autograd's views for backward stay valid: the next gather fills the same storage  Zero3.vacate
        self.full.untyped_storage().resize_(0)


def train_step(blocks: list[Block], optimizer: torch.optim.Optimizer, x, target, stage: int) -> torch.Tensor:
    """Forward, backward and update on this rank's batch; returns its loss."""
    optimizer.zero_grad()
    inputs, outputs = [], []
    for block in blocks:
        if stage == 3:  # (2)
            block.gather()  # Zero3.before_forward
        inputs.append(x.detach().requires_grad_())  # each block has an autograd graph of its own
        outputs.append(x := block.module(inputs[-1]))
        if stage == 3:
            block.free()  # Zero3.after_forward
    loss = nn.functional.mse_loss(x, target)
    (grad_output,) = torch.autograd.grad(loss, x)
    for block in reversed(blocks):
        if stage == 3:  # (3)
            block.gather()  # Zero3.before_backward
        # The gradient of a block's input is the gradient of the output of the block before it.
        grad_output, *grads = torch.autograd.grad(outputs.pop(), [inputs.pop(), *block.params], grad_output)
        if stage == 3:
            block.free()  # Zero3.vacate
        grad = flatten([param_grad / dist.get_world_size() for param_grad in grads])  # (P)  Unit.take_grads
        if stage == 0:  # (4)
            all_reduce(grad)  # DDP.reduce
            block.shard.grad = grad  # (P)
        elif stage == 1:
            block.shard.grad = own_slice(grad)  # (S), a view: all of grad stays in memory
            reduce_scatter(block.shard.grad, grad)  # Zero1.reduce
        else:
            block.shard.grad = torch.empty_like(block.shard)  # (S), new memory
            reduce_scatter(block.shard.grad, grad)  # Zero2.reduce
        del grad, grads  # at stages 2 and 3 no full gradient is left
    optimizer.step()
    if stage in (1, 2):  # (5)
        for block in blocks:
            all_gather(block.full, block.shard.data)  # Zero1.publish
    return loss.detach()


if __name__ == "__main__":  # torchrun --standalone --nproc-per-node 2 zero_mini/by_hand.py
    dist.init_process_group("gloo")
    rank, N = dist.get_rank(), dist.get_world_size()
    for stage in (0, 1, 2, 3):
        sent.clear()
        torch.manual_seed(rank)  # each rank has its own data; its parameters too, until the broadcast
        blocks = [Block(nn.Sequential(nn.Linear(63, 63), nn.Tanh()), stage) for _ in range(4)]
        optimizer = torch.optim.AdamW([block.shard for block in blocks], lr=0.01)
        losses = [round(train_step(blocks, optimizer, x, x, stage).item(), 5) for x in torch.randn(3, 16, 63)]
        tensors = [t for b in blocks for t in (b.full, b.shard, b.shard.grad, *optimizer.state[b.shard].values())]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.dim()}
        psi = sum(block.full.numel() for block in blocks)
        bytes_formula = (16, 8 + 8 / N, 4 + 12 / N, 16 / N)[stage] * psi
        sent_formula = (2, 2, 2, 3)[stage] * psi * (N - 1) / N
        if rank == 0:
            print(
                f"stage {stage}: losses {losses}, bytes held {sum(held.values())} (formula {bytes_formula:.0f})",
                end=", ",
            )
            print(f"elements sent a step {sum(sent) // 3} (formula {sent_formula:.0f})")
    dist.destroy_process_group()
