"""A my_zero.py of another design: one buffer for all at stages 0 and 1, no overlap, freed storage at stage 3."""

import torch
import torch.distributed as dist
from torch import nn

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def concatenated(tensors):
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return torch.cat([flat, flat.new_zeros(-len(flat) % dist.get_world_size())])


def mine(flat):
    return flat.view(dist.get_world_size(), -1)[dist.get_rank()]


def point_into(params, flat):
    at = 0
    for p in params:
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()


class Base:
    def __init__(self, model, make_optimizer):
        self.model = model
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.updated())

    def forward(self, *inputs):
        return self.model(*inputs)

    def full_parameters(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class DDP(Base):
    """One all-reduce for the whole model, after the last backward."""

    def updated(self):
        return self.params

    def backward(self, loss, last=True):
        loss.backward()
        if last:
            used = [p for p in self.params if p.grad is not None]
            flat = concatenated([p.grad for p in used]) / dist.get_world_size()
            for p in used:
                p.grad = None
            dist.all_reduce(flat)
            for p, part in zip(used, flat.split([p.numel() for p in used] + [len(flat) - sum(map(torch.numel, used))])):
                p.grad = part.view(p.shape)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class Zero1(DDP):
    """One buffer for the whole model."""

    def updated(self):
        self.flat = concatenated(self.params)
        point_into(self.params, self.flat)
        self.shard = nn.Parameter(mine(self.flat))
        return [self.shard]

    def backward(self, loss, last=True):
        loss.backward()
        if last:
            grads = concatenated([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
            for p in self.params:
                p.grad = None
            grads /= dist.get_world_size()
            self.shard.grad = torch.empty_like(self.shard)
            reduce_scatter(self.shard.grad, grads)

    def step(self):
        super().step()
        all_gather(self.flat, self.shard.data.clone())


class Zero2(Base):
    """Each parameter is sharded by itself, and its gradient is reduced in its own hook, at once."""

    def updated(self):
        self.flats = {p: concatenated([p]) for p in self.params}
        self.shards = {p: nn.Parameter(mine(flat)) for p, flat in self.flats.items()}
        for p, flat in self.flats.items():
            point_into([p], flat)
            p.register_post_accumulate_grad_hook(self.reduce)
        return list(self.shards.values())

    def reduce(self, p):
        flat, p.grad = concatenated([p.grad]) / dist.get_world_size(), None
        mean = flat.new_empty(len(flat) // dist.get_world_size())
        reduce_scatter(mean, flat)
        shard = self.shards[p]
        shard.grad = mean if shard.grad is None else shard.grad + mean

    def backward(self, loss, last=True):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        for p, flat in self.flats.items():
            all_gather(flat, self.shards[p].data.clone())


class Zero3(Base):
    """Memory of a block's parameters is freed after each of its turns, and allocated for the next."""

    def updated(self):
        self.blocks, self.flats, self.shards = {}, {}, {}
        for block in self.model.blocks:
            if params := [p for p in block.parameters() if p.requires_grad]:
                self.blocks[block] = params
                block.register_forward_pre_hook(lambda block, _: self.gather(block))
                block.register_forward_hook(lambda block, *_: self.free(block))
                block.register_full_backward_pre_hook(lambda block, _: self.gather(block))
        in_blocks = {id(p) for params in self.blocks.values() for p in params}
        self.root = [p for p in self.params if id(p) not in in_blocks]
        self.blocks["root"] = self.root
        for key, params in self.blocks.items():
            self.flats[key] = concatenated(params)
            point_into(params, self.flats[key])
            self.shards[key] = nn.Parameter(mine(self.flats[key]).clone())
            self.to_come = {}
            for p in params:
                p.register_post_accumulate_grad_hook(lambda p, key=key: self.arrived(key))
            if key != "root":
                self.free(key)
        return list(self.shards.values())

    def gather(self, key):
        self.flats[key].untyped_storage().resize_(self.flats[key].nbytes)
        all_gather(self.flats[key], self.shards[key].data)

    def free(self, key):
        self.flats[key].untyped_storage().resize_(0)

    def arrived(self, key):
        self.to_come[key] -= 1
        if self.to_come[key] == 0:
            self.reduce(key)

    def reduce(self, key):
        params = self.blocks[key]
        grads = [p.flatten() * 0 if p.grad is None else p.grad for p in params]
        flat = concatenated(grads) / dist.get_world_size()
        for p in params:
            p.grad = None
        del grads
        mean = torch.empty_like(self.shards[key])
        reduce_scatter(mean, flat)
        shard = self.shards[key]
        shard.grad = mean if shard.grad is None else shard.grad + mean
        if key != "root":
            self.free(key)

    def backward(self, loss, last=True):
        self.to_come = {key: len(params) for key, params in self.blocks.items()}
        loss.backward()
        for key, missing in self.to_come.items():
            if missing:
                self.reduce(key)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        all_gather(self.flats["root"], self.shards["root"].data)

    def full_parameters(self):
        full = {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for key, params in self.blocks.items():
            if key != "root":
                self.gather(key)
            full |= {names[id(p)]: p.detach().clone() for p in params}
            if key != "root":
                self.free(key)
        frozen = {name: p.detach().clone() for name, p in self.model.named_parameters() if not p.requires_grad}
        return full | frozen
