"""The speed of every stage beside torch's DDP and FSDP2 and DeepSpeed, and beside the limits of the machine.

    python zero_mini/comparison/benchmark.py --work cpu                   two ranks on a CPU, about two minutes
    python zero_mini/comparison/benchmark.py --work "1.5B" --out DIR      all GPUs of this machine
    python zero_mini/comparison/benchmark.py --work "1.5B" --systems zero-3 fsdp2 --rounds 3 --out DIR
    python zero_mini/comparison/benchmark.py --work "1.5B" --alone 2      one GPU as rank 0 of 2; nothing is sent

Each row is a fresh group of processes, so that no system inherits another's memory or caches; in several rounds
the systems take turns, so that a machine that warms up slows all of them. A run that fails, or takes longer than its
limit, becomes a row with the reason. A system whose losses differ from torch DDP's shows no speed.

    comparison/    the models, the systems, the measurements and scores
    memory/timeline.py    traces of a GPU
    plots/         the picture

DIR/speed.json keeps every number, with machine and rates for each work. Another invocation replaces the rows that it
measures again (all of a work's rows, if the machine is another) and keeps the rest. DIR/speed.png is drawn from it.
With --alone N (absent_peers.py) the file is DIR/alone.json, without a picture; a run of another N replaces all rows of
a work.

Where the time goes, in ms, from the profiled step of each row (its "timeline" in speed.json). "plain" is forward and
backward alone. The time beyond it: the update; copies (casts into slots, gradients into flat buffers); the slowdown of
products and of attention that ran beside a collective; wire that nothing overlapped; the GPU waiting for its host.

    work, system              step   plain   update   copies   products   attention   wire   idle   host
    -----------------------   ----   -----   ------   ------   --------   ---------   ----   ----   ----
    1.5B, zero-0               198     177       15        3          6           2      1      4    118
    1.5B, zero-1               191     177        8        3         15           1      5      4    125
    1.5B, zero-2               192     177        7        3          4           2      6      5    155
    1.5B, zero-3               195     177        7        6          3           2      2      4    139
    1.5B on H200, zero-1       184     170        6        2          4           2      5      6    141
    1.5B on H200, zero-3       190     170        5        5          2          -1      5     19    190
    350M batch 8, zero-0        58      47        2        1          0           0      1     27     66
    350M batch 8, zero-3        54      47        1        1          0           0      2     16     61
    1.5B checkpointed, zero-3  416     401        5        5         -1          -1      4     35    330
    1.5B compiled, zero-0      188     170       11        2         11           0      1      5    142
    1.5B compiled, zero-1      182     170        6        2          1           0      4     23    142
    1.5B compiled, zero-2      182     170        5        2          0          -1      5     42    144
    1.5B compiled, zero-3      189     170        5        5         12          -1      7     56    183

(1.5B on 2 x H100, the others on 2 x H200. "host": the time of a step of 64 tokens, with almost nothing to multiply.)

So the difference between a stage and plain is the update, which is a part of training, and the copies. 350M at batch 8
is limited by the host: at stage 3 it launches a step in 61 ms, longer than the GPU computes. So is stage 3 of 1.5B on
those H200s: 190 ms. On another such host it took 129 ms, and the step 185.6. With checkpointing plain itself takes
401 ms and FSDP2's step 425, so no system can be more than 1.06 x as fast as FSDP2.
The profiled steps of the compiled rows took longer than the timed ones, 193 to 247 ms: in them the GPU waits for its
host. An earlier run, on a slower host and with the same kernels, took 185, 194, 196 and 212 ms: if one rank is late,
the collective on the other takes longer.

What was tried, on 1.5B unless another work is named (ms a step; before -> after within one run on one machine)

    change                                     predicted          measured                            kept
    -----------------------------------------  -----------------  ----------------------------------  --------
    AdamW in one pass (update/one_pass.py):    -4.5 ms sharded,   the update and its casts 12.2 ->    yes
      28 bytes a parameter instead of 40       -9 ms at stage 0   7.3; stage 3 205.7 -> 199.5
    gathers by copy engines                    -8 ms, stage 3     201.2 -> 198.7, ablation: -2.3;     where a
      (wire/copy_engine.py)                                       the host up to 0.4 ms a gather      unit has
                                                                  slower                              30M
    units of several blocks, 350M batch 8      -10 ms, stage 3:   stage 3 75.2 -> 55.9; stage 0       yes
                                               half the calls     65.9 -> 60.9                        (units=)
    three blocks a unit in place of two, 350M  -2 ms, stage 3:    65.0 -> 63.9, one block 82.3, ddp   the default
      batch 8                                  fewer calls        67.9; one GPU 58.0 -> 53.3          on a GPU
    two blocks a unit, 1.5B                    +-0: host is fast  188.7 -> 190.4; later 185.6 ->      no
                                                                  186.7, stage 1 181.8 -> 183.6
    the paper's 16-bit shard, stage 3          -2 ms: no casts    188.7 -> 189.6, and 2 Psi/N bytes;  no
                                               when it gathers    Qwen, batch 32, 587.3 -> 591.5      (ablation)
    views of whole parameters are made once    -0.7 ms of the     host of a stage 1 of 24 tiny blocks yes
                                               host, stage 1      on a CPU: 4.5 -> 3.7 over plain
    a reduction is sent half-way through the   -5 ms: it meets    matrix products 117 -> 112 in the   yes
      next unit's backward                     attention, not a   profile of stage 0; ablation: -3.9
                                               matrix product
    gradients into the flat buffer by one cat  -0.2 ms            a block 61 -> 57 us                 yes
      instead of a foreach copy
    gradients added where they are reduced,    +1.5 ms: autograd  not built                           no
      instead of the cat: .grad is a view of   has made them, so
      the flat buffer, set to zero             8 bytes, not 4
    fewer thread blocks for NCCL (4, 8, 16)    -3 ms: fewer       stage 3 214, 208, 207 against 207   no
                                               products disturbed
    NCCL's kernels on symmetric memory         -3 ms: shorter     a gather 168 -> 105 us alone, but   no
                                                                  disturbs as much as before
    reductions as all-to-all by copy engines   -4 ms, 0.2 GiB     stage 2 188.6 -> 189.2, stage 3     no
      and a sum of one's own                   more               191.8 -> 192.0. Without the copy
                                                                  into a buffer they reach: 190.3.
                                                                  Without the sum: stage 2 186.7
    torch.compile of each block's forward      a ceiling of 10 %  one graph for all blocks; batch 16  --
                                                                  with a compiled loss: 49.8 % MFU
    gradients of the logits along with the     -8 ms: three       plain 304.9 -> 289.7                yes
      loss, Qwen2.5-1.5B shape                 products, not four
    gate and up as two matrices, the same      -10 ms: no joined  plain 284.4 -> 278.6, stage 3       yes
                                               gradient           292.6 -> 279.4 (one GPU)
    a split gradient joined in slices, the     the same           plain 284.4 -> 284.0: inductor      no
      same (max_pointwise_cat_inputs=1)                           writes the same kernel

The ablations can be repeated (--work ablations; ablations.py): each is stage 3 with one decision changed.
In one run on 2 x H200 stage 3 took 185.9 ms (DDP 219.2, forward and backward alone 169.3), and

    no prefetch                                192.3    each block waits for its gather
    two communicators instead of copy engines  190.8    a gather need not wait for a reduction, but both take SMs
    reductions at once                         189.8    as soon as a block's gradients exist
    gathers as kernels                         188.2    on one communicator
    storage resize instead of two slots        187.2    and 0.13 GiB less: the second slot

Small blocks behave differently: with 350M parameters and batch 8 a GPU finishes before its host has launched the next
block's kernels. In one run its four stages took 50 to 61 ms, in no order; at batch 32 they take the same time. At batch
8 the rows depend on the host's speed, those of FSDP2 and DeepSpeed most of all. Only such works would gain from CUDA
graphs: forward and backward alone, as one captured graph on one H100, take 49.4 ms in place of 50.1 (350M, batch 8),
23.5 in place of 24.0 (124M), 176.5 in place of 177.8 (1.5B). This is the upper limit of the gain with such a fast host,
so hooks and collectives were not captured.

With the optimizer in host memory (--work "1.5B offload", one H100, 16 cores) the CPU's update determines the time of a
step. What was tried there, ms of the update: the optimizer's own step over whole units about 900 (each fp32 gradient
is newly allocated, so the system has to map its pages); in parts of 2^20, 2^21, 2^22, 2^23, 2^25 elements, with one
buffer for the gradient of a part, 699, 635, 573, 552, 591. The package uses 2^23.

Left out: several hosts; tuning of the peers beyond what their documentation says.
"""

