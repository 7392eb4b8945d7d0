"""Functions for lessons: the first cell, the device of tensors, records of real GPUs, pictures for sliders.

    >>> from zero_mini.course.lesson import say_what_is_here
    >>> say_what_is_here()  # doctest: +SKIP
    Python 3.11.2, torch 2.13.0, 2 cores; ranks run on the CPU and talk by gloo.

Left out: installation; error messages name the command.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from zero_mini.course.ranks import own_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEEDED = ("matplotlib", "ipywidgets")


def say_what_is_here(ranks: int = 2) -> None:
    """Print one line; RuntimeError with the command to run if a package of the lessons is missing."""
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


here = own_device  # the device of tensors; the short name is for cells


def recorded(name: str) -> dict:
    """A record of measurements on GPUs that is part of the package: measured/NAME.json, which names its machine.

    FileNotFoundError if there is no such record.

    >>> recorded("memory")["machine"]["cards"]
    2
    """
    return json.loads(files("zero_mini").joinpath(f"measured/{name}.json").read_text())


def ring_step(kind: str = "all_reduce", N: int = 4, step: int = 0) -> Figure:
    """One step of a collective, for a slider; a number past the last step gives the last, and the page says so."""
    from zero_mini.course.plots.frame import write
    from zero_mini.course.plots.steps import draw_steps, ring_sends

    last = len(ring_sends(kind, N))
    figure = draw_steps(kind, N, min(step, last))
    if step > last:
        write(figure, 3.0, 1.3, f"There is no step {step}: {kind} on {N} ranks ends with step {last}.", va="top")
    return figure
