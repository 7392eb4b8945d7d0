"""Rows of the table (rows.py) on other systems, which articles describe under the name of ZeRO, and on unequal data."""

from statistics import mean

from zero_mini.laboratory.verdict import Row, bars, depends, holds, judged, mb


def systems(r: dict) -> list[Row]:
    """Servers and deferred reductions."""
    two, four, memory = r["servers, N = 2"], r["servers, N = 4"], r["memory of servers"]
    busiest = [two["link_bytes"]["ParameterServer"], four["link_bytes"]["ParameterServer"]]
    ours = [two["link_bytes"]["stage 2"], four["link_bytes"]["stage 2"]]
    late = {name: mean(losses[-5:]) for name, losses in r["staleness"].items()}
    deferred = r["accumulation"]
    kept = {
        name: deferred[f"{name}, deferred"]["kept_bytes"]
        for name in ("stage 1", "stage 2", "Deferred2", "stage 3", "Deferred3")
    }
    links = {"server": busiest, "stage 2": ours}
    return [
        Row(
            "ZeRO is a parameter server",
            "bytes of a step through the busiest link, N = 2 and 4",
            f"server {mb(busiest[0])}, {mb(busiest[1])}; stage 2 {mb(ours[0])}, {mb(ours[1])}",
            judged(busiest[1] / busiest[0] == 3 and ours[1] / ours[0] == 1.5, "a server's bytes grow as N - 1"),
            [
                bars(
                    "through the busiest link in a step",
                    "MB",
                    {f"{name}, N = {N}": b / 1e6 for name, at in links.items() for N, b in zip((2, 4), at)},
                )
            ],
        ),
        Row(
            "a server trains otherwise than data parallelism",
            "largest gap of a parameter to torch DDP after 5 steps, N = 2 and 4",
            f"{two['gaps']['ParameterServer']:g} and {four['gaps']['ParameterServer']:.1e}",
            judged(
                two["gaps"]["ParameterServer"] == 0 and four["gaps"]["ParameterServer"] < 1e-6,
                "a synchronous one differs in the order of sums",
            ),
            [
                bars(
                    "largest gap of a parameter to torch DDP",
                    "",
                    {f"N = {N}": found["gaps"]["ParameterServer"] for N, found in ((2, two), (4, four))},
                )
            ],
        ),
        Row(
            "a server shards the states",
            "bytes of states on a rank, N = 4, AdamW in fp32",
            f"server {mb(memory['ParameterServer'])}, stage 0 {mb(memory['stage 0'])}, stage 3 {mb(memory['stage 3'])}",
            judged(memory["ParameterServer"] > 2 * memory["stage 3"], "one rank has all of them"),
            [
                bars(
                    "states on a rank, N = 4",
                    "MB",
                    {"server": memory["ParameterServer"] / 1e6}
                    | {f"stage {stage}": memory[f"stage {stage}"] / 1e6 for stage in (0, 3)},
                )
            ],
        ),
        Row(
            "asynchronous updates cost nothing",
            "mean loss of the last 50 of 300 turns, staleness 0, 2 and 8",
            ", ".join(f"{late[f'staleness {staleness}']:.2f}" for staleness in (0, 2, 8)),
            judged(late["staleness 0"] < late["staleness 2"] < late["staleness 8"], "stale gradients raise the loss"),
            [bars("mean loss of the last 50 turns", "", {name: late[name] for name in late if name[-1] in "028"})],
        ),
        Row(
            "reducing once for k micro-batches is free at every stage",
            "gradients kept between 4 micro-batches, N = 2",
            ", ".join(f"{name} {mb(nbytes)}" for name, nbytes in kept.items()),
            depends(
                deferred["Deferred2, deferred"]["kept_bytes"] == 2 * deferred["stage 2, deferred"]["kept_bytes"],
                "at stages 2 and 3 it keeps whole gradients again",
            ),
            [bars("gradients kept between micro-batches", "MB", {name: nbytes / 1e6 for name, nbytes in kept.items()})],
        ),
    ]


