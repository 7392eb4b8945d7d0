"""Servers: one rank collects all gradients. ZeRO has no such rank; each rank serves 1/N of the parameters.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

    gradient server       every rank sends a gradient to rank 0, and gets their weighted sum back
    parameter server      every rank sends a gradient to rank 0, which has the only optimizer, and gets parameters back
    asynchronous server   rank 0 updates with each gradient as it comes, and sends parameters back to that rank alone

    bytes through a link, sent and received, fp32        kept by a rank, fp32 and AdamW
      server        8 Psi (N-1)      grows with N          (4 + 4 + 8) Psi
      other rank    8 Psi                                  (4 + 4) Psi; (4 + 4 + 8) Psi beside a gradient server
      ZeRO, any    16 Psi (N-1)/N    at most 16 Psi        4 + 4 + 8/N (stage 1) ... (4 + 4 + 8)/N (stage 3), times Psi

With equal weights a synchronous server computes what DDP does: to the bit at N = 2, where a sum of two has one order;
else sums in another order differ by at most 2 (N-1) 2^-24 sum_r |g_r| in an element. Weights are the ranks' shares of
the examples, so that unequal parts of a batch count as one batch.

Asynchronous, W workers served in turn:

    worker 1   |--- gradient at version 0 ---| |--- at version 1 ---|        turn t uses a gradient at version
    worker 2   |--- gradient at version 0 ----| |--- at version 2 ---|       t - (W-1): its staleness is W - 1
    versions   0                             1 2                   3 4

A free server takes gradients in the order in which they arrive, and staleness then depends on the machine. Here workers
have turns, so a run can be repeated: `delayed` is the same training in one process, for any staleness.

Left out: several servers, each with a part of the keys, as the paper has them; a worker that is lost.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import isclose
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zero_mini import zeroify
from zero_mini.laboratory.task import (
    adamw,
    batch,
    byte_model,
    gap,
    gradient_of,
    loss_of,
    momentum,
    parameters_of,
    set_gradient,
    set_parameters,
    sgd,
    train,
)
from zero_mini.memory.formulas import PlainTraining, walk

SERVER = 0

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Link:
    """Messages from one rank to another, and the bytes that went through this rank's link."""

    def __init__(self):
        self.sent = self.received = 0

    def send(self, values: Tensor, to: int) -> None:
        dist.send(values, to)
        self.sent += values.nbytes

    def receive(self, like: Tensor, source: int) -> Tensor:
        """A new tensor with the shape of `like`."""
        values = torch.empty_like(like)
        dist.recv(values, source)
        self.received += values.nbytes
        return values


class GradientServer:
    """Rank 0 adds the weighted gradients; every rank has an optimizer of its own.

    weights    one for each rank, which sum to one; None: 1/N each. ValueError if they do not.
    """

    def __init__(self, model: nn.Module, make_optimizer: MakeOptimizer, weights: Sequence[float] | None = None):
        self.rank, N = dist.get_rank(), dist.get_world_size()
        weights = [1 / N] * N if weights is None else list(weights)
        if len(weights) != N or not isclose(sum(weights), 1, rel_tol=1e-6) or min(weights) < 0:
            raise ValueError(f"{N} ranks need {N} weights >= 0 that sum to 1 (got {weights}): divide them by their sum")
        self.weight, self.others = weights[self.rank], [rank for rank in range(N) if rank != SERVER]
        self.model, self.link = model, Link()
        self.optimizer = make_optimizer(model) if self.has_optimizer else None
        set_parameters(model, self.send_out(parameters_of(model)))  # all start with the server's

    @property
    def has_optimizer(self) -> bool:
        return True

    def collect(self) -> Tensor:
        """On the server the weighted sum (Psi) of all gradients, in the order of ranks; elsewhere the rank's own."""
        total = gradient_of(self.model) * self.weight
        if self.rank != SERVER:
            self.link.send(total, SERVER)
        else:
            for rank in self.others:
                total += self.link.receive(total, rank)
        return total

    def send_out(self, values: Tensor) -> Tensor:
        """The server's values (Psi), on every rank."""
        if self.rank != SERVER:
            return self.link.receive(values, SERVER)
        for rank in self.others:
            self.link.send(values, rank)
        return values

    def step(self) -> None:
        """After every rank's backward. Collective."""
        set_gradient(self.model, self.send_out(self.collect()))
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.model.zero_grad()


class ParameterServer(GradientServer):
    """Rank 0 has the only optimizer, and sends parameters out."""

    @property
    def has_optimizer(self) -> bool:
        return self.rank == SERVER

    def step(self) -> None:
        """After every rank's backward. Collective."""
        total = self.collect()
        if self.rank == SERVER:
            set_gradient(self.model, total)
            self.optimizer.step()
        set_parameters(self.model, self.send_out(parameters_of(self.model)))


