"""Prepare the work of one rank: do everything that can fail on this rank alone, before a rank waits for another.

Left out: the model. It is built after the roll call, because zeroify() sends values to other ranks.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from zero_mini.trainer import text
from zero_mini.trainer.fits import check_memory
from zero_mini.trainer.gpt import PRESETS, GPTConfig, parameter_count
from zero_mini.trainer.launch import Place
from zero_mini.trainer.options import Options
from zero_mini.trainer.report import check_folder, load_weights
from zero_mini.trainer.resume import what_must_not_change

VALIDATION_SEQUENCES = 64
PROMPT_TOKENS = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Job:
    """The work of this rank, prepared before the roll call."""

    config: GPTConfig
    device: torch.device
    backend: str
    precision: str  # "fp32", "bf16" or "fp16"
    micro_batches: int
    batches_from: Callable[[int], Iterator[list[text.Batch]]]  # step -> the micro-batches of each step after it
    validation: list[text.Batch]
    validation_sequences: int
    prompt: torch.Tensor  # (1, PROMPT_TOKENS)
    weights: dict[str, torch.Tensor] | None
    must_not_change: dict[str, object]  # when a run is resumed


def prepare(options: Options, place: Place) -> Job:
    """Do every step that can fail on this rank alone. ValueError with the reason."""
    device, backend = find_device(options.device, options.backend, place)
    precision = find_precision(options.precision, device)
    changes = {"L": options.L, "d": options.d, "heads": options.heads, "T": options.sequence_length}
    changes["dropout"] = options.dropout
    changes = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(PRESETS[options.model], **changes)

    check_memory(options, config, device, DTYPES[precision], place)
    training_text, held_out = text.split(text.load(options.data, config.T, config.vocab))
    ranks, G = place.world_size, options.global_batch
    if options.pretend_world:  # every rank, absent ones included, has the whole batch
        place, ranks = Place(0, 1, 0, 1), 1
    micro_batch = options.micro_batch or (G // ranks if G % ranks == 0 else 1)
    batches_from = partial(text.batches, training_text, config.T, G, place.rank, ranks, micro_batch, options.seed)
    batches_from(0)  # raises if the batches do not fit the text
    for flag, is_given, package in (
        ("--tensorboard", options.tensorboard, "tensorboard"),
        ("--export-gpt2", options.export_gpt2, "safetensors"),
        (f"--init-from {options.init_from}", str(options.init_from).endswith(".safetensors"), "safetensors"),
    ):
        if is_given and importlib.util.find_spec(package) is None:
            raise ValueError(f'{flag} needs a package: pip install -e ".[{package}]"')
    sequences = min(VALIDATION_SEQUENCES, text.count_sequences(held_out, config.T, "the validation text"))
    validation = text.validation_batches(held_out, config.T, sequences, place.rank, ranks, micro_batch)
    weights = None
    if place.rank == 0:  # only rank 0 writes, and zeroify() broadcasts its values
        if options.init_from:
            weights = load_weights(Path(options.init_from), config)
        if options.out:
            check_out(options, config)
    return Job(
        config=config,
        device=device,
        backend=backend,
        precision=precision,
        micro_batches=G // (ranks * micro_batch),
        batches_from=batches_from,
        validation=validation,
        validation_sequences=sequences,
        prompt=held_out[None, :PROMPT_TOKENS].long().to(device),
        weights=weights,
        must_not_change=what_must_not_change(options, config, training_text),
    )


def check_out(options: Options, config: GPTConfig) -> None:
    """ValueError if --out cannot be written to, has too little room, or has weights that the run would write over."""
    folder = Path(options.out)
    can_go_on = any(folder.glob("step-*"))
    if (folder / "weights.pt").exists() and not (options.resume and can_go_on):
        remedy = "delete the folder, or choose another one"
        if can_go_on:
            remedy = f"go on with --resume auto, {remedy}"
        raise ValueError(f"--out {folder} has the weights.pt of a run that ended; {remedy}")
    checkpoints = 12 * (options.keep + 1) if options.save_every else 0  # fp32 master and two moments
    check_folder(folder, (4 + checkpoints) * parameter_count(config))


def find_device(device: str, backend: str, place: Place) -> tuple[torch.device, str]:
    """This rank's device and the backend of its collectives; "auto" takes GPUs and NCCL where there are any.

    ValueError, and no fallback, if there are too few GPUs for the ranks.
    """
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus and backend != "gloo" else "cpu"
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo"
    if backend == "nccl" and place.local_world_size > gpus:
        raise ValueError(
            f"nccl needs one GPU a rank: {place.local_world_size} ranks, {gpus} GPUs; use --backend gloo --device cpu"
        )
    if (device == "cuda") != (backend == "nccl"):
        raise ValueError(f"--device {device} does not go with --backend {backend}: nccl is for GPUs, gloo for the CPU")
    return torch.device(device, place.local_rank if device == "cuda" else None), backend


def find_precision(precision: str, device: torch.device) -> str:
    """The precision of the computation. ValueError if the card only emulates bf16, which torch calls supported.

    >>> find_precision("auto", torch.device("cpu")), find_precision("fp16", torch.device("cpu"))
    ('fp32', 'fp16')
    """
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto":
        return "fp32" if device.type == "cpu" else "bf16" if has_bf16 else "fp16"
    if precision == "bf16" and device.type == "cuda" and not has_bf16:
        raise ValueError(f"{torch.cuda.get_device_name(device)} does not compute in bf16; use --precision fp16")
    return precision
