"""What runs on the ranks: a stage of a student's file, or torch's DDP, trains a few steps; values, traffic, memory."""

import contextlib
import importlib.util
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_mini.course.judge.models import CASES
from zero_mini.course.judge.wire import Traffic, asynchronous
from zero_mini.memory.recorder import Recorder

NAMES = ("DDP", "Zero1", "Zero2", "Zero3")


def load(path: str, stage: int) -> type:
    """The class of that stage in the file. AttributeError if it has none."""
    spec = importlib.util.spec_from_file_location("my_zero", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, NAMES[stage])


class Reference:
    """torch's DDP with the methods of the protocol."""

    def __init__(self, model: nn.Module, make_optimizer, unused: bool):
        self.module, self.model = model, DistributedDataParallel(model, find_unused_parameters=unused)
        self.optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        self.sync = True

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(*inputs)

    def backward(self, loss: torch.Tensor, last: bool = True) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def build(path: str | None, stage: int, name: str):
    """(the stage on a new model, the parameters at the start); path None: torch's DDP."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    if path is None:
        return Reference(model, case.make_optimizer, case.unused), start
    return load(path, stage)(model, case.make_optimizer), start


def one_step(zero, name: str, step: int, micros: int) -> list[float]:
    """k micro-batches and an update; the losses."""
    losses = []
    for micro in range(micros):
        last = micro == micros - 1
        hold = zero.model.no_sync() if isinstance(zero, Reference) and not last else contextlib.nullcontext()
        with hold:
            loss = zero.forward(*CASES[name].batch(step, micro)) / micros
            zero.backward(loss, last)
        losses.append(loss.item())
    zero.step()
    return losses


def trained(path: str | None, stage: int, name: str, steps: int, micros: int, wire: str | None) -> dict:
    """{"start", "end": name -> values; "losses"; "copies": see are_copies}.

    Wire "late" or "prompt": see `asynchronous`; None: as it is.
    """
    with asynchronous(wire) if wire else contextlib.nullcontext():
        zero, start = build(path, stage, name)
        losses = [loss for step in range(steps) for loss in one_step(zero, name, step, micros)]
        given = dict(zero.full_parameters())
        end = {key: value.detach().clone() for key, value in given.items()}
        copies = name != "frozen" or are_copies(zero, given)  # looked at in one check, so that it costs its points once
        return {"start": start, "end": end, "losses": losses, "copies": copies}


def are_copies(zero, given: dict[str, torch.Tensor]) -> bool:
    """Whether full_parameters() gives the same again, after somebody has written to what it gave before."""
    before = {key: value.detach().clone() for key, value in given.items()}
    for value in given.values():
        value.detach().add_(1)
    after = zero.full_parameters()
    return all(torch.equal(after[key], before[key]) for key in before)


def sent(path: str, stage: int, micros: int) -> tuple[float, list[str]]:
    """(elements that this rank sends in a step, the calls), of the second and third step."""
    zero, _ = build(path, stage, "gpt")
    one_step(zero, "gpt", 0, micros)
    with Traffic() as traffic:
        for step in (1, 2):
            one_step(zero, "gpt", step, micros)
    return traffic.sent / 2, [call for call, _ in traffic.calls[: len(traffic.calls) // 2]]


def held(path: str, stage: int) -> tuple[int, int]:
    """(bytes alive after the second backward, the highest number of bytes during it)."""
    with Recorder() as recorder:
        zero, start = build(path, stage, "gpt")
        start.clear()
        one_step(zero, "gpt", 0, 1)
        inputs = [part[:1, :1] for part in CASES["gpt"].batch(1, 0)]  # one token: few activations
        loss = zero.forward(*inputs)
        recorder.live_bytes()
        recorder.peak_bytes = 0
        zero.backward(loss, True)
        del loss, inputs
        time.sleep(0.1)  # gloo's thread may hold a buffer for a moment after the collective returned
        return recorder.live_bytes(), recorder.peak_bytes