def train_asynchronously(model: nn.Module, make_optimizer: MakeOptimizer, turns: int, seed: int = 0) -> Link:
    """`turns` updates by a server and N - 1 workers, each update from one worker's gradient.

    The server's model is trained. ValueError if there is no worker.
    """
    rank, workers, link = dist.get_rank(), dist.get_world_size() - 1, Link()
    if workers < 1:
        raise ValueError("an asynchronous server needs at least one worker: start 2 ranks or more")
    if rank != SERVER:
        for turn in range(rank - 1, turns, workers):
            set_parameters(model, link.receive(parameters_of(model), SERVER))
            loss_of(model, batch(turn, seed=seed)).backward()
            link.send(gradient_of(model), SERVER)
            model.zero_grad()
        return link
    optimizer = make_optimizer(model)
    for worker in range(1, min(workers, turns) + 1):
        link.send(parameters_of(model), worker)
    for turn in range(turns):
        worker = 1 + turn % workers
        set_gradient(model, link.receive(parameters_of(model), worker))
        optimizer.step()
        if turn + workers < turns:  # the worker has another turn
            link.send(parameters_of(model), worker)
    return link


def delayed(model: nn.Module, optimizer: torch.optim.Optimizer, turns: int, staleness: int, seed: int = 0):
    """The same in one process: the gradient of turn t is taken at the parameters of turn t - staleness, or the first.

    Returns the loss at each turn, on that turn's examples, at the parameters that the gradient was taken at.
    """
    versions, losses = deque([parameters_of(model)], maxlen=staleness + 1), []
    for turn in range(turns):
        newest = versions[-1]
        set_parameters(model, versions[0])
        loss = loss_of(model, batch(turn, seed=seed))
        loss.backward()
        set_parameters(model, newest)
        optimizer.step()
        optimizer.zero_grad()
        versions.append(parameters_of(model))
        losses.append(loss.item())
    return losses


# --- the experiments --------------------------------------------------------------------------


def compare_servers(steps: int = 5) -> dict:
    """On ranks: both servers beside torch DDP and all stages; the largest gap, and a step's bytes through the link."""
    rank, N = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(byte_model())
    train(model, momentum(model), steps, rank, N)
    expected, gaps, link_bytes = parameters_of(model), {}, {}
    for kind in (GradientServer, ParameterServer):
        server = kind(byte_model(), momentum)
        at_start = server.link.sent + server.link.received
        train(server.model, server, steps, rank, N)
        gaps[kind.__name__] = gap(parameters_of(server.model), expected)
        link_bytes[kind.__name__] = (server.link.sent + server.link.received - at_start) // steps
    for stage in range(4):
        model = byte_model()
        zero = zeroify(model, momentum(model), stage)
        train(model, zero.optimizer, steps, rank, N)
        gaps[f"stage {stage}"] = gap(parameters_of(model), expected)
        # A ring receives as much as it sends.
        link_bytes[f"stage {stage}"] = int(2 * sum(call.wire_numel(N) * call.itemsize for call in zero.ledger))
    return {"gaps": gaps, "link_bytes": link_bytes, "psi": len(expected)}


def compare_memory() -> dict[str, int]:
    """On ranks: bytes of states on this rank after a step with AdamW, gradients included."""
    rank, N = dist.get_rank(), dist.get_world_size()
    kept, states = {}, ("parameters", "gradients", "optimizer", "communication")
    for kind in (GradientServer, ParameterServer):
        server = kind(byte_model(), adamw)
        train(server.model, server, 1, rank, N)
        loss_of(server.model, batch(1, rank, N)).backward()
        kept[kind.__name__] = walk(PlainTraining(server.model, server.optimizer or SimpleNamespace(state={})))
    for stage in range(4):
        model = byte_model()
        zero = zeroify(model, adamw(model), stage)
        train(model, zero.optimizer, 1, rank, N)
        loss_of(model, batch(1, rank, N)).backward()
        zero.wait()
        kept[f"stage {stage}"] = zero.memory()
    return {name: sum(nbytes[state] for state in states) for name, nbytes in kept.items()}


def compare_staleness(turns: int = 300, stalenesses: Sequence[int] = (0, 1, 2, 4, 8)) -> dict[str, list[float]]:
    """In one process: the loss in each turn, for each staleness."""
    curves = {}
    for staleness in stalenesses:
        model = byte_model()
        curves[f"staleness {staleness}"] = delayed(model, sgd(model), turns, staleness)
    return curves


def asynchronous_gap(turns: int = 12) -> float:
    """On ranks: how far the asynchronous server is from `delayed` with staleness N - 2; 0 on ranks without a server."""
    model, twin = byte_model(), byte_model()
    train_asynchronously(model, momentum, turns)
    if dist.get_rank() != SERVER:
        return 0.0
    delayed(twin, momentum(twin), turns, dist.get_world_size() - 2)
    return gap(parameters_of(model), parameters_of(twin))
