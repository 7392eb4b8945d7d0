"""Every flag of train_gpt.py: one frozen dataclass defines names, defaults, bounds and help."""

import argparse
import dataclasses
import difflib
import math
import typing
from dataclasses import dataclass

from zero_mini.simulate.absent import check_place
from zero_mini.trainer.gpt import PRESETS


def option(default, meaning: str, *, least=None, above=None, choices=None, also=()):
    """A field that is a flag: its number is >= `least` or > `above`; `also` are synonyms of its name."""
    metadata = dict(help=meaning, least=least, above=above, choices=choices, also=also)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """Every flag, its default, its bounds and its help. ValueError if a value is out of bounds.

    >>> Options(lr=float("nan"))
    Traceback (most recent call last):
    ValueError: --lr must be a number > 0 (got nan)
    """

    stage: int = option(2, "of ZeRO; 0 is plain data parallelism", choices=(0, 1, 2, 3))
    model: str = option("nano", "a preset shape; --L, --width, --heads change it", choices=tuple(PRESETS))
    L: int | None = option(None, "blocks", least=1)
    # Up to Python 3.11 torchrun rejects "--d", even after the script's name: it is a prefix of two of its own flags.
    d: int | None = option(None, "channels, a multiple of --heads; torchrun needs --width", least=1, also=("--width",))
    heads: int | None = option(None, "attention heads", least=1)
    data: str | None = option(None, "text file, or folder of them; else Python's own reference")
    steps: int = option(300, "optimizer steps", least=1)
    global_batch: int = option(32, "sequences in a step, over all ranks", least=1)
    micro_batch: int | None = option(None, "sequences that a rank takes at once; else its whole share", least=1)
    sequence_length: int | None = option(None, "T, tokens in a sequence; else the preset's", least=1)
    precision: str = option(
        "auto",
        "of the computation, over an fp32 master copy; auto: bf16 on GPUs that have it, fp16 on others, fp32 on a CPU",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    checkpoint_activations: int = option(
        0, "compute activations of every k-th block again in backward, in place of keeping them; 0: of none", least=0
    )
    keep_activations: str = option(
        "device", "where inputs of such blocks wait for backward", choices=("device", "host")
    )
    offload: str | None = option(
        None, "where master copy and optimizer states wait, and the CPU updates them: host, or a folder (stages 1 to 3)"
    )
    loss_chunks: int = option(1, "parts of the tokens, of which one has logits at a time", least=1)
    lr: float = option(3e-3, "highest learning rate", above=0)
    warmup: int = option(20, "steps in which it rises; then it falls as a cosine", least=0)
    weight_decay: float = option(0.1, "of matrices", least=0)
    dropout: float = option(0.0, "part of the activations that is set to zero, others on each rank", least=0)
    clip: float = option(1.0, "largest norm of a gradient", above=0)
    seed: int = option(0, "of weights, order of data, and sample", least=0)
    log_every: int = option(10, "steps between two readings of the loss; each waits for the device", least=1)
    sample_length: int = option(200, "bytes to write at the end", least=0)
    device: str = option("auto", "auto takes GPUs if there are any", choices=("auto", "cpu", "cuda"))
    backend: str = option("auto", "auto takes nccl on GPUs", choices=("auto", "gloo", "nccl"))
    out: str | None = option(None, "folder for config.json, metrics.jsonl, checkpoints and weights.pt")
    init_from: str | None = option(None, "weights.pt or model.safetensors to start from")
    save_every: int | None = option(
        None, "steps between checkpoints; the last step, Ctrl-C, SIGHUP and SIGTERM make one too", least=1
    )
    keep: int = option(2, "checkpoints that stay, the last ones", least=1)
    save_in_background: bool = option(False, "train on while a checkpoint is written; takes host memory for a copy")
    resume: str | None = option(
        None, "auto: go on from the newest whole checkpoint in --out, if there is one; or PATH of a checkpoint"
    )
    tensorboard: bool = option(False, "write the metrics for TensorBoard too, into --out")
    export_gpt2: bool = option(False, "write the model for Hugging Face's GPT-2 too, into --out")
    pretend_world: int | None = option(
        None,
        "one process is a rank of so many, and the others are absent: two steps at most, then what they took",
        least=1,
    )
    pretend_rank: int = option(0, "which rank of --pretend-world this is", least=0)
    time_out: float = option(600.0, "seconds that a rank waits for the others", above=0)

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, bound = getattr(self, f.name), f.metadata
            if value is None:
                continue
            if value == "" and not bound["choices"]:
                raise ValueError(f"{flag(f)} is empty; give a path, or leave the flag out")
            is_out_of_bounds = (
                (bound["choices"] and value not in bound["choices"])
                or (bound["above"] is not None and not bound["above"] < value < math.inf)
                or (bound["least"] is not None and not bound["least"] <= value < math.inf)
            )
            if is_out_of_bounds:
                raise ValueError(f"{flag(f)} must be {wanted(f)} (got {value})")
        for f, most in (("seed", 2**63 - 1), ("time_out", 1e9)):
            if getattr(self, f) > most:
                raise ValueError(f"--{f.replace('_', '-')} must be at most {most:g} (got {getattr(self, f)})")
        if self.pretend_world is not None:
            check_place(self.pretend_rank, self.pretend_world)
            of_real_ranks = ("offload", "out", "init_from", "resume", "save_every", "tensorboard", "export_gpt2")
            for f in (*of_real_ranks, "dropout"):  # each rank drops other activations
                if getattr(self, f):
                    raise ValueError(f"--{f.replace('_', '-')} does not go with --pretend-world; leave it out")
        elif self.pretend_rank:
            raise ValueError("--pretend-rank is of --pretend-world; add --pretend-world N")
        if self.offload and self.stage == 0:
            raise ValueError("--offload needs sharded states (--stage is 0); add --stage 1, 2 or 3")
        for f in ("save_every", "tensorboard", "export_gpt2"):
            if getattr(self, f) and not self.out:
                raise ValueError(f"--{f.replace('_', '-')} needs a folder to write into; add --out DIR")
        if self.resume == "auto" and not self.out:
            raise ValueError("--resume auto looks for checkpoints in --out; add --out DIR, or give --resume PATH")
        if self.save_in_background and not self.save_every:
            raise ValueError("--save-in-background is of checkpoints; add --save-every N")
        if self.keep_activations == "host" and not self.checkpoint_activations:
            raise ValueError("--keep-activations host is of checkpointed blocks; add --checkpoint-activations 1")


def kind(f: dataclasses.Field) -> type:
    """int for a field of type `int | None` too."""
    return (typing.get_args(f.type) or (f.type,))[0]


def wanted(f: dataclasses.Field) -> str:
    """The values that a flag takes, in words."""
    bound = f.metadata
    if bound["choices"]:
        *most, last = bound["choices"]
        return f"{', '.join(map(str, most))} or {last}"
    number = "a whole number" if kind(f) is int else "a number"
    return f"{number} > {bound['above']}" if bound["above"] is not None else f"{number} >= {bound['least']}"


def flag(f: dataclasses.Field) -> str:
    return "--" + f.name.replace("_", "-")


def unrecognized(unknown: list[str], flags: list[str]) -> str:
    """What to say of arguments that no flag takes.

    >>> unrecognized(["--stgae", "2"], ["--stage", "--steps"])
    'unrecognized arguments: --stgae 2; did you mean --stage? --help lists the flags'
    """
    near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, 1)
    remedy = f"did you mean {near[0]}? " if near else ""
    return f"unrecognized arguments: {' '.join(unknown)}; {remedy}--help lists the flags"