import sys
from pathlib import Path

if not __package__:
    # A script has its own folder first on sys.path. There `import zero_mini` would fail, or import another installed
    # copy: it needs the folder around the package.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import os
import shlex
from collections.abc import Callable, Sequence
from statistics import median

import torch

from zero_mini.comparison import absent_peers, measure, scores
from zero_mini.comparison.models import psi_and_flops
from zero_mini.comparison.systems import SYSTEMS, build, missing
from zero_mini.comparison.works import WORKS, Work
from zero_mini.course.ranks import RankError, run
from zero_mini.trainer.launch import first_line
from zero_mini.trainer.report import check_folder

MODEL = ("L", "d", "heads", "kv_heads", "ffn", "vocab", "tied")  # what describes a model in the record
FACTS = ("machine", "work", "rank_of")  # the rows of a work in the record have these in common


def in_a_fresh_group(ranks: int, limit_s: float, function: Callable, *args: object) -> list | str:
    """Run `function(*args)` on new processes; each rank's result, or the reason of a failure in one line."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what ranks print when they are ended
            return run(function, ranks, *args, timeout_s=limit_s)
    except RankError as error:
        print(error, file=sys.stderr)
        if "OutOfMemoryError" in first_line(error):
            return "out of memory"
        return first_line(error).partition(". ")[0]


def attempt(system: str, work: Work, ranks: int, limit_s: float, build: Callable = build) -> dict:
    """One run of one system: its row, or {"failed": reason}."""
    if reason := missing(system):
        return {"failed": reason}
    rows = in_a_fresh_group(ranks, limit_s, measure.measure, system, work, build)
    return {"failed": rows} if isinstance(rows, str) else scores.merge_ranks(rows)


def compare(
    work: Work, systems: Sequence[str], rounds: int, ranks: int, limit_s: float, build: Callable = build
) -> dict[str, dict]:
    """All rows of a work. Each round runs every system once."""
    runs: dict[str, list[dict]] = {system: [] for system in systems}
    for number in range(1, rounds + 1):
        for system in systems:
            row = attempt(system, work, ranks, limit_s, build)
            runs[system].append(row)
            result = row.get("failed") or f"{median(row['step_ms']):.1f} ms"
            print(f"{work.name}, round {number} of {rounds}, {system}: {result}", flush=True)
    return {system: scores.merge_rounds(rows) for system, rows in runs.items()}


def described(work: Work) -> dict:
    """A work's parameters, for readers of the JSON."""
    psi, flops = psi_and_flops(work)
    of_loss = {"loss_chunks": work.loss_chunks} if work.loss_chunks > 1 else {}
    return {
        "model": {name: getattr(work.config, name) for name in MODEL if hasattr(work.config, name)},
        "batch": work.batch,
        "sequence_length": work.config.T,
        "tokens": work.tokens,
        "precision": "bf16" if work.bf16 else "fp32",
        "checkpointing": work.checkpointing,
        "compiled": work.compiled,
        "fused_loss": work.fused_loss,
        **of_loss,
        "lr": work.lr,
        "psi": psi,
        "flops_per_token": flops,
    }


