"""Compression: fewer bits for what crosses the wire, or for what is offloaded.

    codec        bytes for P fp32 elements   error of an element x, at most
    exact        4 P                         0
    bf16         2 P                         2^-8 |x|
    8 bits       P + 4 P/32                  1/254 of the largest of its 32 elements
    1 bit        P/8 + 4                     |x| + the mean of all |x|; error feedback sends it later
    lossless     depends on the values       0

Sources: ZeRO++, arXiv 2306.10209 (blocks of 8 bits for gathers of parameters); 1-bit Adam, arXiv 2102.02888; 8-bit
optimizer states, arXiv 2110.02861.

Two places to put a codec, through the seams of this package:

    Compressed(codec)    a Comm for stage 0: every rank sends its encoded gradient to all others, each takes the mean.
                         (N-1) x encoded bytes, so for large N more than an all-reduce, whose 8 P (N-1)/N do not grow
    QuantisedGathers     a stage 3 that gathers 8-bit parameters: (N-1)/N (P + 4 P/32) bytes a gather, not 4 P (N-1)/N.
                         The masters stay fp32 shards; forward and backward use rounded parameters

Error feedback: a rank adds to its next gradient what the codec left out of this one. It costs 4 P bytes on every rank.

Left out: reductions that send 1/N of an encoded gradient to each rank and encode the sum again, as 1-bit Adam and
ZeRO++ (qgZ) do: then bytes do not grow with N. Padding gets a sign from the 1-bit codec; nothing reads it.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zero_mini import zeroify
from zero_mini.comm import Comm, Launched
from zero_mini.flat import Unit
from zero_mini.laboratory.task import (
    adamw,
    batch,
    byte_model,
    gradient_of,
    held_out_loss,
    loss_of,
    parameters_of,
    sgd,
    train,
)
from zero_mini.wire.host_words import all_gather
from zero_mini.zero3 import Zero3

BLOCK = 32  # elements that share a scale; it divides every slice (flat.ALIGN)


class Codec(Protocol):
    """values (numel) <-> a message of bytes, whose length depends on numel alone."""

    def encode(self, values: Tensor) -> Tensor: ...  # fp32 (numel) -> uint8

    def decode(self, message: Tensor, numel: int) -> Tensor: ...  # uint8 -> fp32 (numel)


class Cast:
    """The same numbers in another dtype; fp32: the exact codec."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).view(torch.uint8)

    def decode(self, message: Tensor, numel: int) -> Tensor:
        return message.view(self.dtype).float()


class Int8:
    """Whole numbers from -127 to 127, times a scale for each block."""

    def encode(self, values: Tensor) -> Tensor:
        if values.numel() % BLOCK:
            raise ValueError(f"{values.numel()} elements are not a multiple of a block of {BLOCK}: pad them with zeros")
        blocks = values.view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / 127
        codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        return torch.cat([codes.flatten().view(torch.uint8), scales.flatten().view(torch.uint8)])

    def decode(self, message: Tensor, numel: int) -> Tensor:
        codes, scales = message[:numel].view(torch.int8), message[numel:].view(torch.float32)
        return (codes.view(-1, BLOCK) * scales[:, None]).flatten()


class OneBit:
    """The sign of each element, and one number for all: the mean of their sizes."""

    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)

    def encode(self, values: Tensor) -> Tensor:
        bits = torch.nn.functional.pad(values >= 0, (0, -values.numel() % 8)).view(-1, 8)
        return torch.cat(
            [(bits * self.powers).sum(1, dtype=torch.uint8), values.abs().mean().view(1).view(torch.uint8)]
        )

    def decode(self, message: Tensor, numel: int) -> Tensor:
        bits = (message[:-4, None] & self.powers) > 0
        return torch.where(bits.flatten()[:numel], 1.0, -1.0) * message[-4:].clone().view(torch.float32)


def lossless(values: Tensor, planes: bool = False) -> bytes:
    """zlib's fastest. planes: first all first bytes, then all second ones: those with the exponents repeat most.

    >>> len(lossless(torch.arange(1000.0))) > 1.5 * len(lossless(torch.arange(1000.0), planes=True))
    True
    """
    data = values.view(torch.uint8).view(-1, values.element_size())
    return zlib.compress((data.T.contiguous() if planes else data).numpy().tobytes(), 1)


# --- on the wire ------------------------------------------------------------------------------


class Then:
    """A collective in flight, and what to do with its bytes when they have arrived."""

    def __init__(self, launched: Launched, finish: Callable[[], None]):
        self.launched, self.finish = launched, finish

    def wait(self) -> None:
        self.launched.wait()
        self.finish()


def gather_messages(comm: Comm, message: Tensor, unit: str, receive: Callable[[Tensor], None]) -> Then:
    """Every rank's message, one a row, goes to `receive`. The ledger has its bytes."""
    rows = message.new_empty(comm.world_size, message.numel())
    start = partial(all_gather, rows.view(-1), message, group=comm.group, async_op=True)
    return Then(comm.launch("all_gather", unit, rows, start), lambda: receive(rows))


