"""Does the model fit this machine? A check before anything is allocated.

    needed, a rank    memory.model_state_bytes: parameters, gradients and optimizer states at the end of a backward
    there             a GPU's memory; or the host's free memory, divided by the number of ranks on it

Model states alone are a lower bound: if they do not fit, the model cannot train. Activations may still be too large.

Left out: host memory under --offload, and swap.
"""

from pathlib import Path

import torch

from zero_mini.memory.formulas import model_state_bytes
from zero_mini.trainer.gpt import PRESETS, GPTConfig, parameter_count
from zero_mini.trainer.launch import Place
from zero_mini.trainer.options import Options
from zero_mini.trainer.report import readable

PROCESS_BYTES = 3e8  # Python and torch themselves


def check_memory(options: Options, config: GPTConfig, device: torch.device, dtype: torch.dtype, place: Place) -> None:
    """ValueError if the model states of a rank cannot fit; it names the options that would."""
    if options.offload:
        return
    there = memory_of(device, place)
    needed = states(config, options.stage, dtype, place)
    if needed <= there:
        return
    remedies = [f"--stage {s}" for s in range(options.stage + 1, 4) if states(config, s, dtype, place) <= there]
    smaller = [name for name, preset in PRESETS.items() if states(preset, options.stage, dtype, place) <= there]
    largest = max(smaller, key=lambda name: parameter_count(PRESETS[name]), default=None)
    remedies += [f"--model {largest}"] * (largest is not None) + ["--offload host"] * (device.type == "cuda")
    where = "its GPU" if device.type == "cuda" else f"this machine for each of {place.local_world_size} ranks"
    raise ValueError(
        f"--model {options.model} at --stage {options.stage} takes {readable(needed)} for the model states of a rank, "
        f"and {where} has {readable(there)}; {' or '.join(remedies) or 'more ranks'} would fit"
    )


def states(config: GPTConfig, stage: int, dtype: torch.dtype, place: Place) -> float:
    """Bytes of a rank's model states."""
    return sum(model_state_bytes(parameter_count(config), place.world_size, stage, dtype.itemsize).values())


def memory_of(device: torch.device, place: Place) -> float:
    """Bytes available to one rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_bytes() / place.local_world_size - PROCESS_BYTES


def host_bytes(root: Path = Path("/")) -> float:
    """The host's free memory, or its control group's limit if that is lower; infinite if the system reports neither."""
    limits = [float("inf")]
    meminfo, limit = root / "proc/meminfo", root / "sys/fs/cgroup/memory.max"
    if meminfo.is_file():
        limits += [
            1024 * int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")
        ]
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits)
