"""My own ZeRO: the classes DDP, Zero1, Zero2 and Zero3 of the protocol in docs/my_zero.md."""

from functools import partial

import torch
from torch import nn

from zero_mini.comm import Comm


def split_model(model):
    """[(block, its parameters), ..., (None, the rest)]: only trainable parameters, and no entry without any."""
    units = [(block, [p for p in block.parameters() if p.requires_grad]) for block in model.blocks]
    in_blocks = {id(p) for _, params in units for p in params}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in in_blocks]
    return [(module, params) for module, params in [*units, (None, rest)] if params]


def flatten(tensors, N):
    """A new buffer (P) with all elements, and zeros at its end so that N divides P."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % N))


def views(flat, params):
    """Parts of flat (P) in the shapes of the parameters."""
    parts = flat[: sum(p.numel() for p in params)].split([p.numel() for p in params])
    return [part.view_as(p) for part, p in zip(parts, params)]


def take_grads(params, N):
    """A new buffer (P) of all gradients, zeros for an unused one, then padding. Each p.grad is None after."""
    flat = flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in params], N)
    for p in params:
        p.grad = None
    return flat


class DDP:
    """Stage 0: the gradients of each unit are all-reduced, at best while backward still computes others."""

    def __init__(self, model, make_optimizer):
        self.model, self.comm = model, Comm()
        self.modules, self.units = zip(*split_model(model))
        self.in_flight = []
        for i, params in enumerate(self.units):
            for p in params:
                p.register_post_accumulate_grad_hook(partial(self.arrived, i))
        self.optimizer = make_optimizer(self.adopt())

    def adopt(self):
        return [p for params in self.units for p in params]

    def forward(self, *inputs):
        return self.model(*inputs)

    def backward(self, loss, last=True):
        self.last, self.missing = last, [len(params) for params in self.units]
        loss.backward()
        for i, missing in enumerate(self.missing):
            if missing:  # some of its parameters were not used
                self.send(i)
        while self.in_flight:
            self.receive()

    def arrived(self, i, _):
        self.missing[i] -= 1
        if self.missing[i] == 0:
            self.send(i)

    def send(self, i):
        if self.last:
            grad = take_grads(self.units[i], self.comm.world_size)
            self.in_flight.append((i, grad, self.comm.all_reduce(grad, f"unit {i}")))

    def receive(self):
        i, grad, work = self.in_flight.pop(0)
        work.wait()
        for p, view in zip(self.units[i], views(grad, self.units[i])):
            p.grad = view

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_parameters(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class Zero1(DDP):
    """Stage 1: the optimizer has this rank's slice of each unit; reduce-scatter, update, all-gather."""

    def step(self):
        super().step()
        gathers = [self.comm.all_gather(flat, shard.data, "flat") for flat, shard in zip(self.flats, self.shards)]
        for work in gathers:
            work.wait()

    def adopt(self):
        self.flats = [flatten(params, self.comm.world_size) for params in self.units]
        for params, flat in zip(self.units, self.flats):
            for p, view in zip(params, views(flat, params)):
                p.data = view
        self.shards = [nn.Parameter(self.slice_of(flat)) for flat in self.flats]
        return self.shards

    def slice_of(self, flat):
        return flat.chunk(self.comm.world_size)[self.comm.rank]

    def send(self, i):
        if self.last:
            grad = take_grads(self.units[i], self.comm.world_size)
            shard = self.slice_of(grad)
            self.in_flight.append((i, shard, grad, self.comm.reduce_scatter(shard, grad, f"unit {i}")))

    def receive(self):
        i, shard, _, work = self.in_flight.pop(0)
        work.wait()
        self.shards[i].grad = shard


class Zero2(Zero1):
    """Stage 2: gradients are sent after every micro-batch; only slices of them stay."""

    def backward(self, loss, last=True):
        super().backward(loss, last=True)

    def send(self, i):
        if len(self.in_flight) == 2:
            self.receive()
        grad = take_grads(self.units[i], self.comm.world_size)
        shard = torch.empty_like(self.shards[i])
        self.in_flight.append((i, shard, grad, self.comm.reduce_scatter(shard, grad, f"unit {i}")))

    def receive(self):
        i, shard, _, work = self.in_flight.pop(0)
        work.wait()
        p = self.shards[i]
        p.grad = shard if p.grad is None else p.grad + shard


class Zero3(Zero2):
    """Stage 3: a block's parameters are gathered for its turns, into one of two slots; the rest stays whole."""

    def step(self):
        DDP.step(self)
        self.holds = [None, None]  # the slots have the parameters from before the step
        for i, is_block in enumerate(self.is_block):
            if not is_block:
                self.gather(i)

    def adopt(self):
        super().adopt()
        self.is_block = [module is not None for module in self.modules]
        sizes = [len(flat) for flat, is_block in zip(self.flats, self.is_block) if is_block]
        self.slots, self.holds = [self.flats[0].new_empty(max(sizes)) for _ in range(2)], [None, None]
        self.shards = [nn.Parameter(self.slice_of(flat).clone()) for flat in self.flats]
        for i, module in enumerate(self.modules):
            if self.is_block[i]:
                module.register_forward_pre_hook(lambda *_, i=i: self.gather(i))
                module.register_full_backward_pre_hook(lambda *_, i=i: self.gather(i))
                self.flats[i] = self.slots[i % 2][: len(self.flats[i])]
                self.show(i)
        return self.shards

    def show(self, i):
        for p, view in zip(self.units[i], views(self.flats[i], self.units[i])):
            p.data = view

    def gather(self, i):
        if self.holds[i % 2] != i or not self.is_block[i]:
            self.comm.all_gather(self.flats[i], self.shards[i].data, f"unit {i}").wait()
            if self.is_block[i]:
                self.holds[i % 2] = i

    def full_parameters(self):
        names = {id(p): name for name, p in self.model.named_parameters()}
        full = super().full_parameters()  # right for what is in no block, and for frozen parameters
        for i, params in enumerate(self.units):
            if self.is_block[i]:
                self.gather(i)
                full.update((names[id(p)], p.detach().clone()) for p in params)
        return full
