"""The first cell of every lesson: what is installed here, and where ranks will run.

    >>> from zero_mini.course import say_what_is_here
    >>> say_what_is_here()  # doctest: +SKIP
    Python 3.11.2, torch 2.13.0, 2 cores; ranks run on the CPU and talk by gloo.

Left out: installing anything. It says how.
"""

import importlib.util
import os
import platform

import torch
import torch.distributed as dist

NEEDED = ("matplotlib", "ipywidgets")


def say_what_is_here(ranks: int = 2) -> None:
    """Print one line; RuntimeError with the command to run if a lesson could not be worked through here."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{' and '.join(missing)} not installed; in the project's folder: pip install -e '.[lessons]'"
        )
    gpus = torch.cuda.device_count()
    where = "the CPU and talk by gloo"
    if gpus >= ranks:
        where = f"{gpus} x {torch.cuda.get_device_name(0)} and talk by NCCL"
    cores = os.cpu_count()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {cores} cores; ranks run on {where}.")


def here() -> torch.device:
    """In a function on ranks: this rank's GPU if ranks talk by NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
