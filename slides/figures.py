"""The pictures of the decks, by name: zero_mini/course/plots/ on what was measured, without titles, in larger letters.

A picture on a slide is read from the back of a room: its title is the slide's, its machine stands in the slide's
footer, and its letters are larger where there is room. What is measured comes from zero_mini/measured/, or, where the
same bytes come out on every machine, from a short run on two CPU ranks when the decks are built.

Left out: pictures that only one deck's words could explain. zero_mini/course/plots/ draws everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log2
from typing import TYPE_CHECKING

import runs

from zero_mini.comm import Call
from zero_mini.course import scaling
from zero_mini.course.lesson import recorded
from zero_mini.course.plots import (
    calculator,
    curves,
    exponents,
    gantt,
    lines,
    loss_scales,
    moments,
    ownership,
    sent,
    simulated,
    states,
    steps,
)
from zero_mini.course.plots import speed as speeds
from zero_mini.course.plots.frame import spread
from zero_mini.course.plots.palette import FAINT, GRADIENTS, INK, OPTIMIZER
from zero_mini.course.plots.wire_time import draw_wire_time
from zero_mini.course.plots.wire_time import from_measured as wire_times
from zero_mini.wire.fit import fit
from zero_mini.wire.throttled import SlowLink

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of all that were measured.
SYSTEMS = ("zero-0", "zero-1", "zero-2", "zero-3", "ddp", "fsdp2", "fsdp2-keep", "deepspeed-3", "plain")


@dataclass(frozen=True)
class Picture:
    """How it is drawn, and where what it shows is from: a record of zero_mini/measured/, or a file."""

    draw: Callable[[], Figure]
    source: str


def bare(figure: Figure, larger: float = 1.0, notes: int = 2) -> Figure:
    """The picture without title and note (its page's first `notes` texts), its letters so much larger."""
    from matplotlib.text import Text

    for text in figure.texts[:notes]:
        text.set_text("")
    for text in figure.findobj(Text):
        text.set_fontsize(text.get_fontsize() * larger)
    return figure


def ring(kind: str) -> Figure:
    return bare(steps.draw_steps(kind, 4), 1.15)


def what_a_rank_sends() -> Figure:
    """Dots: chunks counted in the steps of a ring."""
    counted = {
        kind: {N: sum(map(len, steps.ring_sends(kind, N))) / N / N for N in (2, 3, 4, 5, 6, 8)} for kind in sent.LINES
    }
    return bare(sent.draw_sent(counted), 1.3)


def time_of_a_collective() -> Figure:
    return bare(draw_wire_time(**wire_times(recorded("collectives"))), 1.2)


def states_of(*stages: int) -> Figure:
    """Bars of these stages, on one scale."""
    shown = states.from_measured(recorded("memory"))
    shown["held"] = {stage: shown["held"][stage] for stage in stages}
    return bare(states.draw_states(**shown))


def moments_of(*stages: int) -> Figure:
    figure = bare(moments.draw_moments(**moments.from_measured(recorded("moments"), *stages)))
    for axes in figure.axes:
        for dot in [line for line in axes.lines if line.get_marker() == "o"]:
            dot.set_zorder(5)
        for text in axes.texts:
            if text.get_text().strip().startswith("peak"):  # where the other's peak is a line through it
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    return figure


def window(name: str) -> Figure:
    return bare(gantt.draw_gantt(**gantt.from_measured(recorded(name), name)))


def owners(*stages: int) -> Figure:
    flat, held = runs.holdings_of((0, 1, 2, 3))
    return bare(ownership.draw_ownership(flat, {stage: held[stage] for stage in stages}))


def paper(stage: int) -> Figure:
    return bare(calculator.draw_calculator("7.5B", N=64, stage=stage), 1.1)


def losses() -> Figure:
    return bare(curves.draw_curves(curves.from_measured(recorded("training"))), 1.3)


def speed() -> Figure:
    entry = recorded("speed")["works"]["1.5B"]
    systems = {system: entry["systems"][system] for system in SYSTEMS}
    figure = speeds.draw({"": entry | {"systems": systems}})
    figure.suptitle("")
    figure.axes[0].texts[-1].set_text("")  # its machine stands in the footer
    return bare(figure, 1.1, notes=0)


def exponents_of_gradients() -> Figure:
    found = runs.exponents_of_gradients()
    larger = {kind: exponents.times(counts, 16) for kind, counts in found.items()}
    return bare(exponents.draw_exponents({"after 100 steps": found, "times 2^16": larger}), 1.25)


def scale_over_time() -> Figure:
    return bare(loss_scales.draw_loss_scales(*zip(*runs.loss_scales())), 1.1)


def activations_kept_and_not() -> Figure:
    return bare(moments.draw_moments(runs.stories_of_checkpointing()))


def losses_of_a_bug(optimizer: str) -> Figure:
    """The wrong curve in orange."""
    figure = bare(curves.draw_curves(runs.losses_of_sums_for_means(optimizer)), 1.45)
    upper, lower = figure.axes
    lower.set_title("difference", loc="left", fontsize=upper._left_title.get_fontsize())
    lower.ticklabel_format(axis="y", style="plain")
    for axes in (upper, lower):
        axes.lines[-1].set_color(GRADIENTS)
        for text in axes.texts:
            if "sum" in text.get_text():
                text.set_color(GRADIENTS)
    return figure


def fitted() -> Figure:
    """Times of collectives, and the line of each: bytes that a rank sends, microseconds."""
    halves = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    us = recorded("collectives")["collectives"]["us"]
    dots = {kind: {halves[kind] * int(nbytes) / 2: t for nbytes, t in of.items()} for kind, of in us.items()}
    found = {kind: fit(of) for kind, of in dots.items()}
    sizes = [2.0**k for k in range(9, 31)]
    curves = {kind: {x: line.seconds(x) for x in sizes} for kind, line in found.items()}
    return bare(lines.draw_lines(curves, dots, "", "", "bytes that a rank sends", "microseconds", log="xy"), 1.3)


def buckets() -> Figure:
    """When equal gradients have arrived that become ready in 100 ms and take 100 ms on the wire; a call takes 5."""

    def arrived_ms(count: int) -> float:
        end = 0.0
        for number in range(1, count + 1):
            end = max(end, 100 * number / count) + 5 + 100 / count
        return end

    curve = {count: arrived_ms(count) for count in (1, 2, 4, 8, 16, 32, 64)}
    return bare(lines.draw_lines({"arrived": curve}, {"arrived": curve}, "", "", "buckets", "ms", log="x"), 1.3)


def of_1024_ranks() -> Figure:
    """An all-reduce in a ring, and by halving and doubling, which has fewer steps and sends the same bytes."""
    link, N = SlowLink(latency_s=5e-6, bytes_per_s=25e9), 1024
    ring_ms = {4.0 * n: 1e3 * link.seconds(Call("all_reduce", "", n, 4), N) for n in (10**k for k in range(3, 10))}
    fewer_ms = 2e3 * (N - 1 - log2(N)) * link.latency_s
    ways = {"ring": ring_ms, "halving and\ndoubling": {x: ms - fewer_ms for x, ms in ring_ms.items()}}
    return bare(lines.draw_lines(ways, {}, "", "", "bytes of the buffer", "ms", log="xy"), 1.3)


def more_than_linear() -> Figure:
    counts = 64, 96, 128, 192, 256, 320, 400, 512, 640, 800, 1024, 1600, 2048, 3200, 4096
    ways = {
        "memory decides": {gpus: scaling.tflops(gpus, scaling.batch(gpus)) for gpus in counts},
        "at most 1,600\nsequences": {
            gpus: scaling.tflops(gpus, 1600 // (gpus // 16)) for gpus in counts if gpus >= 400
        },
    }
    paper = {"paper": {400: scaling.TFLOPS_400}}
    return bare(lines.draw_lines(ways, paper, "", "", "GPUs", "TFLOP/s of each GPU", log="x", low=24.0), 1.3)


def lined(formula: dict, dots: dict, across: str, up: str, log: str = "", low: float = 0.0, line_in: float = 0.25):
    """draw_lines for a slide: larger letters, and names at the right so far apart as these need."""
    figure = lines.draw_lines(formula, dots, "", "", across, up, log, low)
    (axes,) = figure.axes
    names = [text for text in axes.texts if text.get_transform() == axes.transAxes]
    height_in = axes.get_position().height * figure.get_size_inches()[1]
    places = spread([text.get_position()[1] for text in names], line_in / height_in)
    above = max(0.0, max(places) + line_in / height_in / 2 - 1.05)
    for text, y in zip(names, places):
        text.set_y(y - above)
    return bare(figure, 1.35)


def when_it_hides() -> Figure:
    """A step over the slow link: the longer of two lines, and somewhat more."""
    blocks_ms = (0, 2, 4, 6, 8, 10, 12, 14, 16)
    wire = (3 * runs.BLOCKS - 2) * runs.WIRE_MS
    formula = {
        "wire + computing": {ms: wire + 3 * runs.BLOCKS * ms for ms in blocks_ms},
        "computing": {ms: 3 * runs.BLOCKS * ms for ms in blocks_ms},
        "wire": {ms: wire for ms in blocks_ms},
    }
    taken = {ms: step for ms, (_, step) in zip(blocks_ms, runs.steps_on_a_slow_link(*blocks_ms))}
    return lined(formula, {"stage 3": taken}, "ms that a block computes in forward", "ms a step")


def what_never_hides() -> Figure:
    ((spans, ms),) = runs.steps_on_a_slow_link(8)
    return bare(gantt.draw_gantt(spans, until=ms))


def figure_1_measured() -> Figure:
    figure = bare(simulated.draw_simulated(**simulated.from_measured(recorded("figure1"))), 1.05)
    axes = figure.axes[0]
    axes.set_xlabel("GB (1e9 bytes)", fontsize=8.4, color=FAINT)
    return figure


def losses_of(experiment: str, *names: str) -> Figure:
    """Of the record of `make myths`, each a mean of ten steps: the first in ink, then green and orange."""
    results = recorded("myths")["myths"]["results"][experiment]
    curve = {name: [(10 * at, loss) for at, loss in enumerate(results[name]["losses"], 1)] for name in names}
    return colours_apart(curve)


def losses_of_stale_gradients() -> Figure:
    results = recorded("myths")["myths"]["results"]["staleness"]
    names = "staleness 0", "staleness 1", "staleness 2"
    return colours_apart({name: [(10 * at, loss) for at, loss in enumerate(results[name], 1)] for name in names})


def colours_apart(curve: dict[str, list[tuple[int, float]]]) -> Figure:
    figure = bare(curves.draw_curves(curve, colours=dict(zip(curve, (INK, OPTIMIZER, GRADIENTS)))), 1.45)
    for axes in figure.axes:
        names = [text for text in axes.texts if text.get_text().strip()]
        low, high = axes.get_ylim()
        height_in = axes.get_position().height * figure.get_size_inches()[1]
        for text, y in zip(names, spread([text.get_position()[1] for text in names], 0.24 / height_in * (high - low))):
            text.set_y(y)
    return figure


def what_stays() -> Figure:
    """7.5B at stage 3: states fall as 1/N, the peak of a step does not."""
    runs_of = [run for run in recorded("table1")["simulated"] if run["model"] == "7.5B" and run["stage"] == 3]
    psi = runs_of[0]["psi"]
    formula = {"states": {run["world_size"]: 14 * psi / run["world_size"] / 1e9 for run in runs_of}}
    dots = {
        "states": {run["world_size"]: run["states_bytes"] / 1e9 for run in runs_of},
        "peak of\na step": {run["world_size"]: run["moments"]["step 2"]["peak_bytes"] / 1e9 for run in runs_of},
    }
    return lined(formula, dots, "N", "GB on rank 0", log="xy", line_in=0.3)


def too_large_a_batch() -> Figure:
    """Days for a trillion parameters, if tokens grow with the batch as D (1 + B / critical): lesson 11."""
    flops = 1e12 * recorded("speed")["works"]["1.5B"]["scores"]["zero-3"]["tflops"]
    critical, T, tokens, psi = 8e6, 4096, 20e12, 1e12

    def days(gpus: int, batch: float) -> float:
        return 6 * psi * tokens * (1 + batch / critical) / (gpus * flops) / 86400

    counts = [2**k for k in range(8, 19)]
    formula = {"batch of\n1M tokens": {n: days(n, 1e6) for n in counts}}
    for share, name in ((1, "ZeRO alone"), (8, "8 GPUs\na sequence"), (64, "64 GPUs\na sequence")):
        formula[name] = {n: days(n, max(1e6, n * T / share)) for n in counts}
    return lined(formula, {}, "GPUs", "days", log="xy", line_in=0.44)


RUN = "slides/runs.py: a small GPT on 2 CPU ranks"
CLOCK = "slides/runs.py: 8 blocks on 2 CPU ranks, over a link with a simulated clock"
CALCULATED = "zero_mini/memory/formulas.py: the paper's formulas"
FIGURES: dict[str, Picture] = {
    "reduce-scatter": Picture(partial(ring, "reduce_scatter"), "zero_mini/course/plots/steps.py"),
    "all-gather": Picture(partial(ring, "all_gather"), "zero_mini/course/plots/steps.py"),
    "sent": Picture(what_a_rank_sends, "zero_mini/course/plots/steps.py: chunks counted"),
    "wire-time": Picture(time_of_a_collective, "collectives"),
    "wire-fit": Picture(fitted, "collectives"),
    "buckets": Picture(buckets, "slides/figures.py: by formula"),
    "ranks-1024": Picture(of_1024_ranks, "zero_mini/wire/throttled.py: by formula"),
    "more-than-linear": Picture(more_than_linear, "zero_mini/course/scaling.py: a model"),
    "states-0": Picture(partial(states_of, 0), "memory"),
    "states-0-1": Picture(partial(states_of, 0, 1), "memory"),
    "states-0-1-2": Picture(partial(states_of, 0, 1, 2), "memory"),
    "states": Picture(partial(states_of, 0, 1, 2, 3), "memory"),
    "moments-1-2": Picture(partial(moments_of, 1, 2), "moments"),
    "moments-2-3": Picture(partial(moments_of, 2, 3), "moments"),
    "gantt-0": Picture(partial(window, "gantt_0"), "gantt_0"),
    "gantt-1": Picture(partial(window, "gantt_1"), "gantt_1"),
    "gantt-3": Picture(partial(window, "gantt_3"), "gantt_3"),
    "owners-0-1": Picture(partial(owners, 0, 1), RUN),
    "owners-2-3": Picture(partial(owners, 2, 3), RUN),
    "paper-2": Picture(partial(paper, 2), CALCULATED),
    "paper-3": Picture(partial(paper, 3), CALCULATED),
    "losses": Picture(losses, "training"),
    "speed": Picture(speed, "speed/works/1.5B"),
    "exponents": Picture(exponents_of_gradients, RUN),
    "loss-scale": Picture(scale_over_time, RUN),
    "checkpointing": Picture(activations_kept_and_not, RUN),
    "bug-adamw": Picture(partial(losses_of_a_bug, "AdamW"), RUN),
    "bug-sgd": Picture(partial(losses_of_a_bug, "SGD"), RUN),
    "hides": Picture(when_it_hides, CLOCK),
    "never-hides": Picture(what_never_hides, CLOCK),
    "figure1": Picture(figure_1_measured, "figure1"),
    "what-stays": Picture(what_stays, "table1"),
    "batch-limit": Picture(too_large_a_batch, "speed/works/1.5B"),
    "stale": Picture(losses_of_stale_gradients, "myths"),
    "top-k": Picture(partial(losses_of, "densities", "all-reduce", "top 1.0%, feedback", "top 1.0%"), "myths"),
    "one-bit": Picture(partial(losses_of, "codecs", "all-reduce", "1 bit, feedback", "1 bit"), "myths"),
    "samples": Picture(partial(losses_of, "samples", "torch DDP", "p = 0.5, adaptive", "p = 0.1, as it is"), "myths"),
}