def parse(argv: list[str]) -> Options:
    """Arguments -> Options; ValueError, in one line, for an unknown flag or an impossible value."""

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise ValueError(message)

    parser = Parser("train_gpt.py", description="Train a GPT-2 at any stage of ZeRO.", allow_abbrev=False)
    for f in dataclasses.fields(Options):
        if kind(f) is bool:
            parser.add_argument(flag(f), action="store_true", help=f.metadata["help"])
            continue
        choices, default = f.metadata["choices"], "" if f.default is None else f" (default: {f.default})"
        shown = "|".join(map(str, choices)) if choices else {int: "N", float: "X", str: "PATH"}[kind(f)]
        names, meaning = (flag(f), *f.metadata["also"]), f.metadata["help"] + default
        parser.add_argument(*names, default=f.default, metavar=shown, help=meaning)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [name for f in dataclasses.fields(Options) for name in (flag(f), *f.metadata["also"])]
        raise ValueError(unrecognized(unknown, flags))
    values = vars(values)
    for f in dataclasses.fields(Options):
        if isinstance(values[f.name], str) and kind(f) in (int, float):
            try:
                values[f.name] = kind(f)(values[f.name])
            except ValueError as error:
                raise ValueError(f"{flag(f)} must be {wanted(f)} (got {values[f.name]})") from error
    return Options(**values)
