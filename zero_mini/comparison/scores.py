"""From measurements to claims: the gate, the floor, and one line of the table for each system.

The gate. A system shows a speed only if it trains as torch DDP does: each of its first ten losses, averaged over
ranks, is within a tolerance of DDP's (of zero-0's or else FSDP2's, if DDP did not run). The tolerance depends on the
precision, because the systems may differ in:

    fp32    1e-4   the order of sums, 2^-24 of a value each, and AdamW's quotients of two such sums
    bf16    0.05   2^-9 of each activation: DDP's autocast keeps the residual stream in fp32, the others round
                   it at every block. Over some thousand tokens most of that cancels, and 124M and 350M stay
                   within 0.003. The first step of 1.5B overshoots (11.2 -> 14.2), which amplifies the rest:
                   there this package and FSDP2 are 0.025 from DDP and 0.001 apart. DeepSpeed was 0.04 from DDP
                   while its masters began as bf16 numbers (peers.py)

A doubled learning rate, gradients that are not reduced, an unwanted clipping: each moves losses of the small model by
0.02 to 0.3 within the ten steps.
`plain` and `plain + 1/N update` never change the weights: only their first loss is compared.

The floor. A step cannot be shorter than its parts at the rates that this machine reached for each alone
(measure.py). Only the wire can overlap, and only with the computation:

    floor      compute + update + max(0, wire - compute)
    compute    FLOPs x tokens / matmul rate. FLOPs a token: 6 N + 6 L d T, since a causal kernel leaves out the masked
               half of attention (MFU counts 12 L d T, as is usual). With checkpointing 4/3 of it: forward is run
               twice, except for attention where its outputs are kept
    update     28 bytes x Psi / copy rate, x 1/N if sharded: fp32 master, momentum and variance read and written
               (24), a 16-bit gradient read and a 16-bit parameter written (4)
    wire       bytes a parameter (systems.py) x Psi x (N-1)/N / all-reduce bus rate

Left out: attention's own rate, which is below a matrix product's; so no system reaches the floor. Also what a second
forward need not run, the loss and the last product of a block: at most a tenth of the FLOPs.
"""

import math
from statistics import mean, median, quantiles

from tabulate import tabulate

from zero_mini.comparison.systems import SYSTEMS
from zero_mini.comparison.works import BASELINE, PLAIN

TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
REFERENCES = ("ddp", "zero-0", "fsdp2")
# Dense bf16 of the data sheets, FLOP/s.
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H200": 989.4e12, "NVIDIA A100-SXM4-80GB": 312e12}


def merge_ranks(ranks: list[dict]) -> dict:
    """One run of several ranks: the row of the slowest, with the losses averaged over all, and the highest peaks.

    >>> merge_ranks([{"step_ms": [1.0, 3.0], "losses": [4.0]}, {"step_ms": [2.0, 4.0], "losses": [5.0]}])
    {'step_ms': [2.0, 4.0], 'losses': [4.5]}
    """
    row = dict(max(ranks, key=lambda rank: median(rank["step_ms"])))
    row["losses"] = [mean(values) for values in zip(*(rank["losses"] for rank in ranks))]
    for name in ("peak_bytes", "reserved_bytes", "held_bytes"):
        if name in row:
            row[name] = max(rank[name] for rank in ranks)
    return row


def merge_rounds(rounds: list[dict]) -> dict:
    """Runs of one system: all their steps, the first one's other numbers; failures only if none succeeded.

    >>> merge_rounds([{"step_ms": [1.0, 2.0]}, {"failed": "out of memory"}, {"step_ms": [3.0, 5.0]}])
    {'step_ms': [1.0, 2.0, 3.0, 5.0], 'round_medians_ms': [1.5, 4.0], 'failed_rounds': ['out of memory']}
    """
    good = [row for row in rounds if "failed" not in row]
    if not good:
        return rounds[0]
    row = good[0] | {"step_ms": [time for each in good for time in each["step_ms"]]}
    row["round_medians_ms"] = [median(each["step_ms"]) for each in good]
    if "losses" in row:  # those of the round that differs most from the first, so that the gate checks all rounds
        row["losses"] = max((each["losses"] for each in good), key=lambda losses: distance(losses, row["losses"]))
    if len(good) < len(rounds):
        row["failed_rounds"] = [each["failed"] for each in rounds if "failed" in each]
    return row


