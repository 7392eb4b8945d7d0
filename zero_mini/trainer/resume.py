"""Unattended runs: the trainer saves checkpoints, exits at a signal, and resumes where it stopped.

    SIGTERM, Ctrl-C or SIGHUP to rank 1 in step 12:
    rank 0    step 11 | any? no | step 12 | any? yes | save step-12 | exit with status 143
    rank 1    step 11 | any? no | step 12 | any? yes | save step-12 | exit

Only rank 1 received the signal, but a save is collective. So at the end of each step the hosts (not the devices)
all-reduce the signal's number. torchrun passes signals on to its ranks, and kills them 30 seconds later.

To resume: `--resume auto`, also the first time, when there is no checkpoint. Then `torchrun --max-restarts` restarts
a run without help. The order of data follows from the seed and the step, so a checkpoint needs the step only. With
the same number of ranks the bits are those of an uninterrupted run, if the device computes the same bits twice.

Left out: waiting for room when the disk is full. The run ends; its earlier checkpoints are whole.
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
AGAIN_S = 1.0  # the terminal signals all processes, and torchrun passes it on: the second within this time is the same


class Stopped(Refusal):
    """A signal arrived: every rank has saved, and exits."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.status = 128 + number  # the convention of shells


class Saving:
    """Saves checkpoints with the scheduler and `fixed`. Within, a signal takes effect at the end of the step.

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
        """Save if it is time; `check` raises if this state must not be saved. Stopped, if any rank got a signal."""
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
        """The number of a signal that any rank has received, the same on all; 0 for none. Collective of the hosts."""
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
    """The settings in which a resumed run must match the stopped one.

    Stage, number of ranks, precision, micro-batch and --steps may change; so may the global batch, if the number of
    ranks does not divide it.
    """
    names = ("lr", "warmup", "weight_decay", "dropout", "seed", "global_batch")
    shape = dataclasses.asdict(config)
    shape["sequence_length"] = shape.pop("T")
    data = f"text of {len(training_text)} tokens, crc32 {zlib.crc32(training_text.numpy()):08x},"
    return {name: getattr(options, name) for name in names} | shape | {"data": data}


def go_on(options: Options, zero: Script, must_not_change: dict) -> Loaded:
    """Load the checkpoint of --resume, and print which. Collective. Refusal if it is of another run."""
    if options.resume is None:
        return Loaded(None, 0, {}, [])
    loaded = load(Path(options.out if options.resume == "auto" else options.resume), zero)
    if zero.rank == 0:
        for reason in loaded.skipped:
            print(f"train_gpt.py: checkpoint skipped: {reason}", file=sys.stderr, flush=True)
    if loaded.path is None:
        if options.resume != "auto":
            raise Refusal(f"--resume {options.resume} is no checkpoint, and no folder of them; give DIR or DIR/step-N")
        return loaded
    for name, there in loaded.extra["must_not_change"].items():
        here = must_not_change[name]
        if name == "global_batch" and here != there and there % zero.world_size:
            if zero.rank == 0:
                print(f"--global-batch is {here} from here on, {there} before: other data follow")
        elif here != there:
            raise Refusal(
                f"--{name.replace('_', '-')} is {there} in {loaded.path} and {here} here, which would be another run: "
                "give the same, or begin one with --init-from weights.pt"
            )
    if zero.rank == 0:
        print(f"goes on from {loaded.path}", flush=True)
    return loaded
