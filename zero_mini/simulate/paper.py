"""The paper's numbers, measured on one device: rank 0 of N, the others absent.

    python -m zero_mini.simulate.paper figure1              7.5B, N = 64, stages 0 to 3
    python -m zero_mini.simulate.paper figure1 --model 350M --device cpu --sequence-length 128
    python -m zero_mini.simulate.paper table1               7.5B, 128B, 1T; N = 1 to 1024; the cells that may fit
    python -m zero_mini.simulate.paper table2 --memory 32   the largest model, N = 64, by bisection over L
    python -m zero_mini.simulate.paper pair --memory 80     the largest model for 2 GPUs: simulated, then real on two
    python -m zero_mini.simulate.paper title --memory 80    1T, N = 1024

Each writes JSON (--json FILE), run by run, so that an interrupted one keeps what it has. `--memory GB` is a smaller GPU
than the one at hand: torch's allocator gives no more.

Left out: model parallelism, the rows of table 2 below the first.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from zero_mini.memory.formulas import largest_model
from zero_mini.simulate.__main__ import machine
from zero_mini.simulate.measure import report
from zero_mini.simulate.setup import SHAPES, Setup, memory_bytes, shape
from zero_mini.trainer.gpt import GPTConfig
from zero_mini.trainer.launch import first_line
from zero_mini.trainer.report import check_file, readable
from zero_mini.trainer.screen import fill

TABLE_1 = {  # N -> GB at stages 1, 2, 3, as printed
    "7.5B": {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88)}
    | {256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    "128B": {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32)}
    | {256: (518, 263, 8), 1024: (513, 257, 2)},
    "1T": {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250)}
    | {256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
}
TABLE_2 = {0: 2e9, 1: 7.6e9, 2: 14.4e9, 3: 128e9}  # parameters: MP 1, N = 64, 32 GB, states alone
WIDTHS = {0: 1920, 1: 3072, 2: 4096, 3: 8192}  # d at each stage of table 2
PAIR_WIDTH = 4096
NEAR = 1.15  # by how much a model may be larger than the formula's before it is not tried


def figure_1(base: Setup) -> Iterator[dict]:
    """The four bars."""
    return (run(dataclasses.replace(base, stage=stage)) for stage in range(4))


def table_1(base: Setup) -> Iterator[dict]:
    """The cells whose states, by this package's formula, are smaller than the device's memory."""
    there = base.device_bytes or memory_of(base.device)
    for name, rows in TABLE_1.items():
        for N in rows:
            for stage in (1, 2, 3):
                cell = dataclasses.replace(base, config=SHAPES[name], world_size=N, stage=stage)
                if 0.9 * cell.states_bytes < there:
                    yield run(cell) | {"model": name}


def table_2(base: Setup) -> Iterator[dict]:
    """At each stage the largest L at a fixed width with which two steps fit; every trial is a run."""
    for stage, width in WIDTHS.items():
        yield search(dataclasses.replace(base, stage=stage), width)


def pair(base: Setup) -> Iterator[dict]:
    """The largest model as rank 0 of 2, simulated on one GPU; then it and the next larger one on two real ranks."""
    from zero_mini.course.ranks import RankError, Ranks

    base = dataclasses.replace(base, world_size=2)
    for stage in range(4):
        found = search(dataclasses.replace(base, stage=stage), PAIR_WIDTH)
        real = {}
        for L in (found["config"]["L"], found["config"]["L"] + 1) if "config" in found else ():
            setup = dataclasses.replace(base, stage=stage, config=deeper(base, PAIR_WIDTH, L))
            with Ranks(2, backend="nccl" if base.device == "cuda" else "gloo", timeout_s=300) as ranks:
                try:
                    real[L] = ranks.run(setup.run_for_real)[0]
                except RankError as error:
                    if torch.OutOfMemoryError.__name__ not in str(error):
                        raise
                    real[L] = {"outcome": first_line(error)}
            print(f"    two real ranks, L = {L}: {real[L]['outcome']}", flush=True)
        yield found | {"real": real}


def search(base: Setup, width: int) -> dict:
    """The run with the most blocks of this width that fit, and the outcome of every trial."""
    theory = largest_model(base.device_bytes, base.world_size, base.stage)
    trials: dict[int, dict] = {}

    def fits(L: int) -> bool:
        trials[L] = run(dataclasses.replace(base, config=deeper(base, width, L)))
        return trials[L]["outcome"] == "ran"

    best = largest(fits, 1, int(NEAR * theory / (12 * width**2)) + 1)
    tried = {L: trial["outcome"] for L, trial in sorted(trials.items())}
    return trials.get(best, {"outcome": "none fits", "stage": base.stage}) | {"theory_numel": theory, "tried": tried}


def deeper(base: Setup, width: int, L: int) -> GPTConfig:
    """L blocks of this width, 128 channels a head."""
    return dataclasses.replace(base.config, L=L, d=width, heads=max(1, width // 128))


def title(base: Setup) -> Iterator[dict]:
    """One rank of 1024 of a model of a trillion parameters."""
    yield run(dataclasses.replace(base, config=SHAPES["1T"], stage=3, world_size=1024))


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high that fits, if all smaller ones do; low - 1 if none does.

    >>> largest(lambda n: n * n < 50, 1, 100)
    7
    """
    low -= 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def run(setup: Setup) -> dict:
    """One simulation, printed as it ends."""
    about, result = setup.run()
    print(report(about, result, briefly=True), flush=True)
    return about | result


def memory_of(device: str) -> float:
    return torch.cuda.get_device_properties(0).total_memory if device == "cuda" else float("inf")


def main(argv: list[str] | None = None) -> int:
    commands = {"figure1": figure_1, "table1": table_1, "table2": table_2, "pair": pair, "title": title}
    parser = argparse.ArgumentParser("python -m zero_mini.simulate.paper", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=tuple(commands))
    parser.add_argument("--model", default="7.5B", help="of figure1")
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--memory", type=float, metavar="GB", help="of a smaller GPU (1e9 bytes)")
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args(argv)
    if chosen.what in ("table2", "pair") and not chosen.memory:
        parser.error(f"{chosen.what} needs --memory GB, as --memory 32")
    try:
        config = shape(chosen.model, T=chosen.sequence_length)
        small = dataclasses.replace(config, L=1, d=config.heads)  # `replace` in the commands checks what is run
        nbytes = memory_bytes(chosen.memory, chosen.device)
        base = Setup(small, world_size=chosen.world, device=chosen.device, device_bytes=nbytes)
        if chosen.what == "figure1":
            base = dataclasses.replace(base, config=config)
        if chosen.json:
            check_file("--json", chosen.json)
        runs: list[dict] = []
        for each in commands[chosen.what](base):
            runs.append(each)
            if chosen.json:
                record = {"machine": machine(chosen.device), "what": chosen.what, "simulated": runs}
                Path(chosen.json).write_text(json.dumps(record, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"simulate: error: {first_line(error)}", file=sys.stderr)
        return 2
    print(fill(f"{len(runs)} runs; states beside the paper's: {summary(runs)}"))
    return 0


def summary(runs: list[dict]) -> str:
    """
    >>> summary([{"stage": 1, "states_bytes": 2e9, "paper_bytes": 2e9}])
    'stage 1 2.00 GB and 2.00 GB'
    """
    rows = [run for run in runs if "states_bytes" in run]
    return "; ".join(
        f"stage {run['stage']} {readable(run['states_bytes'])} and {readable(run['paper_bytes'])}" for run in rows
    )


if __name__ == "__main__":
    sys.exit(main())
