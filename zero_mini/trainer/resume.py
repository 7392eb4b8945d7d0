"""What lets a run be left alone: the trainer saves itself, leaves at a signal, and goes on where it was.

    SIGTERM, Ctrl-C or SIGHUP to rank 1 in step 12:
    rank 0    step 11 | any? no | step 12 | any? yes | save step-12 | leave with status 143
    rank 1    step 11 | any? no | step 12 | any? yes | save step-12 | leave

Only rank 1 heard the signal, but a save is collective: so at the end of each step the hosts (not the devices) tell
each other whether any has. torchrun passes signals on to its ranks, and ends them for good 30 seconds later.

To go on: `--resume auto`, also the first time, when there is nothing to go on from. Then `torchrun --max-restarts`
needs nobody either. The order of data follows from the seed and the step, so a step is all that is kept of it. On as
many ranks the bits are those of a run that nothing ended, if the device computes the same bits twice.

Left out: waiting for room when the disk is full. The run ends; what it saved before is whole.
"""

import dataclasses
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from zero_mini.checkpoint.sharded import Checkpoints, Loaded, load
from zero_mini.script import Script
from zero_mini.trainer.gpt import GPTConfig
from zero_mini.trainer.launch import Refusal
from zero_mini.trainer.options import Options

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # torchrun's end, Ctrl-C, a terminal that is closed
AGAIN_S = 1.0  # torchrun passes on what the terminal has sent to all processes already: one signal, heard twice


class Stopped(Refusal):
    """A signal: every rank has saved, and leaves."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.status = 128 + number  # as a shell counts


class Saving:
    """When the trainer saves, and what beside the states. Within it, a signal is remembered up to the end of a step.

    A second signal, more than a second later, ends the process at once. Without `checkpoints` nothing is saved, and
    Ctrl-C and SIGHUP end the run at the end of a step.
    """

    def __init__(self, checkpoints: Checkpoints | None, scheduler: LRScheduler, fixed: dict, options: Options):
        self.checkpoints, self.scheduler, self.fixed, self.options = checkpoints, scheduler, fixed, options
        self.heard, self.heard_at = 0, 0.0

    def __enter__(self) -> "Saving":
        signals = SIGNALS if self.checkpoints else SIGNALS[1:]
        self.before = {number: signal.signal(number, self._hear) for number in signals} if is_main_thread() else {}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def after_step(self, zero: Script, step: int, check: Callable[[], object]) -> None:
        """Save if it is time; `check` raises if this is no state to go on from. Stopped, if any rank heard a signal."""
        number = self.heard_by_any(zero)
        if self.checkpoints and (number or step % self.options.save_every == 0 or step == self.options.steps):
            check()
            self.checkpoints.save(step, {**self.fixed, "scheduler": self.scheduler.state_dict()})
        if number:
            name = signal.Signals(number).name
            if not self.checkpoints:
                raise Stopped(f"ended by {name} after step {step}; to keep a run: --out DIR --save-every N", number)
            self.checkpoints.close()
            raise Stopped(
                f"ended by {name} after step {step}, which is saved: --resume auto goes on from there", number
            )

    def heard_by_any(self, zero: Script) -> int:
        """The number of a signal that any rank has heard, the same on all; 0 for none. Collective, between hosts."""
        heard = torch.tensor([self.heard])
        dist.all_reduce(heard, dist.ReduceOp.MAX, group=zero.comm.host.group)
        return int(heard)

    def _hear(self, number: int, frame: object) -> None:
        if self.heard and time.monotonic() > self.heard_at + AGAIN_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.heard:
            self.heard, self.heard_at = number, time.monotonic()


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def what_must_not_change(options: Options, config: GPTConfig, training_text: torch.Tensor) -> dict:
    """What a run that goes on has to share with the one that stopped, or it would not be the same run.

    Stage, number of ranks, precision, micro-batch and --steps are free; so is the global batch, for a number of ranks
    that does not divide it.
    """
    names = ("lr", "warmup", "weight_decay", "dropout", "seed", "global_batch")
    shape = dataclasses.asdict(config)
    shape["sequence_length"] = shape.pop("T")
    data = f"text of {len(training_text)} tokens, crc32 {zlib.crc32(training_text.numpy()):08x},"
    return {name: getattr(options, name) for name in names} | shape | {"data": data}


def go_on(options: Options, zero: Script, must_not_change: dict) -> Loaded:
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
        here = must_not_change[name]
        if name == "global_batch" and here != there and there % zero.world_size:
            if zero.rank == 0:
                print(f"--global-batch is {here} from here on, {there} before: other data follow")
        elif here != there:
            raise Refusal(
                f"--{name.replace('_', '-')} is {there} in {found.path} and {here} here, which would be another run: "
                "give the same, or begin one with --init-from weights.pt"
            )
    if zero.rank == 0:
        print(f"goes on from {found.path}", flush=True)
    return found
