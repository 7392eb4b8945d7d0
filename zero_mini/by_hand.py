"""All of ZeRO on one page: data parallelism (stage 0) and stages 1 to 3 as one training step over a list of blocks.

Source: arXiv 1910.02054, sections 5 (memory) and 7 (volume). Psi parameters, N ranks, AdamW in fp32.

    stage                        0            1               2               3
    parameters held (N = 4)      ####         ####            ####            #...
    gradients held               ####         ####            #...            #...
    optimizer states held        ####         #...            #...            #...
    bytes a parameter            16           8 + 8/N         4 + 12/N        16/N
    (1) the optimizer updates    full (P)     shard (S)       shard (S)       shard (S)
    (2) before a forward                                                      all-gather
    (3) before a backward                                                     all-gather
    (4) after a backward         all-reduce   reduce-scatter  reduce-scatter  reduce-scatter
    (5) after the update                      all-gather      all-gather
    elements sent, x (N-1)/N     2 Psi        2 Psi           2 Psi           3 Psi

A block's parameters lie in one buffer, `full`, of P elements; a rank's shard is a slice of it, of S = P/N elements.
The code asks for the stage at the places (1) to (5). Comments name the method that does the same in the other files.
Left out: 16-bit precision, communication that overlaps computation, models that are not a list of blocks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

sent: list[int] = []  # how many elements this rank sent in each collective


def all_reduce(full: Tensor) -> None:  # Comm.all_reduce: full (P) <- its sum over ranks
    sent.append(2 * (full.numel() - own_slice(full).numel()))  # a reduce-scatter and an all-gather
    dist.all_reduce(full)


def reduce_scatter(shard: Tensor, full: Tensor) -> None:  # Comm.reduce_scatter: shard (S) <- own slice of that sum
    sent.append(full.numel() - shard.numel())
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(shard, full)  # torch 2.13 renamed it


def all_gather(full: Tensor, shard: Tensor) -> None:  # Comm.all_gather: full (P) <- all ranks' shards (S), in order
    sent.append(full.numel() - shard.numel())
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(full, shard)


def flatten(tensors: list[Tensor]) -> Tensor:  # Unit.flatten: one buffer (P); zeros at its end, so that N divides P
    full = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return nn.functional.pad(full, (0, -full.numel() % dist.get_world_size()))


def own_slice(full: Tensor) -> Tensor:  # Unit.own: full (P) -> this rank's slice (S), a view
    return full.chunk(dist.get_world_size())[dist.get_rank()]


class Block:
    """A module, its parameters in one buffer, and the shard of them that this rank's optimizer updates."""

    def __init__(self, module: nn.Module, stage: int):
        self.module, self.params = module, list(module.parameters())
        self.full = flatten(self.params)  # (P)
        dist.broadcast(self.full, src=0)  # Comm.broadcast: all ranks start with the same values
        sizes = [param.numel() for param in self.params]
        for param, values in zip(self.params, self.full[: sum(sizes)].split(sizes)):
            param.data = values.view_as(param)  # Unit.show: the module computes with views of full
        own = self.full if stage == 0 else own_slice(self.full)  # (1) DDP.own: (P); Zero1.own: (S), a view
        self.shard = nn.Parameter(own.clone() if stage == 3 else own)  # Zero3.own: a copy, because full is freed
        if stage == 3:
            self.free()

    def gather(self) -> None:  # Zero3.gather
        self.full.untyped_storage().resize_(4 * self.full.numel())
        all_gather(self.full, self.shard.data)

    def free(self) -> None:  # Zero3.vacate: the views that autograd saved stay valid, and gather() fills them again
        self.full.untyped_storage().resize_(0)


def train_step(blocks: list[Block], optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor, stage: int) -> Tensor:
    """Forward, backward and update with this rank's batch; returns its loss."""
    optimizer.zero_grad()
    inputs, outputs = [], []
    for block in blocks:
        if stage == 3:  # (2)
            block.gather()  # Zero3.before_forward
        inputs.append(x.detach().requires_grad_())  # detached: each block has its own autograd graph
        x = block.module(inputs[-1])
        outputs.append(x)
        if stage == 3:
            block.free()  # Zero3.after_forward
    loss = nn.functional.mse_loss(x, target)
    (grad_output,) = torch.autograd.grad(loss, x)
    for block in reversed(blocks):
        if stage == 3:  # (3)
            block.gather()  # Zero3.before_backward
        # The gradient of this block's input is the gradient of the output of the block before it.
        grad_output, *grads = torch.autograd.grad(outputs.pop(), [inputs.pop(), *block.params], grad_output)
        if stage == 3:
            block.free()
        grad = flatten([param_grad / dist.get_world_size() for param_grad in grads])  # Unit.take_grads: (P)
        if stage == 0:  # (4)
            all_reduce(grad)  # DDP.reduce: each rank has divided by N, so the sum is the mean
            block.shard.grad = grad  # (P)
        elif stage == 1:
            block.shard.grad = own_slice(grad)  # (S), a view, which keeps the memory of all of grad
            reduce_scatter(block.shard.grad, grad)  # Zero1.reduce
        else:
            block.shard.grad = torch.empty_like(block.shard)  # (S), memory of its own
            reduce_scatter(block.shard.grad, grad)  # Zero2.reduce
        del grad, grads  # at stages 2 and 3 nothing holds the full gradient any more
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
        torch.manual_seed(rank)  # each rank has its own data, and its own parameters until the broadcast
        blocks = [Block(nn.Sequential(nn.Linear(63, 63), nn.Tanh()), stage) for _ in range(4)]
        optimizer = torch.optim.AdamW([block.shard for block in blocks], lr=0.01)
        losses = [round(train_step(blocks, optimizer, x, x, stage).item(), 5) for x in torch.randn(3, 16, 63)]
        tensors = [t for b in blocks for t in (b.full, b.shard, b.shard.grad, *optimizer.state[b.shard].values())]
        held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.dim()}.values())
        psi = sum(block.full.numel() for block in blocks)
        formula = round(psi * (16, 8 + 8 / N, 4 + 12 / N, 16 / N)[stage]), psi * (2, 2, 2, 3)[stage] * (N - 1) // N
        if rank == 0:
            print(f"stage {stage}: losses {losses}, {held} bytes held and {sum(sent) // 3} elements sent, {formula=}")
    dist.destroy_process_group()