def merge(record: dict, name: str, entry: dict) -> dict:
    """`record` with a work's new entry. Rows that were not measured again stay if the machine is the same.

    >>> old = {"works": {"cpu": {"machine": 1, "work": {}, "systems": {"ddp": "old", "plain": "old"}}, "1.5B": {}}}
    >>> new = {"machine": 1, "work": {}, "systems": {"ddp": "new"}}
    >>> merge(old, "cpu", new)["works"]["cpu"]["systems"], list(merge(old, "cpu", new)["works"])
    ({'ddp': 'new', 'plain': 'old'}, ['cpu', '1.5B'])
    """
    before = record.get("works", {}).get(name)
    if before and all(before.get(fact) == entry.get(fact) for fact in FACTS):
        rows = before["systems"] | entry["systems"]
        entry = entry | {"systems": {system: rows[system] for system in SYSTEMS if system in rows}}
    return {"works": record.get("works", {}) | {name: entry}}


def save(folder: Path, name: str, entry: dict) -> dict:
    """Merge a work's entry into DIR/speed.json (or alone.json), atomically; returns the merged entry."""
    path = folder / ("alone.json" if "rank_of" in entry else "speed.json")
    folder.mkdir(parents=True, exist_ok=True)
    record = merge(json.loads(path.read_text()) if path.exists() else {}, name, entry)
    entry = record["works"][name]
    entry["scores"] = scores.score(entry)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(unfinished, path)
    return entry


