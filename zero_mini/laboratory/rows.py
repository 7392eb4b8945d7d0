"""The table: for each claim the experiment, its number and a verdict, from the results of `__main__.measure`.

A row is a function of the results. A verdict names its condition; if the numbers do not meet it, the table says so.

Left out: predictions; a reader makes one before the row is shown (lesson 12).
"""

from statistics import mean

from zero_mini.course.lesson import recorded
from zero_mini.laboratory.verdict import Row, depends, first_below, holds, judged, mb

STATES = ("parameters", "gradients", "optimizer", "communication")


def rows(results: dict) -> list[dict]:
    """All rows, as dicts with the keys claim, experiment, number, verdict."""
    return [row._asdict() for part in (systems, approximations, claims) for row in part(results)]


def systems(r: dict) -> list[Row]:
    """Servers and deferred reductions."""
    two, four, memory = r["servers, N = 2"], r["servers, N = 4"], r["memory of servers"]
    busiest = [two["link_bytes"]["ParameterServer"], four["link_bytes"]["ParameterServer"]]
    ours = [two["link_bytes"]["stage 2"], four["link_bytes"]["stage 2"]]
    late = {name: mean(losses[-5:]) for name, losses in r["staleness"].items()}
    deferred = r["accumulation"]
    return [
        Row(
            "ZeRO is a parameter server",
            "bytes of a step through the busiest link, N = 2 and 4",
            f"server {mb(busiest[0])}, {mb(busiest[1])}; stage 2 {mb(ours[0])}, {mb(ours[1])}",
            judged(busiest[1] / busiest[0] == 3 and ours[1] / ours[0] == 1.5, "a server's bytes grow as N - 1"),
        ),
        Row(
            "a server trains otherwise than data parallelism",
            "largest gap of a parameter to torch DDP after 5 steps, N = 2 and 4",
            f"{two['gaps']['ParameterServer']:g} and {four['gaps']['ParameterServer']:.1e}",
            judged(
                two["gaps"]["ParameterServer"] == 0 and four["gaps"]["ParameterServer"] < 1e-6,
                "a synchronous one differs in the order of sums",
            ),
        ),
        Row(
            "a server shards the states",
            "bytes of states on a rank, N = 4, AdamW in fp32",
            f"server {mb(memory['ParameterServer'])}, stage 0 {mb(memory['stage 0'])}, stage 3 {mb(memory['stage 3'])}",
            judged(memory["ParameterServer"] > 2 * memory["stage 3"], "one rank has all of them"),
        ),
        Row(
            "asynchronous updates cost nothing",
            "mean loss of the last 50 of 300 turns, staleness 0, 2 and 8",
            ", ".join(f"{late[f'staleness {staleness}']:.2f}" for staleness in (0, 2, 8)),
            judged(late["staleness 0"] < late["staleness 2"] < late["staleness 8"], "stale gradients raise the loss"),
        ),
        Row(
            "reducing once for k micro-batches is free at every stage",
            "gradients kept between 4 micro-batches, N = 2",
            ", ".join(
                f"{name} {mb(deferred[f'{name}, deferred']['kept_bytes'])}"
                for name in ("stage 1", "stage 2", "Deferred2", "stage 3", "Deferred3")
            ),
            depends(
                deferred["Deferred2, deferred"]["kept_bytes"] == 2 * deferred["stage 2, deferred"]["kept_bytes"],
                "at stages 2 and 3 it keeps whole gradients again",
            ),
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
        ),
        Row(
            "fewer elements take less time",
            "2^20 elements on two ranks of this machine: all-reduce, and top 50 % to 1 %",
            ", ".join(f"{ms:.0f}" for ms in times.values()) + " ms",
            depends(True, f"here {' and '.join(faster) or 'none of them'} took less; bytes break even at 1/N"),
        ),
        Row(
            "rows of an embedding that no rank used may be left out",
            "gap of the sum to the all-reduce; bytes sent",
            f"{embedding['gap']:g}; {mb(embedding['row_bytes'])} and {mb(embedding['all_reduce_bytes'])}",
            holds(embedding["gap"] == 0, "zeros add nothing"),
        ),
        Row(
            "ZeRO compresses what it sends",
            "gathers of stage 3 in fp32 and in 8 bits: bytes, held-out loss",
            f"{mb(plain['sent_bytes']['all_gather'])} and {mb(quantised['sent_bytes']['all_gather'])}; "
            f"{plain['held_out']:.4f} and {quantised['held_out']:.4f}",
            judged(plain["held_out"] == exact != quantised["held_out"], "that is ZeRO++, and the losses are others"),
        ),
        Row(
            "one bit for each element is enough",
            "held-out loss: all-reduce, 1 bit with and without feedback",
            ", ".join(f"{codecs[name]['held_out']:.3f}" for name in ("all-reduce", "1 bit, feedback", "1 bit")),
            depends(
                abs(codecs["1 bit, feedback"]["held_out"] - exact) < 0.1 < codecs["1 bit"]["held_out"] - exact,
                "only with error feedback, 4 bytes an element on every rank",
            ),
        ),
        Row(
            "lossless compression halves the bytes",
            "a gradient by zlib, byte planes apart: ratio, speed",
            f"{lossless['ratio']:.2f}, {lossless['MB_per_s']:.0f} MB/s",
            judged(lossless["ratio"] < 2, "the low bits of a gradient do not repeat"),
        ),
        Row(
            "updating a random part of the model is ZeRO",
            "held-out loss: torch DDP, half with twice the rate, a tenth with ten times",
            f"{samples['torch DDP']['held_out']:.3f}, {half['held_out']:.3f}, {tenth['held_out']:.3f}",
            judged(half["gap_after_one_step"] > 1e-3 and samples["p = 1.0, as it is"]["gap"] == 0, "another algorithm"),
        ),
        Row(
            "ranks may have unequal parts of a batch",
            "gradient of 24, 8, 8, 8 examples, relative gap to the joint batch: means, weighted",
            f"{r['shards']['mean of means, stage 2']:.2f}, {r['shards']['weighted, stage 2']:.0e}",
            depends(r["shards"]["weighted, stage 2"] < 1e-6, "only if each rank's sum is divided by the mean count"),
        ),
        Row(
            "padding or dropping the last batch changes nothing",
            "loss of an epoch of 61 sorted examples on 4 ranks, less the plain mean",
            f"padded {padded:+.4f}, dropped {dropped:+.4f}",
            judged(padded != 0 != dropped, "some examples count twice, or never"),
        ),
    ]


