"""Deferred all-reduce: micro-batches are accumulated on the rank, and their sum is reduced once. It is `no_sync`.

Source: PyTorch DDP, arXiv 2006.15704, section 3.2.4 (gradient accumulation).

    micro-batch   1          2          3          4
    at once       backward r backward r backward r backward r     r: a reduction, Psi elements
    deferred      backward   backward   backward   backward r     sums stay on the rank in between

Both have the gradient of one large batch, but for rounding: sums are taken in another order.

    k micro-batches, fp32       gradients kept, bytes    elements sent, x (N-1)/N
      stages 0, 1               4 Psi                    2k Psi at once (stage 1: (k+1) Psi), 2 Psi deferred
      stage 2 as it is          4 Psi/N                  (k+1) Psi
      stage 2 deferred          4 Psi                    2 Psi: its saving of memory is gone
      stage 3 as it is          4 Psi/N                  3k Psi, less what is still in a slot
      stage 3 deferred          4 Psi                    (2k+1) Psi, less what is still in a slot

So `zero.no_sync()` defers at stages 0 and 1, and changes nothing at stages 2 and 3. `Deferred2` and `Deferred3` are
these stages with the other decision.

Left out: gradients that stay on the rank over several updates (local SGD): that is another algorithm.
"""

import contextlib

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_mini import zeroify
from zero_mini.laboratory.task import batch, byte_model, gap, loss_of, momentum, parameters_of
from zero_mini.script import Script
from zero_mini.zero2 import Zero2
from zero_mini.zero3 import Zero3


class Deferred2(Zero2):
    """Stage 2 whose micro-batches are accumulated on the rank."""

    no_sync = Script.no_sync


class Deferred3(Zero3):
    """Stage 3 whose micro-batches are accumulated on the rank."""

    no_sync = Script.no_sync


def accumulate(model: nn.Module, micro_batches: int, deferred: bool, no_sync) -> None:
    """Backward of `micro_batches` parts of the rank's share of step 0's batch."""
    rank, N = dist.get_rank(), dist.get_world_size()
    for i in range(micro_batches):
        is_last = i == micro_batches - 1
        with no_sync() if deferred and not is_last else contextlib.nullcontext():
            part = batch(0, rank * micro_batches + i, N * micro_batches)
            (loss_of(model, part) / micro_batches).backward()


# --- the experiment ---------------------------------------------------------------------------


def compare_accumulation(micro_batches: int = 4) -> dict[str, dict]:
    """On ranks: parameters after a step, gradients kept between micro-batches, elements sent in the step.

    Gaps are the largest differences of a parameter: to torch DDP with the large batch, and under its no_sync.
    """
    rank, N = dist.get_rank(), dist.get_world_size()
    expected = {}
    for name in ("large", "no_sync"):
        ddp = DistributedDataParallel(byte_model())
        optimizer, before = momentum(ddp), parameters_of(ddp)
        if name == "large":
            loss_of(ddp, batch(0, rank, N)).backward()
        else:
            accumulate(ddp, micro_batches, True, ddp.no_sync)
        optimizer.step()
        expected[name] = parameters_of(ddp)
    rows = {
        "torch DDP": {"to_large": gap(expected["no_sync"], expected["large"]), "update": gap(expected["large"], before)}
    }
    for stage in (0, 1, 2, 3, Deferred2, Deferred3):
        for deferred in (False, True):
            model = byte_model()
            zero = zeroify(model, momentum(model), stage)
            accumulate(model, micro_batches, deferred, zero.no_sync)
            zero.optimizer.step()
            sent, values = sum(call.wire_numel(N) for call in zero.ledger), parameters_of(model)
            zero.optimizer.zero_grad()
            with zero.no_sync() if deferred else contextlib.nullcontext():
                loss_of(model, batch(1, rank, N)).backward()  # the first micro-batch of the next step
            zero.wait()
            name = f"stage {stage}" if isinstance(stage, int) else stage.__name__
            rows[f"{name}, {'deferred' if deferred else 'at once'}"] = {
                "to_large": gap(values, expected["large"]),
                "to_ddp": gap(values, expected["no_sync"]),
                "kept_bytes": zero.memory()["gradients"],
                "sent_numel": sent,
                "psi": sum(unit.P for unit in zero.units),
                "in_slots": sum(unit.P for unit in zero.units[-2:]),
            }
            zero.optimizer.zero_grad()
    return rows
