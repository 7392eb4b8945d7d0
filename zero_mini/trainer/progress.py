"""Between steps: every --log-every steps the host reads losses and norms from the device, shows and records them.

    step          1     2     3     4
    on device     l n   l n   l n   l n      loss and norm of each step, without waiting
    read                            ^        once for all four; Refusal if any is not finite on any rank

A terminal gets a bar, any other stream a line for each reading; both are rank 0's. The metrics go to the run's folder.
"""

import math
import sys
import time

import torch
from tqdm import tqdm

from zero_mini.script import Script
from zero_mini.trainer.job import Job
from zero_mini.trainer.launch import Refusal
from zero_mini.trainer.options import Options
from zero_mini.trainer.report import Folder, readable, sent_bytes


class Progress:
    """The readings of one run, from `start_step` on. A context: its bar ends with the block."""

    def __init__(self, zero: Script, options: Options, job: Job, folder: Folder, start_step: int = 0):
        self.zero, self.options, self.job, self.folder = zero, options, job, folder
        self.memory: dict[str, dict[str, int]] = {}  # place -> category -> bytes, as `count_memory` found them last
        self.recent: list[torch.Tensor | None] = []  # (loss, norm) of each step since the last reading; None: skipped
        self.since = time.perf_counter()  # the last reading
        self.has_bar = zero.rank == 0 and sys.stderr.isatty()
        self.bar = tqdm(total=options.steps, initial=start_step, disable=not self.has_bar, unit="step")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def reads_at(self, step: int) -> bool:
        """Is there a reading at the end of this step?"""
        return step % self.options.log_every == 0 or step == self.options.steps

    def count_memory(self) -> None:
        """List what this rank keeps alive now, as the paper counts it: after backward, before the step."""
        self.memory = {place: self.zero.memory(place) for place in self.zero.places}

    def after_step(self, step: int, loss: torch.Tensor, norm: torch.Tensor, lr: float) -> None:
        """Keep loss and norm (0-dim, on the device) of a step that had the learning rate `lr`; read them if it is time.

        Collective. Refusal if a loss or norm was not finite.
        """
        self.recent.append(torch.stack([loss, norm]) if self.zero.stepped else None)
        self.bar.update()
        if self.reads_at(step):
            self.report(step, lr)

    def check(self, step: int) -> None:
        """Refusal if a loss or norm since the last reading was not finite. Collective; the host waits."""
        read(self.recent, step, self.zero, self.options)

    def report(self, step: int, lr: float) -> None:
        """Read, show and record. Collective."""
        loss, norm = read(self.recent, step, self.zero, self.options)
        now = time.perf_counter()
        tokens_per_s = len(self.recent) * self.options.global_batch * self.job.config.T / (now - self.since)
        self.recent, self.since = [], now
        most_bytes = sum(self.memory["device"].values())
        if self.job.device.type == "cuda":  # torch counts allocations on CUDA only
            most_bytes = torch.cuda.max_memory_allocated(self.job.device)
        results = {} if math.isnan(loss) else {"loss": loss, "grad_norm": norm}
        status = f"loss {loss:.3f}" if results else "all steps skipped"
        self.bar.set_postfix_str(status)
        if self.zero.rank == 0 and not self.has_bar:
            costs = f"{readable(tokens_per_s, '')} tokens/s, {readable(most_bytes)} held by rank 0"
            print(f"step {step}/{self.options.steps}: {status}, {costs}", flush=True)
        costs = {"memory_bytes": most_bytes, "wire_bytes": sent_bytes(self.zero.ledger, self.zero.world_size)}
        if self.zero.scaler is not None:
            costs |= {"loss_scale": self.zero.scaler.scale, "skipped": self.zero.scaler.skipped}
        self.folder.note(step=step, lr=lr, tokens_per_s=tokens_per_s, **results, **costs)


def read(recent: list[torch.Tensor | None], step: int, zero: Script, options: Options) -> tuple[float, float]:
    """The loss, mean over ranks, and norm of the last step that was not skipped; NaN if all were. The host waits here.

    Refusal, on every rank, if any rank's loss or norm was not finite in a step up to `step` that was not skipped.
    """
    taken = [(number, pair) for number, pair in enumerate(recent, step - len(recent) + 1) if pair is not None]
    if not taken:  # on all ranks alike
        return math.nan, math.nan
    ranks = zero.comm.host.gather(torch.stack([pair for _, pair in taken]).tolist())  # [rank][step](loss, norm)
    for (number, _), one_step in zip(taken, zip(*ranks)):
        for rank, values in enumerate(one_step):
            for what, value in zip(("loss", "gradient norm"), values):
                if not math.isfinite(value):
                    raise Refusal(f"{what} is {value} at step {number} on rank {rank}; lower --lr ({options.lr})")
    last = [steps[-1] for steps in ranks]
    return sum(loss for loss, _ in last) / len(last), last[0][1]