def draw(folder: Path) -> None:
    """Draw DIR/speed.png, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed (pip install -e '.[lessons]')")
        return
    from zero_mini.course.plots import speed

    speed.save(json.loads((folder / "speed.json").read_text()), folder / "speed.png")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmark.py", description="How fast each stage is, beside its peers.")
    gpus = torch.cuda.device_count()
    names = ", ".join(f'"{name}"' for name in WORKS)
    works = {"nargs": "+", "choices": WORKS, "metavar": "NAME", "default": ["1.5B" if gpus else "cpu"]}
    parser.add_argument("--work", **works, help="models and batches to train (default: 1.5B, without a GPU cpu)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help="else those of the work")
    parser.add_argument("--rounds", type=int, default=1, metavar="K", help="runs of each system, in turn (default: 1)")
    parser.add_argument("--ranks", type=int, metavar="N", help="else one for each GPU, or 2 on a CPU")
    parser.add_argument(
        "--alone", type=int, metavar="N", help="one process as rank 0 of N; the others are absent, nothing is sent"
    )
    parser.add_argument("--limit", type=float, default=240, metavar="S", help="seconds a run may take (default: 240)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep speed.json and speed.png there; with --alone alone.json"
    )
    parser.epilog = f"works: {names}; systems: {', '.join(SYSTEMS)}"
    options = parser.parse_args(argv)
    if options.alone is not None and options.ranks is not None:
        parser.error(f"--alone {options.alone} has one process, which is rank 0 of {options.alone}; leave --ranks out")
    if options.ranks is None:
        options.ranks = 1 if options.alone is not None else gpus or 2
    if options.rounds < 1 or options.ranks < 1:
        parser.error("--rounds and --ranks must be at least 1")
    if not options.limit > 0:
        parser.error(f"--limit must be a number of seconds > 0 (got {options.limit:g})")
    if options.alone is not None:
        if options.alone < 2:
            parser.error(f"--alone N: a rank of N >= 2 (got {options.alone})")
        if wrong := [system for system in options.systems or () if system not in absent_peers.ALLOWED]:
            parser.error(f"--alone: {', '.join(wrong)} cannot run alone; {', '.join(absent_peers.ALLOWED)} can")
    for name in options.work if not gpus else ():
        if WORKS[name].bf16:
            parser.error(f'--work "{name}" is for GPUs, and torch finds none here; --work cpu runs without')
    if options.out:  # last: what is refused leaves no folder
        try:
            check_folder(options.out, 0)
        except ValueError as error:
            parser.error(str(error))
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table for each work, and save the numbers if --out is given."""
    options = parse(argv)
    facts = in_a_fresh_group(options.ranks, options.limit, measure.machine_and_rates)
    if isinstance(facts, str):
        sys.exit(f"benchmark.py: error: {facts}")
    machine, _ = facts[0]
    by_rank = [rates for _, rates in facts if rates]
    rates = {name: min(each[name] for each in by_rank) for name in by_rank[0]} if by_rank else None  # the slowest's
    for name in options.work:
        work = WORKS[name]
        systems = options.systems or work.systems
        command = ["python", "zero_mini/comparison/benchmark.py", "--work", name, "--rounds", str(options.rounds)]
        how, about_rank = build, {}
        if options.alone is not None:
            if left_out := [system for system in systems if system not in absent_peers.ALLOWED]:
                print(f"{name}: without {', '.join(left_out)}, which cannot run alone", flush=True)
            systems = [system for system in systems if system in absent_peers.ALLOWED]
            command += ["--alone", str(options.alone)]
            how, about_rank = functools.partial(absent_peers.build, options.alone), {"rank_of": options.alone}
        entry = {
            "machine": machine,
            "rates": rates,
            "command": shlex.join(command + (["--systems", *options.systems] if options.systems else [])),
            "work": described(work),
            **about_rank,
            "systems": compare(work, systems, options.rounds, options.ranks, options.limit, how),
        }
        if options.out:
            entry = save(options.out, name, entry)
        print("\n" + scores.table(name, entry) + "\n", flush=True)
    if options.out and options.alone is None:
        draw(options.out)


if __name__ == "__main__":
    main()