class Compressed(Comm):
    """At stage 0 gradients cross the wire encoded."""

    def __init__(self, codec: Codec, feedback: bool = False):
        super().__init__()
        self.codec, self.feedback = codec, feedback
        self.residuals: dict[str, Tensor] = {}  # unit -> (P) what was left out so far

    def all_reduce(self, buffer: Tensor, unit: str) -> Then:
        """buffer (P) <- the mean of what the ranks' messages say."""
        values = buffer + self.residuals[unit] if unit in self.residuals else buffer
        message = self.codec.encode(values)
        if self.feedback:
            self.residuals[unit] = values - self.codec.decode(message, buffer.numel())

        def receive(rows: Tensor) -> None:
            buffer.copy_(sum(self.codec.decode(row, buffer.numel()) for row in rows) / self.world_size)

        return gather_messages(self, message, unit, receive)


class QuantisedGathers(Zero3):
    """Stage 3 whose gathers of parameters have 8 bits an element and a scale for each block."""

    codec: Codec = Int8()

    def launch_gather(self, unit: Unit) -> None:
        slot = unit.place.slot
        self.vacate(slot)

        def receive(rows: Tensor) -> None:  # the own slice too: all ranks compute with the same parameters
            for rank, row in enumerate(rows):
                unit.slice_of(slot.buffer, rank).copy_(self.codec.decode(row, unit.S))

        message = self.codec.encode(self.update.source(unit))
        slot.arriving = gather_messages(self.comm, message, unit.name, receive)
        slot.holder = unit


# --- the experiments --------------------------------------------------------------------------


def compare_codecs(steps: int = 300, names: Sequence[str] = ()) -> dict[str, dict]:
    """On ranks: what `run` returns, for each system; `names`: only for these."""
    systems = {
        "all-reduce": (0, None),
        "exact": (0, lambda: Compressed(Cast())),
        "bf16": (0, lambda: Compressed(Cast(torch.bfloat16))),
        "8 bits": (0, lambda: Compressed(Int8())),
        "1 bit": (0, lambda: Compressed(OneBit())),
        "1 bit, feedback": (0, lambda: Compressed(OneBit(), feedback=True)),
        "stage 3": (3, None),
        "stage 3, 8-bit gathers": (QuantisedGathers, None),
    }
    return {name: run(*systems[name], steps) for name in names or systems}


def run(stage, make_comm: Callable[[], Comm] | None, steps: int) -> dict:
    """One training: losses, loss on held-out text, bytes that a rank sends in a step, residuals that it keeps."""
    model = byte_model()
    zero = zeroify(model, sgd(model), stage, comm=make_comm() if make_comm else None)
    losses = train(model, zero.optimizer, steps, zero.rank, zero.world_size)
    sent: dict[str, float] = {}  # by kind of collective
    for call in zero.ledger:
        sent[call.kind] = sent.get(call.kind, 0) + call.wire_numel(zero.world_size) * call.itemsize
    return {
        "losses": losses,
        "held_out": held_out_loss(model),
        "sent_bytes": sent,
        "residual_bytes": sum(value.nbytes for value in getattr(zero.comm, "residuals", {}).values()),
    }


def compare_tensors(steps: int = 100) -> dict[str, dict]:
    """In one process: ratio, relative error, part that became zero, MB/s of each codec on what AdamW leaves behind."""
    model = byte_model()
    optimizer = adamw(model)
    train(model, optimizer, steps)
    loss_of(model, batch(steps)).backward()
    states = [optimizer.state[param] for param in model.parameters()]
    tensors = {"parameters": parameters_of(model), "gradient": gradient_of(model)}
    for name, key in (("momentum", "exp_avg"), ("variance", "exp_avg_sq")):
        tensors[name] = torch.cat([state[key].flatten() for state in states])
    rows = {}
    for what, values in tensors.items():
        for name, codec in {"bf16": Cast(torch.bfloat16), "8 bits": Int8(), "1 bit": OneBit()}.items():
            start = time.perf_counter()
            message = codec.encode(values)
            decoded = codec.decode(message, values.numel())
            rows[f"{what}, {name}"] = {
                "ratio": values.nbytes / message.nbytes,
                "error": ((decoded - values).norm() / values.norm()).item(),
                "to_zero": ((decoded == 0) & (values != 0)).float().mean().item(),
                "MB_per_s": values.nbytes / 1e6 / (time.perf_counter() - start),
            }
        for planes in (False, True):
            start = time.perf_counter()
            size = len(lossless(values, planes))
            seconds = time.perf_counter() - start
            rows[f"{what}, lossless{', by planes' if planes else ''}"] = {
                "ratio": values.nbytes / size,
                "error": 0.0,
                "to_zero": 0.0,
                "MB_per_s": values.nbytes / 1e6 / seconds,  # without decoding
            }
    return rows
