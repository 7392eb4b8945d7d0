"""The output of a run: tables on the screen, and a folder with metrics and weights.

    DIR/config.json     every argument, the model's shape, the number of ranks
    DIR/metrics.jsonl   one JSON object a line, for each step that was logged; a resumed run appends to it
    DIR/weights.pt      model.state_dict(), whole and in fp32: for any stage, any number of ranks, or one GPU
    DIR/step-20         a checkpoint (checkpoint/sharded.py); DIR/lock keeps other jobs out
    DIR/tensorboard     the metrics again, with --tensorboard
    DIR/gpt2            the model for Hugging Face's GPT-2, with --export-gpt2 (gpt2_file.py)

In the tables MB is 1e6 bytes and GB 1e9.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tabulate import tabulate

from zero_mini.comm import Call
from zero_mini.memory import formulas
from zero_mini.trainer.gpt import GPT, GPTConfig
from zero_mini.trainer.gpt2_file import export_gpt2, import_gpt2
from zero_mini.trainer.launch import OwnRefusal, first_line


def readable(count: float, unit: str = "B") -> str:
    """A count in three digits, decimal prefixes.

    >>> readable(1_234_567), readable(16e9), readable(831_000, unit="")
    ('1.23 MB', '16.0 GB', '831 k')
    """
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            digits = f"{count / factor:#.3g}".rstrip(".")
            return f"{digits} {prefix}{unit}"
    return f"{count:.0f} {unit}".rstrip()


# --- tables -----------------------------------------------------------------------------------


def cost_table(
    psi: int,
    stage: int,
    world_size: int,
    compute_bytes: int,
    micro_batches: int,
    memory: dict[str, dict[str, int]],
    calls: list[Call],
) -> str:
    """Memory and communication: the paper's formulas beside this run's numbers on rank 0.

    psi: parameters. compute_bytes: 4 in fp32, 2 in bf16. memory: place -> category -> bytes (`zero.memory(place)`)
    after a step's last backward; a place other than the device has a column if it holds anything. calls: the ledger of
    one step.
    """
    places = [place for place in memory if place == "device" or any(memory[place].values())]
    states = formulas.model_state_bytes(psi, world_size, stage, compute_bytes, accumulate=micro_batches > 1)
    rows = [
        [category, readable(states.get(category, 0)), *(readable(memory[place][category]) for place in places)]
        for category in memory["device"]
        if category in states or any(memory[place][category] for place in places)
    ]
    totals = [readable(sum(memory[place].values())) for place in places]
    rows.append(["together", readable(sum(states.values())), *totals])
    numel = formulas.wire_numel(psi, world_size, stage, micro_batches)
    sent_numel = sum(call.wire_numel(world_size) for call in calls)
    rows.append(["elements sent in a step", readable(numel, ""), readable(sent_numel, "")])
    sent = wire_bytes(psi, stage, world_size, compute_bytes, micro_batches)
    rows.append(["bytes sent in a step", readable(sent), readable(sent_bytes(calls, world_size))])
    measured = ["measured"] if len(places) == 1 else places
    align = ("left", "right", *["right"] * len(places))
    return tabulate(rows, headers=["rank 0 holds", "the paper", *measured], colalign=align)


def host_peak_bytes() -> int:
    """The peak of this process's memory in the host's RAM, Python and torch included."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def sent_bytes(calls: list[Call], world_size: int) -> float:
    """Bytes that one rank sends, ring convention."""
    return sum(call.wire_numel(world_size) * call.itemsize for call in calls)


def wire_bytes(psi: float, stage: int, world_size: int, compute_bytes: int, micro_batches: int) -> float:
    """Bytes that one rank sends in a step: `formulas.wire_numel` times the bytes of an element.

    With several micro-batches stages 0 and 1 sum gradients in fp32 and send them in fp32.

    >>> wire_bytes(1000, stage=1, world_size=2, compute_bytes=2, micro_batches=1)
    2000.0
    >>> wire_bytes(1000, stage=1, world_size=2, compute_bytes=2, micro_batches=4)
    3000.0
    """
    total = formulas.wire_numel(psi, world_size, stage, micro_batches) * compute_bytes
    if micro_batches > 1 and stage < 2:
        gradients = (2 if stage == 0 else 1) * psi * (world_size - 1) / world_size
        total += gradients * (4 - compute_bytes)
    return total


# --- the folder -------------------------------------------------------------------------------


