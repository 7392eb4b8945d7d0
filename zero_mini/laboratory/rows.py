"""The table: for each claim the experiment, its number, a verdict and bars, from the results of `__main__.measure`.

A row is a function of the results. A verdict names its condition; if the numbers do not meet it, the table says so.
Here are the claims about ZeRO itself; rows_of_systems.py has the other systems.

Left out: predictions; a reader makes one before the row is shown (lesson 12).
"""

from zero_mini.course.lesson import recorded
from zero_mini.laboratory.rows_of_systems import approximations, systems
from zero_mini.laboratory.verdict import Row, bars, depends, first_below, judged, mb

STATES = ("parameters", "gradients", "optimizer", "communication")
SHOWN = ((0, 4), (1, 4), (2, 4), (3, 1), (3, 2), (3, 4))  # (stage, N) whose activations have a bar


def rows(results: dict) -> list[dict]:
    """All rows, as dicts with the keys claim, experiment, number, verdict, measured."""
    return [row._asdict() for part in (systems, approximations, claims) for row in part(results)]


def about_zero(results: dict) -> list[dict]:
    """The rows of the claims about ZeRO itself."""
    return [row._asdict() for row in claims(results)]


def claims(r: dict) -> list[Row]:
    """What people say of ZeRO itself."""
    two, four, traffic, memory = r["accuracy, N = 2"], r["accuracy, N = 4"], r["traffic"], r["memory"]
    loss = four["held_out"]
    first = {
        name.removesuffix(", seed 0"): first_below(losses, 3.0)
        for name, losses in two["losses"].items()
        if name.endswith(", seed 0")
    }
    sent = [traffic[f"stage {stage}"]["sent"] for stage in range(4)]
    ms = [traffic[f"stage {stage}"]["step_ms"] for stage in range(4)]
    states = {key: sum(nbytes[name] for name in STATES) for key, nbytes in memory.items()}
    alone = {key: states[key] for key in ("plain", *(f"stage {stage}, N = 1" for stage in range(4)))}
    halved = [states[f"stage {stage}, N = 4"] / states[f"stage {stage}, N = 2"] for stage in range(4)]
    activations = {nbytes["activations"] for nbytes in memory.values()}
    work, peaks, adafactor = r["work"], r["peaks"], r["optimizers"]["Adafactor"]
    gpu = recorded("speed")["works"]["1.5B"]
    scores, cards = gpu["scores"], f"{gpu['machine']['cards']} x {gpu['machine']['card']}"
    return [
        Row(
            "ZeRO costs accuracy",
            "largest gap to torch DDP, stages 0 to 3, 300 steps, N = 2, three seeds",
            ", ".join(f"{gap:g}" for gap in two["gaps"].values()),
            judged(not any(two["gaps"].values()), "every parameter is equal to the bit"),
            [bars("largest gap of a parameter to torch DDP", "", two["gaps"])],
        ),
        Row(
            "on four ranks nothing differs either",
            "first gradient, stage 2 and torch DDP: elements that differ, by units in the last place of sum_r |g_r|",
            f"{four['differ']:.0%}, by at most {four['ulps']:.1f}; after 300 steps parameters by at most "
            f"{four['gaps']['stage 2']:.1e}, the held-out loss by {abs(loss['stage 2'] - loss['torch DDP']):.1e}",
            depends(0 < four["ulps"] <= 3, "the order of sums differs, as between two settings of DDP's buckets"),
            [
                bars("elements of the first gradient that differ", "%", {"stage 2": 100 * four["differ"]}),
                bars("parameters at the end, largest gap", "", {"stage 2": four["gaps"]["stage 2"]}),
            ],
        ),
        Row(
            "ZeRO converges faster",
            "steps until ten steps have a mean loss below 3, torch DDP and stages 0 to 3",
            ", ".join(map(str, first.values())),
            judged(len(set(first.values())) == 1, "the steps are the same; memory may allow a larger batch"),
            [bars("until the mean loss of ten steps is below 3", "steps", first)],
        ),
        Row(
            "ZeRO sends less",
            "elements of a step / (Psi (N-1)/N), stages 0 to 3",
            ", ".join(f"{x:.2f}" for x in sent),
            judged(sent[1] == sent[2] == sent[0] == 2 and sent[3] > 2, "as much as data parallelism, at stage 3 more"),
            [
                bars(
                    "sent in a step, in units of Psi (N-1)/N", "", {f"stage {stage}": x for stage, x in enumerate(sent)}
                )
            ],
        ),
        Row(
            "1.5 x the traffic is 1.5 x the time",
            f"ms of a step, stages 2 and 3: here; 1.5B on {cards} (speed.json)",
            f"{ms[2]:.1f} and {ms[3]:.1f}; {scores['zero-2']['ms']:.1f} and {scores['zero-3']['ms']:.1f}",
            judged(
                scores["zero-3"]["ms"] < 1.1 * scores["zero-2"]["ms"],
                "on GPUs the computation hides the wire; here each launch costs time",
            ),
            [
                bars("a step on this machine", "ms", {"stage 2": ms[2], "stage 3": ms[3]}),
                bars(
                    f"a step of 1.5B, {cards}",
                    "ms",
                    {f"stage {stage}": scores[f"zero-{stage}"]["ms"] for stage in (2, 3)},
                ),
            ],
        ),
        Row(
            "ZeRO helps on one GPU",
            "bytes of states: plain PyTorch, stages 0 to 3 with N = 1",
            ", ".join(map(mb, alone.values())),
            judged(min(alone.values()) > 0.999 * alone["plain"], "1/N of them is all of them"),
            [bars("states, N = 1", "MB", {name: nbytes / 1e6 for name, nbytes in alone.items()})],
        ),
        Row(
            "twice the ranks, half the memory",
            "bytes of states, N = 4 / N = 2, stages 0 to 3",
            ", ".join(f"{x:.2f}" for x in halved),
            judged(halved[0] == 1 and min(halved) > 0.5, "only what is sharded halves; activations do not"),
            [bars("states, N = 4 / N = 2", "x", {f"stage {stage}": x for stage, x in enumerate(halved)})],
        ),
        Row(
            "ZeRO shards activations",
            "bytes that autograd saves, plain and stages 0 to 3, N = 1, 2, 4",
            ", ".join(mb(nbytes) for nbytes in sorted(activations)) + " each",
            judged(len(activations) == 1, "they depend on the rank's batch alone; P_a needs model parallelism"),
            [
                bars(
                    "saved by autograd",
                    "MB",
                    {
                        key: memory[key]["activations"] / 1e6
                        for key in ("plain", *(f"stage {stage}, N = {N}" for stage, N in SHOWN))
                    },
                )
            ],
        ),
        Row(
            "ZeRO is model parallelism",
            "FLOPs of a rank at stage 3, N = 2, and of one process with the rank's half of the batch",
            f"{work['stage 3']['flops']:,} and {work['plain']['flops']:,}",
            judged(work["stage 3"] == work["plain"], "every rank computes the whole model on its own examples"),
            [
                bars(
                    "a rank's forward and backward, N = 2",
                    "MFLOP",
                    {
                        "one process, half": work["plain"]["flops"] / 1e6,
                        "stage 3": work["stage 3"]["flops"] / 1e6,
                        "one process, all": work["plain, all rows"]["flops"] / 1e6,
                    },
                )
            ],
        ),
        Row(
            "any optimizer works",
            "Adafactor at stage 2, made to run: gap to torch DDP after 3 steps; AdamW",
            f"{adafactor['gap']:.3f}; {r['optimizers']['AdamW']['gap']:g}",
            judged(bool(adafactor["refused"]) and adafactor["gap"] > 1e-3, "only those that update each element alone"),
            [
                bars(
                    "after 3 steps, gap to torch DDP",
                    "",
                    {f"stage 2, {name}": r["optimizers"][name]["gap"] for name in ("AdamW", "Adafactor")},
                )
            ],
        ),
        Row(
            "the peak of stage 2 is always below that of stage 1",
            "most bytes alive in a step, stages 1 and 2: many units, one unit",
            "; ".join(
                f"{mb(peaks[f'{units}, stage 1'])}, {mb(peaks[f'{units}, stage 2'])}"
                for units in ("many units", "one unit")
            ),
            judged(
                peaks["one unit, stage 2"] > peaks["one unit, stage 1"],
                "a unit's gradient is whole while it is reduced, beside the shard",
            ),
            [
                bars(
                    f"most bytes alive in a step, {units}",
                    "MB",
                    {f"stage {stage}": peaks[f"{units}, stage {stage}"] / 1e6 for stage in (1, 2)},
                )
                for units in ("many units", "one unit")
            ],
        ),
    ]
