"""What lets a run be left alone: the trainer saves itself, leaves when it is told to, and goes on where it was.

    SIGTERM to rank 1 in step 12:
    rank 0    step 11 | any? no | step 12 | any? yes | save step-12 | leave with status 143
    rank 1    step 11 | any? no | step 12 | any? yes | save step-12 | leave

Only rank 1 heard the signal, but a save is collective: so at the end of each step the hosts (not the devices) tell
each other whether any has. torchrun passes SIGTERM on to its ranks, and ends them for good 30 seconds later.

To go on: `--resume auto`, also the first time, when there is nothing to go on from. Then `torchrun --max-restarts`
needs nobody either. The order of data follows from the seed and the step, so a step is all that is kept of it. On as
many ranks the bits are those of a run that nothing ended, if the device computes the same bits twice.

Left out: waiting for room when the disk is full. The run ends; what it saved before is whole.
"""

import dataclasses
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from zero_mini.checkpoint import Checkpoints, Loaded, load
from zero_mini.ddp import DDP
from zero_mini.gpt import GPTConfig
from zero_mini.launch import Refusal
from zero_mini.options import Options


class Stopped(Refusal):
    """SIGTERM: every rank has saved, and leaves."""

    status = 128 + signal.SIGTERM  # as a shell counts


class Saving:
    """When the trainer saves, and what beside the states. Within it, SIGTERM is remembered up to the end of a step.

    A second SIGTERM ends the process at once.
    """

    def __init__(self, checkpoints: Checkpoints, scheduler: LRScheduler, fixed: dict, options: Options):
        self.checkpoints, self.scheduler, self.fixed, self.options = checkpoints, scheduler, fixed, options
        self.heard = False

    def __enter__(self) -> "Saving":
        self.before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def after_step(self, step: int, check: Callable[[], object]) -> None:
        """Save if it is time; `check` raises if this is no state to go on from. Stopped, if any rank heard SIGTERM."""
        leaving = self.heard_by_any()
        if leaving or step % self.options.save_every == 0 or step == self.options.steps:
            check()
            self.checkpoints.save(step, {**self.fixed, "scheduler": self.scheduler.state_dict()})
        if leaving:
            self.checkpoints.close()
            raise Stopped(f"ended by SIGTERM after step {step}, which is saved: --resume auto goes on from there")

    def heard_by_any(self) -> bool:
        """Has any rank been told to leave? The same answer on all. Collective, between hosts."""
        heard = torch.tensor([int(self.heard)])
        dist.all_reduce(heard, dist.ReduceOp.MAX, group=self.checkpoints.zero.comm.host_group)
        return bool(heard)

    def _hear(self, number: int, frame: object) -> None:
        self.heard = True
        signal.signal(number, signal.SIG_DFL)


def what_must_not_change(options: Options, config: GPTConfig, training_text: torch.Tensor) -> dict:
    """What a run that goes on has to share with the one that stopped, or it would not be the same run.

    Stage, number of ranks, precision, micro-batch and --steps are free.
    """
    names = ("lr", "warmup", "weight_decay", "dropout", "seed", "global_batch")
    shape = dataclasses.asdict(config)
    shape["sequence_length"] = shape.pop("T")
    data = f"text of {len(training_text)} tokens, crc32 {zlib.crc32(training_text.numpy()):08x},"
    return {name: getattr(options, name) for name in names} | shape | {"data": data}


def go_on(options: Options, zero: DDP, must_not_change: dict) -> Loaded:
    """Load what --resume asks for, and say what was. Collective. Refusal if it is another run's."""
    if options.resume is None:
        return Loaded(None, 0, {}, [])
    found = load(Path(options.out if options.resume == "auto" else options.resume), zero)
    if zero.rank == 0:
        for reason in found.skipped:
            print(f"train_gpt.py: checkpoint skipped: {reason}", file=sys.stderr, flush=True)
    if found.path is None:
        if options.resume != "auto":
            raise Refusal(f"--resume {options.resume} is no checkpoint, and no folder of them; give DIR or DIR/step-N")
        return found
    for name, there in found.extra["must_not_change"].items():
        if (here := must_not_change[name]) != there:
            raise Refusal(
                f"--{name.replace('_', '-')} is {there} in {found.path} and {here} here, which would be another run: "
                "give the same, or begin one with --init-from weights.pt"
            )
    if zero.rank == 0:
        print(f"goes on from {found.path}", flush=True)
    return found
