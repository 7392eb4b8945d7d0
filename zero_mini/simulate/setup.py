"""A GPT as rank r of N: its shape, its options, and whether the host can run it at all."""

import functools
from dataclasses import asdict, dataclass, replace

import torch

from zero_mini.activations.checkpointing import checkpoint_blocks
from zero_mini.binding.split import split_blocks
from zero_mini.memory.formulas import model_state_bytes
from zero_mini.script import Script
from zero_mini.simulate.absent import Absent, OwnSlice, check_place
from zero_mini.simulate.measure import Training, at_most, formulas, measure
from zero_mini.simulate.values import Values
from zero_mini.trainer.fits import PROCESS_BYTES, host_bytes
from zero_mini.trainer.gpt import GPT, PRESETS, GPTConfig, init_rule, param_groups, parameter_count
from zero_mini.trainer.report import readable
from zero_mini.zeroify import zeroify

# The sizes of figure 1 and table 1, with GPT-2's text and 128 channels a head.
SHAPES = PRESETS | {
    "7.5B": GPTConfig(L=32, d=4352, heads=34, vocab=50304, T=1024),
    "128B": GPTConfig(L=101, d=10240, heads=80, vocab=50304, T=1024),
    "1T": GPTConfig(L=128, d=25600, heads=200, vocab=50304, T=1024),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCK_BYTES = 1e5  # of a block in the host's memory, without any values: modules, hooks, units
SPLIT_ABOVE = 1 << 30  # elements of a block


@dataclass(frozen=True)
class Setup:
    """One simulated rank. ValueError, in one line, if it cannot be run here."""

    config: GPTConfig
    stage: int = 3
    world_size: int = 64
    rank: int = 0
    device: str = "cpu"
    precision: str = "bf16"
    batch: int = 1
    checkpoint: bool = True
    loss_chunks: int = 8
    split: int | None = SPLIT_ABOVE  # blocks of more elements are cut; None: none is
    seed: int = 0
    own_slice: bool = False  # the trap
    device_bytes: float | None = None  # of a smaller GPU than this one

    def __post_init__(self) -> None:
        check_place(self.rank, self.world_size)
        check_describable(self.config)
        for name, value, allowed in (("precision", self.precision, DTYPES), ("device", self.device, ("cpu", "cuda"))):
            if value not in allowed:
                raise ValueError(f"{name} must be {' or '.join(allowed)} (got {value!r})")
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1 (got {self.batch})")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no GPU that torch can use here; take --device cpu, and a smaller model")
        if self.device == "cpu":
            needed, there = self.states_bytes, host_bytes() - PROCESS_BYTES
            if needed > there:
                raise ValueError(
                    f"the model states of rank {self.rank} of {self.world_size} at stage {self.stage} take "
                    f"{readable(needed)}, and this machine has {readable(there)}; raise --stage or --world, or take "
                    "a smaller --model"
                )

    @property
    def psi(self) -> int:
        return parameter_count(self.config)

    @property
    def here(self) -> torch.device:
        """The device, with its number."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    @property
    def states_bytes(self) -> float:
        """By the paper's formula."""
        return sum(model_state_bytes(self.psi, self.world_size, self.stage, DTYPES[self.precision].itemsize).values())

    def build(self, absent: bool = True) -> Script:
        """The handle of this rank, whose peers are absent; or that of a real rank in the process group."""
        values = Values(functools.partial(init_rule, L=self.config.L), self.seed)
        comm = (OwnSlice if self.own_slice else Absent)(self.rank, self.world_size, values) if absent else None
        with torch.device("meta"):
            model = GPT(self.config, self.loss_chunks)
        if self.checkpoint:
            checkpoint_blocks(model)
        optimizer = torch.optim.AdamW(param_groups(model, 0.1), lr=1e-4, fused=True)
        is_cut = self.split and 12 * self.config.d**2 > self.split
        return zeroify(
            model,
            optimizer,
            self.stage,
            dtype=DTYPES[self.precision],
            device=self.here,
            units=split_blocks(model, self.split) if is_cut else None,
            initialise=values.initialise,
            comm=comm,
        )

    def training(self, absent: bool = True) -> Training:
        """Steps on random tokens, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.config.T + 1)
        tokens = torch.randint(self.config.vocab, shape, generator=generator).to(self.here)

        def compute(zero: Script) -> torch.Tensor:
            loss = zero.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            return loss.detach()

        def update(zero: Script) -> None:
            zero.optimizer.step()
            zero.optimizer.zero_grad()

        return Training(functools.partial(self.build, absent), compute, update)

    def run(self, steps: int = 2) -> tuple[dict, dict]:
        """(what was asked for, what was measured)."""
        device = torch.device(self.device)
        with at_most(self.device_bytes, device):
            result = measure(self.training(), device, steps)
        result |= formulas(self.psi, self.stage, self.world_size, DTYPES[self.precision].itemsize, result)
        return {**asdict(self), "psi": self.psi}, result

    def run_for_real(self, steps: int = 2) -> dict:
        """What a real rank measures: call it on `world_size` ranks.

        OutOfMemoryError, with the moment: the other ranks may have enough memory, and would wait for this one.
        """
        with at_most(self.device_bytes, torch.device(self.device)):
            result = measure(self.training(absent=False), torch.device(self.device), steps)
        if result["outcome"] != "ran":
            raise torch.OutOfMemoryError(result["outcome"])
        return result


def check_describable(config: GPTConfig) -> None:
    """ValueError if the host could not hold the modules of such a model."""
    if max(parameter_count(config), 4 * config.d**2, config.vocab * config.d) >= 2**60:
        raise ValueError(f"a model of {parameter_count(config):.3g} parameters is larger than torch can describe")
    needed, there = BLOCK_BYTES * config.L, host_bytes()
    if needed > there:
        raise ValueError(
            f"{config.L:,} blocks take about {readable(needed)} of host memory to describe, without any values, and "
            f"this machine has {readable(there)}; take fewer and wider blocks"
        )


def memory_bytes(gigabytes: float | None, device: str) -> float | None:
    """--memory in bytes. ValueError if no GPU can have so much, or the device is a CPU, whose memory has no such limit.

    >>> memory_bytes(32, "cuda")
    32000000000.0
    """
    if gigabytes is None:
        return None
    if not 0 < gigabytes < float("inf"):
        raise ValueError(f"--memory must be a number of GB > 0 (got {gigabytes})")
    if device == "cpu":
        raise ValueError(f"--memory {gigabytes:g} is of a GPU, and the device is the CPU; leave --memory out")
    return 1e9 * gigabytes


def shape(model: str, **changes: int | None) -> GPTConfig:
    """A named shape with some numbers changed. ValueError for an unknown name."""
    if model not in SHAPES:
        raise ValueError(f"--model must be one of {', '.join(SHAPES)} (got {model})")
    return replace(SHAPES[model], **{name: value for name, value in changes.items() if value is not None})