def approximations(r: dict) -> list[Row]:
    """Fewer bytes for other numbers; unequal data."""
    dense, codecs, tensors, samples = r["densities"], r["codecs"], r["tensors"], r["samples"]
    exact, embedding, times = dense["all-reduce"]["held_out"], r["embedding"], r["break-even"]
    one, fed = dense["top 1.0%"]["held_out"], dense["top 1.0%, feedback"]["held_out"]
    faster = [name for name in times if times[name] < times["all-reduce"]]
    plain, quantised = codecs["stage 3"], codecs["stage 3, 8-bit gathers"]
    lossless = tensors["gradient, lossless, by planes"]
    half, tenth = samples["p = 0.5, adaptive"], samples["p = 0.1, adaptive"]
    padded, dropped = (r["samplers"][name] - r["samplers"]["plain"] for name in ("padded", "dropped"))
    return [
        Row(
            "ZeRO sends sparse gradients",
            "held-out loss after 300 steps: all-reduce, top 1 % with and without feedback",
            f"{exact:.3f}, {fed:.3f}, {one:.3f}",
            judged(fed != exact < one - 0.1, "top-k is another algorithm, and it needs feedback"),
            [
                bars(
                    "held-out loss after 300 steps", "", {"all-reduce": exact, "top 1 %, feedback": fed, "top 1 %": one}
                )
            ],
        ),
        Row(
            "fewer elements take less time",
            "2^20 elements on two ranks of this machine: all-reduce, and top 50 % to 1 %",
            ", ".join(f"{ms:.0f}" for ms in times.values()) + " ms",
            depends(True, f"here {' and '.join(faster) or 'none of them'} took less; bytes break even at 1/N"),
            [bars("2^20 elements on two ranks", "ms", times)],
        ),
        Row(
            "rows of an embedding that no rank used may be left out",
            "gap of the sum to the all-reduce; bytes sent",
            f"{embedding['gap']:g}; {mb(embedding['row_bytes'])} and {mb(embedding['all_reduce_bytes'])}",
            holds(embedding["gap"] == 0, "zeros add nothing"),
            [
                bars("largest gap of the sum to the all-reduce", "", {"used rows alone": embedding["gap"]}),
                bars(
                    "sent",
                    "MB",
                    {
                        "used rows alone": embedding["row_bytes"] / 1e6,
                        "all-reduce": embedding["all_reduce_bytes"] / 1e6,
                    },
                ),
            ],
        ),
        Row(
            "ZeRO compresses what it sends",
            "gathers of stage 3 in fp32 and in 8 bits: bytes, held-out loss",
            f"{mb(plain['sent_bytes']['all_gather'])} and {mb(quantised['sent_bytes']['all_gather'])}; "
            f"{plain['held_out']:.4f} and {quantised['held_out']:.4f}",
            judged(plain["held_out"] == exact != quantised["held_out"], "that is ZeRO++, and its losses differ"),
            [
                bars(
                    "gathered in a step",
                    "MB",
                    {
                        "stage 3": plain["sent_bytes"]["all_gather"] / 1e6,
                        "8 bits": quantised["sent_bytes"]["all_gather"] / 1e6,
                    },
                ),
                bars(
                    "held-out loss, less the all-reduce's",
                    "",
                    {"stage 3": plain["held_out"] - exact, "8 bits": quantised["held_out"] - exact},
                ),
            ],
        ),
        Row(
            "one bit for each element is enough",
            "held-out loss: all-reduce, 1 bit with and without feedback",
            ", ".join(f"{codecs[name]['held_out']:.3f}" for name in ("all-reduce", "1 bit, feedback", "1 bit")),
            depends(
                abs(codecs["1 bit, feedback"]["held_out"] - exact) < 0.1 < codecs["1 bit"]["held_out"] - exact,
                "only with error feedback, 4 bytes an element on every rank",
            ),
            [
                bars(
                    "held-out loss after 300 steps",
                    "",
                    {name: codecs[name]["held_out"] for name in ("all-reduce", "1 bit, feedback", "1 bit")},
                )
            ],
        ),
        Row(
            "lossless compression halves the bytes",
            "a gradient by zlib, byte planes apart: ratio, speed",
            f"{lossless['ratio']:.2f}, {lossless['MB_per_s']:.0f} MB/s",
            judged(lossless["ratio"] < 2, "the low bits of a gradient do not repeat"),
            [
                bars(
                    "bytes before / bytes after",
                    "x",
                    {"lossless, by zlib": lossless["ratio"], "bf16, which rounds": tensors["gradient, bf16"]["ratio"]},
                )
            ],
        ),
        Row(
            "updating a random part of the model is ZeRO",
            "held-out loss: torch DDP, half with twice the rate, a tenth with ten times",
            f"{samples['torch DDP']['held_out']:.3f}, {half['held_out']:.3f}, {tenth['held_out']:.3f}",
            judged(half["gap_after_one_step"] > 1e-3 and samples["p = 1.0, as it is"]["gap"] == 0, "another algorithm"),
            [
                bars(
                    "held-out loss after 300 steps",
                    "",
                    {
                        "torch DDP": samples["torch DDP"]["held_out"],
                        "half, rate x 2": half["held_out"],
                        "a tenth, rate x 10": tenth["held_out"],
                    },
                )
            ],
        ),
        Row(
            "ranks may have unequal parts of a batch",
            "gradient of 24, 8, 8, 8 examples, relative gap to the joint batch: means, weighted",
            f"{r['shards']['mean of means, stage 2']:.2f}, {r['shards']['weighted, stage 2']:.0e}",
            depends(r["shards"]["weighted, stage 2"] < 1e-6, "only if each rank's sum is divided by the mean count"),
            [
                bars(
                    "relative gap to the joint batch's gradient",
                    "",
                    {
                        "mean of means": r["shards"]["mean of means, stage 2"],
                        "weighted": r["shards"]["weighted, stage 2"],
                    },
                )
            ],
        ),
        Row(
            "padding or dropping the last batch changes nothing",
            "loss of an epoch of 61 sorted examples on 4 ranks, less the plain mean",
            f"padded {padded:+.4f}, dropped {dropped:+.4f}",
            judged(padded != 0 != dropped, "some examples count twice, or never"),
            [bars("loss of an epoch, less the plain mean", "", {"padded": padded, "dropped": dropped})],
        ),
    ]
