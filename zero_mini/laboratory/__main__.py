"""Run every experiment, write runs/myths.json, and print the table: claim, experiment, number, verdict.

    python -m zero_mini.laboratory            `make myths`: about three minutes on two CPU cores
    python -m zero_mini.laboratory --table    the table of the committed record, as docs/facts.md has it
    python -m zero_mini.laboratory --rows     writes the rows of the committed record again, from its results
    python -m zero_mini.laboratory --out zero_mini/measured/myths.json    makes a new record to commit

An experiment is a function of this package that runs on 2 or 4 ranks, on the CPU. A row of the table is a function of
the numbers: where they say otherwise, the verdict is another one.
"""

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate

from zero_mini.course.lesson import recorded
from zero_mini.course.ranks import Ranks
from zero_mini.laboratory import balance, claims, compression, deferred, sampling, server, sparse
from zero_mini.laboratory.rows import rows
from zero_mini.laboratory.verdict import merge
from zero_mini.trainer.report import check_file

EXPERIMENTS: dict[str, tuple[int, Callable, dict]] = {  # name -> (ranks, function, arguments)
    "servers, N = 2": (2, server.compare_servers, {}),
    "staleness": (2, server.compare_staleness, {}),
    "accumulation": (2, deferred.compare_accumulation, {}),
    "densities": (2, sparse.compare_densities, {}),
    "break-even": (2, sparse.break_even, {}),
    "embedding": (2, sparse.exchange_embedding, {}),
    "codecs": (2, compression.compare_codecs, {}),
    "tensors": (2, compression.compare_tensors, {}),
    "samples": (2, sampling.compare_samples, {}),
    "samplers": (2, balance.compare_samplers, {}),
    "accuracy, N = 2": (2, claims.accuracy_and_speed, {}),
    "traffic": (2, claims.traffic_and_time, {}),
    "work": (2, claims.work_of_a_rank, {}),
    "optimizers": (2, claims.optimizers, {}),
    "peaks": (2, claims.peaks, {}),
    "servers, N = 4": (4, server.compare_servers, {}),
    "memory of servers": (4, server.compare_memory, {}),
    "asynchronous": (4, server.asynchronous_gap, {}),
    "shards": (4, balance.compare_shards, {}),
    "tokens": (4, balance.compare_tokens, {}),
    "accuracy, N = 4": (4, claims.accuracy_and_speed, {"seeds": 1}),
    "memory": (4, claims.memory_by_ranks, {}),
}
RECORD = Path(__file__).parents[1] / "measured" / "myths.json"
COLUMNS = ("claim", "experiment", "number", "verdict")


def measure() -> dict[str, object]:
    """The result of each experiment, by its name."""
    results = {}
    for N in sorted({N for N, _, _ in EXPERIMENTS.values()}):
        with Ranks(N, timeout_s=600, backend="gloo", device="cpu") as ranks:
            for name, (wanted, function, arguments) in EXPERIMENTS.items():
                if wanted == N:
                    print(f"{name} on {N} ranks", flush=True)
                    results[name] = merge(ranks.run(function, **arguments))
    return {name: results[name] for name in EXPERIMENTS}


def machine() -> dict[str, object]:
    """What the times depend on."""
    return {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(), "backend": "gloo"}


def table(results: dict, to_read: bool = True) -> str:
    """Claim, experiment, number, verdict: to read on a screen, or in GitHub's format."""
    cells = [[row[column] for column in COLUMNS] for row in rows(results)]
    if to_read:
        return tabulate(cells, headers=COLUMNS, tablefmt="grid", maxcolwidths=[26, 34, 46, 34])
    lines = [COLUMNS, 4 * ("---",), *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m zero_mini.laboratory", description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print the table of the record, and run nothing")
    parser.add_argument("--rows", action="store_true", help="write the rows of the record again, and run nothing")
    # A run of a reader's own does not replace the committed record, which pages and tests quote.
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: runs/myths.json; with --rows the record")
    options = parser.parse_args(argv)
    if options.table:
        record = recorded("myths")
    else:
        out = options.out or (RECORD if options.rows else Path("runs/myths.json"))
        with contextlib.suppress(OSError):  # check_file then says it
            out.parent.mkdir(parents=True, exist_ok=True)
        try:
            check_file("--out", out)
        except ValueError as error:
            parser.error(str(error))
        record = recorded("myths") if options.rows else {"machine": machine(), "myths": {"results": measure()}}
        record["myths"]["rows"] = rows(record["myths"]["results"])
        out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record["myths"]["results"], to_read=not options.table))
    if not options.table:
        print(f"written to {out}")


if __name__ == "__main__":
    main()