def check_folder(folder: Path, needed_bytes: int) -> None:
    """ValueError unless `folder`, made if it is missing, can be written to and has room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be written to: {error.strerror}; choose another folder") from error
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        room = f"{readable(needed_bytes)} needed, {readable(free_bytes)} free"
        raise ValueError(f"--out {folder}: {room}; make room, or choose a folder on another disk")


def check_file(flag: str, path: str | Path) -> None:
    """ValueError now, and not after the run, unless the file can be written. A file that was not there is not left."""
    new = not os.path.lexists(path)
    try:
        open(path, "a").close()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written to: {error.strerror}; choose another file") from error
    if new:
        os.remove(path)


class Folder:
    """The files of one run. Without a path, as on all ranks but 0, its methods do nothing."""

    def __init__(self, path: Path | None, config: dict, start_step: int = 0, tensorboard: bool = False):
        """start_step: the step at which the run begins. Metrics of later steps, left by a crash, are dropped."""
        self.path, self.board = path, None
        self.write("config.json", json.dumps(config, indent=2))
        self.write("metrics.jsonl", "".join(self.metrics_until(start_step)))
        if path and tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # an extra

            self.board = SummaryWriter(path / "tensorboard", purge_step=start_step + 1)

    def metrics_until(self, step: int) -> list[str]:
        """Lines of an earlier run in this folder, up to `step`; a line that a crash has cut short is left out."""
        if not step or not self.path or not (self.path / "metrics.jsonl").is_file():
            return []
        lines = (self.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] <= step]

    def note(self, **metrics: float) -> None:
        """Append one line of metrics; it is in the file when this returns."""
        self.write("metrics.jsonl", json.dumps(metrics) + "\n", "a")
        if self.board:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, metrics["step"])
            self.board.flush()

    def write(self, name: str, text: str, mode: str = "w") -> None:
        """Append to a file ("a"), or replace it ("w"): a reader finds the whole old or the whole new file."""
        if self.path:
            file = self.path / name
            try:
                if mode == "w":
                    file.with_name(f"{name}.unfinished").write_text(text)
                    os.replace(file.with_name(f"{name}.unfinished"), file)
                else:
                    with file.open(mode) as opened:
                        opened.write(text)
            except OSError as error:
                raise OwnRefusal(f"{file} could not be written: {error.strerror}") from error

    def save(self, model: GPT, for_gpt2: bool = False) -> None:
        """Write whole weights. Collective, because they may be gathered. OwnRefusal if the disk is full."""
        state = model.state_dict()
        if not self.path:
            return
        unfinished = self.path / "weights.pt.unfinished"
        try:
            # clone: each tensor is a view of its unit's buffer, and torch.save would write the whole buffer.
            torch.save({name: value.cpu().clone() for name, value in state.items()}, unfinished)
            os.replace(unfinished, self.path / "weights.pt")  # atomic: a reader finds the whole old or new file
            if for_gpt2:
                export_gpt2(self.path / "gpt2", state, model.config)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
            unfinished.unlink(missing_ok=True)
            raise OwnRefusal(f"weights could not be written to {self.path}: {first_line(error)}") from error


def load_weights(path: Path, config: GPTConfig) -> dict[str, torch.Tensor]:
    """The weights that `Folder.save` wrote, memory-mapped; ValueError if the file is not of such a model."""
    if not path.exists():
        raise ValueError(f"--init-from {path} does not exist; give the weights.pt or model.safetensors of a run")
    if path.suffix == ".safetensors":
        return import_gpt2(path, config)
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
    except Exception as error:  # torch.load raises whatever the bytes of a foreign file provoke
        raise ValueError(f"--init-from {path} holds no weights: {first_line(error)}") from error
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in GPT(config).state_dict().items()}
    for name in expected | shapes:
        if shapes.get(name) != expected.get(name):
            raise ValueError(
                f"--init-from {path} is of another model: {name} is {shapes.get(name, 'missing')} there and "
                f"{expected.get(name, 'missing')} here; give the --model, --L, --d, --sequence-length it was made with"
            )
    settings = path.with_name("config.json")  # needed for the number of heads, which no tensor's shape shows
    heads = json.loads(settings.read_text())["model_shape"]["heads"] if settings.is_file() else config.heads
    if heads != config.heads:
        raise ValueError(f"--init-from {path} is of another model: it has {heads} heads; pass --heads {heads}")
    return weights
