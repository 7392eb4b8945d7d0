"""Train a GPT-2 at any stage of ZeRO, and see what the stage costs and saves.

    torchrun zero_mini/train_gpt.py --stage 2                                     one process
    torchrun --standalone --nproc-per-node 2 zero_mini/train_gpt.py --stage 2     two of them, on a CPU or two GPUs
    python zero_mini/train_gpt.py --stage 3 --pretend-world 1024                  rank 0 of 1024; the others are absent
    python zero_mini/train_gpt.py --help                                          every flag

A step, for each rank:

    micro-batch 1    forward  backward      all but the last under no_sync(): stages 0 and 1 then accumulate locally
    ...
    micro-batch k    forward  backward      gradients are means over ranks now
    clip, update, next learning rate, zero_grad

The host does not wait for the device inside a step (except once in fp16, to learn whether gradients overflowed):
losses and norms stay on the device and are read together, every `--log-every` steps. The result depends on the seed
and the global batch; up to rounding it does not depend on the stage or the number of ranks. Options that cannot work
end the job with one line and status 2, before any rank waits for another.

With `--out DIR --save-every 100 --resume auto` a run needs no attention (trainer/resume.py): after any interruption it
resumes from its last checkpoint, to the same bits if the number of ranks is the same.

Left out: evaluation while training.
"""

import sys
from pathlib import Path

if not __package__:
    # A script has its own folder first on sys.path. There `import zero_mini` would fail, or import another installed
    # copy: it needs the folder around the package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import dataclasses
import math
import os
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from zero_mini import zeroify
from zero_mini.activations.checkpointing import checkpoint_blocks
from zero_mini.checkpoint.sharded import CheckpointError, Checkpoints
from zero_mini.comm import Call
from zero_mini.script import Script
from zero_mini.simulate.absent import Absent
from zero_mini.simulate.measure import Training, formulas, measure, report
from zero_mini.simulate.values import Values
from zero_mini.trainer import text
from zero_mini.trainer.gpt import GPT, generate, init_rule, param_groups, parameter_count
from zero_mini.trainer.job import DTYPES, Job, prepare
from zero_mini.trainer.launch import (
    OwnRefusal,
    Place,
    Refusal,
    find_place,
    first_line,
    leave,
    open_store,
    refusal_for,
    roll_call,
)
from zero_mini.trainer.options import Options, parse
from zero_mini.trainer.printout import describe, print_costs, print_results
from zero_mini.trainer.progress import Progress
from zero_mini.trainer.report import Folder
from zero_mini.trainer.resume import Saving, go_on
from zero_mini.trainer.screen import fill, safe_streams