def distance(losses: list[float], reference: list[float]) -> float:
    """The largest difference of two curves; infinite if one is not a number.

    >>> distance([3.0, 2.0], [3.0, 2.5]), distance([math.nan], [3.0])
    (0.5, inf)
    """
    differences = [abs(a - b) for a, b in zip(losses, reference)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def judge(system: str, row: dict, entry: dict) -> str | None:
    """Why this row shows no speed; None if it may. Writes `losses_differ_by` into the row."""
    if "failed" in row or "rank_of" in entry:  # beside absent peers no loss is that of a training
        return row.get("failed")
    runs = [name for name in REFERENCES if "losses" in entry["systems"].get(name, {})]
    if not runs:
        return f"losses not checked: none of {', '.join(REFERENCES)} ran"
    compared = 1 if system in PLAIN else None
    row["losses_differ_by"] = distance(row["losses"][:compared], entry["systems"][runs[0]]["losses"][:compared])
    if row["losses_differ_by"] > TOLERANCE[entry["work"]["precision"]]:
        return f"losses differ by {row['losses_differ_by']:.2g} from those of {runs[0]}"
    return None


def floor_parts_s(system: str, entry: dict) -> dict[str, float] | None:
    """Seconds of a step's parts, and their floor; None where no rates were measured."""
    work, rates, N = entry["work"], entry["rates"], entry.get("rank_of", entry["machine"]["cards"])
    if rates is None:
        return None
    attention = 6 * work["model"]["L"] * work["model"]["d"] * work["sequence_length"]
    flops = work["flops_per_token"] - attention  # without the masked half
    if work["checkpointing"]:
        flops += (flops - (attention if "keep attention" in system else 0)) / 3
    compute = flops * work["tokens"] / rates["matmul_flops"]
    update = wire = 0.0
    if system != "plain":
        update = 28 * work["psi"] / (N if SYSTEMS[system].shards_update else 1) / rates["copy_bytes"]
    if entry["machine"]["cards"] > 1:
        wire = SYSTEMS[system].sends * work["psi"] * (N - 1) / N / rates["all_reduce_bytes"]
    return {"compute": compute, "update": update, "wire": wire, "floor": compute + update + max(0.0, wire - compute)}


def score(entry: dict) -> dict[str, dict]:
    """For each system of a work the numbers of the table, or {"reason": why it has none}."""
    work, peak = entry["work"], PEAK_FLOPS.get(entry["machine"]["card"])
    scores: dict[str, dict] = {}
    for system, row in entry["systems"].items():
        reason = judge(system, row, entry)
        if reason is not None:
            scores[system] = {"reason": reason}
            continue
        ms = median(row["step_ms"])
        tenths = quantiles(row["step_ms"], n=10, method="inclusive")
        tokens_s = work["tokens"] / ms * 1e3
        parts = floor_parts_s(system, entry)
        scores[system] = {
            "ms": ms,
            "p10_ms": tenths[0],
            "p90_ms": tenths[-1],
            "tokens_s": tokens_s,
            "tflops": tokens_s * work["flops_per_token"] / 1e12,
            "mfu": tokens_s * work["flops_per_token"] / peak if peak else None,
            "x_floor": ms / 1e3 / parts["floor"] if parts else None,
        }
    speeds = {system: s["tokens_s"] for system, s in scores.items() if "tokens_s" in s}
    ddp = max((speeds[name] for name in ("ddp", "ddp-bf16-hook") if name in speeds), default=None)
    for system, tokens_s in speeds.items():
        scores[system]["of_plain"] = tokens_s / speeds["plain"] if "plain" in speeds else None
        scores[system]["x_ddp"] = tokens_s / ddp if ddp else None
        scores[system]["over_baseline"] = speeds[BASELINE] / tokens_s if BASELINE in speeds else None
    return scores


def table(name: str, entry: dict) -> str:
    """The table of a work in GitHub's format, its formulas below."""
    scores, lines = score(entry), []
    for system, row in entry["systems"].items():
        s = scores[system]
        line = {"system": system, "ms": s.get("reason")}
        if "reason" not in s:
            profile, GiB = row.get("timeline"), 2**30
            line |= {
                "ms": f"{s['ms']:.1f} ({s['p10_ms']:.1f}, {s['p90_ms']:.1f})",
                "tokens/s": f"{s['tokens_s']:,.0f}",
                "TFLOP/s": f"{s['tflops']:.3g}",
                "MFU": s["mfu"] and f"{s['mfu']:.1%}",
                "of plain": s["of_plain"] and f"{s['of_plain']:.1%}",
                "over plain + update": s["over_baseline"] and f"{s['over_baseline']:.3f}",
                "x ddp": s["x_ddp"] and f"{s['x_ddp']:.2f}",
                "x floor": s["x_floor"] and f"{s['x_floor']:.2f}",
                "peak GiB": "peak_bytes" in row and f"{row['peak_bytes'] / GiB:.1f}",
                "reserved GiB": "reserved_bytes" in row and f"{row['reserved_bytes'] / GiB:.1f}",
                "states GB": row.get("state_bytes") and f"{row['state_bytes'] / 1e9:.3g}",
                "wire GB": row.get("wire_bytes") and f"{row['wire_bytes'] / 1e9:.3g}",
                "kernels": profile and f"{profile['kernels']}",
                "short ms": "short_step_ms" in row and f"{row['short_step_ms']:.1f}",
                "overlap": profile and f"{profile['overlapping_a_matmul']}/{profile['collectives']}",
                "exposed ms": profile and f"{profile['exposed_ms']:.1f}",
                "idle ms": profile and f"{profile['idle_ms']:.1f}",
            }
        lines.append(line)
    columns = dict.fromkeys(column for line in lines for column in line if any(line.get(column) for line in lines))
    cells = [[line.get(column) or "" for column in columns] for line in lines]
    align = ("left", *["right"] * (len(columns) - 1))
    rows = tabulate(cells, headers=[*columns], tablefmt="github", colalign=align, disable_numparse=True)
    return f"{name}\n\n{rows}\n\n{formulas(entry)}"


def formulas(entry: dict) -> str:
    """The definitions of the columns, with this work's numbers, as lines of text."""
    work, rates, machine = entry["work"], entry["rates"], entry["machine"]
    peak, T, N = PEAK_FLOPS.get(machine["card"]), work["tokens"], machine["cards"]
    multiplied = "N" if "ffn" in work["model"] else "Psi"  # N: without an embedding that is only looked up
    alone = f" as rank 0 of {entry['rank_of']} (nothing is sent: see absent_peers.py)" if "rank_of" in entry else ""
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "cuda", "nccl") if name in machine)
    lines = [
        f"{N} x {machine['card']}{alone}, {versions}. ms is the median of all steps of the slowest rank (p10, p90).",
        f"tokens/s = {T} tokens a GPU / ms.  TFLOP/s = tokens/s x {work['flops_per_token']:.4g} FLOPs a token"
        f" (6 {multiplied} + 12 L d T)" + (f".  MFU = TFLOP/s / {peak / 1e12:.4g}" if peak else ""),
        f"over plain + update: ms over the ms of {BASELINE}: one GPU, no wire, a rank's share of the update.",
        "x ddp: tokens/s over those of the faster DDP.",
        "states: between steps, without gradients; stage 3 with its slots and root; kinds that hide theirs are blank.",
    ]
    if rates is not None:
        lines.append(
            f"measured alone: matmul {rates['matmul_flops'] / 1e12:.0f} TFLOP/s, copy {rates['copy_bytes'] / 1e12:.2f} "
            f"TB/s (read + written), all-reduce {rates['all_reduce_bytes'] / 1e9:.0f} GB/s (bus)"
        )
        for system in [name for name in ("zero-0", "zero-3", "ddp") if name in entry["systems"]]:
            part = {name: f"{1e3 * value:.1f}" for name, value in floor_parts_s(system, entry).items()}
            lines.append(
                f"floor of {system} = compute {part['compute']} + update {part['update']} + "
                f"max(0, wire {part['wire']} - compute) = {part['floor']} ms"
            )
        lines.append("short ms: a step of one sequence of 64 tokens, so the host, or else the wire and the update")
    return "\n".join(lines)
