"""What rank 0 prints before the first step and after the last one: the model and the step; then costs and a sample.

Left out: the lines of the steps in between, which `fit` of train_gpt.py prints.
"""

import torch

from zero_mini.comm import Call
from zero_mini.memory.inventory import waiting_places
from zero_mini.script import Script
from zero_mini.trainer import text
from zero_mini.trainer.gpt import parameter_count
from zero_mini.trainer.job import DTYPES, PROMPT_TOKENS, Job
from zero_mini.trainer.launch import Place
from zero_mini.trainer.options import Options
from zero_mini.trainer.report import cost_table, host_peak_bytes, readable
from zero_mini.trainer.screen import fill, printable

ABOUT_SLOTS = (
    "communication: the buffers that blocks are gathered into, two of them however many blocks there are, and the "
    "root's; a block that is still in one when it is needed again is not sent again"
)


def describe(options: Options, job: Job, place: Place) -> str:
    """Two lines on model and step, and a hint if there is one rank only."""
    N, k, shape = place.world_size, job.micro_batches, job.config
    lines = [
        f"GPT of {readable(parameter_count(shape), '')} parameters (L={shape.L} d={shape.d} heads={shape.heads}), "
        f"stage {options.stage}, {job.precision}, ranks: {N} on {job.device.type} by {job.backend}",
        f"a step is {options.global_batch} sequences of {shape.T} tokens: {N} ranks x {k} micro-batches x "
        f"{options.global_batch // (N * k)}",
    ]
    if N == 1:
        lines += [
            "One rank holds everything: nothing is sharded. To shard:",
            f"    torchrun --standalone --nproc-per-node 2 zero_mini/train_gpt.py --stage {options.stage}",
        ]
    return "\n".join(lines)


def print_costs(options: Options, job: Job, zero: Script, memory: dict[str, dict], calls: list[Call]) -> None:
    """Print memory and communication beside the paper's formulas; then host memory, activations and the loss scale.

    memory    place -> category -> bytes, after the last backward
    calls     the collectives of the last step
    """
    if memory:  # there was a step
        psi, itemsize = parameter_count(job.config), DTYPES[job.precision].itemsize
        print()
        print(cost_table(psi, options.stage, zero.world_size, itemsize, job.micro_batches, memory, calls))
        if options.stage == 3:
            print(fill(ABOUT_SLOTS))
    if options.offload:
        print(f"\nhost memory of this process at its peak, all in all: {readable(host_peak_bytes())}")
    if options.checkpoint_activations:
        blocks = len(range(0, job.config.L, options.checkpoint_activations))
        line = f"activations: {blocks} blocks keep their inputs alone and compute the rest again in backward"
        for host in waiting_places(zero.model):
            line += f"; at most {readable(host.peak_bytes)} waited in host memory"
        print("\n" + fill(line))
    if zero.scaler is not None:
        scale, skipped = zero.scaler.scale, zero.scaler.skipped
        print(f"\nloss scale: {scale:g} at the end; steps skipped for an overflow: {skipped}")


def print_results(options: Options, at_start: float, at_end: float, sample: torch.Tensor) -> None:
    """Print the validation loss before and after the training, and `sample` (tokens: the prompt, then new ones)."""
    print(f"\nvalidation loss: {at_start:.3f} at the start, {at_end:.3f} at the end")
    if options.sample_length:
        opening, continuation = (printable(text.decode(part)) for part in sample.tensor_split([PROMPT_TOKENS]))
        print(f"\nthe held-out text begins:\n{fill(opening)}\n\nthe model goes on:\n{fill(continuation)}")