def claims(r: dict) -> list[Row]:
    """What people say of ZeRO itself."""
    two, four, traffic, memory = r["accuracy, N = 2"], r["accuracy, N = 4"], r["traffic"], r["memory"]
    loss = four["held_out"]
    first = {name: first_below(losses, 3.0) for name, losses in two["losses"].items() if name.endswith("seed 0")}
    sent = [traffic[f"stage {stage}"]["sent"] for stage in range(4)]
    ms = [traffic[f"stage {stage}"]["step_ms"] for stage in range(4)]
    states = {key: sum(nbytes[name] for name in STATES) for key, nbytes in memory.items()}
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
        ),
        Row(
            "on four ranks nothing differs either",
            "first gradient, stage 2 and torch DDP: elements that differ, by units in the last place of sum_r |g_r|",
            f"{four['differ']:.0%}, by at most {four['ulps']:.1f}; after 300 steps parameters by at most "
            f"{four['gaps']['stage 2']:.1e}, the held-out loss by {abs(loss['stage 2'] - loss['torch DDP']):.1e}",
            depends(0 < four["ulps"] <= 3, "the order of sums differs, as between two settings of DDP's buckets"),
        ),
        Row(
            "ZeRO converges faster",
            "steps until ten steps have a mean loss below 3, torch DDP and stages 0 to 3",
            ", ".join(map(str, first.values())),
            judged(len(set(first.values())) == 1, "the steps are the same; memory may allow a larger batch"),
        ),
        Row(
            "ZeRO sends less",
            "elements of a step / (Psi (N-1)/N), stages 0 to 3",
            ", ".join(f"{x:.2f}" for x in sent),
            judged(sent[1] == sent[2] == sent[0] == 2 and sent[3] > 2, "as much as data parallelism, at stage 3 more"),
        ),
        Row(
            "1.5 x the traffic is 1.5 x the time",
            f"ms of a step, stages 2 and 3: here; 1.5B on {cards} (speed.json)",
            f"{ms[2]:.1f} and {ms[3]:.1f}; {scores['zero-2']['ms']:.1f} and {scores['zero-3']['ms']:.1f}",
            judged(
                scores["zero-3"]["ms"] < 1.1 * scores["zero-2"]["ms"],
                "on GPUs the computation hides the wire; here each launch costs time",
            ),
        ),
        Row(
            "ZeRO helps on one GPU",
            "bytes of states: plain PyTorch, stages 0 to 3 with N = 1",
            ", ".join(mb(states[key]) for key in ("plain", *(f"stage {stage}, N = 1" for stage in range(4)))),
            judged(
                min(states[f"stage {stage}, N = 1"] for stage in range(4)) > 0.999 * states["plain"],
                "1/N of them is all of them",
            ),
        ),
        Row(
            "twice the ranks, half the memory",
            "bytes of states, N = 4 / N = 2, stages 0 to 3",
            ", ".join(f"{x:.2f}" for x in halved),
            judged(halved[0] == 1 and min(halved) > 0.5, "only what is sharded halves; activations do not"),
        ),
        Row(
            "ZeRO shards activations",
            "bytes that autograd saves, plain and stages 0 to 3, N = 1, 2, 4",
            ", ".join(mb(nbytes) for nbytes in sorted(activations)) + " each",
            judged(len(activations) == 1, "they depend on the rank's batch alone; P_a needs model parallelism"),
        ),
        Row(
            "ZeRO is model parallelism",
            "FLOPs of a rank at stage 3, N = 2, and of one process with the rank's half of the batch",
            f"{work['stage 3']['flops']:,} and {work['plain']['flops']:,}",
            judged(work["stage 3"] == work["plain"], "every rank computes the whole model on its own examples"),
        ),
        Row(
            "any optimizer works",
            "Adafactor at stage 2, made to run: gap to torch DDP after 3 steps; AdamW",
            f"{adafactor['gap']:.3f}; {r['optimizers']['AdamW']['gap']:g}",
            judged(bool(adafactor["refused"]) and adafactor["gap"] > 1e-3, "only those that update each element alone"),
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
        ),
    ]