def lr_factor(step: int, warmup: int, steps: int) -> float:
    """The factor of the highest learning rate at `step`, counted from 0: a ramp, then a cosine to a tenth.

    >>> [round(lr_factor(step, warmup=2, steps=6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.87, 0.55, 0.23]
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * progress)


def train(options: Options, job: Job, place: Place) -> None:
    """Build, resume, train, report. Collective."""
    zero, scheduler = build(options, job, place)
    is_rank_0 = place.rank == 0
    if is_rank_0:
        print(fill(describe(options, job, place)), flush=True)
    torch.manual_seed(options.seed + place.rank)  # dropout
    _, start_step, extra, _ = go_on(options, zero, job.must_not_change)
    checkpoints = None
    if options.out:  # lock the folder before anything is written to it
        try:
            checkpoints = Checkpoints(Path(options.out), zero, options.keep, start_step, options.save_in_background)
        except CheckpointError as error:
            hint = " (go on: --resume auto)" if "later than step" in str(error) else ""
            raise Refusal(f"--out: {first_line(error)}{hint}") from error
    shape = dataclasses.asdict(job.config)
    config = {**dataclasses.asdict(options), "model_shape": shape, "world_size": place.world_size}
    folder = Folder(Path(options.out) if options.out and is_rank_0 else None, config, start_step, options.tensorboard)
    if start_step:
        scheduler.load_state_dict(extra["scheduler"])
        at_start = extra["at_start"]
    else:
        at_start = validate(zero, job)
        folder.note(step=0, validation_loss=at_start)
    fixed = {"must_not_change": job.must_not_change, "at_start": at_start}
    saving = Saving(checkpoints if options.save_every else None, scheduler, fixed, options)
    memory, calls = fit(zero, scheduler, options, job, folder, start_step, saving)
    at_end = validate(zero, job)
    folder.note(step=options.steps, validation_loss=at_end)
    if not math.isfinite(at_end):  # on all ranks alike; the last update may be the one that did it
        raise Refusal(f"validation loss is {at_end} after step {options.steps}; lower --lr ({options.lr:g})")
    generator = torch.Generator().manual_seed(options.seed)  # the same on all ranks, as generate() requires
    sample = generate(zero.model, job.prompt, options.sample_length, temperature=0.8, generator=generator)[0].cpu()
    if checkpoints:  # save before printing, which may fail
        folder.save(zero.model, options.export_gpt2)
        checkpoints.close()
    if is_rank_0:
        print_costs(options, job, zero, memory, calls)
        print_results(options, at_start, at_end, sample)


def build(
    options: Options, job: Job, place: Place, absent: bool = False
) -> tuple[Script, torch.optim.lr_scheduler.LRScheduler]:
    """The handle of model and optimizer at the stage of the options, and the schedule. Collective.

    absent    True: the other ranks are absent, and nothing is sent (simulate/absent.py).
    """
    torch.manual_seed(options.seed)
    if options.offload:  # the update runs on the CPU, and torchrun sets one thread a rank
        torch.set_num_threads(max(1, os.cpu_count() // place.local_world_size))
    with torch.device("meta"):  # no rank ever holds a whole model: zeroify() initialises it unit by unit
        model = GPT(job.config, options.loss_chunks)
    if options.checkpoint_activations:
        checkpoint_blocks(model, options.checkpoint_activations, options.keep_activations)

    values = Values(partial(init_rule, L=job.config.L), options.seed)  # alike for any units and number of ranks

    def initialise(name: str, tensor: torch.Tensor) -> None:
        if job.weights:
            tensor.copy_(job.weights[name])
        else:
            values.initialise(name, tensor)

    groups = param_groups(model, options.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
    factor = partial(lr_factor, warmup=options.warmup, steps=options.steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    comm = Absent(place.rank, place.world_size, values) if absent else None
    zero = zeroify(
        model,
        optimizer,
        options.stage,
        dtype=DTYPES[job.precision],
        device=job.device,
        initialise=initialise,
        offload=options.offload,
        comm=comm,
    )
    return zero, scheduler


def pretend(options: Options, job: Job, place: Place) -> None:
    """Run one or two steps of one rank without its peers; print their memory and time. Refusal if memory is short."""
    itemsize, psi = DTYPES[job.precision].itemsize, parameter_count(job.config)
    batches = job.batches_from(0)

    def compute(zero: Script) -> torch.Tensor:
        return accumulate(zero, next(batches), job.device)

    def update(zero: Script) -> None:
        zero.clip_grad_norm_(options.clip)
        zero.optimizer.step()
        zero.optimizer.zero_grad()

    training = Training(lambda: build(options, job, place, absent=True)[0], compute, update)
    result = measure(training, job.device, min(options.steps, 2))
    result |= formulas(psi, options.stage, place.world_size, itemsize, result)
    about = {"stage": options.stage, "precision": job.precision, "psi": psi, "device": job.device.type}
    print(fill(report(about | {"rank": place.rank, "world_size": place.world_size}, result)))
    if result["outcome"] != "ran":
        raise Refusal(result["outcome"])


def fit(
    zero: Script,
    scheduler,
    options: Options,
    job: Job,
    folder: Folder,
    start_step: int = 0,
    saving: Saving | None = None,
) -> tuple[dict[str, dict], list[Call]]:
    """Run the steps after `start_step`. Collective.

    Returns this rank's memory before the last update (place -> category -> bytes), and the last step's collectives.
    """
    batches = job.batches_from(start_step)
    with Progress(zero, options, job, folder, start_step) as progress, saving or nullcontext():
        for step in range(start_step + 1, options.steps + 1):
            loss = accumulate(zero, next(batches), job.device)
            if progress.reads_at(step):
                progress.count_memory()  # before the step: clipping copies 16-bit gradients to fp32
            norm = zero.clip_grad_norm_(options.clip)
            lr = scheduler.get_last_lr()[0]
            zero.optimizer.step()
            if zero.stepped:  # False only in fp16, after an overflow
                scheduler.step()
            zero.optimizer.zero_grad()
            progress.after_step(step, loss, norm, lr)
            if saving:
                saving.after_step(zero, step, partial(progress.check, step))
    return progress.memory, zero.ledger


def accumulate(zero: Script, micro_batches: list[text.Batch], device: torch.device) -> torch.Tensor:
    """Forward and backward of all micro-batches (x, y), each (B, T): gradients become means over them and over ranks.

    Returns this rank's mean loss (0-dim, on the device).
    """
    total = torch.zeros((), device=device)
    for index, (x, y) in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        with nullcontext() if last else zero.no_sync():
            loss = zero.model(to(device, x), to(device, y)) / len(micro_batches)
            zero.scale(loss).backward()
        total += loss.detach()
    return total


def to(device: torch.device, tokens: torch.Tensor) -> torch.Tensor:
    """Copy to the device without waiting. (From pageable memory CUDA would first finish its queue.)"""
    return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens


@torch.no_grad()
def validate(zero: Script, job: Job) -> float:
    """Mean loss over the validation sequences; each rank computes its share. Collective."""
    zero.model.eval()
    total = sum(zero.model(to(job.device, x), to(job.device, y)).item() * len(x) for x, y in job.validation)
    zero.model.train()
    zero.comm.ledger.end_step()  # the gathers of stage 3 above are no part of a training step's ledger
    return sum(zero.comm.host.gather(total)) / job.validation_sequences


def main(argv: list[str] | None = None) -> None:
    """The whole program. If it ends early: one line on stderr, and status 2, or 128 + the number of a signal."""
    with safe_streams():
        run(sys.argv[1:] if argv is None else argv)


def run(argv: list[str]) -> None:
    """Prepare, meet the other ranks, train. A Refusal ends the process here."""
    place, store = Place(0, 1, 0, 1), None
    try:
        place = find_place(os.environ)
        options, arguments, job, problem, pretended = Options(), {}, None, None, None
        try:
            options = parse(argv)
            arguments = dataclasses.asdict(options)
            if options.pretend_world:
                pretended = Place(options.pretend_rank, options.pretend_world, 0, 1)
                if place.world_size > 1:
                    raise ValueError("--pretend-world is of one process; start it with python, not with torchrun")
            job = prepare(options, pretended or place)
        except (ValueError, OSError) as error:
            problem = first_line(error)
        time_out = timedelta(seconds=options.time_out)
        store = open_store(place, os.environ, time_out)
        roll_call(store, place, arguments, problem, time_out)
        if pretended:
            pretend(options, job, pretended)
        else:
            start_and_train(options, job, place, store, time_out)
    except Refusal as refusal:
        leave(refusal, place, store, os.environ)
    except KeyboardInterrupt:  # before the first step or after the last; in between Saving receives the signal
        leave(OwnRefusal("ended by Ctrl-C"), place, store, os.environ)


def start_and_train(options: Options, job: Job, place: Place, store: dist.Store, time_out: timedelta) -> None:
    """Everything from the first collective on. A Refusal of `refusal_for`, if training ends early."""
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    dist.init_process_group(job.backend, store=store, rank=place.rank, world_size=place.world_size, timeout=time_out)
    try:
        train(options, job, place)
    except Exception as error:
        refusal = refusal_for(error, options, place)
        if refusal is None:
            raise
        raise refusal from error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
